"""MLBench's FP16Optimizer on real gloo ranks."""

import pytest
import torch
from models import flat, mlp, shards
from support.training import on_whole_batches
from torch import nn

from stenograd.errors import StenogradError
from stenograd.mlbench import FP16Optimizer

INF = float("inf")


def _wrapped(model, world_size, momentum=0.9, **arguments):
    fp = FP16Optimizer(model, world_size, average_world="average_custom" not in arguments, **arguments)
    fp.set_optimizer(torch.optim.SGD([fp.fp32_params], lr=0.05, momentum=momentum))
    return fp


def _backward(fp, rank, step, world_size):
    xs, ys = shards(step, world_size)
    kind = next(fp.fp16_model.parameters()).dtype
    loss = nn.functional.mse_loss(fp.fp16_model(xs[rank].to(kind)).float(), ys[rank])
    before = float(loss)
    fp.backward_loss(loss)
    assert float(loss) == before  # the caller's loss is left alone


def _scales(rank, kind):
    """Scale 1 and 1024 give the same parameters; the model is the master weights, rounded."""
    out = []
    for scale in (1, 1024):
        fp = _wrapped(mlp(rank).to(kind), 2, init_scale=scale, divide_before=True, by_layer=scale == 1)
        for s in range(5):
            fp.zero_grad()
            _backward(fp, rank, s, 2)
            assert fp.step()
        out.append(fp.fp32_params.detach().clone())
        assert torch.equal(flat(fp.fp16_model), out[-1].to(kind))
    return out


@pytest.mark.parametrize(("kind", "close"), [(torch.float16, 2e-4), (torch.bfloat16, 2e-3)])
def test_the_loss_scale_does_not_matter(pool, kind, close):
    ranks = pool.run(2, _scales, kind)
    torch.testing.assert_close(ranks[0][0], ranks[0][1], rtol=0, atol=close)
    whole = on_whole_batches(lambda ps: torch.optim.SGD(ps, lr=0.05, momentum=0.9), 2, 5)
    torch.testing.assert_close(ranks[0][1], whole, rtol=0, atol=20 * close)
    assert torch.equal(ranks[0][1], ranks[1][1])


def _overflow(rank, divide_before):
    model = nn.Linear(2, 1, bias=False).half()
    fp = _wrapped(model, 3, divide_before=divide_before)
    before = fp.fp32_params.detach().clone(), flat(model)
    model.weight.grad = torch.full((1, 2), 60000.0, dtype=torch.float16)
    applied = fp.step()
    same = torch.equal(before[0], fp.fp32_params), torch.equal(before[1], flat(model))
    return applied, fp.loss_scaler.loss_scale, same


def test_a_half_precision_sum_overflows_unless_divided_before(pool):
    """60000 x 3: skipped, scale 1024 -> 512, nothing moves; with divide_before applied."""
    assert pool.run(3, _overflow, False) == [(False, 512, (True, True))] * 3
    assert pool.run(3, _overflow, True) == [(True, 1024, (False, False))] * 3


def _one_bad_rank(rank):
    fp = _wrapped(nn.Linear(2, 1).half(), 3, init_scale=4, min_scale=1)
    told = []
    for step in range(4):
        for p in fp.fp16_model.parameters():
            p.grad = torch.ones_like(p) if step == 0 else None
        if rank == 1 and step:
            fp.fp16_model.weight.grad = torch.full((1, 2), INF).half()
        try:
            told.append((fp.step(), fp.loss_scaler.loss_scale))
        except StenogradError as error:
            told.append(str(error))
    return told


def test_all_ranks_skip_alike_and_min_scale_is_legitimate_d_m6(pool):
    """4, then 2, then 1 = min_scale is allowed (MLBench raised there), then 0.5 is an error on all ranks."""
    for told in pool.run(3, _one_bad_rank):
        assert told[:3] == [(True, 4), (False, 2), (False, 1)]
        assert told[3].startswith("the loss scale is 0.5, below min_scale=1")


def _multiplied(rank, world_size):
    """Four batches accumulated with multiplier 4, or with denom 4 times the world size: the mean batch."""
    out = []
    for arguments, step in [
        ({}, {"multiplier": 4}),
        ({"average_custom": True}, {"denom": torch.tensor([4.0 * world_size])}),
    ]:
        fp = _wrapped(mlp(0), world_size, momentum=0, **arguments)
        for s in range(4):
            _backward(fp, rank, s, world_size)
        fp.step(**step)
        out.append(fp.fp32_params.detach().clone())
    return out


@pytest.mark.parametrize("world_size", [1, 2])
def test_multiplier_and_denom(pool, world_size):
    model = mlp(0)
    for s in range(4):
        xs, ys = shards(s, world_size)
        (nn.functional.mse_loss(model(torch.cat(xs)), torch.cat(ys)) / 4).backward()
    oracle = torch.cat([(p - 0.05 * p.grad).detach().reshape(-1) for p in model.parameters()])
    for results in pool.run(world_size, _multiplied, world_size):
        for result in results:
            torch.testing.assert_close(result, oracle, rtol=1e-5, atol=1e-6)


def _clipped(rank):
    """Averaged, unscaled gradient 2 on 15 elements, clipped to norm 1."""
    model = nn.Linear(5, 3, bias=False)
    fp = _wrapped(model, 2, momentum=0, grad_clip=1.0, init_scale=8)
    old = fp.fp32_params.detach().clone()
    model.weight.grad = torch.full((3, 5), 8 * (1.0 + 2 * rank))
    fp.step()
    return (old - fp.fp32_params.detach()) / 0.05


def test_clipping_is_on_the_averaged_unscaled_gradient(pool):
    torch.testing.assert_close(pool.run(2, _clipped)[1], torch.full((15,), 15**-0.5), rtol=1e-4, atol=0)


class Odd(nn.Module):
    """Frozen, unused, tied and float32 parameters beside float16."""

    def __init__(self):
        super().__init__()
        self.a, self.b, self.c = (nn.Linear(3, 3).half() for _ in range(3))
        self.b.weight = self.a.weight
        self.c.requires_grad_(False)
        self.unused = nn.Parameter(torch.ones(2).half())
        self.norm = nn.LayerNorm(3)

    def forward(self, x):
        return self.norm(self.c(self.b(self.a(x.half()))).float()).square().sum() + self.a.bias.sum()


def _odd(rank):
    model = Odd()
    fp = _wrapped(model, 2)
    frozen, unused = flat(model.c), model.unused.detach().clone()
    losses = []
    for _ in range(2):

        def closure():
            fp.zero_grad()
            loss = model(torch.ones(2, 3) * (rank + 1))
            fp.backward_loss(loss)
            return loss

        losses.append(fp.step(closure).item())
    assert torch.equal(frozen, flat(model.c))
    assert torch.equal(unused, model.unused)
    return flat(model), losses, fp.applied, model.norm.weight.dtype


def test_frozen_unused_tied_and_mixed_parameters_and_closures_d_m6(pool):
    ranks = pool.run(2, _odd)
    assert torch.equal(ranks[0][0], ranks[1][0])
    assert all(applied and kind == torch.float32 for _, _, applied, kind in ranks)
