"""SINGA's collectives on gloo ranks: sums in place, what each sends, and what is refused."""

import inspect

import pytest
import torch
from singa_helpers import spied, unit_sgd

from stenograd.errors import ConfigError, TensorTypeError
from stenograd.singa import SGD, DistOpt

CALLS = {
    "all_reduce": lambda o, g: o.all_reduce(g),
    "synch": lambda o, g: o.communicator.synch(g),
    "half": lambda o, g: o.all_reduce_half(g),
    "fused": lambda o, g: o.fused_all_reduce([g]),
    "fused half": lambda o, g: o.fused_all_reduce_half([g]),
    "threshold": lambda o, g: o.sparsification(g, None, 0.05, False),
    "top-k": lambda o, g: o.sparsification(g, None, 1.0, True),
    "fused threshold": lambda o, g: o.fused_sparsification([g], None, 0.05, False),
    "fused top-k": lambda o, g: o.fused_sparsification([g], None, 1.0, True),
}


def _updates(rank):
    """SINGA's test_dist: p = 10, g = 1, lr .1; the sum divided by N is 1, so p becomes 9.9."""
    out = {}
    for name, call in CALLS.items():
        opt = DistOpt(SGD(lr=0.1), timeout_s=30)
        p, g = torch.full((10, 10), 10.0), torch.ones(10, 10)
        call(opt, g)
        opt.wait()
        out[name] = float(g[0, 0])
        opt.update(p, g)
        assert torch.allclose(p, torch.full((10, 10), 9.9), rtol=1e-6), name
        opt.step()
    return out


@pytest.mark.parametrize("world_size", [1, 2, 3])
def test_every_collective_sums_and_update_averages(pool, world_size):
    for sums in pool.run(world_size, _updates):
        assert sums == dict.fromkeys(CALLS, pytest.approx(world_size, rel=1e-6))


def _whole_numbers(rank):
    opt = unit_sgd()
    one, several = torch.arange(5000.0) + rank, [torch.arange(70.0) - rank, torch.full((2,), 5.0)]
    opt.all_reduce(one)
    opt.fused_all_reduce(several)
    return one, *several


def test_sums_of_whole_numbers_are_whole(pool):
    """Thirds of 5, 10 and 20 are rounded, so that three times their sum is not."""
    for one, several, fives in pool.run(3, _whole_numbers):
        assert torch.equal(one, 3 * torch.arange(5000.0) + 3)
        assert torch.equal(several, 3 * torch.arange(70.0) - 3)
        assert fives.tolist() == [15.0] * 2


def _send_flag(rank):
    """Rank r holds r+1 and 10(r+1): on two ranks the sums are 3 and 30."""
    opt = unit_sgd()
    log = spied(opt)
    a, b = torch.full((2,), rank + 1.0), torch.full((2, 2), 10.0 * (rank + 1))
    opt.fused_all_reduce([a], send=False)
    opt.fused_all_reduce([b], send=False)
    quiet, a0 = len(log), a.tolist()
    opt.fused_all_reduce([a, b], send=True)
    earlier = torch.full((3,), rank + 1.0)
    opt.fused_all_reduce_half([earlier])
    opt.fused_all_reduce([a], send=False)
    with pytest.raises(ConfigError, match="must hold the 2 elements of the buffer, got 4"):
        opt.fused_all_reduce([b], send=True)
    for send in (False, True):
        with pytest.raises(ConfigError, match="must have one type and device"):
            opt.fused_all_reduce([a.double()], send)
    kept = torch.zeros(2)
    opt.fused_all_reduce([kept])
    return quiet, a0, log, a.tolist(), b.flatten().tolist(), earlier.tolist(), kept.tolist()


def test_send_false_only_buffers_and_send_true_reduces_in_place_and_in_order(pool):
    for rank, (quiet, a0, log, a, b, earlier, kept) in enumerate(pool.run(2, _send_flag)):
        assert quiet == 0
        assert a0 == [rank + 1.0] * 2
        assert log == [4 * 6, 2 * 3, 4 * 2]  # float32 in one collective, then float16, then what was kept
        assert (a, b, earlier) == ([3.0] * 2, [30.0] * 4, [3.0] * 3)
        assert kept == [6.0] * 2  # what was pushed before the refused calls


def _sparse(rank, world_size):
    opt = unit_sgd()
    log = spied(opt)
    out = {}
    v = torch.tensor([0.1, 0.9, -0.3, 0.2])
    residual = torch.zeros(4)
    opt.sparsification(v, residual, 0.25, True)
    out["top-k"] = (v / world_size).tolist(), residual.tolist()
    v = torch.zeros(4)
    opt.sparsification(v, residual, 0.25, True)
    out["next"] = (v / world_size).tolist()
    v = torch.tensor([0, 0, 0.1, 0.2])
    opt.sparsification(v, None, 0.05, False)
    out["zeros"] = v.tolist()
    v = torch.tensor([0.05, -0.05, 0.049])
    opt.sparsification(v, None, 0.05, False)
    out["equal"] = (v / world_size).tolist()
    del log[:]
    v = torch.zeros(1000).index_fill_(0, torch.arange(3 * rank), 1.0)
    opt.sparsification(v, None, 0.5, False)  # rank r has 3 r elements to send
    out["ragged"] = int(v.sum()), list(log)
    del log[:]
    v = torch.arange(10_000.0) + 1
    opt.sparsification(v, None, 0.01, True)
    out["wire"] = sum(log)
    shorter, longer = torch.zeros(2), torch.zeros(4)  # groups take turns, each with its own accumulation
    for _ in range(2):
        opt.sparsification(torch.tensor([1.0, 2.0]), shorter, 0.5, True)
        opt.sparsification(torch.tensor([4.0, 3.0, 2.0, 1.0]), longer, 0.25, True)
    out["turns"] = shorter.tolist(), longer.tolist()
    a, b = torch.full((2,), 0.1), torch.full((2,), 5.0)
    opt.fused_sparsification([a, b], torch.zeros(4), 0.5, True)
    out["fused"] = a.tolist(), (b / world_size).tolist()
    return out


@pytest.mark.parametrize("world_size", [2, 3])
def test_sparse_sums(pool, world_size):
    """The acceptance rows, with top-k of values below 1 and zeros in threshold mode."""
    for out in pool.run(world_size, _sparse, world_size):
        near = lambda values: pytest.approx(values, rel=1e-6)  # noqa: E731
        sent, residual = out["top-k"]
        assert sent == near([0, 0.9, 0, 0])
        assert residual == torch.tensor([0.1, 0, -0.3, 0.2]).tolist()  # exactly zero where it was sent
        assert out["next"] == near([0, 0, -0.3, 0])
        assert out["zeros"] == near([0, 0, 0.1 * world_size, 0.2 * world_size])
        assert out["equal"] == near([0.05, -0.05, 0])
        most = 3 * (world_size - 1)
        assert out["ragged"] == (sum(3 * r for r in range(world_size)), [4, 8 * most])
        # 1 + 2 max nnz words; values tell by themselves whether they are finite
        assert out["wire"] <= 41 * 100 / 8  # at most 41 bits for each of 100; 2 k words are 800 bytes
        # [1, 2] leaves [1, 0], and [2, 2] one 2; [4, 3, 2, 1] leaves [0, 3, 2, 1], and [4, 6, 4, 2] all but 6
        assert sorted(out["turns"][0]) == [0, 2]
        assert out["turns"][1] == [4, 0, 4, 2]
        assert out["fused"] == ([0, 0], near([5.0, 5.0]))  # top-k over the concatenation


def _fp16(rank):
    opt = unit_sgd()
    large, small = torch.full((4,), 40000.0), torch.full((4,), 0.1)
    opt.all_reduce_half(large)
    opt.all_reduce_half(small)
    return large.tolist(), small.tolist()


def test_half_sums_that_would_overflow_are_finite(pool):
    """40,000 on two ranks, where a float16 sum overflows; .1 to 11 bits."""
    for large, small in pool.run(2, _fp16):
        assert large == [80000.0] * 4
        assert small == pytest.approx([0.2] * 4, rel=2**-11)


def _synchronized(rank):
    model = torch.nn.Sequential(torch.nn.Linear(3, 2), torch.nn.BatchNorm1d(2))
    torch.nn.init.constant_(model[0].weight, rank)
    model[1].running_mean.fill_(rank)
    w, opt = torch.full((3,), rank + 1.0, requires_grad=True), unit_sgd()
    opt.synchronize(model)
    opt.synchronize([w])
    guide = torch.full((3,), rank + 1.0)
    opt.all_reduce(guide.data)  # the guide's synchronize, which does not wait
    guide /= opt.world_size
    return model[0].weight.sum().item(), model[1].running_mean.sum().item(), w.tolist(), guide.tolist()


def test_initial_parameters_are_broadcast(pool):
    """Rank 0's values, where averaging would shrink them; the guide's own way needs no wait."""
    for weight, buffer, w, guide in pool.run(2, _synchronized):
        assert (weight, buffer, w, guide) == (0.0, 0.0, [1.0] * 3, [1.5] * 3)


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16, torch.float32, torch.float64])
@pytest.mark.parametrize("top_k", [True, False])
def test_an_accumulation_of_any_type_is_sent_once(dtype, top_k):
    """What of it is beyond half of float16's range waits for the next call."""
    opt, held = unit_sgd(), torch.tensor([40000.0, 1.0], dtype=dtype)
    all_of_it, sent = held[0].item(), []
    for _ in range(2):
        x = torch.zeros(2, dtype=dtype)
        opt.sparsification(x, held, 0.5 if top_k else 2.0, top_k)
        sent.append(x[0].item())
    first = 32752.0 if dtype is torch.float16 else all_of_it
    assert sent == [first, all_of_it - first]
    assert held.tolist() == [0.0, 1.0 if sent[1] or not top_k else 0.0]


@pytest.mark.parametrize(
    ("tensor", "error", "message"),
    [
        (torch.ones(4, 4).t()[:2], ConfigError, "must be contiguous"),
        (torch.ones(2, device="meta"), ConfigError, "must be on the group's device, got 'meta'"),
        (torch.ones(2, dtype=torch.int32), TensorTypeError, "floating-point"),
        ([1.0], TypeError, "expected a tensor, got list"),
    ],
    ids=["strided", "device", "integer", "list"],
)
def test_wrong_tensors_are_refused(tensor, error, message):
    with pytest.raises(error, match=message):
        unit_sgd().all_reduce(tensor)


def test_wrong_accumulations_mixtures_and_shares_are_refused():
    opt = unit_sgd()
    with pytest.raises(ConfigError, match="accumulation must have the 4 elements of what is summed, got 3"):
        opt.sparsification(torch.ones(4), torch.zeros(3), 0.5, True)
    with pytest.raises(ConfigError, match="must have one type and device"):
        opt.fused_all_reduce([torch.ones(2), torch.ones(2).double()])
    for spars, top in ((0, True), (1.5, True), (-0.1, False), (0, False), (float("nan"), True)):
        with pytest.raises(ConfigError, match="spars must be"):
            opt.sparsification(torch.ones(4), None, spars, top)


DOCUMENTED = {
    "__init__": "opt=None nccl_id=None local_rank=None world_size=None buffSize=4194304",
    "update": "param grad",
    "all_reduce": "tensor",
    "fused_all_reduce": "tensor send=True",
    "all_reduce_half": "tensor",
    "fused_all_reduce_half": "tensor send=True",
    "sparsification": "tensor accumulation spars topK",
    "fused_sparsification": "tensor accumulation spars topK",
    "wait": "",
    "backward_and_update": "loss threshold=2097152",
    "backward_and_update_half": "loss threshold=2097152 clipping=False clip_Value=100",
    "backward_and_partial_update": "loss threshold=2097152",
    "backward_and_spars_update": "loss threshold=2097152 spars=0.05 topK=False corr=True",
    "backward_and_sparse_update": "loss threshold=2097152 spars=0.05 topK=False corr=True",
}


@pytest.mark.parametrize("name", DOCUMENTED)
def test_signatures_are_those_of_the_documents(name):
    """What the documents do not name comes by its name only."""
    _, *every = inspect.signature(getattr(DistOpt, name)).parameters.values()
    given = [p for p in every if p.kind != p.KEYWORD_ONLY]
    shown = [p.name if p.default is p.empty else f"{p.name}={p.default}" for p in given]
    assert " ".join(shown) == DOCUMENTED[name]


def test_tensors_may_come_from_what_can_be_gone_through_once():
    """Alone the sums are what was pushed."""
    opt, model = unit_sgd(), torch.nn.Linear(2, 1)
    pushed = [p.detach().clone() for p in model.parameters()]
    opt.fused_all_reduce(model.parameters(), send=False)
    with torch.no_grad():
        for p in model.parameters():
            p.zero_()
    opt.fused_all_reduce(model.parameters())
    assert all(map(torch.equal, model.parameters(), pushed))
    opt.fused_sparsification(model.parameters(), None, 1.0, True)
    assert all(map(torch.equal, model.parameters(), pushed))
