"""What compression leaves out is owed: it is applied later, and never lost or sent twice."""

import warnings
from functools import partial

import pytest
import torch
from models import flat
from torch import nn

import stenograd

LOSSY = {
    "topk": "topk:ratio=0.05",
    "topk-regions": "topk:ratio=0.05,reduce=regions",
    "threshold": "threshold:value=0.5",
    "randomk": "randomk:ratio=0.1",
    "sign": "sign:dense_below=0",
    "sign-small-dense": "sign:dense_below=50",
    "qsgd": "qsgd:bits=2,feedback=true",
    "powersgd": "powersgd:rank=1",
    "fp16": "fp16:feedback=true",
    "topk-wrapped": "topk:ratio=0.05,dense_below=20,clip_norm=1e9,warmup_steps=3",
}


class _Alternating(nn.Module):
    """Two layers of which each step uses one or both; with 300 bytes a bucket they share one with `bias`."""

    def __init__(self):
        super().__init__()
        torch.manual_seed(0)
        self.a = nn.Parameter(torch.randn(20, 20))
        self.bias = nn.Parameter(torch.randn(30))
        self.b = nn.Parameter(torch.randn(40))

    def loss(self, rank, s):
        g = torch.Generator().manual_seed(100 * s + rank)
        total = (self.a * torch.randn(20, 20, generator=g)).sum()
        if s % 3 != 1:
            total = total + (self.bias * torch.randn(30, generator=g)).sum()
        if s % 2 == 0 or (s % 5 == 3 and rank == 0):  # some steps use it on one rank only
            total = total + (self.b * torch.randn(40, generator=g)).sum()
        return total


def _conserved(rank, world_size, method, bucket_bytes):
    model = _Alternating()
    optimizer = torch.optim.SGD(model.parameters(), lr=1.0)
    sync = stenograd.distribute(model, optimizer, method, bucket_bytes=bucket_bytes, timeout_s=30)
    applied = {n: torch.zeros_like(p, dtype=torch.float64) for n, p in model.named_parameters()}
    made = {n: torch.zeros_like(p, dtype=torch.float64) for n, p in model.named_parameters()}

    def note(name, grad):
        made[name] += grad.double()

    for n, p in model.named_parameters():
        p.register_hook(partial(note, n))
    for s in range(12):
        optimizer.zero_grad()
        model.loss(rank, s).backward()
        for n, p in model.named_parameters():
            if p.grad is not None:
                applied[n] += p.grad.double()
        optimizer.step()
    states = sync.state_dict()["parameters"]
    # nothing is owed of what travels densely
    owed = {n: states[n].get("residual", torch.zeros(p.shape)) for n, p in model.named_parameters()}
    sync.close()
    return made, applied, owed, flat(model)


@pytest.mark.parametrize("bucket_bytes", [300, 4 << 20])
@pytest.mark.parametrize("method", LOSSY.values(), ids=LOSSY)
def test_what_is_applied_and_what_is_owed_add_up_to_the_gradients(pool, method, bucket_bytes):
    """sum of mean gradients = sum of what was applied + mean residual, whatever is used when."""
    ranks = pool.run(2, _conserved, 2, method, bucket_bytes)
    for name in ranks[0][0]:
        total = sum(made[name] for made, *_ in ranks) / len(ranks)
        owed = sum(residuals[name].double() for *_, residuals, _ in ranks) / len(ranks)
        lost = total - ranks[0][1][name] - owed.view(total.shape)
        rounding = 1e-3 if method.startswith("fp16") else 1e-5  # its sums round once more on the wire
        assert lost.norm() < rounding * total.norm(), (
            f"{lost.norm():.3g} of {total.norm():.3g} of {name} lost"
        )
    assert torch.equal(ranks[0][3], ranks[1][3])


def _rests(rank, method):
    """Layer b gets a gradient once; afterwards nobody uses it."""
    model = _Alternating()
    optimizer = torch.optim.SGD(model.parameters(), lr=1.0, weight_decay=0.1)
    with stenograd.distribute(model, optimizer, method, timeout_s=30) as sync:
        model.loss(rank, 0).backward()
        optimizer.step()
        before = sync.state_dict()["parameters"]["b"]["residual"].clone()
        weights = model.b.detach().clone()
        for s in (1, 5, 7):
            optimizer.zero_grad()
            model.loss(rank, s).backward()
            assert model.b.grad is None
            optimizer.step()
        after = sync.state_dict()["parameters"]["b"]["residual"]
        assert before.any()
        assert torch.equal(before, after)
        assert torch.equal(weights, model.b)


@pytest.mark.parametrize("method", ["topk:ratio=0.05", "sign:dense_below=0"])
def test_a_parameter_that_no_rank_uses_keeps_its_residual_and_its_weights(pool, method):
    pool.run(2, _rests, method)


def _stale(rank, method):
    """A gradient that was left from the last pass, and no rank used since, is not sent again."""
    model = _Alternating()
    optimizer = torch.optim.SGD(model.parameters(), lr=1.0)
    with stenograd.distribute(model, optimizer, method, timeout_s=30) as sync:
        model.loss(rank, 0).backward()
        left = model.b.grad.clone()
        residual = sync.state_dict()["parameters"]["b"]["residual"].clone()
        model.a.grad = model.bias.grad = None
        model.loss(rank, 1).backward()
        assert torch.equal(model.b.grad, left)
        assert torch.equal(sync.state_dict()["parameters"]["b"]["residual"], residual)


def test_a_gradient_left_from_an_earlier_pass_is_not_sent_again(pool):
    pool.run(2, _stale, "topk:ratio=0.05")


def _new_head(rank, method, width):
    """After three steps, a new head that starts otherwise on each rank, in a group of its own as before."""
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(8, 40), nn.Linear(40, 6))
    optimizer = torch.optim.SGD([{"params": list(layer.parameters())} for layer in model], lr=0.1)
    sync = stenograd.distribute(model, optimizer, method, timeout_s=30)
    told, kept = [], True
    for step in range(6):
        if step == 3:
            before = sync.state_dict()["parameters"]
            torch.manual_seed(100 + rank)
            model[1] = nn.Linear(40, width)
            optimizer.param_groups.pop()
            with warnings.catch_warnings(record=True) as caught:
                warnings.simplefilter("always")
                optimizer.add_param_group({"params": list(model[1].parameters())})
            told = [str(w.message) for w in caught]
            after = sync.state_dict()["parameters"]
            kept = all(torch.equal(t, after["0.weight"][key]) for key, t in before["0.weight"].items())
            owed = after["1.weight"].get("residual", torch.zeros(1))
            kept = kept and not owed.any() and bool(before["0.weight"])
        optimizer.zero_grad()
        model(
            torch.randn(4, 8, generator=torch.Generator().manual_seed(9 * step + rank))
        ).square().sum().backward()
        optimizer.step()
    sync.close()
    return torch.cat([p.detach().flatten() for p in model.parameters()]), told, kept


@pytest.mark.parametrize("width", [6, 7])
@pytest.mark.parametrize("method", ["topk:ratio=0.1,dense_below=0", "powersgd:rank=1", "qsgd:feedback=true"])
def test_what_is_owed_to_a_head_goes_with_it(pool, method, width):
    """A new head starts owing nothing, equal on all ranks; what is owed to other layers stays."""
    (mine, told, kept), (theirs, _, _) = pool.run(2, _new_head, method, width)
    assert torch.equal(mine, theirs)
    assert kept
    assert len(told) == 1
    assert "parameters were replaced, 1.bias" in told[0]
