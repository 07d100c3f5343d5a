"""Checkpoint files and agreement between ranks, below the command line."""

import hashlib
import os
import random
import time
from collections import Counter, OrderedDict
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
import torch
from damage import DAMAGES, MANIFEST_DAMAGES, Checkpoints

from stenograd.checkpoint import files as checkpoint
from stenograd.checkpoint.api import read_set
from stenograd.checkpoint.files import write_atomically
from stenograd.errors import CheckpointError, DataError, StenogradError
from stenograd.wire.agreement import agree, everyone, sum_over_ranks
from stenograd.wire.driver import Driver

IDENTITY = {"task": "digits", "recipe": {"lr": 0.1, "betas": (0.9, 0.99)}}


def save(folder, step, ranks=1, set_id="ab12", **content):
    files = [checkpoint.write_rank(folder, step, set_id, rank, content) for rank in range(ranks)]
    manifest = checkpoint.Manifest(step=step, set_id=set_id, world_size=ranks, files=tuple(files))
    checkpoint.write_manifest(folder, manifest)
    return manifest


def test_round_trip(tmp_path):
    content = {"w": torch.arange(3.0), "rows": [{"loss": None, "epoch": 1}]}
    manifest = save(tmp_path, 3, ranks=2, **content)
    loaded = checkpoint.read_rank(tmp_path, checkpoint.read_manifest(tmp_path, 3), 1)
    assert torch.equal(loaded["w"], content["w"])
    assert loaded["rows"] == content["rows"]
    names = [*(f"checkpoint-step3-ab12-rank{rank}.pt" for rank in range(2)), "checkpoint-step3.json"]
    assert sorted(p.name for p in tmp_path.iterdir()) == names
    assert [file.nbytes for file in manifest.files] == [
        (tmp_path / name).stat().st_size for name in names[:2]
    ]


def test_cleaning(tmp_path):
    """The newest sets stay, a truncated one is not counted, and a crash's leftovers go with their rank."""
    for step in (1, 2, 4, 8, 16):
        save(tmp_path, step, ranks=3)
    assert checkpoint.saved_steps(tmp_path) == [1, 2, 4, 8, 16]
    assert checkpoint.saved_steps(tmp_path / "nowhere") == []
    (tmp_path / "checkpoint-step4-ab12-rank1.pt").write_bytes(b"short")
    left = [
        "checkpoint-step9-cd-rank0.pt",
        ".checkpoint-step9-cd-rank1.pt.part",
        "checkpoint-step9-cd-rank3.pt",
    ]
    for name in [*left, "checkpoint-stepX.json", "notes.txt"]:
        (tmp_path / name).touch()
    for rank in range(3):
        assert checkpoint.complete(tmp_path, 8, rank) == [[2, "ab12"], [1, "ab12"]]
    for rank in range(3):
        checkpoint.drop_others(tmp_path, [[8, "ab12"], [2, "ab12"]], rank, 3)
    assert checkpoint.saved_steps(tmp_path) == [2, 8]
    kept = [f"checkpoint-step{step}-ab12-rank{rank}.pt" for step in (2, 8) for rank in range(3)]
    kept += ["checkpoint-step2.json", "checkpoint-step8.json", "checkpoint-stepX.json", "notes.txt"]
    assert sorted(path.name for path in tmp_path.iterdir()) == sorted(kept)


def test_two_saves_of_a_step_at_one_moment_leave_the_manifest_of_the_last(tmp_path, monkeypatch):
    """Workers of an open run are rank 0 each; a crash in the midst leaves what the next save removes."""
    first, second = (checkpoint.Manifest(step=3, set_id=s, world_size=1, files=()) for s in ("ab", "cd"))
    force, left = os.fsync, []

    def forced(number):
        if not left:
            left.append(next(tmp_path.iterdir()).name)
            checkpoint.write_manifest(tmp_path, second)
        force(number)

    monkeypatch.setattr(os, "fsync", forced)
    checkpoint.write_manifest(tmp_path, first)
    assert '"ab"' in checkpoint.manifest_path(tmp_path, 3).read_text()
    (tmp_path / left[0]).touch()
    checkpoint.drop_others(tmp_path, [[3, "ab"]], 0, 1)
    assert [path.name for path in tmp_path.iterdir()] == ["checkpoint-step3.json"]


def test_an_interrupted_write_leaves_the_old_file(tmp_path, monkeypatch):
    path = tmp_path / "file"
    write_atomically(path, b"old")
    monkeypatch.setattr("os.fsync", lambda number: (_ for _ in ()).throw(OSError("disk full")))
    with pytest.raises(OSError, match="disk full"):
        write_atomically(path, b"new")
    assert [(p.name, p.read_bytes()) for p in tmp_path.iterdir()] == [("file", b"old")]


def test_what_is_no_file_is_not_replaced_by_one(tmp_path):
    """As /dev/null was, by root."""
    os.mkfifo(pipe := tmp_path / "pipe")
    with pytest.raises(OSError, match="no regular file"):
        write_atomically(pipe, b"new")
    assert (pipe.is_fifo(), [*tmp_path.iterdir()]) == (True, [pipe])


@pytest.mark.parametrize(
    ("text", "says"),
    [
        ("", "Expecting value"),
        ("[]", "its format must be 2, got no object"),
        ('{"format": 1}', "its format must be 2, got 1"),
        ('{"format": 2}', "'files'"),
        ('{"format": 2, "step": 9, "set_id": "a", "world_size": 1, "files": []}', "step 9 and 0 files of 1"),
    ],
)
def test_damaged_manifests(tmp_path, text, says):
    (tmp_path / "checkpoint-step3.json").write_text(text)
    with pytest.raises(CheckpointError, match=rf"checkpoint-step3\.json: cannot be read .*({says})"):
        checkpoint.read_manifest(tmp_path, 3)


@pytest.fixture(scope="module")
def two_checkpoints(tmp_path_factory):
    return Checkpoints(tmp_path_factory.mktemp("checkpoints"))


@pytest.mark.parametrize("how", sorted(DAMAGES | MANIFEST_DAMAGES))
def test_any_damage_ends_in_a_whole_checkpoint_or_a_named_error(two_checkpoints, how):
    """The newest whole one of two, within a second; `pytest -m soak` tries more."""
    for seed in range(4):
        start = time.monotonic()
        two_checkpoints(random.Random(f"{how}/{seed}"), how)
        assert time.monotonic() - start < 10


@pytest.mark.parametrize("place", ["relative", "absolute"])
def test_a_manifest_names_no_whole_file_elsewhere(tmp_path, place):
    """Its length and digest are right, so nothing but the name tells."""
    run = tmp_path / "run"
    run.mkdir()
    manifest = save(run, 3, w=torch.ones(3))
    (name,) = (file.name for file in manifest.files)
    (run / name).rename(tmp_path / "elsewhere.pt")
    other = "../elsewhere.pt" if place == "relative" else str(tmp_path / "elsewhere.pt")
    path = run / "checkpoint-step3.json"
    path.write_text(path.read_text().replace(name, other))
    with pytest.raises(CheckpointError, match="the name or SHA-256 of rank 0's file has another form"):
        checkpoint.read_manifest(run, 3)


def test_a_folder_that_is_a_file_is_no_empty_folder(tmp_path, pool):
    """On rank 1 alone, where ranks have disks of their own; none waits for another."""
    (tmp_path / "file").touch()
    for answer in pool.run(2, _reads_a_file, str(tmp_path)):
        assert "file: cannot be read (Not a directory)" in answer


def _reads_a_file(rank, folder):
    try:
        return str(read_set(Driver(timeout_s=30), Path(folder) / ("file" if rank == 1 else "none")))
    except CheckpointError as error:
        return str(error)


def test_a_folder_of_a_files_name_hides_no_other_from_cleaning(tmp_path):
    for step in (1, 2, 3):
        save(tmp_path, step)
    (tmp_path / "checkpoint-step0.json").mkdir()
    checkpoint.drop_others(tmp_path, [[3, "ab12"]], 0, 1)
    assert checkpoint.saved_steps(tmp_path) == [0, 3]


def test_code_in_a_file_is_not_run(tmp_path):
    """Even with the right digest: only tensors and plain values are read."""
    manifest = save(tmp_path, 3)
    path = tmp_path / manifest.files[0].name
    torch.save({"set_id": "ab12", "rank": 0, "content": {"bad": Trap()}}, path)
    data = path.read_bytes()
    file = checkpoint.RankFile(name=path.name, nbytes=len(data), sha256=hashlib.sha256(data).hexdigest())
    with pytest.raises(CheckpointError, match="cannot be read"):
        checkpoint.read_rank(tmp_path, replace(manifest, files=(file,)), 0)
    assert not Trap.sprung


class Trap:
    sprung = False

    def __reduce__(self):
        return setattr, (Trap, "sprung", True)


def test_foreign():
    path = Path("run.json")
    checkpoint.check_identity(path, {"n": 1, "seed": 2}, {"n": 3, "seed": 2}, except_for=("n",))
    with pytest.raises(CheckpointError, match=r"run\.json: task is digits there and text now"):
        checkpoint.check_identity(path, IDENTITY, IDENTITY | {"task": "text"})
    with pytest.raises(CheckpointError, match="seed is nothing there and 1 now"):
        checkpoint.check_identity(path, IDENTITY, IDENTITY | {"seed": 1})


def _fails_on_1(rank, everywhere):
    def action():
        if rank == 1 or everywhere:
            raise DataError("no file")
        return rank

    try:
        return agree(Driver(timeout_s=30), action)
    except StenogradError as error:
        return type(error).__name__, str(error)


def _disk_full(rank):
    def action():
        if rank == 0:
            raise OSError("disk full")

    try:
        return agree(Driver(timeout_s=30), action)
    except StenogradError as error:
        return str(error)


def _breaks(rank, error):
    def action():
        if rank == 1:
            raise error

    start = time.monotonic()
    try:
        return agree(Driver(timeout_s=30), action)
    except StenogradError as raised:
        return type(raised).__name__, str(raised), type(raised.__cause__), time.monotonic() - start < 20


@pytest.mark.parametrize(
    ("error", "says"), [(KeyError("lr"), "KeyError: 'lr'"), (MemoryError(), "MemoryError")], ids=repr
)
def test_any_error_on_one_rank_is_one_on_all_at_once(pool, error, says):
    """Other ranks waited for the timeout, and then blamed rank 1's silence."""
    first, second = pool.run(2, _breaks, error)
    assert first == ("StenogradError", f"rank 1: {says}", type(None), True)
    assert second == ("StenogradError", f"rank 1: {says}", type(error), True)


def _sums(rank):
    driver = Driver(timeout_s=30)
    return sum_over_ranks(driver, [0.1, rank, 2**53]), everyone(driver, f"rank {rank}")


def test_an_error_on_one_rank_is_one_on_all(pool):
    assert pool.run(3, _fails_on_1, False) == [("DataError", "rank 1: no file")] * 3
    assert pool.run(2, _fails_on_1, True) == [("DataError", "no file")] * 2
    assert pool.run(2, _disk_full) == ["rank 0: disk full"] * 2


def test_sums(pool):
    """0.1 three times in rank order, 0 + 1 + 2, and 3 * 2^53, which float32 could not add."""
    texts = ["rank 0", "rank 1", "rank 2"]
    assert pool.run(3, _sums) == [([0.1 + 0.1 + 0.1, 3.0, 3.0 * 2**53], texts)] * 3


@pytest.mark.parametrize(
    ("value", "says"),
    [
        (np.float64(0.9), r"extra\.best is a numpy\.float64, .*: give float\(x\), int\(x\) or x\.tolist\(\)"),
        ([1, (2, np.int64(3))], r"extra\.best\[1\]\[1\] is a numpy\.int64"),
        ({np.str_("a"): 1}, r"a key of extra\.best is a numpy\.str_"),
        (print, r"extra\.best is a builtin_function_or_method"),
        (lambda: 0, r"extra\.best is a function, .*: give tensors, numbers, texts, lists or"),
    ],
)
def test_what_could_not_be_read_is_not_written(tmp_path, value, says):
    """A NumPy number was written for weeks and refused at resume, in every checkpoint kept."""
    content = {"model": {"w": torch.ones(3)}, "extra": {"loss": 0.5, "best": value}}
    with pytest.raises(CheckpointError, match=f"^cannot be saved: {says}"):
        save(tmp_path, 3, **content)
    assert list(tmp_path.iterdir()) == []


def test_all_that_torch_reads_is_written(tmp_path):
    plain = {"a": [None, True, 1, 0.5, 1j, "é", b"\0"], "b": (torch.Size([2]), torch.float16), 3: {}}
    parts = {"ordered": OrderedDict(x=1), "counter": Counter("aab"), "bf16": torch.ones(2).bfloat16()}
    save(tmp_path, 3, **parts, plain=plain, sparse=torch.eye(3).to_sparse())
    loaded = checkpoint.read_rank(tmp_path, checkpoint.read_manifest(tmp_path, 3), 0)
    assert loaded["plain"] == plain
    assert {name: loaded[name] for name in ("ordered", "counter")} == {
        name: parts[name] for name in ("ordered", "counter")
    }
    assert torch.equal(loaded["sparse"].to_dense(), torch.eye(3))
