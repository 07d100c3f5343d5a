"""How often a step makes the host wait for its device, counted on a device that is not there.

Each wait lets a GPU run out of work, so their number must not grow with that of buckets.
"""

import sys
import threading
from pathlib import Path

import pytest
import torch
from torch import nn

import stenograd
from stenograd.comm.tensor_exchange import TensorExchange
from stenograd.compressors.topk import TopK
from stenograd.errors import WireError
from stenograd.kernels import indices, scatter, select
from stenograd.simulate import ranks
from stenograd.testing.methods import by_name

sys.path.append(str(Path(__file__).parents[2] / "benchmarks"))
from host_waits import AWAY, host_waits

WORLD, BUCKETS = 4, 3
# One look at the end of a step: flags of all ranks, whether all was finite, whether messages were whole.
# Top-k decodes after that, so what it finds in messages is read once more.
BARS = {"topk": 2}
# Lengths that differ between the ranks are asked for bucket by bucket.
PER_BUCKET = ("threshold",)


def step_of(text, world=WORLD):
    """Return what made the hosts of all ranks wait in the second step."""
    gate = threading.Barrier(world)

    def train(driver):
        torch.manual_seed(0)
        layers = [nn.Sequential(nn.Linear(32, 32, bias=False), nn.Tanh()) for _ in range(BUCKETS)]
        model = nn.Sequential(*layers).to(AWAY)
        optimizer = torch.optim.SGD(model.parameters(), lr=1e-3)
        sync = stenograd.distribute(model, optimizer, text, group=driver, bucket_bytes=4096)
        for step in range(2):
            if step == 1 and gate.wait() == 0:
                found.clear()
            gate.wait()
            model(torch.ones(8, 32).to(AWAY, non_blocking=True)).square().mean().backward()
            optimizer.step()
            gate.wait()
        counted = list(found)
        gate.wait()
        sync.close()
        return counted

    with host_waits(AWAY) as found:
        return ranks(world, train)[0]


@pytest.mark.parametrize("text", [text for text in by_name() if not text.startswith(PER_BUCKET)])
def test_the_host_waits_once_per_step_whatever_the_number_of_buckets(text, monkeypatch):
    monkeypatch.setenv("STENOGRAD_KERNELS", "reference")
    found = step_of(text)
    assert len(found) <= BARS.get(text.partition(":")[0], 1) * WORLD, found


def test_between_two_rounds_the_host_waits_only_to_see_whether_a_gradient_is_finite(monkeypatch):
    """A round ends after four steps; the second is none. A bad step is skipped, so all gradients are read."""
    monkeypatch.setenv("STENOGRAD_KERNELS", "reference")
    assert len(step_of("local:every=4")) <= WORLD


@pytest.mark.parametrize("k", [0, 1, 5, 40])
def test_selection_and_codes_of_places_are_those_of_the_cpu(k):
    """Among 40 numbers of four magnitudes most are equal to others: those at lower places are taken."""
    x = torch.randint(-2, 3, (40,), generator=torch.Generator().manual_seed(1)).float()
    wanted = select.select(x, k)
    packed = indices.pack_places(wanted[0], 40)
    with host_waits(AWAY) as found:
        places, values = select.select(x.to(AWAY, non_blocking=True), k)
        code = indices.pack_places(places, 40)
        again = indices.unpack_places(code, 40, k)
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
