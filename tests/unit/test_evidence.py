"""The table and the picture of a cell of evidence, from a record of two seeds."""

import json
import sys
from dataclasses import replace
from pathlib import Path

import pytest
import torch

sys.path.append(str(Path(__file__).parents[2] / "benchmarks"))  # behind the tests' own folders

import evidence
import pictures
from rivals import FLOOR, is_here

FEW_BITS = "diloco:every=10/lowbit:format=e3m0"


def points(seconds, losses):
    """Steps, seconds, bytes, loss, accuracy at four evaluations."""
    return [[10 * k, k * seconds, k * 1_000_000, loss, 0.1 * k] for k, loss in enumerate(losses, 1)]


@pytest.fixture
def results():
    """DDP needs 10 and 12 s for a part, computing alone 2 s; its worst seed ends at 2.2."""
    slow = {"0": 10.0, "1": 12.0}
    ddp = {"0": [4.0, 3.0, 2.5, 2.1], "1": [4.0, 3.0, 2.5, 2.2]}
    few = {"0": [3.5, 2.5, 2.2, 2.0], "1": [3.5, 2.6, 2.3, 2.15]}
    return {
        "rates": {FLOOR: 1.0, "ddp": 2.0, "bf16": 1.0, FEW_BITS: 0.5},
        "seeds": {
            seed: {
                FLOOR: points(2.0, [4.0, 3.9, 3.8, 3.7]),
                "ddp": points(slow[seed], ddp[seed]),
                "bf16": points(5.0, [4.0, 3.5, 3.0, 2.9]),
                FEW_BITS: points(2.5, few[seed]),
            }
            for seed in ("0", "1")
        },
    }


def test_the_table_tells_the_worst_seed(monkeypatch, results):
    """DDP is at 2.2 after 37.5 and 48 s, DiLoCo after 7.5 and 9.17 s: 5 and 5.24 times as fast.

    Computing alone takes 8 of its 10 s. Two hosts have learnt from 2 x 40 x 12 x 64 characters. DDP is never
    at 2.0, where DiLoCo's first seed ends, so all its 40 s count; it is at 2.9, where bf16 ends after 20 s,
    after 22 and 26.4 s.
    """
    monkeypatch.setitem(evidence.EVIDENCE, "try", replace(evidence.EVIDENCE["try"], steps=40))
    lines = evidence.summary(results, "try", 2).splitlines()
    assert lines[0] == "2 seeds, 40 steps."
    assert lines[5].startswith(
        "| `ddp` | 2 | 2.150 (2.100 to 2.200) | 42.8 (37.5 to 48.0) | 1.00 | 1.00 | 44.0 (40.0 to 48.0) |"
    )
    bf16 = "| `bf16` | 1 | 2.900 (2.900 to 2.900) |  |  | 1.10 | 20.0 (20.0 to 20.0) | 40 (40 to 40) |"
    assert lines[6].startswith(bf16)
    few = "| 0.5 | 2.075 (2.000 to 2.150) | 8.3 (7.5 to 9.2) | 5.00 | 4.00 | 10.0 (10.0 to 10.0)"
    assert lines[7] == f"| `{FEW_BITS}` {few} | 80 (80 to 80) | 6,144 | 4.0 |"


def test_a_rate_is_chosen_by_the_lowest_loss(tmp_path, monkeypatch):
    """All are tried already, so nothing is trained."""
    monkeypatch.setattr(evidence, "FOLDER", tmp_path)
    names = [name for name in evidence.EVIDENCE["try"].rivals[1:] if is_here(name)]
    found = {"1.0": dict.fromkeys(names, 2.0), "2.0": dict.fromkeys(names, 2.5) | {"ddp": 1.9}}
    (tmp_path / "tuned_try_2.json").write_text(json.dumps(found))
    assert evidence._tuned("try", 2, "") == {FLOOR: 1.0} | dict.fromkeys(names, 1.0) | {"ddp": 2.0}


def test_a_seed_that_another_machine_measured_is_refused(tmp_path, monkeypatch, results):
    """Computing took 8 s in the others; one of 2 s is not kept beside them, and the record stays as it is."""
    point = {"epoch": 1.0, "seconds": 2.0, "host_bytes": 0, "eval_loss": 3.7, "accuracy": 0.4}
    monkeypatch.setattr(evidence, "FOLDER", tmp_path)
    monkeypatch.setattr(evidence, "_tuned", lambda *_: results["rates"])
    monkeypatch.setattr(
        evidence.Place, "run", lambda *_, **__: [{name: [point] for name in results["rates"]}]
    )
    record = tmp_path / "try_2_none.json"
    record.write_text(before := json.dumps({"results": results}))
    with pytest.raises(ValueError, match=r"took 2\.0 s, and 8\.0 s .* another machine"):
        evidence.run("try:2:none", "", [2], "2026-11-29")
    assert record.read_text() == before


def test_a_cell_that_is_none_is_refused():
    with pytest.raises(ValueError, match="WORKLOAD:HOSTS:RATE"):
        evidence.hours("mnist")


def test_the_picture_has_a_line_for_each_of_three_rivals(tmp_path, results):
    pytest.importorskip("matplotlib")
    assert pictures.bands(tmp_path / "x.png", results["seeds"], "here").startswith("wrote")


def test_adapters_begin_as_nothing_and_are_all_that_trains():
    """B is zero at first. A of 8 x 3 and B of 5 x 8 are 64 numbers."""
    base = torch.nn.Linear(3, 5).requires_grad_(False)
    adapted, x = evidence._Adapted(base), torch.randn(2, 3)
    assert torch.equal(adapted(x), base(x))
    assert sum(p.numel() for p in adapted.parameters() if p.requires_grad) == 64


def test_residual_blocks_have_batchnorm_and_ten_scores():
    model = evidence._Resnet.build(None)
    assert model(torch.randn(2, 1, 28, 28)).shape == (2, 10)
    assert any(isinstance(module, torch.nn.BatchNorm2d) for module in model.modules())
