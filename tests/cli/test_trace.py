"""`stenograd train --trace FILE`, in this process."""

import json

from cli_process import QUICK


def test_a_trace_is_written(here, tmp_path):
    """Every step of the epoch has its backward pass and its optimizer step, all of rank 0."""
    path = tmp_path / "trace.json"
    status, out, _ = here("train", *QUICK, "--epochs", 1, "--trace", path)
    assert (status, "epoch 1/1" in out) == (0, True)
    events = [e for e in json.loads(path.read_text())["traceEvents"] if e["ph"] == "X"]
    steps = [e for e in events if e["name"] == "step"]
    assert len(steps) == sum(e["name"] == "backward" for e in events) > 1
    assert {e["pid"] for e in events} == {0}


def test_a_file_that_cannot_be_written(here, tmp_path):
    status, _, err = here("train", *QUICK, "--epochs", 1, "--trace", tmp_path / "no" / "trace.json")
    assert status == 2
    assert "the trace must be a file that can be written" in err
