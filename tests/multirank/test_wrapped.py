"""What frameworks put around models, optimizers and steps."""

import os

import pytest
import torch
import torch.distributed as dist
from models import flat, mlp, shards
from support.processes import free_port
from torch import nn

import stenograd
from stenograd.heat import DASO
from stenograd.mlbench import CentralizedSGD, CentralizedSparsifiedSGD, DecentralizedSGD, PowerSGD
from stenograd.singa import DistOpt
from stenograd.wire.driver import Driver


class _FabricModule(nn.Module):
    """As Lightning Fabric wraps a module."""

    def __init__(self, module):
        super().__init__()
        self._forward_module = module

    def forward(self, *args):
        return self._forward_module(*args)


class _Prepared(torch.optim.Optimizer):
    """As Accelerate wraps an optimizer: a subclass whose base was never initialised."""

    def __init__(self, optimizer):
        self.optimizer = optimizer

    @property
    def param_groups(self):
        return self.optimizer.param_groups

    def step(self, closure=None):
        return self.optimizer.step(closure)

    def zero_grad(self, set_to_none=True):
        self.optimizer.zero_grad(set_to_none)


def _train(rank, how):
    model = mlp(rank)
    bare = torch.optim.SGD(model.parameters(), lr=0.1)
    net, optimizer = model, bare
    if how == "wrapped":
        net, optimizer = _FabricModule(model), _Prepared(bare)
    if how == "compiled":
        net = torch.compile(model, backend="eager", fullgraph=True)
    sync = stenograd.distribute(net, optimizer, "topk:ratio=0.1", bucket_bytes=1200, timeout_s=60)
    assert sync.world_size == 2

    def step(x, y):
        optimizer.zero_grad()
        loss = nn.functional.mse_loss(net(x), y)
        loss.backward()
        optimizer.step()

    if how == "step":
        step = torch.compile(step, backend="eager")
    for s in range(4):
        xs, ys = shards(s, 2)
        step(xs[rank], ys[rank])
    names = list(sync.state_dict()["parameters"])
    sync.close()
    return flat(model), names


@pytest.fixture(scope="module")
def bare(pool):
    return pool.run(2, _train, "bare")


@pytest.mark.parametrize("how", ["wrapped", "compiled", "step"])
def test_what_frameworks_wrap_trains_as_if_bare(pool, bare, how):
    """torch.compile of the model breaks no graph, and of a whole step does not trace into the hooks."""
    for (got, names), (wanted, plain) in zip(pool.run(2, _train, how), bare, strict=True):
        torch.testing.assert_close(got, wanted, rtol=1e-5, atol=1e-6)
        assert names == plain


def _compiled_autograd(rank):
    model = mlp(0)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    with stenograd.distribute(model, optimizer, "topk", timeout_s=30):
        loss = model(torch.ones(1, 10)).sum()
        with (
            torch._dynamo.compiled_autograd._enable(torch.compile(backend="eager")),
            pytest.raises(stenograd.StenogradError, match="compiled autograd"),
        ):
            loss.backward()


def test_compiled_autograd_is_refused_by_name(pool):
    pool.run(2, _compiled_autograd)


def _groups(rank):
    """Engines leave their groups when they are closed or forgotten."""
    counts = []
    for i in range(6):
        model = mlp(0)
        optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
        sync = stenograd.distribute(model, optimizer, "topk", timeout_s=30)
        model(torch.ones(1, 10)).sum().backward()
        if i % 2:
            sync.close()
        del model, optimizer, sync
        import gc

        gc.collect()
        counts.append(len(dist.distributed_c10d._world.pg_map))
    return counts


def test_engines_leave_their_process_groups(pool):
    for counts in pool.run(2, _groups):
        assert set(counts) == {counts[0]}


def _overlapping(rank):
    """Ranks that are in different numbers of the program's groups attach in parts of the world."""
    dist.new_group([0, 1])
    pairs = [dist.new_group([0, 2]), dist.new_group([1, 2])]
    group = pairs[rank % 2] if rank < 2 else pairs[0]
    dist.barrier()  # a rank that has left the world would break a group that others still connect
    if rank == 1:
        return None
    model = mlp(rank)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    sync = stenograd.distribute(model, optimizer, "powersgd:rank=1", group=group, timeout_s=20)
    model(torch.ones(1, 10) * (rank + 1)).sum().backward()
    sync.close()
    return model[0].weight.grad.clone()


def test_a_group_of_the_programs_own_says_only_which_ranks(pool):
    first, nothing, third = pool.run(3, _overlapping)
    assert nothing is None
    assert torch.equal(first, third)


def _messages(rank):
    """3,000 tensors of four elements travel in one message when attaching."""
    model = nn.ParameterList(nn.Parameter(torch.full((4,), float(rank))) for _ in range(3000))
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    sync = stenograd.distribute(model, optimizer, "dense", timeout_s=30)
    told = [e for e in sync.traffic.entries() if e.op == "broadcast"]
    values = {float(p.detach().sum()) for p in model}
    sync.close()
    return [e.count for e in told], values


def test_attaching_sends_many_small_tensors_in_one_message(pool):
    for counts, values in pool.run(2, _messages):
        assert counts == [1]
        assert values == {0.0}


@pytest.mark.usefixtures("unlaunched")
def test_one_rank_alone_makes_no_group_so_that_the_program_can():
    assert not dist.is_initialized()
    model = mlp(0)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    sync = stenograd.distribute(model, optimizer, "topk")
    model(torch.ones(1, 10)).sum().backward()
    optimizer.step()
    assert not dist.is_initialized()
    dist.init_process_group("gloo", init_method=f"tcp://127.0.0.1:{free_port()}", rank=0, world_size=1)
    try:
        model(torch.ones(1, 10)).sum().backward()
        assert Driver().world_size == 1
    finally:
        dist.destroy_process_group()
        sync.close()


def _daso(model, optimizer):
    daso = DASO(optimizer, total_epochs=9)
    daso.set_model(model)
    daso.last_batch = 3
    return daso


ALONE = {
    "distribute": lambda model, optimizer: stenograd.distribute(model, optimizer, "topk"),
    "singa": lambda model, optimizer: DistOpt(optimizer),
    "mlbench": lambda model, _: CentralizedSGD(None, model, lr=0.1),
    "mlbench's weights": lambda model, _: CentralizedSGD(None, model, lr=0.1, agg_grad=False),
    "powersgd": lambda model, _: PowerSGD(model, lr=0.1),
    "sparsified": lambda model, _: CentralizedSparsifiedSGD(model.parameters(), lr=0.1),
    "neighbours": lambda model, _: DecentralizedSGD(0, [], model, lr=0.1),
    "daso": _daso,
}


def _step(face, model, made):
    loss = model(torch.ones(1, 10)).sum()
    if face == "singa":
        made(loss)
    else:
        loss.backward()
        made.step()


def _late_group(rank):
    """This process is alone when it attaches; then the program joins others."""
    place = {name: os.environ.pop(name) for name in ("RANK", "WORLD_SIZE", "LOCAL_RANK", "LOCAL_WORLD_SIZE")}
    stenograd.shutdown()
    store = dist.FileStore(os.environ.pop("STENOGRAD_STORE") + "-late", 2)
    made = {}
    for face, attach in ALONE.items():
        model = mlp(0)
        made[face] = model, attach(model, torch.optim.SGD(model.parameters(), lr=0.1))
    dist.init_process_group("gloo", store=store, rank=rank, world_size=2)
    for face, pair in made.items():
        with pytest.raises(stenograd.StenogradError, match="call init_process_group"):
            _step(face, *pair)
    with pytest.raises(stenograd.StenogradError, match="call init_process_group"):
        made["singa"][1].all_reduce(torch.ones(1))
    dist.barrier()  # else one rank may close its connections while the other is still making them
    dist.destroy_process_group()
    os.environ.update(place)


def test_a_group_made_after_attaching_alone_is_told(pool):
    pool.run(2, _late_group)
