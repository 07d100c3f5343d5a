"""What adapters share, and those of frameworks that are not installed."""

import importlib.util
import sys

import pytest
import torch
from torch import nn
from torch.utils._python_dispatch import TorchDispatchMode

from stenograd import method
from stenograd.adapters import Attached, stops


@pytest.mark.parametrize("name", ["accelerate", "lightning", "transformers"])
def test_without_the_framework_the_error_names_the_extra(name, monkeypatch):
    for module in [module for module in sys.modules if module.startswith(f"stenograd.{name}")]:
        monkeypatch.delitem(sys.modules, module)
    monkeypatch.setitem(sys.modules, name, None)  # makes `import name` fail, also where it is installed
    monkeypatch.setattr(importlib.util, "find_spec", lambda name: None)
    with pytest.raises(ImportError, match=rf"pip install stenograd\[{name}\]"):
        importlib.import_module(f"stenograd.{name}")


class Caching(nn.Linear):
    """Keeps as many positions as the longest input had."""

    def __init__(self):
        super().__init__(2, 2)
        self.register_buffer("positions", torch.zeros(1))

    def forward(self, x):
        if len(x) > len(self.positions):
            self.register_buffer("positions", torch.arange(len(x)).float())
        return super().forward(x)


class Cloned(TorchDispatchMode):
    """Counts elements that are cloned."""

    def __init__(self):
        super().__init__()
        self.elements = 0

    def __torch_dispatch__(self, function, types, args=(), kwargs=None):
        out = function(*args, **(kwargs or {}))
        if function is torch.ops.aten.clone.default:
            self.elements += out.numel()
        return out


@pytest.fixture
def in_rounds():
    """Attach models in rounds."""
    attached = []

    def attach(model):
        held = [p for p in model.parameters() if p.requires_grad]
        options = {"timeout_s": 60.0}
        attached.append(
            Attached.by_optimizers(model, [torch.optim.SGD(held, lr=0.1)], method("local:every=4"), options)
        )
        return attached[-1]

    yield attach
    for one in attached:
        one.close()


def test_a_buffer_may_grow_while_the_consensus_is_in_place(in_rounds):
    model = Caching()
    attached = in_rounds(model)
    model(torch.ones(2, 2)).sum().backward()
    own = model.weight.detach().clone()
    attached.show()
    model(torch.ones(5, 2))
    with torch.no_grad():
        model.weight.zero_()
    attached.hide()
    assert model.positions.tolist() == [0, 1, 2, 3, 4]
    assert torch.equal(model.weight, own)


def test_what_is_frozen_is_not_copied_for_the_consensus(in_rounds):
    model = nn.Sequential(nn.Linear(100, 100).requires_grad_(False), nn.Linear(100, 1))
    attached = in_rounds(model)
    with Cloned() as cloned, attached.shown():
        assert 0 < cloned.elements < 1000


class _Asked:
    """What only polls tell of requests, from the third on."""

    needs_poll = listens = True
    stopping = False
    _polled = polls = 0

    def poll(self):
        self.polls += 1
        return self.polls > 2


@pytest.mark.parametrize("numbers", [range(1, 33), range(1, 33, 2), [3, 3, 3, 10, 20, 30]], ids=str)
def test_ranks_poll_once_in_eight_steps_whichever_numbers_these_have(numbers):
    sync = _Asked()
    assert [stops(sync, number) for number in numbers].count(True) >= 1
    assert sync.polls == max(numbers) // 8
