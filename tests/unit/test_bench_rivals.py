"""Rivals of the benchmark that come from elsewhere: who is refused, and how a package is attached."""

import sys
import types
from pathlib import Path

import pytest
import torch

from stenograd.errors import MethodError

sys.path.append(str(Path(__file__).parents[2] / "benchmarks"))  # behind the tests' own folders

import rivals


def test_unknown_rivals_and_missing_packages_are_refused(monkeypatch):
    monkeypatch.setattr(sys, "path", [p for p in sys.path if not (Path(p) / "powersgd").exists()])
    monkeypatch.delitem(sys.modules, "powersgd", raising=False)
    rivals.check_names(["none", "ddp", "topk:ratio=0.01"])
    with pytest.raises(ValueError, match="epfml-powersgd needs"):
        rivals.check_names(["epfml-powersgd"])
    with pytest.raises(MethodError):
        rivals.check_names(["epfml"])


class _Half:
    """Sends half of a gradient and leaves the other half behind."""

    def __init__(self, params, config):
        self.config = config

    def aggregate(self, gradients):
        sent = [g / 2 for g in gradients]
        for g, s in zip(gradients, sent, strict=True):
            g -= s
        return sent


def test_what_the_authors_package_leaves_behind_stays_in_the_gradients(monkeypatch):
    """Gradient 1, learning rate 1: steps of 1/2, (1/2 + 1) / 2, ..., though gradients are set to zero."""
    package = types.ModuleType("powersgd")
    package.Config, package.PowerSGD = dict, _Half
    monkeypatch.setitem(sys.modules, "powersgd", package)
    model = torch.nn.Linear(1, 1, bias=False)
    torch.nn.init.zeros_(model.weight)
    optimizer = torch.optim.SGD(model.parameters(), lr=1.0)
    attached = rivals.Attached("epfml-powersgd-1", model, optimizer)
    moved = [0.0]
    for _ in range(3):
        optimizer.zero_grad()
        attached.module(torch.ones(1, 1)).sum().backward()
        optimizer.step()
        moved.append(-model.weight.item())
    assert moved == [0.0, 0.5, 1.25, 2.125]
    assert model.weight.grad.item() == 0.875
