"""What all ranks must share is compared, travels, or is refused by name; nothing of it differs silently."""

import copy
import re
from contextlib import nullcontext

import pytest
import torch
from models import flat, mlp
from support.faces import attached
from support.training import descend
from torch import nn
from torch.nn.parallel import DistributedDataParallel

import stenograd
from stenograd.catalog.registry import schedules
from stenograd.errors import MismatchError
from stenograd.heat import DASO, DataParallel, DataParallelOptimizer
from stenograd.mlbench import CentralizedSGD, FP16Optimizer
from stenograd.mlbench.aggregation import AllReduceAggregation
from stenograd.mlbench.decentralized import DecentralizedAggregation, DecentralizedSGD
from stenograd.simulate import ranks
from stenograd.singa import DistOpt
from stenograd.sync.averaging import take_states
from stenograd.sync.gradients import GradientSync
from stenograd.sync.step_settings import StepSettings
from stenograd.testing.methods import by_name

EVERY_SCHEDULE = ["dense", *(f"{name}:every=2" for name in schedules())]


def _sgd(model, lr=0.1, **options):
    return torch.optim.SGD(model.parameters(), lr=lr, **options)


class _Pair(nn.Module):
    """Two parts of one shape, `a` before `b` or the other way round; `which` says of what kind they are."""

    def __init__(self, which, flip):
        super().__init__()
        for name in "ba" if flip else "ab":
            if which == "buffer":
                self.register_buffer(name, torch.full((3,), float(ord(name))))
            else:
                layer = nn.Linear(3, 3, bias=False)
                nn.init.constant_(layer.weight, float(ord(name)))
                self.add_module(name, layer.requires_grad_(which != "frozen"))
        self.head = nn.Linear(3, 1)


def _attached(method, which, rank):
    flip = bool(rank.rank)
    model = _Pair(which, flip and which != "group")
    held = list(model.parameters())
    optimizer = torch.optim.SGD(held[::-1] if flip and which == "group" else held, lr=0.1)
    before = {name: t.clone() for name, t in model.state_dict().items()}
    with pytest.raises(MismatchError, match="differ in the order of tensors") as caught:
        stenograd.distribute(model, optimizer, method, group=rank)
    assert all(torch.equal(t, before[name]) for name, t in model.state_dict().items())
    return str(caught.value)


@pytest.mark.parametrize("which", ["parameter", "frozen", "buffer", "group"])
@pytest.mark.parametrize("method", EVERY_SCHEDULE)
def test_another_order_of_tensors_on_a_rank_is_an_error_that_names_the_first(method, which):
    """Rank 1 registers b before a, or gives its optimizer the last parameter first; nothing is changed."""
    for said in ranks(2, lambda rank: _attached(method, which, rank)):
        first, second = said.split(" rank 0 has ")[1].split(", rank 1 has ")
        names = ("head.bias", "a.weight") if which == "group" else ("b", "a")
        assert names[1] in first
        assert names[0] in second.split(":")[0]


def _neighbours(rank):
    return DecentralizedAggregation(rank, [1 - rank], timeout_s=30)


def _faces(rank, other):
    """Every face that takes a model compares the order and the shapes of what it holds."""
    stenograd.init()

    def pair():
        model = _Pair("parameter", flip=other == "order" and bool(rank))
        if other == "shape" and rank:
            model.a = nn.Linear(3, 2, bias=False)
        return model

    def delayed():
        model = pair()
        DataParallel(model, optimizer=DataParallelOptimizer(_sgd(model)), timeout_s=30)

    def daso():
        model = pair()
        DASO(_sgd(model), total_epochs=9, node_size=1, timeout_s=30).set_model(model)

    faces = {
        "DDP": lambda: stenograd.ddp.register(DistributedDataParallel(pair()), "dense", timeout_s=30),
        "heat": delayed,
        "DASO": daso,
        "singa": lambda: DistOpt(timeout_s=30).synchronize(pair()),
        "mlbench": lambda: CentralizedSGD(2, pair(), lr=0.1),
        "mlbench's weights": lambda: AllReduceAggregation(2).agg_model()(pair(), "avg_world"),
        "mlbench's gradients": lambda: AllReduceAggregation(2).agg_grad()(pair(), "avg_world"),
        "distribute": lambda: stenograd.distribute(model := pair(), _sgd(model), timeout_s=30),
        "neighbours in mlbench": lambda: DecentralizedSGD(rank, [1 - rank], pair(), lr=0.1),
        "neighbours' weights": lambda: _neighbours(rank).agg_model()(pair(), "avg_world"),
        "neighbours' gradients": lambda: _neighbours(rank).agg_grad()(pair(), "avg_world"),
    }
    if other == "shape":
        del faces["DDP"]  # torch refuses it by itself
    for face, attach in faces.items():
        with pytest.raises(MismatchError) as caught:
            attach()
        assert other == "shape" or "order" in str(caught.value), face
        assert re.search(r"\ba\b|parameter 0", str(caught.value)), face
        assert "rank 1" in str(caught.value), face
    if other == "order":
        with pytest.raises(MismatchError, match="order"):
            CentralizedSGD(2, _Pair("buffer", flip=bool(rank)), lr=0.1)
        _guarded(rank, pair())


def _guarded(rank, model):
    for name, p in model.named_parameters():  # the same by name, whatever the order
        nn.init.constant_(p, float(len(name)))
    guard = stenograd.sync.replica_guard.ReplicaGuard(model)
    assert guard.check() == []
    if rank:
        nn.init.zeros_(model.a.weight)
    with pytest.raises(stenograd.errors.ReplicaDivergence) as found:
        guard.check()
    assert list(found.value.tensors) == ["a.weight"]


@pytest.mark.parametrize("other", ["order", "shape"])
def test_every_face_compares_what_ranks_hold_and_the_replica_guard_goes_by_name(pool, other):
    pool.run(2, _faces, other)


def test_a_checkpoint_does_not_give_one_parameter_the_state_of_another(tmp_path):
    """Momenta 1 of a and 2 of b, which torch's optimizers save by number, must not change places."""
    first, second = _Pair("parameter", False), _Pair("parameter", True)
    saved = _sgd(first, momentum=0.9)
    first.a.weight.grad, first.b.weight.grad = torch.full((3, 3), 1.0), torch.full((3, 3), 2.0)
    saved.step()
    stenograd.save_checkpoint(tmp_path, step=1, model=first, optimizer=saved)
    with pytest.raises(stenograd.errors.CheckpointError, match=r"b\.weight in the place of a\.weight"):
        stenograd.load_checkpoint(tmp_path, model=second, optimizer=_sgd(second, momentum=0.9))
    stenograd.shutdown()


def _settings(method, what, rank):
    model = mlp(0)
    optimizer = _sgd(model, lr=0.1 + 0.1 * (what == "lr") * rank.rank, momentum=0.9)
    if what == "state" and not rank.rank:
        for p in model.parameters():
            p.grad = torch.ones_like(p)
        optimizer.step()
    if method != "dense":  # each rank may train as it likes between rounds
        stenograd.distribute(model, optimizer, method, group=rank).close()
        return
    with pytest.raises(MismatchError, match={"lr": r"lr of .*0\.1, rank 1 has 0\.2"}.get(what, what)):
        stenograd.distribute(model, optimizer, method, group=rank)


@pytest.mark.parametrize("what", ["lr", "state"])
@pytest.mark.parametrize("method", ["dense", "local:every=2"])
def test_replicas_start_with_equal_settings_and_states_of_their_optimizers(method, what):
    """Rank 1 has twice the learning rate, or rank 0 alone loaded a momentum: replicas would part silently."""
    ranks(2, lambda rank: _settings(method, what, rank))


class _Scaled:
    """A training with a GradScaler of this rank's, one step at a time."""

    def __init__(self, rank, method, *, face="distribute", scale=4.0, fused=False, grows=1000):
        self.rank, self.model = rank, mlp(0)
        self.optimizer = torch.optim.AdamW(self.model.parameters(), lr=0.01, fused=fused)
        self.model, self.sync = attached(face, self.model, self.optimizer, method)
        self.scaler = torch.amp.GradScaler("cpu", init_scale=scale, growth_interval=grows)

    def steps(self, count):
        for number in range(count):
            self.step(number)

    def step(self, number):
        torch.manual_seed(10 * number + self.rank)
        self.optimizer.zero_grad()
        self.scaler.scale(self.model(torch.randn(4, 10)).square().mean()).backward()
        self.scaler.step(self.optimizer)
        self.scaler.update()


def _other_scales(rank, face, method, fused):
    """Rank 1 loads a scale of its own: found by the second exchange, or one of the next seven."""
    run = _Scaled(rank, method, face=face, scale=4.0 + 4.0 * rank, fused=fused)
    with pytest.raises(MismatchError, match=r"loss scale: rank 0 has 4\.0, rank 1 has 8\.0"):
        run.steps(9)
    run.sync.close()
    return run.sync.step


@pytest.mark.parametrize("fused", [False, True])
@pytest.mark.parametrize(
    ("face", "method"), [("distribute", "dense"), ("distribute", "topk:ratio=0.1"), ("ddp", "topk:ratio=0.1")]
)
def test_two_scales_of_a_loss_are_an_error_on_every_rank(pool, face, method, fused):
    steps = pool.run(2, _other_scales, face, method, fused)
    assert steps[0] == steps[1] <= 9


def _rounds_with_scales(rank, method):
    """Between rounds gradients stay on their rank, so each may have a scale of its own."""
    run = _Scaled(rank, method, scale=4.0 + 4.0 * rank)
    run.steps(4)
    run.sync.close()


def test_rounds_leave_each_rank_its_scale(pool):
    for method in ("local:every=2", "gossip"):
        pool.run(2, _rounds_with_scales, method)


def _uneven(rank, with_tensor):
    """Rank r has 3 + 3 r batches, a scheduler per batch, and a scaler that grows every second batch."""
    run = _Scaled(rank, "dense", grows=2)
    optimizer = run.optimizer
    if with_tensor:
        optimizer.param_groups[0]["lr"] = torch.tensor(0.01)
    schedules = torch.optim.lr_scheduler
    by_epoch = schedules.LambdaLR(optimizer, lambda batch: 0.9**batch)
    by_batch = schedules.CyclicLR(optimizer, 0.001, 0.01, step_size_up=5, cycle_momentum=True)
    for epoch in range(2):
        with run.sync.join():
            for number in range(3 + (3 * rank if not epoch else 0)):
                run.step(number)
                (by_batch if epoch else by_epoch).step()
    group = {k: v for k, v in optimizer.param_groups[0].items() if k != "params"}
    counts = by_epoch.last_epoch, by_batch.last_epoch, run.scaler.state_dict()
    run.sync.close()
    return [p.tolist() for p in run.model.parameters()], {k: str(v) for k, v in group.items()}, counts


@pytest.mark.parametrize("with_tensor", [False, True])
def test_after_uneven_inputs_all_ranks_go_on_with_the_last_ones_settings(pool, with_tensor):
    """6 batches, of which rank 0 has 3, then 3 on both: learning rates, betas, counts and scales are equal.

    A LambdaLR computes the rate from its own count, so that is shared as well: 6 steps, not 3.
    """
    first, second = pool.run(2, _uneven, with_tensor)
    assert first == second
    assert first[2][0] == 6
    assert first[2][2]["scale"] == 4.0 * 2**4  # 9 batches are 4 times 2, and one


def _made_otherwise(driver):
    """Schedulers that ranks find in different orders, as Python's garbage collector does not keep them."""
    optimizers = [_sgd(mlp(0)), _sgd(mlp(0))]
    kinds = torch.optim.lr_scheduler
    makes = {
        1: lambda: kinds.ExponentialLR(optimizers[0], 0.9),
        2: lambda: kinds.ExponentialLR(optimizers[0], 0.5),
        3: lambda: kinds.ExponentialLR(optimizers[1], 0.5),
        4: lambda: kinds.StepLR(optimizers[1], 3),
    }
    order = list(makes) if driver.rank else reversed(makes)
    made = {number: makes[number]() for number in order}
    for number, scheduler in made.items():
        scheduler.last_epoch = 10 * number + driver.rank
    StepSettings(optimizers).share(driver, 1)
    gammas = [made[number].gamma for number in makes]
    return [made[number].last_epoch for number in makes], gammas


def test_schedulers_are_shared_in_whichever_order_they_are_found():
    assert ranks(2, _made_otherwise) == [([11, 21, 31, 41], [0.9, 0.5, 0.5, 0.1])] * 2


def _with_states(driver, source):
    p = torch.ones(2)
    plain = {"pair": (1, 2.5), 3: None, "rows": [(1,), [2]], "by": {4: "four", (5, 6): True}}
    state = {p: {**plain, "moment": torch.ones(2)}} if driver.rank == source else {}
    take_states(driver, [p], [state], source)
    assert state[p].pop("moment").tolist() == [1, 1]
    return state[p], plain


def test_plain_values_of_states_arrive_as_they_are():
    for found, plain in ranks(2, _with_states, 1):
        assert found == plain


def _parting_rates(rank, rate):
    model = mlp(0)
    optimizer = _sgd(model, lr=rate)
    sync = stenograd.distribute(model, optimizer, "dense", timeout_s=30)

    def train():
        for _ in range(10):
            descend(optimizer, model(torch.ones(2, 10)).square().mean())
            optimizer.param_groups[0]["lr"] *= 0.5 if rank else 1.0

    with sync, pytest.raises(MismatchError, match=r"rates: rank 0 has \[0\.1\d*\], rank 1 has"):
        train()
    return sync.step


@pytest.mark.parametrize("rate", [0.1, torch.tensor(0.1)], ids=str)
def test_learning_rates_that_part_are_an_error(pool, rate):
    steps = pool.run(2, _parting_rates, rate)
    assert steps[0] == steps[1] <= 10


def _scales_of_faces(rank):
    """MLBench's FP16Optimizer after one rank loaded a state, and DASO's scaler."""
    model = mlp(0).bfloat16()
    fp = FP16Optimizer(model, 2, average_world=True, divide_before=True)
    fp.set_optimizer(torch.optim.SGD([fp.fp32_params], lr=0.1))
    if rank:
        state = fp.state_dict()
        fp.load_state_dict({**state, "loss_scaler": {**state["loss_scaler"], "scale": 2048.0}})

    def train():
        for _ in range(9):
            fp.zero_grad()
            fp.backward_loss(model(torch.ones(2, 10, dtype=torch.bfloat16)).square().mean())
            fp.step()

    with pytest.raises(MismatchError, match=r"loss scale: rank 0 has 1024\.0, rank 1 has 2048\.0"):
        train()
    with pytest.raises(MismatchError, match=r"loss scale: rank 0 has 4\.0, rank 1 has 8\.0"):
        _daso(rank, 1, scale=4.0 + 4.0 * rank, without=())


def _daso(rank, node_size, scale, without):
    """Two ranks that are one node, or two; rank 1 has no backward pass in the batches `without`."""
    model = mlp(0)
    optimizer = torch.optim.AdamW(model.parameters(), lr=0.01)
    daso = DASO(
        optimizer, total_epochs=3, warmup_epochs=1, cooldown_epochs=1, node_size=node_size, timeout_s=30
    )
    daso.set_model(model)
    if scale:
        daso.add_scaler(torch.amp.GradScaler("cpu", init_scale=scale))
    daso.last_batch = 3
    for batch in range(8):
        daso.zero_grad()
        if not (rank and batch in without):
            torch.manual_seed(10 * batch + rank)
            loss = model(torch.randn(4, 10)).square().mean()
            (daso.scaler.scale(loss) if scale else loss).backward()
        daso.step()
        if batch % 4 == 3:
            daso.epoch_loss_logic(1.0)
    told = flat(model), daso.scaler.state_dict() if scale else None
    daso.close()
    return told


def test_the_faces_own_scalers_are_compared_too(pool):
    pool.run(2, _scales_of_faces)


@pytest.mark.parametrize("scale", [0.0, 4.0])
@pytest.mark.parametrize("node_size", [1, 2])
def test_daso_goes_on_where_a_rank_has_no_backward_pass_in_a_batch(pool, node_size, scale):
    """In batch 0, before its scaler has scaled anything, and in batch 5; it counts as one with zeros."""
    first, second = pool.run(2, _daso, node_size, scale, (0, 5))
    assert torch.equal(first[0], second[0])
    assert first[1] == second[1]


class _Master(torch.optim.Optimizer):
    """SGD on float64 copies made with the optimizer, which it writes back into the parameters.

    `place` says where they are: in the state, in an attribute, or, of all parameters together, in one tensor.
    """

    def __init__(self, params, lr, place):
        super().__init__(params, {"lr": lr})
        held = [p for group in self.param_groups for p in group["params"]]
        wide = [p.detach().double() for p in held]
        self._step = 0
        if place == "state":
            for p, w in zip(held, wide, strict=True):
                self.state[p]["copied"] = w
        elif place == "attribute":
            self.kept = [{"masters": wide}]
        else:
            self.kept = torch.cat([w.reshape(-1) for w in wide])
        self.place = place

    def _copies(self):
        held = [p for group in self.param_groups for p in group["params"]]
        if self.place == "state":
            return [(p, self.state[p]["copied"]) for p in held]
        if self.place == "attribute":
            return list(zip(held, self.kept[0]["masters"], strict=True))
        parts = self.kept.split([p.numel() for p in held])
        return [(p, part.view(p.shape)) for p, part in zip(held, parts, strict=True)]

    @torch.no_grad()
    def step(self, closure=None):
        for p, wide in self._copies():
            if p.grad is not None:
                wide.sub_(p.grad, alpha=self.param_groups[0]["lr"])
                p.copy_(wide)


class _Lookahead:
    """Wraps an optimizer: every third step `slow <- (slow + p) / 2` and `p <- slow`."""

    def __init__(self, optimizer):
        self.optimizer, self.steps = optimizer, 0
        self.slow = [[p.detach().clone() for p in group["params"]] for group in optimizer.param_groups]

    @torch.no_grad()
    def step(self):
        self.optimizer.step()
        self.steps += 1
        if self.steps % 3 == 0:
            for group, slow in zip(self.optimizer.param_groups, self.slow, strict=True):
                for p, s in zip(group["params"], slow, strict=True):
                    p.copy_(s.lerp_(p, 0.5))

    def zero_grad(self):
        self.optimizer.zero_grad()


def _with_copies(rank, kind, method, dtype):
    """Train 12 steps towards another target on each rank, and return this rank's parameters."""
    model = nn.Linear(4, 3).to(dtype)
    nn.init.constant_(model.weight, 1.0 + rank.rank)  # other ones until rank 0's are broadcast
    nn.init.constant_(model.bias, 0.5)
    if kind == "lookahead":
        optimizer = _Lookahead(_sgd(model, lr=0.05))
    elif kind == "plain":
        optimizer = _sgd(model, lr=0.05)
    else:
        optimizer = _Master(model.parameters(), 0.05, kind)
    given = {"only": optimizer}.values() if kind == "attribute" else optimizer
    with stenograd.distribute(model, given, method, group=rank) as sync:
        for _ in range(12):
            for p in model.parameters():
                p.grad = None
            (model(torch.ones(2, 4, dtype=dtype)) - 10.0 * rank.rank).square().mean().backward()
            optimizer.step()
        sync.flush()
    return flat(model).double()


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16], ids=str)
@pytest.mark.parametrize("kind", ["state", "attribute", "lookahead"])
@pytest.mark.parametrize("method", EVERY_SCHEDULE)
def test_copies_that_an_optimizer_keeps_follow_every_average(method, kind, dtype):
    """Two ranks are pulled to targets 10 apart; only averages hold them together.

    Plain SGD, which starts from what a round left, says how far apart they may be; optimizers that undo
    rounds went apart as if there were none (8 and more).
    """
    ends = ranks(2, lambda rank: _with_copies(rank, kind, method, dtype))
    plain = ranks(2, lambda rank: _with_copies(rank, "plain", method, dtype))
    apart, allowed = ((found[0] - found[1]).abs().max() for found in (ends, plain))
    assert apart <= 1.2 * allowed + (0.1 if kind != "lookahead" else 1.0)  # whose slow weights lag behind
    if kind != "lookahead":
        assert torch.allclose(ends[0], plain[0], atol=0.1)


@pytest.mark.parametrize("kind", ["state", "attribute"])
@pytest.mark.parametrize(
    "method",
    [
        "diloco:every=4,fragments=2,delay=1,mix=0.5",
        "diloco:every=2,eager=true",
        "local:every=2,states=average,states_every=1",
        "diloco:every=2,states=average,states_every=1",
        "noloco:every=2",
    ],
)
def test_copies_follow_whatever_a_round_moves_and_when(method, kind):
    """Copies in double precision that follow each round train as plain SGD does, but for its rounding."""
    ends = ranks(2, lambda rank: _with_copies(rank, kind, method, torch.float32))
    plain = ranks(2, lambda rank: _with_copies(rank, "plain", method, torch.float32))
    for mine, theirs in zip(ends, plain, strict=True):
        assert torch.allclose(mine, theirs, atol=1e-4)


@pytest.mark.parametrize("every", [1, 3])
@pytest.mark.parametrize("schedule", list(schedules()))
def test_an_optimizer_that_undoes_rounds_from_hidden_copies_is_refused_by_name(schedule, every):
    """One flat tensor of all parameters is no parameter's copy, but the step after a round shows it."""

    def train(rank):
        with pytest.raises(stenograd.errors.ConfigError, match="_Master, which goes on from copies"):
            _with_copies(rank, "flat", f"{schedule}:every={every}", torch.float32)

    ranks(2, train)


def test_the_first_of_two_optimizers_is_seen_to_undo_rounds():
    def train(rank):
        model = nn.Sequential(nn.Linear(4, 3), nn.Linear(3, 3))
        for p in model.parameters():
            nn.init.constant_(p, 0.1)
        optimizers = [_Master(model[0].parameters(), 0.05, "flat"), _sgd(model[1], lr=0.0)]
        with stenograd.distribute(model, optimizers, "local:every=2", group=rank):
            for _ in range(8):
                model.zero_grad()
                (model(torch.ones(2, 4)) - 10.0 * rank.rank).square().mean().backward()
                for optimizer in optimizers:
                    optimizer.step()

    with pytest.raises(stenograd.errors.ConfigError, match="_Master, which goes on from copies"):
        ranks(2, train)


@pytest.mark.parametrize("kind", ["state", "attribute"])
@pytest.mark.parametrize("method", ["local:every=4", "diloco:every=4"])
def test_copies_follow_where_refresh_ends_a_round(method, kind):
    """A step by a gradient of zeros then moves nothing; copies that had stayed would take the mean back."""

    def train(rank):
        model = nn.Linear(4, 3)
        nn.init.constant_(model.weight, 1.0)
        nn.init.constant_(model.bias, 0.5)
        optimizer = _Master(model.parameters(), 0.05, kind)
        with stenograd.distribute(model, optimizer, method, group=rank) as sync:
            (model(torch.ones(2, 4)) - 10.0 * rank.rank).square().mean().backward()
            optimizer.step()
            sync.refresh()
            before = flat(model)
            model.zero_grad()
            (model(torch.ones(2, 4)) * 0.0).sum().backward()
            optimizer.step()
            return before, flat(model)

    for before, after in ranks(2, train):
        assert torch.allclose(before, after, atol=1e-6)


class _Own(torch.optim.SGD):
    """An optimizer of the program's own, without copies."""


def _without_copies(rank, start, kind, method):
    model = copy.deepcopy(start)
    optimizer = kind(model.parameters(), lr=0.5, momentum=0.5)
    with stenograd.distribute(model, optimizer, method, group=rank):
        for number in range(20):
            optimizer.zero_grad()
            x = torch.randn(8, 10, generator=torch.Generator().manual_seed(number + 50 * rank.rank))
            (model(x) - 3.0 * rank.rank).square().mean().backward()
            optimizer.step()
    return flat(model)


@pytest.mark.parametrize("every", [1, 3])
@pytest.mark.parametrize("schedule", list(schedules()))
def test_an_optimizer_without_copies_trains_as_torch_s_own_does_bit_for_bit(schedule, every):
    """Even with a large step and targets that pull ranks apart, nobody takes it for one that undoes them."""
    method = f"{schedule}:every={every}"
    start = mlp(0)  # here, because the ranks are threads that share torch's random state
    own, torchs = (
        ranks(2, lambda rank, k=kind: _without_copies(rank, start, k, method))
        for kind in (_Own, torch.optim.SGD)
    )
    assert all(map(torch.equal, own, torchs))


@pytest.mark.parametrize("seed", range(6))
def test_gradients_along_one_line_are_not_taken_for_copies(seed):
    """Noise along it makes some steps go back by what a round has moved."""

    def train(rank):
        model = nn.Linear(8, 1, bias=False)
        nn.init.constant_(model.weight, 0.1)
        optimizer = _Own(model.parameters(), lr=0.3)
        noise = torch.Generator().manual_seed(100 * seed + rank.rank)
        with stenograd.distribute(model, optimizer, "local:every=2", group=rank) as sync:
            for _ in range(40):
                optimizer.zero_grad()
                x, y = torch.randn(2, generator=noise)
                (model(torch.full((1, 8), float(x))) - y).square().sum().backward()
                optimizer.step()
            return sync.round

    assert ranks(2, train) == [20, 20]


def _accumulating(rank, method, passes, quiet):
    """4 steps of so many backward passes each; all but the last inside no_sync() where it is `quiet`."""
    model = mlp(0)
    optimizer = _sgd(model)
    with stenograd.distribute(model, optimizer, method, group=rank) as sync:
        for _ in range(4):
            optimizer.zero_grad()
            for number in range(passes):
                with sync.no_sync() if quiet and number < passes - 1 else nullcontext():
                    model(torch.ones(2, 10)).square().mean().backward()
            optimizer.step()
        return sync.step, sync.round


@pytest.mark.parametrize("schedule", list(schedules()))
def test_a_step_that_sees_several_passes_warns_once_that_rounds_count_passes(schedule):
    """4 steps of 2 passes are 8 ticks of the clock, so 4 rounds of every=2, not 2; no_sync() makes it 4."""
    method = f"{schedule}:every=2"
    with pytest.warns(UserWarning, match=rf"sees 2 backward passes, and {schedule}.*no_sync\(\)") as caught:
        assert ranks(2, lambda rank: _accumulating(rank, method, 2, False)) == [(8, 4)] * 2
    assert len([w for w in caught if "sees" in str(w.message)]) == 2  # one for each rank
    for passes, quiet in ((2, True), (1, False)):  # a warning would be an error
        told = ranks(2, lambda rank, n=passes, q=quiet: _accumulating(rank, method, n, q))
        assert told == [(4, 2)] * 2


_KNOWN = [name for name in dir(GradientSync) if name[0] != "_"]
_OF_JOIN = {"shadow", "take_from_last", "take_part"} | {name for name in _KNOWN if name.startswith("join_")}


def _attributes(rank):
    """What every sync tells of itself, before and after a step, by its face and method."""
    told = {}
    for method in [*EVERY_SCHEDULE, "ddp"]:
        model = mlp(0)
        optimizer = _sgd(model)
        if method == "ddp":
            model = DistributedDataParallel(model)
            sync = stenograd.ddp.register(model, "dense", timeout_s=30)
        else:
            sync = stenograd.distribute(model, optimizer, method, timeout_s=30)
        for _ in range(2):
            descend(optimizer, model(torch.ones(2, 10)).square().mean())
        sync.flush()
        with sync.consensus():
            names = {name for name in dir(sync) if name[0] != "_"}
        told[method] = names, {name: getattr(sync, name) for name in ("step", "round", "skipped", "finite")}
        told[method][1].update(
            pending=sync.pending, left_out=sync.left_out, share=sync.share, events=sync.events
        )
        sync.close()
    return told


def test_every_sync_has_the_same_attributes_so_that_a_method_s_text_can_be_replaced(pool):
    for told in pool.run(2, _attributes):
        everything = set().union(*(names for names, _ in told.values())) - _OF_JOIN - {"on_bucket"}
        for method, (names, values) in told.items():
            assert everything - names == set(), method
            rounds = 1 if ":" in method else 2  # every=2, or each of the two steps
            assert values == {
                "step": 2,
                "round": rounds,
                "skipped": 0,
                "finite": True,
                "pending": False,
                "left_out": 0,
                "share": 1.0,
                "events": [],
            }


def _own_rate(rank, method, dtype):
    """Rank 1 halves its learning rate after the first step; return how many exchanges it took to find out."""
    model = nn.Linear(6, 5).to(dtype)
    optimizer = _sgd(model)
    sync = stenograd.distribute(model, optimizer, method, group=rank)

    def train():
        for _ in range(10):
            descend(optimizer, model(torch.ones(2, 6, dtype=dtype)).square().mean())
            optimizer.param_groups[0]["lr"] = 0.1 / (1 + rank.rank)

    with pytest.raises(MismatchError, match=r"rates: rank 0 has \[0\.1\], rank 1 has \[0\.05\]"):
        train()
    return sync.step + sync.skipped


@pytest.mark.parametrize("dtype", [torch.float32, torch.float16, torch.bfloat16], ids=str)
def test_every_method_tells_settings_with_its_own_messages(dtype):
    """Flags ride on what a method sends, as bytes or as numbers of its type; all ranks find out together."""
    for method in by_name():
        first, second = ranks(2, lambda rank, text=method: _own_rate(rank, text, dtype))
        assert first == second <= 9, method
