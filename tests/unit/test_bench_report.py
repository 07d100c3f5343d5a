"""What the benchmarks compute without a network: rates, plans, tables, and who may not run them."""

import json
import os
import runpy
import shutil
import signal
import sys
from itertools import pairwise, permutations
from pathlib import Path

import pytest

sys.path.append(str(Path(__file__).parents[2] / "benchmarks"))  # behind the tests' own folders

import bench
import harness
import pictures

from stenograd.emulate import hosts as emulated
from stenograd.emulate.hosts import Hosts, HostsError, parse_delay, parse_rate


@pytest.mark.parametrize(
    ("text", "bits_per_s"),
    [("none", None), ("56kbit", 56e3), ("100mbit", 1e8), ("1gbit", 1e9), ("2.5gbit", 2.5e9)],
)
def test_rates(text, bits_per_s):
    assert parse_rate(text) == bits_per_s


@pytest.mark.parametrize("text", ["", "100", "mbit", "0mbit", "1 gbit", "1Gbit", "1gbit/s", "-1mbit"])
def test_wrong_rates(text):
    with pytest.raises(ValueError, match="must be none or like 100mbit"):
        Hosts(2, text)


@pytest.mark.parametrize(
    ("text", "seconds"), [("none", 0.0), ("0ms", 0.0), ("500us", 5e-4), ("2.5ms", 2.5e-3), ("1s", 1.0)]
)
def test_delays(text, seconds):
    assert parse_delay(text) == pytest.approx(seconds)


@pytest.mark.parametrize("text", ["", "20", "ms", "20 ms", "20MS", "-1ms", "1m", "1e3us"])
def test_wrong_delays(text):
    with pytest.raises(ValueError, match=f"must be none or like 20ms or 500us, got '{text}'"):
        Hosts(2, delay=text)


@pytest.mark.parametrize("count", [0, 255])
def test_wrong_counts(count):
    with pytest.raises(ValueError, match=rf"in 1\.\.254, got {count}"):
        Hosts(count)


@pytest.mark.parametrize("cores", [-1, 1])
def test_wrong_cores(monkeypatch, cores):
    """Three cores are none for each of four hosts, and one for each of three."""
    monkeypatch.setattr(os, "sched_getaffinity", lambda pid: {2, 3, 5})
    Hosts(3, cores_per_host=1)
    with pytest.raises(
        ValueError, match=rf"cores_per_host must be in 0\.\.0 for 4 hosts on 3 cores, got {cores}"
    ):
        Hosts(4, cores_per_host=cores)


def test_systems_without_affinity_are_told_what_hosts_need(monkeypatch):
    """Such as macOS: hosts that share all cores ask for none."""
    monkeypatch.delattr(os, "sched_getaffinity")
    monkeypatch.setattr(shutil, "which", lambda program: None)
    with pytest.raises(HostsError), Hosts(2):
        pass


def test_systems_without_fcntl_and_sighup_import_the_modules(monkeypatch):
    """Such as Windows, where `Hosts` must get so far as to say that it needs Linux."""
    monkeypatch.setitem(sys.modules, "fcntl", None)
    monkeypatch.delattr(signal, "SIGHUP")
    assert runpy.run_path(emulated.relay.__file__)["READY"] == emulated.relay.READY
    assert runpy.run_path(emulated.__file__)["MAX_HOSTS"] == emulated.MAX_HOSTS


def test_only_root_emulates_hosts(monkeypatch):
    monkeypatch.setattr(shutil, "which", lambda program: f"/sbin/{program}")
    monkeypatch.setattr(os, "geteuid", lambda: 1000)
    with pytest.raises(HostsError, match="need root"), Hosts(2):
        pass


def test_the_package_is_named(monkeypatch):
    monkeypatch.setattr(shutil, "which", lambda program: None if program == "tc" else f"/sbin/{program}")
    with pytest.raises(HostsError, match="command 'tc': install Debian's package iproute2"), Hosts(2):
        pass


def test_elsewhere_than_linux(monkeypatch):
    monkeypatch.setattr(emulated.sys, "platform", "darwin")
    with pytest.raises(HostsError, match="need Linux's network namespaces, this is darwin"):
        emulated.require_rights()


def test_what_fails_is_told():
    with pytest.raises(HostsError, match=r"`ls /nowhere` failed: .*which some containers forbid"):
        emulated.command("ls", "/nowhere")


def _relay_that(monkeypatch, folder, code):
    script = folder / "relay.py"
    script.write_text(code)
    monkeypatch.setattr(emulated.relay, "__file__", str(script))
    emulated._start_relay(0.1, "switch", [])


def test_a_relay_that_does_not_get_ready_is_not_waited_for(monkeypatch, tmp_path):
    monkeypatch.setattr(emulated, "_START_S", 0.5)
    with pytest.raises(HostsError, match=r"not ready within 0\.5 s: end other programs"):
        _relay_that(monkeypatch, tmp_path, "import time; time.sleep(600)")
    with pytest.raises(HostsError, match=r"not ready within 0\.5 s"):
        _relay_that(monkeypatch, tmp_path, "import time; print('half', flush=True); time.sleep(600)")


@pytest.mark.parametrize(
    ("code", "why"), [("1 / 0", "ZeroDivisionError"), ("import os; os._exit(3)", "status 3")]
)
def test_a_relay_that_fails_says_why(monkeypatch, tmp_path, code, why):
    with pytest.raises(HostsError, match=f"TAP devices .*, which cannot be made here: .*{why}"):
        _relay_that(monkeypatch, tmp_path, code)


def test_slow_rivals_take_few_steps():
    assert [bench.turn_steps(s, 1.5, 40) for s in (1e-4, 0.03, 0.1, 3.6)] == [40, 40, 15, 1]


def test_rounds_have_random_orders_that_all_ranks_know():
    """Each rival has one turn in each round, and after 40 rounds every other one went before it."""
    order = list(harness.turns("abcd", 40))
    assert order == list(harness.turns("abcd", 40))
    orders = [order[i : i + 4] for i in range(0, 160, 4)]
    assert all(sorted(order) == [*"abcd"] for order in orders)
    assert {pair for order in orders for pair in pairwise(order)} == set(permutations("abcd", 2))


def turns(*turns_ms, counted=None):
    bytes_ = [1000.0] * len(turns_ms)
    return {"turns_ms": list(turns_ms), "interface_bytes": bytes_, "counted_bytes": [counted] * len(turns_ms)}


TURNS = {"none": turns(10, 20, 10), "ddp": turns(20, 40, 30), "sign": turns(10, 20, 60, counted=900.0)}


@pytest.fixture
def rows():
    told = {"rivals": TURNS, "refused": {"ddp-bf16": "wants CUDA"}}
    return bench.rows(told, ["none", "ddp", "ddp-bf16", "sign"])


def test_ratios_are_within_rounds(rows):
    """Sign against DDP: 10/20, 20/40, 60/30, so 0.5; the ratio of the medians would be 20/30."""
    none, ddp, bf16, sign = rows
    assert (sign["ms"], sign["ddp_ratio"], sign["floor_ratio"]) == (20, 0.5, 1.0)
    assert (ddp["ddp_ratio"], ddp["floor_ratio"]) == (1.0, 2.0)
    assert (ddp["counted_bytes"], ddp["interface_bytes"]) == (None, 1000)
    assert (none["floor_ratio"], sign["counted_bytes"]) == (1.0, 900)
    assert bf16 == {"rival": "ddp-bf16", "refused": "wants CUDA"}


def test_tables(rows):
    run = {"model": "cnn", "rate": "1gbit", "hosts": 2, "parameters": 431_080, "rows": rows, "turns": TURNS}
    text = bench.step_tables([run, run | {"rate": "none"}])
    lines = text.splitlines()
    assert lines[0] == "### cnn, 0.43 M parameters, 2 hosts"
    assert "1gbit: ms | 1gbit: x DDP" in lines[2]
    assert "| sign | 20.0 (10 to 60) | 0.500 | 20.0 (10 to 60) | 0.500 | 0.9 | 1.0 |" in lines
    assert "| ddp-bf16 | not supported |  | not supported |  |  |  |" in lines
    assert lines[-1] == "ddp-bf16: wants CUDA"
    assert {line.count("|") for line in lines if "|" in line} == {8}


def test_files(rows, tmp_path):
    stem = tmp_path / "new" / "steps"
    run = {"model": "cnn", "rate": "none", "hosts": 2, "parameters": 1, "rows": rows}
    text = harness.document("Title", "2030-01-02", ["bench.py", "--out", str(tmp_path)], "body")
    harness.write(stem, "2030-01-02", {"rounds": 3}, [run], text)
    told = json.loads(stem.with_suffix(".json").read_text())
    assert told["results"][0]["rows"][3]["ddp_ratio"] == 0.5
    assert set(told["machine"]) >= {"cpu", "cores", "ram_gb", "torch", "python", "stenograd"}
    written = stem.with_suffix(".md").read_text()
    assert "python benchmarks/bench.py\n" in written
    assert str(tmp_path) not in written
    assert pictures.step_times(tmp_path / "x.png", [run]).startswith("wrote")
    assert (tmp_path / "x.png").read_bytes()[:4] == b"\x89PNG"


def test_places_are_not_shown():
    argv = ["/somewhere/daso.py", "--data", "/home/me", "--epochs", "3", "--out", "/tmp/x", "--name", "y"]
    assert "\npython benchmarks/daso.py --data DIR --epochs 3\n" in harness.document("", "", argv, "")


def test_no_picture_without_matplotlib(monkeypatch, tmp_path, rows):
    monkeypatch.setitem(sys.modules, "matplotlib.figure", None)
    run = {"model": "cnn", "rate": "none", "rows": rows}
    assert "pip install stenograd[plots]" in pictures.step_times(tmp_path / "x.png", [run])


def test_pictures_suit_a_dark_page_and_a_narrow_one(tmp_path, rows):
    """The ground is transparent, and what is drawn for 6 inches can be read in a window of 400 px."""
    image = pytest.importorskip("matplotlib.image")
    pictures.step_times(tmp_path / "x.png", [{"model": "cnn", "rate": "none", "rows": rows}])
    for path in [tmp_path / "x.png", *Path(bench.__file__).parent.glob("results/**/*.png")]:
        pixels = image.imread(path)
        assert pixels.shape[1] <= 1000, path
        assert pixels.shape[2] == 4, path
        assert pixels[0, 0, 3] == 0, path
