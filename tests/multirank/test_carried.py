"""What a model carries besides what it trains: buffers and frozen parameters of any type, by schedule."""

import copy
import math

import pytest
import torch
from support.training import descend
from torch import nn
from torch.nn.parallel import DistributedDataParallel

import stenograd
from stenograd.mlbench import DecentralizedAggregation
from stenograd.simulate import ranks
from stenograd.testing.methods import scheduled

INF = math.inf
TYPES = [torch.bool, torch.uint8, torch.int8, torch.int16, torch.int32, torch.int64]
TYPES += [torch.uint16, torch.uint32, torch.uint64, torch.float16, torch.bfloat16, torch.float32]
TYPES += [torch.float64, torch.complex64, torch.float8_e4m3fn, torch.float8_e5m2]
TEXTS = scheduled()


def seeded(model):
    """Fill the parameters by a generator of their own: ranks in one process share the global one."""
    generator = torch.Generator().manual_seed(0)
    with torch.no_grad():
        for p in model.parameters():
            p.copy_(torch.randn(p.shape, generator=generator) / 3)
    return model


class Block(nn.Module):
    """Attention as in small GPTs: a causal mask of -inf is a buffer."""

    def __init__(self):
        super().__init__()
        self.q, self.k, self.v = (nn.Linear(4, 4, bias=False) for _ in range(3))
        self.mask = torch.full((3, 3), -INF).triu(1)

    def forward(self, x):
        return torch.softmax(self.q(x) @ self.k(x).mT + self.mask, -1) @ self.v(x)


class Net(nn.Module):
    """The same training with and without buffers; with frozen parameters of types that no backend adds."""

    def __init__(self, carries):
        super().__init__()
        self.block, self.head = Block(), nn.Linear(4, 2)
        seeded(self)
        if carries:
            mask = self.block.mask
            del self.block.mask
            self.block.register_buffer("mask", mask)
            for dtype in TYPES:
                name = str(dtype).removeprefix("torch.")
                self.register_buffer(f"of_{name}", (torch.arange(6) % 2).to(dtype))
                if dtype in (torch.int64, torch.uint8, torch.float8_e4m3fn):
                    frozen = nn.Parameter((torch.arange(5) % 2).to(dtype), requires_grad=False)
                    self.register_parameter(f"frozen_{name}", frozen)
            self.register_buffer("wide", torch.full((1, 3), 0.1).expand(4, 3))
            self.register_buffer("thirds", torch.tensor([0.1, 1 / 3, torch.finfo(torch.float32).max]))
            self.register_buffer("none", torch.zeros(0))
            self.register_buffer("scalar", torch.tensor(math.nan))

    def forward(self, x):
        return self.head(self.block(x))


def trained(driver, text, carries):
    model = Net(carries)
    trainable = [p for p in model.parameters() if p.requires_grad]
    optimizer = torch.optim.AdamW(trainable, lr=0.05)
    sync = stenograd.distribute(model, optimizer, text, group=driver, timeout_s=30)
    before = {name: b.clone() for name, b in [*model.named_buffers(), *frozen_of(model)]}
    generator = torch.Generator().manual_seed(sync.rank)
    for _ in range(7):
        descend(optimizer, model(torch.randn(6, 3, 4, generator=generator)).square().mean())
    with sync.consensus():
        common = [p.detach().clone() for p in trainable]
        stay(model, before)
    stay(model, before)
    left_out, rounds = sync.left_out, sync.round
    sync.close()
    return [p.detach() for p in trainable], common, (left_out, rounds)


def frozen_of(model):
    return [(name, p) for name, p in model.named_parameters() if not p.requires_grad]


def raw(t):
    return t.contiguous().reshape(-1).view(torch.uint8)


def stay(model, before):
    for name, b in [*model.named_buffers(), *frozen_of(model)]:
        same = torch.equal(raw(b), raw(before[name])) or (name == "scalar" and bool(b.isnan()))
        assert same, (name, b, before[name])


@pytest.mark.parametrize("text", TEXTS)
def test_what_is_equal_on_all_ranks_stays_and_changes_no_training(text):
    """Masks of -inf, the largest number, NaN, thirds, every type: as without them, bit for bit, and kept."""
    world = 4 if "node_size" in text else 3
    alone = ranks(world, lambda driver: trained(driver, text, False))
    beside = ranks(world, lambda driver: trained(driver, text, True))
    for (p, common, told), (q, same, also) in zip(alone, beside, strict=True):
        assert told == also
        for a, b in zip([*p, *common], [*q, *same], strict=True):
            assert a.isfinite().all()
            assert torch.equal(a, b)
    assert alone[0][2][1] > 0 or stenograd.method(text).schedule.after


AVERAGING = [t for t in TEXTS if "buffers=" in t or not t.startswith("gossip") if "buffers=keep" not in t]


@pytest.mark.parametrize("text", [t for t in AVERAGING if "qsr" not in t])  # that has no round at this rate
def test_statistics_that_are_nan_on_one_rank_become_the_mean_of_the_others(text):
    """BatchNorm of rank 0 sees NaN in the first pass; after the round all ranks have finite statistics."""

    def rank_of(driver):
        model = seeded(nn.Sequential(nn.Linear(4, 4), nn.BatchNorm1d(4), nn.Linear(4, 2)))
        optimizer = torch.optim.SGD(model.parameters(), lr=0.01)
        sync = stenograd.distribute(model, optimizer, text, group=driver, timeout_s=30)
        generator = torch.Generator().manual_seed(sync.rank)
        for step in range(12):
            x = torch.randn(8, 4, generator=generator)
            if step == 0 and sync.rank == 0:
                x[0, 0] = math.nan
            descend(optimizer, model(x).square().mean())
        counted = int(model[1].num_batches_tracked)
        fit = all(t.isfinite().all() for t in model.state_dict().values())
        left_out = sync.left_out
        sync.close()
        return counted, fit, left_out

    with pytest.warns(RuntimeWarning, match="a gradient"):
        assert ranks(4, rank_of) == [(12, True, 0)] * 4


def healed(driver, text, held):
    """Hold one round; this rank's buffer is given."""
    model = nn.Linear(2, 1)
    model.register_buffer("held", torch.zeros(4))
    optimizer = torch.optim.SGD(model.parameters(), lr=0.0)
    sync = stenograd.distribute(model, optimizer, text, group=driver, timeout_s=30)
    model.held.copy_(held[sync.rank])
    model(torch.ones(1, 2)).sum().backward()
    optimizer.step()
    found = model.held.clone()
    sync.close()
    return found


@pytest.mark.parametrize("text", ["local:every=1", "diloco:every=1", "gossip:graph=complete,buffers=average"])
def test_an_element_is_the_mean_of_the_ranks_where_it_is_finite(text):
    """Of (1, 2, 6) the mean is 3, of (NaN, 2, 6) 4, of (inf, -inf, 5) 5; -inf everywhere stays."""
    held = [
        torch.tensor([1.0, math.nan, INF, -INF]),
        torch.tensor([2.0, 2.0, -INF, -INF]),
        torch.tensor([6.0, 6.0, 5.0, -INF]),
    ]
    for found in ranks(3, lambda driver: healed(driver, text, held)):
        assert found[:3].tolist() == pytest.approx([3.0, 4.0, 5.0])
        assert found[3] == -INF


@pytest.mark.parametrize(
    "text", ["local:every=2", "diloco:every=2", "noloco:every=2", "gossip:buffers=average"]
)
def test_a_buffer_that_grows_with_a_ranks_inputs_stays_its_own(text):
    """As a cache of positions does; the buffer after it is averaged as ever."""

    def rank_of(driver):
        model = nn.Linear(3, 2)
        model.register_buffer("cache", torch.zeros(2))
        model.register_buffer("seen", torch.zeros(1))
        optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
        with stenograd.distribute(model, optimizer, text, group=driver, timeout_s=30) as sync:
            if driver.rank:
                model.cache = torch.ones(5)
            model.seen.fill_(driver.rank)
            for _ in range(2):
                descend(optimizer, model(torch.ones(1, 3)).sum())
            with sync.consensus():
                pass
            return model.cache.tolist(), model.seen.item()

    cache, *others = ranks(2, rank_of)
    assert cache[0] == [0.0, 0.0]
    assert others == [([1.0] * 5, 0.5)]


def two_levels(driver, text, where):
    model = seeded(nn.Sequential(nn.Linear(4, 6), nn.Tanh(), nn.Linear(6, 2)))
    optimizer = torch.optim.SGD(model.parameters(), lr=0.05, momentum=0.9)
    sync = stenograd.distribute(model, optimizer, text, group=driver, timeout_s=30)
    generator = torch.Generator().manual_seed(sync.rank)
    for step in range(7):
        optimizer.zero_grad()
        model(torch.randn(8, 4, generator=generator)).square().mean().backward()
        if step == 2 and sync.rank in where:
            with torch.no_grad():
                model[2].weight[:, 0] = math.nan
        optimizer.step()
    momenta = [optimizer.state.get(p, {}).get("momentum_buffer") for p in model.parameters()]
    mine = [p.detach().clone() for p in model.parameters()]
    rounds = sync.round
    sync.close()
    return mine, momenta, rounds


@pytest.mark.filterwarnings("ignore:rank .*were not finite")
@pytest.mark.parametrize("where", [(0, 1), (0,), (1,), (2, 3), ()])
@pytest.mark.parametrize(
    "text",
    [
        "local:every=3",
        "local:every=3,states=reset",
        "local:every=3/topk:ratio=0.5,dense_below=0",
        "diloco:every=3",
        "diloco:every=3,states=reset",
        "diloco:every=3,eager=true",
    ],
)
def test_parameters_that_are_not_finite_in_a_node_cost_the_round_on_two_levels(text, where):
    """Nobody waits for another, all are finite again, and a node's ranks stay equal with their momenta."""
    schedule, slash, codec = text.partition("/")
    text = f"{schedule},inside=dense,node_size=2{slash}{codec}"
    done = ranks(4, lambda driver: two_levels(driver, text, where))
    assert len({rounds for *_, rounds in done}) == 1
    for a, b in ((done[0], done[1]), (done[2], done[3])):
        for p, q in zip(a[0], b[0], strict=True):
            assert p.isfinite().all()
            assert torch.equal(p, q)
        for m, n in zip(a[1], b[1], strict=True):
            assert (m is None and n is None) or torch.equal(m, n)


def second_level_twice(driver):
    model = nn.Linear(4, 2)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    text = "local:every=1,inside=dense,node_size=2"
    sync = stenograd.distribute(model, optimizer, text, group=driver, timeout_s=30)
    for _ in range(2):
        model(torch.ones(1, 4)).sum().backward()
        if sync.rank < 2:
            with torch.no_grad():
                model.weight.fill_(math.nan)
        optimizer.step()


@pytest.mark.filterwarnings("ignore:rank .*were not finite")
def test_the_second_time_in_a_row_it_is_an_error_on_all_ranks_of_all_nodes():
    with pytest.raises(stenograd.errors.NonFiniteError, match="as the round before did"):
        ranks(4, second_level_twice)


@pytest.mark.parametrize("kind", ["adamw", "momentum", "amsgrad"])
def test_a_rank_without_state_takes_the_mean_of_those_that_have_one(kind):
    """Ranks 0 and 2 step, rank 1 skips all its steps: m = (m_0 + m_2) / 2 on all three, by copies alone."""

    def built():
        model = seeded(nn.Linear(3, 2))
        if kind == "momentum":
            return model, torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9)
        return model, torch.optim.AdamW(model.parameters(), lr=0.1, amsgrad=kind != "adamw")

    def loss_of(model, rank, step):
        x = torch.randn(4, 3, generator=torch.Generator().manual_seed(10 * step + rank))
        return model(x).square().mean() * (math.nan if rank == 1 else 1.0)

    def rank_of(driver):
        model, optimizer = built()
        text = "local:every=2,states=average,states_every=1"
        sync = stenograd.distribute(model, optimizer, text, group=driver, timeout_s=30)
        for step in range(2):
            descend(optimizer, loss_of(model, sync.rank, step))
        sync.flush()
        found = copy.deepcopy([optimizer.state[p] for p in model.parameters()])
        optimizer.zero_grad()
        model(torch.ones(1, 3)).sum().backward()
        optimizer.step()  # it goes on from there
        sync.close()
        return found

    with pytest.warns(RuntimeWarning, match="a gradient"):
        done = ranks(3, rank_of)
    alone = []
    for rank in (0, 2):
        model, optimizer = built()
        for step in range(2):
            descend(optimizer, loss_of(model, rank, step))
        alone.append([optimizer.state[p] for p in model.parameters()])
    for states in done:
        for found, a, b in zip(states, *alone, strict=True):
            assert found.keys() == a.keys()
            for key in a:
                wanted = (a[key].double() + b[key].double()) / 2
                assert torch.allclose(found[key].double(), wanted, rtol=1e-6, atol=1e-9), key


class Barred(torch.optim.Optimizer):
    """Momentum by a key that holds the sign by which moments were named."""

    def step(self, closure=None):
        for p in self.param_groups[0]["params"]:
            moment = self.state[p].setdefault("exp|avg", torch.zeros_like(p))
            p.data.sub_(moment.mul_(0.9).add_(p.grad), alpha=0.1)


def test_moments_may_have_any_key():
    """Rank 1 has made no step, and takes what rank 0 has."""

    def rank_of(driver):
        model = seeded(nn.Linear(3, 2))
        optimizer = Barred(model.parameters(), {})
        text = "local:every=2,states=average,states_every=1"
        with stenograd.distribute(model, optimizer, text, group=driver, timeout_s=30) as sync:
            for _ in range(2):
                optimizer.zero_grad()
                model(torch.ones(1, 3)).square().sum().backward()
                if driver.rank == 0:
                    optimizer.step()
            sync.flush()
        return [optimizer.state[p]["exp|avg"].clone() for p in model.parameters()]

    first, second = ranks(2, rank_of)
    assert all(map(torch.equal, first, second))
    assert all(moment.any() for moment in first)


def _met(rank, method):
    """Rank 1 begins with other values of every type, and takes rank 0's; in rounds it goes on."""
    model = Net(carries=True)
    if rank == 1:
        with torch.no_grad():
            for t in (*model.parameters(), *model.buffers()):
                if t.is_contiguous() and t.numel():
                    t.copy_(torch.ones_like(t, dtype=torch.float32).to(t.dtype))
            model.wide[:1].fill_(7.0)
    trainable = [p for p in model.parameters() if p.requires_grad]
    optimizer = torch.optim.SGD(trainable, lr=0.01)
    with stenograd.distribute(model, optimizer, method, timeout_s=30, check_buffers=True, **GUARD[method]):
        if rank == 1 and GUARD[method]:
            model.of_int16[2] += 1  # the guard sends it in its own type, too
        for _ in range(2):
            descend(optimizer, model(torch.ones(2, 3, 4)).sum())
    stay(model, dict([*Net(True).named_buffers(), *frozen_of(Net(True))]))


GUARD = {"dense": {"check_every": 1, "repair": True}, "local:every=2": {}, "gossip:buffers=average": {}}


@pytest.mark.filterwarnings("ignore:.*repaired")
@pytest.mark.parametrize("method", GUARD)
def test_every_dense_type_travels_when_ranks_meet(pool, method):
    """On real gloo ranks, which cannot broadcast most of these types themselves."""
    pool.run(3, _met, method)


def _unfit(rank, kind, method, lone):
    model = nn.Linear(2, 2)
    if not lone or rank:
        if kind == "lazy":
            model.register_module("later", nn.LazyLinear(2))
        elif kind == "meta":
            model.register_buffer("odd", torch.zeros(2, device="meta"))
        elif kind == "nested":
            odd = torch.nested.nested_tensor([torch.ones(1), torch.ones(2)], layout=torch.jagged)
            model.register_buffer("odd", odd)
        else:
            model.register_buffer("odd", torch.eye(2).to_sparse(layout=getattr(torch, kind)))
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    error = stenograd.errors.MismatchError if lone else stenograd.errors.TensorTypeError
    name = (
        "order|odd|later|in parameters: rank 0 has 2, rank 1 has 4"
        if lone
        else "buffer odd must|parameter later.weight must"
    )
    with pytest.raises(error, match=name):
        stenograd.distribute(model, optimizer, method, timeout_s=20)


@pytest.mark.parametrize("lone", [False, True])
@pytest.mark.parametrize("method", ["dense", "local"])
@pytest.mark.parametrize("kind", ["sparse_coo", "sparse_csr", "meta", "lazy", "nested"])
def test_what_cannot_travel_is_refused_by_name_on_all_ranks(pool, kind, method, lone):
    pool.run(2, _unfit, kind, method, lone)


class _Frozen(nn.Module):
    def __init__(self):
        super().__init__()
        self.linear = nn.Linear(4, 2)
        self.codes = nn.Parameter(torch.tensor([2, 1], dtype=torch.uint8), requires_grad=False)
        self.table = nn.Parameter(torch.tensor([2, 1]), requires_grad=False)

    def forward(self, x):
        return self.linear(x)


def _frozen(rank, how):
    torch.manual_seed(rank)
    model = _Frozen()
    if how == "mlbench":
        DecentralizedAggregation(rank, [1 - rank]).agg_model()(model, "avg_world")
    else:
        stenograd.ddp.register(ddp := DistributedDataParallel(model), how)
        ddp(torch.full((1, 4), 1.0 + rank)).sum().backward()
    return model.linear.weight.tolist(), model.linear.bias.grad is not None, model.table.tolist()


@pytest.mark.parametrize("how", ["dense", "topk:ratio=0.5", "powersgd", "mlbench"])
def test_frozen_parameters_of_whole_numbers_are_left_alone(pool, how):
    """A base model of 4 bits under LoRA: it has no gradients, and there is no mean of its codes."""
    (a, graded, table), (b, *_) = pool.run(2, _frozen, how)
    assert a == b
    assert table == [2, 1]
    assert graded == (how != "mlbench")
