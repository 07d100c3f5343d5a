"""Deep gradient compression against the paper's algorithm in plain loops, and against torch.optim.SGD."""

import copy
import math

import pytest
import torch
from support.gradients import ranks_of
from support.training import descend
from torch import nn

import stenograd
from stenograd.checkpoint.reshard import reshard
from stenograd.compressors.dgc import DGC
from stenograd.errors import MethodError
from stenograd.kernels.indices import indices_bytes
from stenograd.simulate import exchange

SHAPES = [torch.Size(s) for s in [(12, 10), (5,), (0, 3), (), (4, 2, 3)]]
NUMELS = [s.numel() for s in SHAPES]
LARGE = [0, 4]  # tensors of two dimensions and more
NUMEL = sum(NUMELS)


def plain_loop(world, steps, ratio, m, nesterov, masking):
    """The paper's algorithm, rank by rank; returns the delivered gradients in float64."""
    start = [sum(NUMELS[:i]) for i in range(len(NUMELS))]
    large = torch.cat([torch.arange(start[i], start[i] + NUMELS[i]) for i in LARGE])
    small = torch.tensor([i for i in range(NUMEL) if i not in set(large.tolist())])
    u = [torch.zeros(len(large), dtype=torch.float64) for _ in range(world)]
    v = [torch.zeros(len(large), dtype=torch.float64) for _ in range(world)]
    momentum, delivered = torch.zeros(len(small), dtype=torch.float64), []
    for step in range(steps):
        xs = [x.double() for x in ranks_of(world, NUMEL, step)]
        out = torch.zeros(NUMEL, dtype=torch.float64)
        k = math.ceil(ratio * len(large))
        for rank in range(world):
            g = xs[rank][large]
            if nesterov:
                u[rank] = m * (u[rank] + g)
                v[rank] = v[rank] + u[rank] + g
            else:
                u[rank] = m * u[rank] + g
                v[rank] = v[rank] + u[rank]
            chosen = v[rank].abs().topk(k).indices
            out[large[chosen]] += v[rank][chosen] / world
            v[rank][chosen] = 0
            if masking:
                u[rank][chosen] = 0
        mean = sum(x[small] for x in xs) / world
        momentum = m * (momentum + mean) if nesterov else m * momentum + mean
        out[small] = momentum + mean if nesterov else momentum
        delivered.append(out)
    return delivered


@pytest.mark.parametrize("nesterov", [False, True])
@pytest.mark.parametrize("masking", [False, True])
@pytest.mark.parametrize("world", [1, 3])
def test_it_is_the_papers_loop(world, masking, nesterov):
    codec, states = DGC(ratio=0.1, momentum=0.9, nesterov=nesterov, masking=masking), None
    for step, wanted in enumerate(plain_loop(world, 12, 0.1, 0.9, nesterov, masking)):
        out = exchange(codec, ranks_of(world, NUMEL, step), states, shapes=SHAPES, step=step)
        states = [e.state for e in out]
        assert all(torch.equal(e.average, out[0].average) for e in out)
        assert torch.allclose(out[0].average.double(), wanted, atol=1e-5)


@pytest.mark.parametrize("nesterov", [False, True])
def test_sending_all_without_masking_is_momentum_sgd(nesterov):
    trained = train(DGC(ratio=1.0, momentum=0.9, masking=False, nesterov=nesterov), 0.0)
    wanted = train("dense", 0.9, nesterov)
    for a, b in zip(trained, wanted, strict=True):
        assert torch.allclose(a, b, atol=1e-6)


def test_sending_all_with_masking_is_plain_sgd():
    """What is sent loses its momentum, so a matrix that is sent whole never has any."""
    weights = [single_layer(DGC(ratio=1.0, momentum=0.9), 0.0), single_layer("dense", 0.0)]
    assert torch.allclose(*weights, atol=1e-6)
    assert not torch.allclose(weights[0], single_layer("dense", 0.9), atol=1e-2)


def single_layer(method, momentum):
    """A matrix without a bias, so that masking alone decides."""
    torch.manual_seed(0)
    return fit(nn.Linear(6, 4, bias=False), method, momentum)[0]


def train(method, momentum, nesterov=False):
    torch.manual_seed(0)
    return fit(nn.Sequential(nn.Linear(6, 8), nn.Tanh(), nn.Linear(8, 4)), method, momentum, nesterov)


def fit(model, method, momentum, nesterov=False):
    optimizer = torch.optim.SGD(model.parameters(), lr=0.05, momentum=momentum, nesterov=nesterov)
    with stenograd.distribute(model, optimizer, method):
        for step in range(10):
            x = torch.randn(16, 6, generator=torch.Generator().manual_seed(step))
            descend(optimizer, model(x).square().sum(1).mean())
    return [p.detach().clone() for p in model.parameters()]


def test_the_ramp_falls_by_a_factor_per_step():
    """From 1/4 to 0.02 in 4 steps over 144 elements: k = 36, 20, 11, 6, 3 and 3."""
    codec, states, sent = DGC(ratio=0.02, ratio_from=0.25, ramp_steps=4), None, []
    shapes = [torch.Size((12, 12))]
    for step in range(6):
        x = torch.randn(144, generator=torch.Generator().manual_seed(step))
        (e,) = exchange(codec, [x], states, shapes=shapes, step=step)
        states = [e.state]
        sent.append(int((e.average != 0).sum()))
    assert sent == [math.ceil(144 * 0.25 * (0.02 / 0.25) ** (s / 4)) for s in range(4)] + [3, 3]
    assert sent[:2] == [36, 20]


def test_clipping_limits_a_tensors_norm_by_the_root_of_the_ranks():
    """Norm 5 with clip=2 on four ranks: limited to 2 / sqrt(4) = 1."""
    x = torch.tensor([[3.0, 4.0]])
    out = exchange(DGC(ratio=1.0, clip=2.0), [x] * 4)
    assert out[0].average.tolist() == pytest.approx([0.6, 0.8])


def test_bytes():
    """120 + 24 large elements, k = 15 indices and values; six small ones in float32."""
    spied = []
    exchange(DGC(ratio=0.1), ranks_of(2, NUMEL, 0), shapes=SHAPES, spy=spied.append)
    assert sum(r.nbytes for r in spied) == indices_bytes(NUMEL, 15) + 4 * 15 + 4 * 6
    assert len(spied) == 2


@pytest.mark.parametrize("dtype", [torch.float64, torch.float16, torch.bfloat16])
def test_other_types_keep_float32_or_wider_state(dtype):
    codec = DGC(ratio=0.2)
    out = exchange(codec, ranks_of(2, NUMEL, 0, dtype), shapes=SHAPES)
    assert out[0].average.dtype is dtype
    assert out[0].state["dgc_u"].dtype is torch.promote_types(dtype, torch.float32)


def test_velocities_keep_their_sum_when_the_number_of_ranks_changes():
    """Ranks 0 and 1 owe 1 and 5 on one element: three ranks owe 2 each; exact momentum is copied."""
    about = {"format": 1, "method": "dgc", "step": 1, "skipped": 0, "world_size": 2}

    def state(rank, owed):
        held = {"dgc_u": torch.tensor([owed]), "dgc_v": torch.tensor([2 * owed])}
        return {**about, "rank": rank, "parameters": {"w": {**held, "dense_momentum": torch.ones(1)}}}

    new = reshard([state(0, 1.0), state(1, 5.0)], 3)
    for one in new:
        tensors = one["parameters"]["w"]
        assert [tensors[k].item() for k in ("dgc_u", "dgc_v", "dense_momentum")] == [2.0, 4.0, 1.0]


def test_saving_in_between_changes_nothing():
    def run(save_at):
        torch.manual_seed(0)
        model = nn.Sequential(nn.Linear(6, 8), nn.Tanh(), nn.Linear(8, 4))
        optimizer = torch.optim.SGD(model.parameters(), lr=0.05)
        sync = stenograd.distribute(model, optimizer, "dgc:ratio=0.1,ramp_steps=6")
        for step in range(8):
            if step == save_at:
                saved = copy.deepcopy(sync.state_dict())
                sync.close()
                sync = stenograd.distribute(model, optimizer, "dgc:ratio=0.1,ramp_steps=6")
                sync.load_state_dict(saved)
            x = torch.randn(16, 6, generator=torch.Generator().manual_seed(step))
            descend(optimizer, model(x).square().sum(1).mean())
        sync.close()
        return [p.detach().clone() for p in model.parameters()]

    for a, b in zip(run(None), run(4), strict=True):
        assert torch.equal(a, b)


def test_a_second_momentum_is_refused():
    model = nn.Linear(3, 2)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9)
    with pytest.raises(MethodError, match=r"dgc has momentum of its own, and SGD has momentum=0\.9: set"):
        stenograd.distribute(model, optimizer, "dgc")
    stenograd.distribute(model, optimizer, "dgc:momentum=0").close()


@pytest.mark.parametrize(
    ("text", "says"),
    [
        ("dgc:ratio=0", r"ratio must be in \(0, 1\], got 0.0"),
        ("dgc:momentum=1", r"momentum must be in \[0, 1\), got 1.0"),
        ("dgc:momentum=0,nesterov=true", "nesterov needs momentum above 0"),
        ("dgc:clip=-1", "clip must be at least 0"),
        ("dgc:ramp_steps=-1", "ramp_steps must be at least 1"),
        ("dgc:ramp_steps=5,ratio_from=0.0001", "ratio_from must be in"),
        ("dgc:feedback=true", "keeps what it has not sent by itself: leave feedback out"),
        ("dgc:feedback_decay=0.9", "feedback_decay needs error feedback"),
    ],
)
def test_wrong_keys_are_named(text, says):
    with pytest.raises(MethodError, match=says):
        stenograd.method(text)


def test_a_schedule_of_parameters_is_refused():
    model = nn.Linear(3, 2)
    with pytest.raises(MethodError, match="accumulates gradients by itself"):
        stenograd.distribute(model, torch.optim.SGD(model.parameters(), lr=0.1), "local:every=2/dgc")
