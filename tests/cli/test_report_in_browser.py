"""A plan's report in a real browser: Chromium without a window, where one is installed."""

import json
import re
import shutil
import subprocess

import pytest

BROWSER = next(filter(None, map(shutil.which, ("chromium", "chromium-browser", "google-chrome"))), None)
pytestmark = pytest.mark.skipif(BROWSER is None, reason="needs Chromium")
pytest.importorskip("matplotlib")

QUIET = [
    "--headless",
    "--no-sandbox",
    "--disable-gpu",
    "--disable-quic",
    "--no-first-run",
    "--disable-background-networking",
    "--disable-component-update",
    "--disable-sync",
    "--enable-logging=stderr",
    "--virtual-time-budget=2000",
]
# Only the test adds a script: the page that users get has none.
MEASURE = """<script>
const boxes = [...document.querySelectorAll("figure svg")].map(svg => svg.getBoundingClientRect());
const told = {
  width: document.documentElement.scrollWidth, window: window.innerWidth,
  fetched: performance.getEntriesByType("resource").length,
  pictures: boxes.map(box => [box.width, box.height]),
  rows: [...document.querySelectorAll("table")].map(table => table.rows.length),
};
document.title = JSON.stringify(told);
</script></body>"""


@pytest.fixture(scope="module")
def report(tmp_path_factory):
    """The report of a small plan, made by the command in a process of its own."""
    folder = tmp_path_factory.mktemp("plan")
    command = "stenograd plan --task digits --workers 2 --link 20mbit,0.1ms --seconds 1 --methods topk"
    subprocess.run([*command.split(), "--out", folder], check=True, capture_output=True, timeout=120)
    return folder / "report.html"


def browse(page, folder, *options):
    """Open a page, and return what it came to and what the browser complained of in it."""
    home = folder / "browser"
    command = [BROWSER, *QUIET, f"--user-data-dir={home}", *options, page.as_uri()]
    done = subprocess.run(command, capture_output=True, text=True, timeout=120, cwd=folder)
    assert done.returncode == 0, done.stderr
    return done.stdout, [line for line in done.stderr.splitlines() if "CONSOLE" in line]


@pytest.mark.parametrize("width", [400, 1200])
def test_everything_shows_and_nothing_is_fetched(report, tmp_path, width):
    """On a phone's width as on a screen's; Chromium's own windows are at least 500 wide."""
    page = tmp_path / "report.html"
    page.write_text(report.read_text().replace("</body>", MEASURE))
    shown, complaints = browse(page, tmp_path, f"--window-size={width},900", "--dump-dom")
    assert complaints == []
    told = json.loads(re.search(r"<title>(.*?)</title>", shown)[1])
    assert told["width"] <= told["window"], "something is wider than the window"
    assert told["fetched"] == 0
    assert len(told["pictures"]) >= 2
    assert all(wide > 200 and high > 100 for wide, high in told["pictures"])
    assert min(told["rows"]) >= 2, "a table's head, and at least one row"


def test_it_is_drawn(report, tmp_path):
    """A blank page of this size compresses to some kilobytes."""
    picture = tmp_path / "report.png"
    _, complaints = browse(report, tmp_path, "--window-size=1000,2000", f"--screenshot={picture}")
    assert complaints == []
    assert picture.read_bytes()[:8] == b"\x89PNG\r\n\x1a\n"
    assert picture.stat().st_size > 50_000
