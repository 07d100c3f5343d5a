"""How often a step makes the host wait for its device, counted on a device that is not there.

Each wait lets a GPU run out of work, so their number must not grow with that of buckets.
"""

import sys
import warnings
from pathlib import Path

import pytest
import torch
from torch import nn

import stenograd
from stenograd.compressors.threshold import Threshold
from stenograd.compressors.topk import TopK
from stenograd.errors import WireError
from stenograd.exchange.tensor_exchange import TensorExchange
from stenograd.kernels import indices, scatter, select
from stenograd.simulate import exchange, ranks
from stenograd.sync.steps import zero_bad
from stenograd.testing.methods import by_name, wrapped

sys.path.append(str(Path(__file__).parents[2] / "benchmarks"))
from host_waits import AWAY, BETWEEN, between_rounds, host_waits, waits_of

WORLD, BUCKETS = 4, 5
# One look at the end of a step: flags of all ranks, whether all was finite, whether messages were whole.
# Top-k decodes after that, so what it finds in messages is read once more. Lengths that differ between the
# ranks must be known before the messages are sent. All that is read together for all buckets.
BARS = {"topk": 2, "threshold": 3}
MOVING = ["demo", "dion", "dgc:ratio=0.1"]  # which deliver a momentum of their own


@pytest.mark.parametrize("text", [*by_name(), *wrapped(), *MOVING])
def test_the_host_waits_as_often_whatever_the_number_of_buckets(text, monkeypatch):
    monkeypatch.setenv("STENOGRAD_KERNELS", "reference")
    found = waits_of(text, buckets=BUCKETS)[1]
    assert len(found) <= BARS.get(text.partition(":")[0], 1) * WORLD, found


@pytest.mark.parametrize("text", BETWEEN)
def test_between_two_rounds_the_host_does_not_wait(text, monkeypatch):
    """Before and after the first rounds, with a gradient that is not finite among them."""
    monkeypatch.setenv("STENOGRAD_KERNELS", "reference")
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", RuntimeWarning)
        found = waits_of(text, buckets=2, steps=8, bad=(1,), beside=False)
    between = between_rounds(text, 8)
    assert len(between) >= 4
    assert [found[t] for t in between] == [[]] * len(between)


@pytest.mark.parametrize("device", [torch.device("cpu"), AWAY], ids=str)
def test_a_bad_gradient_between_rounds_costs_one_step(device, monkeypatch):
    """A host that does not look lets the step take zeros, which move nothing without momentum.

    The gradient of `(w - r)^2` is `2 (w - r)`; with steps of 1/4 w halves its distance to rank r, and stays
    where it is in the bad step: 1 - 1/2 = 1/2 twice instead of 1/4, on both ranks the same.
    """
    monkeypatch.setenv("STENOGRAD_KERNELS", "reference")

    def train(driver):
        model = nn.Linear(1, 1, bias=False).to(device)
        nn.init.zeros_(model.weight)
        sgd = torch.optim.SGD(model.parameters(), lr=0.25)
        sync = stenograd.distribute(model, sgd, "local:every=3", group=driver)
        for step in range(3):
            x = torch.full((1, 1), float("nan") if step == 1 else 1.0).to(device, non_blocking=True)
            sgd.zero_grad()
            (model(x) - 1).square().sum().backward()
            finite.append((step, sync.finite))
            sgd.step()
        counts.append(sync.skipped)
        sync.close()
        return float(model.weight.detach().cpu())

    finite, counts = [], []
    with host_waits(AWAY), pytest.warns(RuntimeWarning, match="was not finite"):
        assert ranks(2, train) == [0.75, 0.75]
    assert counts == [1, 1]
    assert sorted(finite) == [(0, True)] * 2 + [(1, False)] * 2 + [(2, True)] * 2


def test_zeros_take_the_place_of_a_step_and_of_what_is_bad_elsewhere():
    """One of three parameters steps: a bad pass makes its gradient zeros, and of the others only the bad."""
    mine, good, bad = (nn.Parameter(torch.ones(2)) for _ in range(3))
    sgd = torch.optim.SGD([mine], lr=1.0)

    def gradients_after(sound):
        mine.grad, good.grad, bad.grad = torch.ones(2), torch.ones(2), torch.tensor([1.0, float("inf")])
        zero_bad(sgd, {id(p) for p in (mine, good, bad)}, torch.tensor(sound), [mine, good, bad])
        return [p.grad.tolist() for p in (mine, good, bad)]

    assert gradients_after(False) == [[0.0, 0.0], [1.0, 1.0], [0.0, 0.0]]
    assert gradients_after(True)[0] == [1.0, 1.0]
    mine.grad = torch.sparse_coo_tensor([[0]], [float("nan")], (2,), check_invariants=True)
    zero_bad(sgd, {id(mine)}, torch.tensor(False), [mine])
    assert mine.grad.to_dense().tolist() == [0.0, 0.0]


@pytest.mark.parametrize("feedback", [False, True])
@pytest.mark.parametrize("value", [0.3, 1.0, 9.0])
def test_a_threshold_sends_the_same_from_a_device(value, feedback, monkeypatch):
    """Three ranks with other lengths; at 9 nothing reaches it. Bytes, averages and what is left are equal."""
    monkeypatch.setenv("STENOGRAD_KERNELS", "reference")
    xs = [torch.randn(50, generator=torch.Generator().manual_seed(r)) * (r + 1) for r in range(3)]

    def sent(device):
        found = []
        moved = [x.to(device, non_blocking=True) for x in xs]
        told = exchange(Threshold(value=value), moved, want_error=feedback, spy=found.append)
        tensors = [t for e in told for t in (e.average, e.error) if t is not None]
        return [t.cpu() for t in tensors], [(r.op, r.nbytes) for r in found if r.nbytes]

    there, messages = sent(torch.device("cpu"))
    with host_waits(AWAY):
        here, same = sent(AWAY)
    assert messages == same
    assert len(there) == (6 if feedback else 3)
    assert all(map(torch.equal, there, here))


@pytest.mark.parametrize("k", [0, 1, 5, 40])
def test_selection_and_codes_of_places_are_those_of_the_cpu(k):
    """Among 40 numbers of four magnitudes most are equal to others: those at lower places are taken."""
    x = torch.randint(-2, 3, (40,), generator=torch.Generator().manual_seed(1)).float()
    wanted = select.select(x, k)
    packed = indices.pack_indices(wanted[0], 40)
    with host_waits(AWAY) as found:
        places, values = select.select(x.to(AWAY, non_blocking=True), k)
        code = indices.pack_indices(places, 40)
        again = indices.unpack_indices(code, 40, k)
        dense = scatter.scatter_mean([(again, values)] * 2, 40)
        assert "nonzero" not in " ".join(found)
        got = [t.cpu() for t in (places, values, code, again, dense)]
    for mine, other in zip(got, (*wanted, packed, wanted[0]), strict=False):
        assert torch.equal(mine, other)
    assert torch.equal(got[-1], scatter.scatter_mean([wanted] * 2, 40))


@pytest.mark.parametrize("compact", [True, False])
def test_damaged_places_are_named_when_the_step_is_read(compact, monkeypatch):
    """Every byte of the places is 127: as int32 far outside, and as a code with too many bits set."""
    monkeypatch.setenv("STENOGRAD_KERNELS", "reference")
    encode = TopK.encode_error

    def damaged(self, x, residual, site):
        (places, *values), error = encode(self, x, residual, site)
        return (torch.full_like(places.view(torch.uint8), 127).view(places.dtype), *values), error

    def average(driver):
        method = f"topk:ratio=0.1,compact={str(compact).lower()}"
        TensorExchange(method, driver, waits=True).average({"w": torch.ones(100).to(AWAY)})

    monkeypatch.setattr(TopK, "encode_error", damaged)
    with host_waits(AWAY), pytest.raises(WireError, match="disagree on k" if compact else "lie in"):
        ranks(2, average)
