"""The compressor that `docs/compressors.md` shows conforms, is right on average, and trains a model."""

import re
from dataclasses import dataclass, field, fields
from pathlib import Path

import pytest
import torch
from torch import nn

import stenograd
from stenograd.compression import Codec, Compressor, ErrorFeedback, Exchange, Facts, Site
from stenograd.compression.codec import message_share
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


def _names(text):
    """The names in the first column of a page's tables, without arguments."""
    return {name.removeprefix("site.") for name in re.findall(r"^\| `([\w.]+)", text, re.MULTILINE)}


def test_an_author_needs_ten_names_and_the_whole_contract_is_on_the_page():
    """Counted are the rows of the two tables; no public name of a class of the contract is left out."""
    author, whole = PAGE.read_text().split("## The whole contract")
    whole = whole.split("## What acts around")[0]
    assert len(_names(author)) == 10
    assert len(_names(author) | _names(whole)) <= 22
    classes = (Compressor, Codec, Facts, Exchange, Site)
    public = {name for cls in classes for name in dir(cls) if not name.startswith("_")} - set(dir(tuple))
    plain = {f.name for f in fields(Site)} | {"numels"}  # where and when: told, nothing to write
    assert public - plain <= _names(author) | _names(whole)
    assert all(f"`{name}`" in whole for name in plain)


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
