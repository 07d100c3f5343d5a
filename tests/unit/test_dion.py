"""Dion against a plain loop in float64 with QR, and against the polar factor."""

import math

import pytest
import torch
from support.gradients import ranks_of
from torch import nn

import stenograd
from stenograd.compression import Kind
from stenograd.compressors.dion import Dion
from stenograd.errors import MethodError
from stenograd.exchange.tensor_exchange import TensorExchange
from stenograd.simulate import exchange, ranks

SHAPES = [torch.Size(s) for s in [(12, 8), (7,), (0, 3), (4, 3, 3), (), (1, 5), (8, 12)]]
NUMELS = [s.numel() for s in SHAPES]


@pytest.mark.parametrize("world", [1, 3])
@pytest.mark.parametrize(("ratio", "mu"), [(0.25, 0.95), (1.0, 0.5), (0.5, 0.0)])
def test_it_is_a_plain_loop(world, ratio, mu):
    """B = M + G; P = qr(mean B Q); R = B^T P; M = B - (1 - mu) P R^T; sqrt(n / m) P colnorm(mean R)^T."""
    codec, states = Dion(ratio=ratio, momentum=mu), None
    momenta, queries = [torch.zeros(sum(NUMELS)).double() for _ in range(world)], {}
    for step in range(5):
        gs = ranks_of(world, sum(NUMELS), step)
        if states is None:
            first = exchange(codec, [torch.zeros(sum(NUMELS))], shapes=SHAPES)[0].state
            queries = {i: first[f"dion_q/{i}"].T.double() for i in (0, 3, 6)}
        out = exchange(codec, gs, states, shapes=SHAPES, step=step)
        states = [e.state for e in out]
        wanted = torch.stack(gs).double().mean(0)
        for i, part in enumerate(wanted.split(NUMELS)):
            if i not in queries:
                continue
            n, start = SHAPES[i][0], sum(NUMELS[:i])
            where = slice(start, start + NUMELS[i])
            b = [(mom[where] + g[where].double()).view(n, -1) for mom, g in zip(momenta, gs, strict=True)]
            p = torch.linalg.qr(sum(x @ queries[i] for x in b) / world)[0]
            r = [x.T @ p for x in b]
            for mom, x, mine in zip(momenta, b, r, strict=True):
                mom[where] = (x - (1 - mu) * p @ mine.T).reshape(-1)
            mean = sum(r) / world
            queries[i] = mean / mean.norm(dim=0)
            part.copy_((math.sqrt(n / (NUMELS[i] // n)) * p @ queries[i].T).reshape(-1))
            assert queries[i].shape[1] == math.ceil(ratio * min(n, NUMELS[i] // n))
        torch.testing.assert_close(out[0].average.double(), wanted, rtol=0, atol=5e-4)
        for state, mine in zip(states, momenta, strict=True):
            torch.testing.assert_close(state["dion_momentum"].double(), mine, rtol=0, atol=5e-4)


def test_the_direction_tends_to_the_polar_factor():
    """Full rank, one rank, a momentum that stays as it is: U V^T, of singular values 4, 3, 2, 1."""
    generator = torch.Generator().manual_seed(0)
    u = torch.linalg.qr(torch.randn(6, 4, generator=generator))[0]
    v = torch.linalg.qr(torch.randn(4, 4, generator=generator))[0]
    m = u @ torch.diag(torch.tensor([4.0, 3.0, 2.0, 1.0])) @ v.T
    codec, state = Dion(ratio=1.0, momentum=1 - 1e-9), None
    for step in range(40):
        x = m if state is None else torch.zeros_like(m)
        (out,) = exchange(codec, [x], None if state is None else [state], shapes=[m.shape], step=step)
        state = out.state
    wanted = math.sqrt(6 / 4) * u @ v.T
    torch.testing.assert_close(out.average.view(6, 4), wanted, rtol=0, atol=1e-3)


def test_a_matrix_of_rank_k_is_held_whole():
    """Without momentum nothing of it stays: P spans its columns after one projection on any Q."""
    generator = torch.Generator().manual_seed(1)
    m = torch.randn(9, 2, generator=generator) @ torch.randn(2, 8, generator=generator)
    (out,) = exchange(Dion(ratio=0.25, momentum=0.0), [m], shapes=[m.shape])
    assert out.state["dion_momentum"].abs().max() < 1e-5 * m.abs().max()


def test_it_trains_and_shares_what_is_owed():
    """SGD(lr) along orthonormal directions learns a linear map; new ranks share the sum of momenta."""
    assert Dion.state_kinds == {"dion_momentum": Kind.SUM}
    target = torch.randn(10, 10, generator=torch.Generator().manual_seed(5))

    def rank_of(driver):
        model = nn.Linear(10, 10, bias=False)
        with torch.no_grad():
            model.weight.zero_()
        optimizer = torch.optim.SGD(model.parameters(), lr=0.05)
        with stenograd.distribute(model, optimizer, "dion", group=driver, timeout_s=30) as sync:
            for step in range(150):
                generator = torch.Generator().manual_seed(10 * step + driver.rank)
                x = torch.randn(16, 10, generator=generator)
                optimizer.zero_grad()
                (model(x) - x @ target.T).square().mean().backward()
                optimizer.step()
            state = sync.state_dict()
        return float((model.weight - target).detach().norm()), state, model.weight.detach().clone()

    (first, one, a), (_, two, b) = ranks(2, rank_of)
    assert torch.equal(a, b)
    assert first < 0.3 * float(target.norm())
    new = stenograd.reshard([one, two], 1)[0]["parameters"]["weight"]["dion_momentum"]
    old = [s["parameters"]["weight"]["dion_momentum"].double() for s in (one, two)]
    torch.testing.assert_close(new.double(), sum(old), rtol=1e-5, atol=1e-6)


def test_what_does_not_fit_is_refused():
    for text, message in {
        "dion:ratio=0": "ratio must be in",
        "dion:momentum=1": "momentum must be in",
        "dion:feedback=true": "keeps what it has not sent by itself",
        "diloco/dion": "it accumulates gradients by itself",
        "gossip:graph=ring,consensus=0.1/dion": "it accumulates gradients by itself",
    }.items():
        with pytest.raises(MethodError, match=message):
            stenograd.method(text)
    model = nn.Linear(2, 2)
    with pytest.raises(MethodError, match="dion has momentum of its own, and SGD has momentum"):
        stenograd.distribute(model, torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9), "dion")


def test_ranks_with_other_numbers_of_threads_get_the_same_bits():
    """torch adds a single row of 200,000 by as many parts as there are threads, which are a thread's own."""
    mine = torch.randn(2, 1 << 18, generator=torch.Generator().manual_seed(0), dtype=torch.float64)

    def rank_of(driver):
        before = torch.get_num_threads()
        torch.set_num_threads(1 + 3 * driver.rank)
        try:
            exchange = TensorExchange("dion", driver, waits=True)
            averages = [exchange.average({"w": mine * step})["w"].clone() for step in (1, 2, 3)]
        finally:
            torch.set_num_threads(before)
        exchange.close()
        return averages

    assert all(map(torch.equal, *ranks(2, rank_of)))
