"""`stenograd train --trace FILE`, in this process, or on ranks of the pool."""

import json
import os
import signal
import time

import pytest
from cli_process import QUICK, on_a_rank

from stenograd.checkpoint.files import saved_steps
from stenograd.cli.loop import Trainer
from stenograd.stopping import STOPPED


def test_a_trace_is_written(here, tmp_path):
    """Every step of the epoch has its backward pass and its optimizer step, all of rank 0."""
    path = tmp_path / "trace.json"
    status, out, _ = here("train", *QUICK, "--epochs", 1, "--trace", path)
    assert (status, "epoch 1/1" in out) == (0, True)
    events = [e for e in json.loads(path.read_text())["traceEvents"] if e["ph"] == "X"]
    steps = [e for e in events if e["name"] == "step"]
    assert len(steps) == sum(e["name"] == "backward" for e in events) > 1
    assert {e["pid"] for e in events} == {0}


def _stopped(rank, words):
    with pytest.MonkeyPatch.context() as patch:
        real = Trainer.take_step

        def step(self, indices):
            time.sleep(0.01 * rank)
            if rank == 1 and self.taken == 3:
                signal.raise_signal(signal.SIGTERM)
            return real(self, indices)

        patch.setattr(Trainer, "take_step", step)
        return on_a_rank(rank, words)


@pytest.mark.parametrize("method", ["dense", "local:every=0.05s"])
def test_ranks_that_are_asked_to_stop_save_and_write_one_trace(pool, tmp_path, method):
    """By time they do so at the end of the epoch, where all are at one step again."""
    path, words = tmp_path / "trace.json", [method if word == QUICK[3] else word for word in QUICK]
    (status, out, _), (other, _, _) = pool.run(
        2, _stopped, ["train", *words, "--trace", path, "--out", tmp_path / "run"]
    )
    assert (status, other, f"wrote {path}" in out) == (STOPPED, STOPPED, True)
    assert saved_steps(tmp_path / "run") == [4 if method == "dense" else 12]
    assert not [*tmp_path.glob("trace.json.rank*")]
    assert {e["pid"] for e in json.loads(path.read_text())["traceEvents"]} == {0, 1}


@pytest.mark.parametrize(
    ("name", "says"), [("no/trace.json", "a file that can be written"), ("pipe", "a regular file")]
)
def test_a_file_that_cannot_be_written(here, tmp_path, name, says):
    """Root would replace /dev/null by a file, for all programs."""
    os.mkfifo(tmp_path / "pipe")
    status, _, err = here("train", *QUICK, "--epochs", 1, "--trace", tmp_path / name)
    assert (status, f"the trace must be {says}" in err) == (2, True)
