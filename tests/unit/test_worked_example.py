"""The compressor that `docs/compressors.md` shows conforms, is right on average, and trains a model."""

import re
from dataclasses import dataclass, field
from pathlib import Path

import pytest
import torch
from torch import nn

import stenograd
from stenograd.compression.codec import message_share
from stenograd.compression.error_feedback import ErrorFeedback
from stenograd.simulate import exchange, ranks
from stenograd.testing import check

PAGE = Path(__file__).parents[2] / "docs" / "compressors.md"


@pytest.fixture(scope="module")
def ternary():
    (code,) = re.findall(r"```python\n(.*?)```", PAGE.read_text(), re.DOTALL)
    names = {"__name__": "worked_example"}
    exec(code, names)
    return names["Ternary"]


def test_it_conforms(ternary):
    check(ternary())


def test_it_needs_no_more_names_than_the_page_lists(ternary):
    rows = re.findall(r"^\| (`[^|]*) \|", PAGE.read_text().split("## How codes travel")[0], re.MULTILINE)
    assert len(rows) <= 15


def test_two_bits_and_one_number_travel(ternary):
    sent = []
    exchange(ternary(), [torch.randn(1000), torch.randn(1000)], spy=sent.append)
    assert [request.nbytes for request in sent] == [250 + 4]


def test_the_library_finds_out_how_large_its_messages_are(ternary):
    """Nothing is declared: 2 bits of 32 for each element, and a scale."""
    assert message_share(ternary()) == pytest.approx(1 / 16 + 4 / (4 * 2**16))


def test_a_compressor_with_a_list_attaches(ternary):
    """Its fields may be of any kind: it need not be hashable."""

    @dataclass(frozen=True, kw_only=True)
    class Listed(ternary):
        levels: list[int] = field(default_factory=lambda: [-1, 0, 1])

    model = nn.Linear(3, 1)
    with stenograd.distribute(model, torch.optim.SGD(model.parameters(), lr=0.1), Listed()):
        model(torch.tensor([[3.0, 1.0, -1.0]])).sum().backward()
    first, *others = model.weight.grad.view(-1).tolist()
    assert (first, {*map(abs, others)} <= {0.0, 3.0}) == (3.0, True)  # dense, they would be 1 and -1


def test_it_trains_under_feedback_with_equal_replicas(ternary):
    """60 steps of least squares, each rank with its own data: the loss falls to less than a tenth."""

    def rank_of(driver):
        generator = torch.Generator().manual_seed(driver.rank)
        x = torch.randn(64, 10, generator=generator)
        model = nn.Linear(10, 1)
        optimizer = torch.optim.SGD(model.parameters(), lr=0.05)
        with stenograd.distribute(model, optimizer, ErrorFeedback(inner=ternary()), group=driver):
            losses = []
            for _ in range(60):
                optimizer.zero_grad()
                loss = (model(x) - x.sum(1, keepdim=True)).square().mean()
                loss.backward()
                optimizer.step()
                losses.append(loss.item())
        return losses, model.weight.detach().clone()

    (losses, weight), (_, other) = ranks(2, rank_of)
    assert losses[-1] < losses[0] / 10
    assert torch.equal(weight, other)
