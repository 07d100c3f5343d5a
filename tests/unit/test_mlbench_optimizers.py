"""MLBench's optimizers alone: formulas, names, and what is refused."""

import inspect
import math

import pytest
import torch
from torch import nn

import stenograd.mlbench
from stenograd.errors import CheckpointError, ConfigError, TensorTypeError
from stenograd.launch import process_group as groups
from stenograd.mlbench import (
    AllReduceAggregation,
    CentralizedAdam,
    CentralizedSGD,
    CentralizedSparsifiedSGD,
    CustomCentralizedOptimizer,
    DynamicLossScaler,
    FP16Optimizer,
    GenericCentralizedOptimizer,
    PowerSGD,
    SignSGD,
    SparsifiedSGD,
    get_optimizer,
)
from stenograd.mlbench.tracker import Tracker


@pytest.fixture(autouse=True, scope="module")
def alone():
    """A world of one, left at the end."""
    groups.init()
    yield
    groups.shutdown()


def _sgd(model):
    return torch.optim.SGD(model.parameters(), lr=0.1)


def test_all_is_sorted_and_documented():
    assert stenograd.mlbench.__all__ == sorted(stenograd.mlbench.__all__)
    for name in stenograd.mlbench.__all__:
        assert inspect.getdoc(getattr(stenograd.mlbench, name)), name


@pytest.mark.parametrize(
    ("make", "signature"),
    [
        (SparsifiedSGD, "params lr=None weight_decay=0 sparse_grad_size=10"),
        (SignSGD, "params lr=None momentum=0 weight_decay=0 dampening=0 nesterov=False"),
        (
            GenericCentralizedOptimizer,
            "world_size model use_cuda=False by_layer=False divide_before=False agg_grad=True",
        ),
        (
            CentralizedSGD,
            "world_size=None model=None lr=None momentum=0 dampening=0 weight_decay=0 nesterov=False "
            "use_cuda=False by_layer=False agg_grad=True",
        ),
        (
            CentralizedAdam,
            "world_size=None model=None lr=None betas=(0.9, 0.999) eps=1e-08 weight_decay=0 amsgrad=False "
            "use_cuda=False by_layer=False agg_grad=True",
        ),
        (
            CustomCentralizedOptimizer,
            "model world_size optimizer use_cuda=False by_layer=False agg_grad=True grad_clip=inf "
            "average_world=False average_custom=False divide_before=False",
        ),
        (
            CentralizedSparsifiedSGD,
            "params=None lr=None weight_decay=0 sparse_grad_size=10 random_sparse=False world_size=1 "
            "average_world=True",
        ),
        (
            PowerSGD,
            "model=None lr=None momentum=0 weight_decay=0 dampening=0 nesterov=False average_world=True "
            "use_cuda=False by_layer=False reuse_query=False world_size=1 rank=1",
        ),
        (
            FP16Optimizer,
            "fp16_model world_size use_cuda=False use_horovod=False by_layer=False grad_clip=inf "
            "init_scale=1024 scale_factor=2 scale_window=128 max_scale=None min_scale=0.0001 "
            "average_world=False average_custom=False divide_before=False",
        ),
        (DynamicLossScaler, "init_scale=32768.0 scale_factor=2.0 scale_window=2000 max_scale=None"),
        (SparsifiedSGD.step, "self closure=None"),
        (SparsifiedSGD.sparsify_gradients, "self param lr"),
        (SparsifiedSGD.update_estimated_weights, "self iteration sparse_vector_size"),
        (SparsifiedSGD.get_estimated_weights, "self"),
        (SignSGD.step, "self closure=None"),
        (GenericCentralizedOptimizer.step, "self closure=None tracker=None"),
        (CustomCentralizedOptimizer.step, "self closure=None tracker=None denom=None"),
        (FP16Optimizer.step, "self closure=None tracker=None multiplier=1 denom=None"),
        (FP16Optimizer.backward_loss, "self loss"),
        (FP16Optimizer.fp16_to_fp32_flat_grad, "fp32_params fp16_model"),
        (FP16Optimizer.fp32_to_fp16_weights, "fp16_model fp32_params"),
    ],
)
def test_signatures_are_those_of_the_documents(make, signature):
    """`required` is None here, and refused."""
    parameters = inspect.signature(make).parameters.values()
    shown = [p.name if p.default is p.empty else f"{p.name}={p.default}" for p in parameters]
    assert " ".join(shown) == signature


def test_sign_sgd():
    """lr .5, mu .9: b = g = [1, -1], then b = .9 b + g; decay .1 alone moves a weight without gradient."""
    w = nn.Parameter(torch.tensor([0.0, 0.0]))
    optimizer = SignSGD([w], lr=0.5, momentum=0.9)
    for gradient in ([1.0, -1.0], [-0.5, 2.0]):
        w.grad = torch.tensor(gradient)
        optimizer.step()
    assert w.tolist() == [-1.0, 0.0]
    v = nn.Parameter(torch.tensor([2.0]))
    v.grad = torch.tensor([-0.1])
    assert SignSGD([v], lr=0.5, weight_decay=0.1, momentum=0.9, nesterov=True).step(lambda: 7) == 7
    assert v.item() == 1.5


def test_sign_sgd_takes_sparse_gradients():
    """Row 0 comes twice, with 1 and -3; row 2 once, with 1."""
    rows = nn.Embedding(3, 2, sparse=True)
    nn.init.zeros_(rows.weight)
    (rows(torch.tensor([0, 2, 0])) * torch.tensor([[1.0], [1.0], [-3.0]])).sum().backward()
    SignSGD(rows.parameters(), lr=0.5).step()
    assert rows.weight.tolist() == [[0.5, 0.5], [0.0, 0.0], [-0.5, -0.5]]


def test_sparsified_keeps_weights_and_counts_lr_and_decay_d_m4():
    """k covers all: p - lr g - lr wd p = 2 - .5 * .4 - .5 * .1 * 2 = 1.7."""
    for shape in [(3,), (2, 2), (), (1, 4, 1)]:
        p = nn.Parameter(torch.full(shape, 2.0))
        optimizer = SparsifiedSGD([p], lr=0.5, weight_decay=0.1)
        assert bool((p == 2).all())
        p.grad = torch.full(shape, 0.4)
        optimizer.step()
        torch.testing.assert_close(p.detach(), torch.full(shape, 1.7))


@pytest.mark.parametrize("random", [False, True])
def test_every_coordinate_is_equally_likely_d_m4(random):
    """d = 7, k = 3: also the last d mod k; 3500 draws give each 1500 +- 120 (4 sigma)."""
    p = nn.Parameter(torch.zeros(7))
    optimizer = CentralizedSparsifiedSGD([p], lr=1.0, sparse_grad_size=3, random_sparse=random)
    counts = torch.zeros(7)
    for _ in range(3500):
        p.grad = torch.ones(7)
        places, values = optimizer.sparsify_gradients(p, lr=1.0)
        assert places.dtype == torch.int64
        assert len(places) == len(values) == 3
        counts[places] += 1
    assert bool(((counts - 1500).abs() < 120).all())


def test_sparsify_gradients_refuses_other_tensors():
    optimizer = SparsifiedSGD([torch.ones(3, requires_grad=True)], lr=0.1, sparse_grad_size=1)
    with pytest.raises(ConfigError, match=r"param must be one of the optimizer's, got \(2,\)"):
        optimizer.sparsify_gradients(torch.ones(2), lr=0.1)


def test_sparsify_gradients_is_what_the_step_sends():
    p, q = (nn.Parameter(torch.zeros(9)) for _ in range(2))
    ours = SparsifiedSGD([p], lr=0.5, sparse_grad_size=2)
    theirs = SparsifiedSGD([q], lr=0.5, sparse_grad_size=2)
    for step in range(5):
        p.grad = torch.arange(1.0, 10.0) * (step + 1)
        q.grad = p.grad.clone()
        old = q.detach().clone()
        places, values = ours.sparsify_gradients(p, lr=0.5)
        theirs.step()
        torch.testing.assert_close((old - q.detach())[places], values)
        assert torch.equal(ours.state[p]["memory"], theirs.state[q]["memory"])


def test_estimated_weights():
    """tau = 2, p_i = i + 1: the means with weights (i + 2)^2."""
    p = nn.Parameter(torch.ones(4))
    optimizer = SparsifiedSGD([p], lr=0.1)
    seen = []
    for t in range(4):
        with torch.no_grad():
            p.fill_(t + 1)
        optimizer.update_estimated_weights(t, 2)
        seen.append(optimizer.get_estimated_weights()[0][0].item())
    assert seen == pytest.approx([1, 1.6923077, 2.4137931, 3.1481481])


def test_half_precision_memory_survives_a_checkpoint():
    p = nn.Parameter(torch.zeros(8, dtype=torch.float16))
    optimizer = SparsifiedSGD([p], lr=1e-3, sparse_grad_size=1)
    p.grad = torch.full((8,), 1e-6, dtype=torch.float16)
    optimizer.step()
    memory = optimizer.state[p]["memory"].clone()
    assert memory.dtype == torch.float32
    optimizer.load_state_dict(optimizer.state_dict())
    assert torch.equal(optimizer.state[p]["memory"], memory)


def _half(width):
    fp = FP16Optimizer(nn.Linear(width, 1).half(), 1, average_world=True)
    fp.set_optimizer(torch.optim.SGD([fp.fp32_params], lr=0.1))
    return fp


def test_states_of_other_models_and_methods_are_checkpoint_errors():
    saved, fp = _half(3), _half(2)
    saved.loss_scaler.update_scale(True)
    with pytest.raises(CheckpointError, match="must have 3 elements, got 4"):
        fp.load_state_dict(saved.state_dict())
    assert fp.loss_scaler.loss_scale == 1024
    plain = CentralizedSGD(1, nn.Linear(2, 1), lr=0.1)
    with pytest.raises(CheckpointError, match="must have 'aggregation'"):
        PowerSGD(nn.Linear(2, 1), lr=0.1).load_state_dict(plain.state_dict())
    for state in (CentralizedSGD(1, nn.Linear(2, 1, bias=False), lr=0.1).state_dict(), {}):
        with pytest.raises(CheckpointError, match="the state does not fit"):
            plain.load_state_dict(state)


def test_loss_scaler_traces():
    """Window 4, overflow at call 5; window 128 grows at calls 127 and 255."""
    scaler = DynamicLossScaler(1024, 2, 4)
    seen = []
    for call in range(14):
        scaler.update_scale(call == 5)
        seen.append(scaler.loss_scale)
    assert seen == [1024] * 3 + [2048] * 2 + [1024] * 4 + [2048] * 4 + [4096]
    scaler = DynamicLossScaler(1, 2, 128, max_scale=2)
    grown = []
    for call in range(300):
        before = scaler.loss_scale
        scaler.update_scale(False)
        grown += [call] if scaler.loss_scale > before else []
    assert (grown, scaler.loss_scale) == ([127], 2)
    assert DynamicLossScaler.has_overflow(math.nan)
    assert not DynamicLossScaler.has_overflow(torch.tensor(3.0))


def test_schedulers_groups_and_attributes_reach_the_inner_optimizer():
    model = nn.Sequential(nn.Linear(2, 2), nn.Linear(2, 1))
    optimizer = CustomCentralizedOptimizer(
        model, 1, torch.optim.SGD(model[0].parameters(), lr=1.0), average_world=True
    )
    optimizer.add_param_group({"params": model[1].parameters(), "lr": 0.5})
    scheduler = torch.optim.lr_scheduler.ExponentialLR(optimizer, 0.1)
    model(torch.ones(1, 2)).sum().backward()
    optimizer.step()
    scheduler.step()
    assert [g["lr"] for g in optimizer.optimizer.param_groups] == pytest.approx([0.1, 0.05])
    assert isinstance(optimizer, torch.optim.Optimizer)
    optimizer.zero_grad()
    assert model[0].weight.grad is None
    with pytest.raises(AttributeError, match="nothing_like_it"):
        _ = optimizer.nothing_like_it
    with pytest.raises(ConfigError, match="optimizer must hold the model's parameters, got 1 of"):
        optimizer.add_param_group({"params": [nn.Parameter(torch.ones(1))]})
    assert len(optimizer.param_groups) == 2


@pytest.mark.parametrize("fused", [False, True])
def test_a_grad_scaler_unscales_for_the_optimizer_inside(fused):
    model = nn.Linear(2, 1, bias=False)
    nn.init.zeros_(model.weight)
    inner = torch.optim.SGD(model.parameters(), lr=0.5, fused=fused)
    optimizer = CustomCentralizedOptimizer(model, 1, inner, average_world=True)
    scaler = torch.amp.GradScaler("cpu", init_scale=1024.0)
    scaler.scale(model(torch.ones(1, 2)).sum()).backward()
    scaler.step(optimizer)
    assert model.weight.tolist() == [[-0.5, -0.5]]


def test_a_refused_group_leaves_no_trace():
    optimizer = SparsifiedSGD(nn.Linear(2, 1).parameters(), lr=0.1)
    with pytest.raises(TensorTypeError, match="parameters must be real"):
        optimizer.add_param_group({"params": [torch.ones(1, dtype=torch.complex64, requires_grad=True)]})
    assert len(optimizer.param_groups) == 1
    assert len(optimizer.state_dict()["state"]) == 2


def test_a_step_tells_a_tracker_of_its_parts():
    model, tracker = nn.Linear(2, 1), Tracker([], 0, 0)
    optimizer = CustomCentralizedOptimizer(model, 1, _sgd(model), average_world=True)
    model(torch.ones(1, 2)).sum().backward()
    optimizer.step(tracker=tracker)
    assert [name for name, _ in tracker.batch_times] == ["agg", "opt_step"]


def test_get_optimizer():
    model = nn.Linear(2, 1)
    makers = {
        "sign_sgd": {"params": model.parameters()},
        "sparsified_sgd": {"params": model.parameters()},
        "centralized_sparsified_sgd": {"params": model.parameters()},
        "centralized_sgd": {"world_size": 1, "model": model},
        "centralized_adam": {"world_size": 1, "model": model},
        "power_sgd": {"model": model},
    }
    for name, arguments in makers.items():
        kind = type(get_optimizer(name, lr=0.1, **arguments)).__name__
        assert kind.lower() == name.replace("_", "")
    with pytest.raises(ConfigError, match=r"name must be one of .*power_sgd.* got 'sgd'"):
        get_optimizer("sgd")


MODEL = nn.Linear(2, 1)
HALF = nn.Linear(2, 1).half()


@pytest.mark.parametrize(
    ("make", "says"),
    [
        (lambda: CentralizedSGD(1, None, lr=0.1), "model must be a torch.nn.Module, got None"),
        (lambda: CentralizedSGD(1, MODEL), "lr must be given, finite and at least 0, got None"),
        (lambda: CentralizedSGD(2, MODEL, lr=0.1), "world_size must be 1"),
        (
            lambda: CentralizedSGD(1, nn.Linear(1, 1).requires_grad_(False), lr=1),
            "trainable parameters, got none",
        ),
        (lambda: PowerSGD(MODEL, lr=0.1, average_world=False), "average_world must be True"),
        (lambda: PowerSGD(MODEL, lr=0.1, rank=0), "rank must be at least 1, got 0"),
        (lambda: SparsifiedSGD(MODEL.parameters(), lr=0.1, sparse_grad_size=0), "sparse_grad_size must be"),
        (lambda: CentralizedSparsifiedSGD(lr=0.1), "params must be given"),
        (lambda: SignSGD(MODEL.parameters(), lr=0.1, nesterov=True), "0 with nesterov"),
        (lambda: SignSGD(MODEL.parameters()), "lr must be given"),
        (lambda: CustomCentralizedOptimizer(MODEL, 1, _sgd(MODEL)), "one True, one False"),
        (
            lambda: CustomCentralizedOptimizer(MODEL, 1, _sgd(MODEL), average_world=True, grad_clip=0),
            "grad_clip must be above 0",
        ),
        (
            lambda: CustomCentralizedOptimizer(MODEL, 1, _sgd(HALF), average_world=True),
            "optimizer must hold the model's parameters, got 2 of 2 not in it",
        ),
        (lambda: CustomCentralizedOptimizer(MODEL, 1, "sgd", average_world=True), "must be a torch.optim"),
        (
            lambda: CustomCentralizedOptimizer(
                MODEL, 1, torch.optim.LBFGS(MODEL.parameters()), average_world=True
            ),
            "got LBFGS",
        ),
        (
            lambda: CustomCentralizedOptimizer(MODEL, 1, _sgd(MODEL), average_custom=True).step(),
            "denom must be given with average_custom",
        ),
        (
            lambda: CustomCentralizedOptimizer(MODEL, 1, _sgd(MODEL), average_custom=True).step(denom=0),
            "denom must be finite and above 0, got 0.0",
        ),
        (
            lambda: CustomCentralizedOptimizer(MODEL, 1, _sgd(MODEL), average_world=True).step(denom=2),
            "denom needs average_custom=True",
        ),
        (lambda: GenericCentralizedOptimizer(1, MODEL).step(), "has no optimizer inside yet"),
        (lambda: AllReduceAggregation(1).agg_grad()(MODEL, "sum"), "op must be 'avg_world' or 'avg_custom'"),
        (lambda: FP16Optimizer(HALF, 1, use_horovod=True), r"use_horovod must be False.*torch.distributed"),
        (lambda: FP16Optimizer(HALF, 1), "one True, one False"),
        (lambda: FP16Optimizer(HALF, 1, average_world=True, min_scale=0), "min_scale must be above 0"),
        (lambda: FP16Optimizer(HALF, 1, average_world=True).set_optimizer(_sgd(HALF)), "fp32_params alone"),
        (lambda: DynamicLossScaler(scale_factor=1), "scale_factor must be finite and above 1"),
        (lambda: DynamicLossScaler(max_scale=1), "max_scale must be at least init_scale"),
    ],
)
def test_what_is_refused(make, says):
    with pytest.raises(ConfigError, match=says):
        make()


@pytest.mark.skipif(torch.cuda.is_available(), reason="there is a CUDA device")
def test_use_cuda_without_a_device():
    with pytest.raises(ConfigError, match="use_cuda needs a CUDA device"):
        CentralizedSGD(1, MODEL, lr=0.1, use_cuda=True)
