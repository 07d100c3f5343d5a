"""EF21 against a plain loop over ranks, and its invariant: what is delivered is the mean of what is known."""

import pytest
import torch
from torch import nn

import stenograd
from stenograd.checkpoint.reshard import reshard
from stenograd.compression.feedback import EF21
from stenograd.compressors.powersgd import PowerSGD
from stenograd.compressors.sign import Sign
from stenograd.compressors.topk import TopK
from stenograd.errors import MethodError
from stenograd.simulate import exchange
from stenograd.testing.conformance import check

SHAPES = [torch.Size((12, 20)), torch.Size((5,)), torch.Size((0,)), torch.Size(())]
NUMEL = 246


def gradients(world, step, dtype=torch.float32):
    generator = torch.Generator().manual_seed(step)
    return [torch.randn(NUMEL, generator=generator).to(dtype) for _ in range(world)]


@pytest.mark.parametrize("eta", [1.0, 0.1])
@pytest.mark.parametrize("dtype", [torch.float32, torch.float64, torch.bfloat16])
def test_it_is_a_plain_loop(eta, dtype):
    """Three ranks, top 10 %: h starts at the first gradient, then takes the largest differences."""
    fed, k, world = EF21(inner=TopK(ratio=0.1, values="float32"), eta=eta), 25, 3
    wide = torch.promote_types(dtype, torch.float32)
    known, v, states = [], [], None
    for step in range(8):
        xs = gradients(world, step, dtype)
        out = exchange(fed, xs, states, shapes=SHAPES, step=step)
        states = [e.state for e in out]
        for rank, x in enumerate(x.to(wide) for x in xs):
            if step == 0:
                known.append(x.clone())
                v.append(x.clone())
                continue
            v[rank] = (1 - eta) * v[rank] + eta * x
            off = v[rank] - known[rank]
            places = off.abs().sort(descending=True, stable=True).indices[:k]  # bfloat16 has many ties
            known[rank][places] += off[places]
        wanted = sum(known) / world
        rtol = 1e-2 if dtype is torch.bfloat16 else 0
        assert torch.allclose(out[0].average.to(wide), wanted, rtol=rtol, atol=2e-5)
        assert all(torch.equal(e.average, out[0].average) for e in out)
        for state, mine in zip(states, known, strict=True):
            assert torch.allclose(state["ef21_known"], mine, atol=2e-5)


INNER = [TopK(ratio=0.1), TopK(ratio=0.1, values="int8"), Sign(block=16), PowerSGD(rank=2)]


@pytest.mark.parametrize("inner", INNER, ids=str)
@pytest.mark.parametrize("world", [1, 2, 5])
def test_what_is_delivered_is_the_mean_of_what_is_known(inner, world):
    """Also where codes are averaged twice (sign on five ranks), or only about k sums return (topk)."""
    fed, states = EF21(inner=inner), None
    for step in range(20):
        out = exchange(fed, gradients(world, step), states, shapes=SHAPES, step=step)
        states = [e.state for e in out]
        known = torch.stack([s["ef21_known"] for s in states]).double().mean(0)
        assert torch.allclose(out[0].average.double(), known, atol=1e-4)


@pytest.mark.parametrize("eta", [1.0, 0.1])
def test_a_lossless_inner_compressor_delivers_the_mean(eta):
    """Top-k of all: h is v at every step, so G is the mean gradient, or its moving average."""
    fed, states, moving = EF21(inner=TopK(ratio=1.0, values="float32"), eta=eta), None, None
    for step in range(5):
        xs = gradients(3, step)
        out = exchange(fed, xs, states, shapes=SHAPES, step=step)
        states = [e.state for e in out]
        dense = torch.stack(xs).mean(0)
        moving = dense if moving is None else (1 - eta) * moving + eta * dense
        assert torch.allclose(out[0].average, moving, atol=1e-5)


def test_a_constant_gradient_is_known_after_one_exchange_and_a_new_one_soon():
    """x jumps from 1 to 2 everywhere: with a quarter of the differences per step, four steps catch up."""
    fed, shapes = EF21(inner=TopK(ratio=0.25)), [torch.Size((8,))]
    (e,) = exchange(fed, [torch.ones(8)], shapes=shapes)
    assert e.average.tolist() == [1] * 8
    for step in range(1, 5):
        (e,) = exchange(fed, [torch.full((8,), 2.0)], [e.state], shapes=shapes, step=step)
        assert sorted(e.average.tolist()) == [1.0] * (8 - 2 * step) + [2.0] * (2 * step)


@pytest.mark.parametrize("inner", INNER, ids=str)
def test_it_conforms(inner):
    check(EF21(inner=inner, eta=0.5))


def test_a_tensor_that_is_not_used_does_not_keep_its_bucket_dense():
    """Two layers in a bucket, one of them unused for three steps: after the first, a tenth travels."""
    torch.manual_seed(0)
    model = nn.ModuleList([nn.Linear(16, 16), nn.Linear(16, 16)])
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    sizes, sync = [], stenograd.distribute(model, optimizer, "topk:ratio=0.1,feedback=ef21")
    for step in range(4):
        before = sync.traffic.payload_bytes
        optimizer.zero_grad()
        x = torch.randn(4, 16)
        x = model[0](x) if step < 3 else model[1](model[0](x))
        x.square().mean().backward()
        optimizer.step()
        sizes.append(sync.traffic.payload_bytes - before)
    sync.close()
    assert sizes[0] > 4 * 544
    assert all(size < 0.2 * sizes[0] for size in sizes[1:])


def test_new_ranks_start_from_the_mean():
    """Known 1 and 5 with G = 3: three ranks know 3 each; moving averages 2 and 6 become 4."""
    about = {"format": 1, "method": "topk", "step": 1, "skipped": 0, "world_size": 2}

    def state(rank, known, moving):
        held = {"ef21_known": torch.tensor([known]), "ef21_mean": torch.tensor([3.0])}
        held |= {"ef21_momentum": torch.tensor([moving]), "ef21_begun": torch.ones(())}
        return {**about, "rank": rank, "parameters": {"w": held}}

    for one in reshard([state(0, 1.0, 2.0), state(1, 5.0, 6.0)], 3):
        held = one["parameters"]["w"]
        assert {key: t.item() for key, t in held.items()} == {
            "ef21_known": 3.0,
            "ef21_mean": 3.0,
            "ef21_momentum": 4.0,
            "ef21_begun": 1.0,
        }


def test_it_trains_and_refuses_a_second_momentum():
    torch.manual_seed(0)
    model = nn.Linear(6, 4)
    x = torch.randn(64, 6)
    target = x @ torch.randn(6, 4)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    losses = []
    with stenograd.distribute(model, optimizer, "topk:ratio=0.2,feedback=ef21-sgdm"):
        for _ in range(150):
            optimizer.zero_grad()
            loss = (model(x) - target).square().mean()
            loss.backward()
            optimizer.step()
            losses.append(loss.item())
    assert losses[-1] < 0.05 * losses[0]
    heavy = torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9)
    with pytest.raises(MethodError, match="has momentum of its own"):
        stenograd.distribute(model, heavy, "topk:feedback=ef21-sgdm")
    stenograd.distribute(model, heavy, "topk:feedback=ef21").close()


def test_wrong_arguments_are_refused():
    with pytest.raises(MethodError, match=r"eta must be in \(0, 1\], got 0"):
        EF21(inner=TopK(), eta=0)
    with pytest.raises(MethodError, match="needs a biased compressor whose average is a mean"):
        EF21(inner=TopK(divide="senders"))
