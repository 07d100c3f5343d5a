"""The benchmark behind docs/planning.md: what a cell is, what counts as found, and ranks that sleep."""

import sys
import time
from pathlib import Path

import pytest
import torch

sys.path.append(str(Path(__file__).parents[2] / "benchmarks"))  # behind the tests' own folders

from paced import Pace, Paced, pace_of
from plan_validation import Cell, answers, link_errors

from stenograd.planning.link import assumed


def test_a_cell_is_read_and_written():
    assert Cell.of("cnn:2x2:100mbit/20mbit,5ms:paced") == ("cnn", 2, 2, "100mbit/20mbit", "5ms", True)
    assert str(Cell.of("cnn:2x2:100mbit/20mbit,5ms:paced")) == (
        "cnn, 2 hosts of 2 ranks, 100 Mbit/s up and 20 Mbit/s down, 5ms, paced"
    )
    assert str(Cell.of("gpt:3:1.5gbit")) == "gpt, 3 hosts, 1.5 Gbit/s"
    assert Cell.of("gpt:3:1gbit") == ("gpt", 3, 1, "1gbit", "none", False)


def test_rates_are_compared_with_what_others_can_take():
    """100 Mbit/s up and 20 down: with two hosts both are 20, with three a host sends up to 40."""
    two, three = assumed("20mbit,5ms", [0, 1]), assumed("40mbit/20mbit,6ms", [0, 1, 2])
    assert link_errors("cnn:2:100mbit/20mbit,5ms", two) == pytest.approx([0.0] * 5)
    assert link_errors("cnn:3:100mbit/20mbit,5ms", three) == pytest.approx([0.0] * 6 + [0.2])


def test_the_worst_regret_leaves_ties_out():
    """A tie with 30 % and a clear question with 10 %: mean 20 %, worst 30 %, worst but for ties 10 %."""
    clear = {"accuracy": "lossy", "slower": {"dense": 0.1, "topk": 0.0}, "best": "topk", "answer": "dense"}
    clear |= {"regret": 0.1, "tie": False, "dense is best": False}
    tie = clear | {"slower": {"dense": 0.3, "topk": 0.0}, "regret": 0.3, "tie": True}
    rounded = clear | {"accuracy": "rounded", "slower": {"dense": 0.0}, "regret": 0.0, "best": "dense"}
    found = answers([clear, tie, rounded | {"dense is best": True}])
    assert found["regret, lossy"] == pytest.approx([0.2, 0.3, 0.1])
    assert found["best constant answer, lossy"] == ["topk", 0.0, 0.0]
    assert found["dense recognised"] == [1, 1]


def test_a_paced_model_has_the_gradients_of_the_real_one_and_takes_its_time():
    """Two layers, so four parameters: 20 ms forward, 10 ms for each gradient, twice as long by its spread."""
    torch.manual_seed(0)
    model = torch.nn.Sequential(torch.nn.Linear(4, 3), torch.nn.Tanh(), torch.nn.Linear(3, 2))
    x = torch.randn(5, 4)
    order = pace_of(model, lambda: model(x).square().mean()).order
    assert sorted(order) == [0, 1, 2, 3]
    assert set(order[:2]) == {2, 3}  # the last layer's come first
    model.zero_grad()
    model(x).square().mean().backward()
    expected = [p.grad.clone() for p in model.parameters()]

    pace = Pace(0.02, (0.01,) * 4, order, (2.0,))
    paced = Paced(model, lambda: model(x).square().mean(), pace, seed=0)
    came = []
    for at, p in enumerate(paced.parameters()):
        p.register_post_accumulate_grad_hook(lambda _, at=at: came.append(at))
    paced.zero_grad()
    start = time.perf_counter()
    paced().backward()
    assert time.perf_counter() - start >= 2 * (0.02 + 4 * 0.01)
    assert came == list(order)
    for p, grad in zip(paced.parameters(), expected, strict=True):
        assert torch.equal(p.grad, grad)
