"""Checkpoint files and agreement between ranks, below the command line."""

import pytest
import torch

from laconic import checkpoint
from laconic.drive import Driver
from laconic.errors import CheckpointError, DataError, LaconicError
from laconic.totals import agree, everyone, sum_over_ranks

IDENTITY = {"task": "digits", "recipe": {"lr": 0.1, "betas": (0.9, 0.99)}}


def test_round_trip(tmp_path):
    path = checkpoint.checkpoint_path(tmp_path, 3, 1)
    content = {"w": torch.arange(3.0), "rows": [{"loss": None, "epoch": 1}]}
    checkpoint.save(path, IDENTITY, content)
    loaded = checkpoint.load(path, IDENTITY)
    assert torch.equal(loaded["w"], content["w"])
    assert loaded["rows"] == content["rows"]
    assert [p.name for p in tmp_path.iterdir()] == ["checkpoint-epoch3-rank1.pt"]


def test_epochs_and_cleaning(tmp_path):
    for epoch, rank in ((9, 0), (10, 0), (9, 1)):
        checkpoint.save(checkpoint.checkpoint_path(tmp_path, epoch, rank), IDENTITY, {})
    (tmp_path / "checkpoint-epochX-rank0.pt").touch()
    assert checkpoint.saved_epochs(tmp_path, 0) == [9, 10]
    assert checkpoint.saved_epochs(tmp_path / "nowhere", 0) == []
    checkpoint.drop_others(tmp_path, 10, 0)
    assert (checkpoint.saved_epochs(tmp_path, 0), checkpoint.saved_epochs(tmp_path, 1)) == ([10], [9])


def test_an_interrupted_write_leaves_the_old_file(tmp_path, monkeypatch):
    path = tmp_path / "file"
    checkpoint.write_atomically(path, b"old")
    monkeypatch.setattr(checkpoint.os, "fsync", lambda number: (_ for _ in ()).throw(OSError("disk full")))
    with pytest.raises(OSError, match="disk full"):
        checkpoint.write_atomically(path, b"new")
    assert path.read_bytes() == b"old"


@pytest.mark.parametrize("damage", [lambda b: b[: len(b) // 2], lambda b: b"", lambda b: b"not a checkpoint"])
def test_damaged(tmp_path, damage):
    path = tmp_path / "x.pt"
    checkpoint.save(path, IDENTITY, {"w": torch.zeros(1000)})
    path.write_bytes(damage(path.read_bytes()))
    with pytest.raises(CheckpointError, match=r"x\.pt: cannot be read"):
        checkpoint.load(path, IDENTITY)


def test_missing_and_foreign(tmp_path):
    path = tmp_path / "x.pt"
    with pytest.raises(CheckpointError, match="No such file"):
        checkpoint.load(path, IDENTITY)
    torch.save({"w": torch.zeros(1)}, path)
    with pytest.raises(CheckpointError, match="format must be 1, got nothing"):
        checkpoint.load(path, IDENTITY)
    checkpoint.save(path, IDENTITY, {})
    with pytest.raises(CheckpointError, match=r"x\.pt: task is digits there and text now"):
        checkpoint.load(path, IDENTITY | {"task": "text"})
    with pytest.raises(CheckpointError, match="seed is nothing there and 1 now"):
        checkpoint.load(path, IDENTITY | {"seed": 1})


def _fails_on_1(rank, everywhere):
    def action():
        if rank == 1 or everywhere:
            raise DataError("no file")
        return rank

    try:
        return agree(Driver(timeout_s=30), action)
    except LaconicError as error:
        return type(error).__name__, str(error)


def _disk_full(rank):
    def action():
        if rank == 0:
            raise OSError("disk full")

    try:
        return agree(Driver(timeout_s=30), action)
    except LaconicError as error:
        return str(error)


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
