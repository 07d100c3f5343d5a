"""`stenograd compare`, `methods` and `doctor`."""

import dataclasses
import json
import re
import sys

import forked
import pytest
from launched import clean_env

from stenograd.catalog.method import METHOD_KEYS, method, method_names, methods
from stenograd.catalog.presets import PRESETS
from stenograd.catalog.registry import entries, entry_of, schedules
from stenograd.cli import compare, pictures


def plain(compressor):
    """What is inside of error feedback."""
    return getattr(compressor, "inner", compressor)


def test_compare(on_two_ranks, tmp_path):
    """Three methods in one set of workers; at fp16 a worker sends half of the dense bytes."""
    listed = ("--method", "dense,fp16", "--method", "topk:ratio=0.05,dense_below=64")
    out = on_two_ranks("compare", "--workers", 2, "--epochs", 1, *listed, "--out", tmp_path / "out")
    table = [line for line in out.splitlines() if line.startswith("│")]
    assert [line.split()[1] for line in table] == ["dense", "fp16", "topk:ratio=0.05,dense_below=64"]
    told = json.loads((tmp_path / "out" / "compare.json").read_text())
    assert (told["world_size"], told["epochs"], told["steps_per_epoch"]) == (2, 1, 23)
    dense, half, sparse = told["methods"]
    assert 0.99 < dense["compression"] <= 1
    assert 1.99 < half["compression"] <= 2
    assert 28 < sparse["compression"] < 28.7  # the bias of ten elements goes densely
    assert all(
        len(row["epochs"]) == 1 and row["step_ms"] > 0 and row["error"] is None for row in told["methods"]
    )
    assert (tmp_path / "out" / "compare.png").read_bytes()[:8] == b"\x89PNG\r\n\x1a\n"


def test_nothing_is_not_said_to_be_many_times_less(here):
    """Without a round the bytes of dense training were divided by one byte: 1,722,096 times less."""
    words = ("--method", "local:every=500", "--epochs", 1, "--batch-size", 256)
    status, out, _ = here("train", *words)
    assert (status, "sent 0.00 MB  compression -\n" in out) == (0, True)
    status, out, _ = here("compare", *words, "--json")
    (found,) = json.loads(out)["methods"]
    assert (status, found["compression"], found["epochs"][0]["compression"]) == (0, None, None)


def test_defaults_are_methods():
    found = {method(text).text.partition(":")[0] for text in compare.default_methods()}
    alone = {name for name in methods() if method(name).own_momentum}
    assert found | {"dgc"} == set(methods()) - (alone - {"dgc"})  # dgc has a key for it, which compare sets
    assert {"dense", "dgc", "topk"} <= found


@pytest.mark.parametrize(
    ("texts", "expected"),
    [
        (["dense,sign"], ["dense", "sign"]),
        (["topk:ratio=0.1,feedback=off,sign:block=64"], ["topk:ratio=0.1,feedback=off", "sign:block=64"]),
        (["dense; topk:ratio=0.1 , clip_norm=1", "foo"], ["dense", "topk:ratio=0.1 , clip_norm=1", "foo"]),
        ([" ; ,"], []),
    ],
)
def test_split_methods(texts, expected):
    assert compare.split_methods(texts) == expected


def test_no_picture_without_matplotlib(monkeypatch, tmp_path):
    monkeypatch.setitem(sys.modules, "matplotlib.figure", None)
    assert "pip install stenograd[plots]" in pictures.draw_curves(tmp_path / "x.png", "digits", {})


@pytest.mark.parametrize("workers", [1, 3])
def test_methods(here, workers):
    status, out, err = here("methods", "--size", 10_000, "--workers", workers)
    assert (status, err) == (0, "")
    rows = {line.split("│")[1].strip(): line.split("│")[2:] for line in out.splitlines() if line[0] == "│"}
    assert set(methods()) <= set(rows)
    assert "ratio=0.01" in out
    assert "feedback (bool)" in out
    dense = next(line for line in out.splitlines() if line.startswith("│ dense"))
    moved = {1: "0", 3: "53,333"}[workers]  # 2 (N - 1) / N of 40,000
    assert [cell.strip() for cell in dense.split("│")[2:6]] == ["40,000", moved, "32", "1.0x"]


@pytest.mark.parametrize("name", method_names())
def test_one_method_is_explained(name, here):
    """Every key of the class in the registry, with its default, what it means, and a line that is right."""
    status, out, err = here("methods", name, "--size", 100, "--json")
    assert (status, err) == (0, "")
    told = json.loads(out)
    how = method(name)
    own = how.schedule if name in [*schedules(), *PRESETS] else entry_of(plain(how.compressor)).compressor()
    hidden = entries()[name].preset if name in entries() else {}
    assert set(told["keys"]) == {f.name for f in dataclasses.fields(own)} - set(hidden)
    for key, said in told["keys"].items():
        assert said["default"] == getattr(own, key)
        assert len(said["meaning"]) > 10
    assert set(told["shared_keys"]) == set(METHOD_KEYS)
    assert all(said["meaning"] for said in told["shared_keys"].values())
    assert told["reference"] or name in ("dense", "fp16", "bf16")
    words = told["example"].split()
    assert words[:3] == ["stenograd", "train", "--method"]
    tried = method(words[3])
    assert (tried.compressor, tried.schedule) == (how.compressor, how.schedule)
    assert ("--momentum" in words) == how.own_momentum


def test_a_method_is_explained_in_words(here, monkeypatch):
    monkeypatch.setenv("COLUMNS", "80")
    status, out, err = here("methods", "topk", "--size", 100_000)
    assert (status, err) == (0, "")
    told = " ".join(re.sub("[│┃]", " ", out).split())
    assert out.startswith("topk: the largest elements of each bucket")
    assert "ratio 0.01 share of the elements to send, in (0, 1]." in told
    assert "warmup_steps 0 number of dense exchanges" in told
    assert "Paper: Aji and Heafield" in told
    assert out.endswith("Example: stenograd train --method topk:ratio=0.01 --workers 2\n")
    assert "Stands for local:every=16,after=2000" in here("methods", "postlocal")[1]


def test_doctor(here):
    """It starts two processes of its own, which average a vector."""
    status, out, err = here("doctor")
    assert (status, err) == (0, "")
    for line in ("torch", "gloo", "cores", "launcher", "works"):
        assert line in out


CLOCKS = """
import sys
from stenograd.cli import loop, main
real = loop.Trainer.run_epoch
def run_epoch(trainer, *arguments):
    before = set(sys.modules)
    row = real(trainer, *arguments)
    print("loaded", trainer.sync.method, len(set(sys.modules) - before))
    return row
loop.Trainer.run_epoch = run_epoch
sys.exit(main())
"""


def test_no_clock_of_a_comparison_runs_while_modules_load(tmp_path):
    """The first method paid for what its first steps import: seconds, where an epoch takes half of one."""
    words = ("compare", "--epochs", 1, "--batch-size", 64, "--method", "topk,dense,local:every=4/qsgd")
    done = forked.python(["-c", CLOCKS, *words], tmp_path, clean_env())
    assert done.returncode == 0, done.stderr
    loaded = [line for line in done.stdout.splitlines() if line.startswith("loaded")]
    assert loaded == ["loaded topk 0", "loaded dense 0", "loaded local:every=4/qsgd 0"]
