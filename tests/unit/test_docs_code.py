"""The code of the tutorials and of the migration pages runs, each page in a fresh process with one rank."""

import re
import subprocess
import sys
from pathlib import Path

import forked
import pytest

import stenograd

DOCS = Path(__file__).parents[2] / "docs"
sys.path.insert(0, str(DOCS))
from extract import code  # noqa: E402

MIGRATE = sorted(DOCS.glob("migrate/*.md"))
OTHERS = [DOCS / f"{page}.md" for page in ("checkpoints", "extending", "open-runs", "preemption")]
WITHOUT = {"ddp-hooks", "deepspeed", "grace", "horovod", "slurm"}  # show tables, diffs and shell alone
PAGES = [p for p in sorted([*DOCS.glob("tutorials/*.md"), *MIGRATE, *OTHERS]) if p.stem not in WITHOUT]


def name(page):
    return page.stem


def run(text, folder):
    """Run a script in a process of its own, in which every warning is an error."""
    script = folder / "page.py"
    script.write_text(text)
    done = forked.python([script], folder, strict=True)
    assert done.returncode == 0, done.stderr


@pytest.mark.parametrize("page", PAGES, ids=name)
def test_the_code_of_a_page_runs(page, tmp_path):
    text = code(page.read_text())
    assert text, f"{page.name} has no Python code"
    run(text, tmp_path)


@pytest.mark.parametrize("page", MIGRATE, ids=name)
def test_the_methods_in_the_tables_of_a_page_exist(page):
    rows = [line for line in page.read_text().splitlines() if line.startswith("|")]
    texts = [text for row in rows for text in re.findall(r'`"([a-z][^"` ]*)"`', row)]
    assert texts
    for text in texts:
        stenograd.method(text.partition(":")[0] if "..." in text or "=N" in text else text)


COMPLETE = "no_sync() clip_grad_norm_ scheduler.step() consensus() save_checkpoint load_checkpoint extra["


def test_one_page_shows_a_complete_loop():
    """Accumulation, clipping, a schedule, evaluation, a checkpoint, and resuming, bytes sent included."""
    assert any(all(part in code(page.read_text()) for part in COMPLETE.split()) for page in PAGES)


def test_the_diff_of_the_readme_runs_as_it_stands(tmp_path):
    diff = code((DOCS.parent / "README.md").read_text(), "diff")
    run("".join(line[2:] or "\n" for line in diff.splitlines(keepends=True)), tmp_path)


@pytest.mark.parametrize("page", [p for p in PAGES if "```bash\n" in p.read_text()], ids=name)
def test_the_shell_code_of_a_page_parses(page):
    done = subprocess.run(
        ["bash", "-n"], input=code(page.read_text(), "bash"), capture_output=True, text=True
    )
    assert done.returncode == 0, done.stderr


def test_blocks_of_other_languages_are_left_out():
    assert code("```python\na\n```\n```diff\n+b\n```\n```\nc\n```\n```python\nd\n```\n") == "a\nd\n"
