"""Heat's DataParallel and DataParallelMultiGPU in use: start, process groups, other collectives, errors."""

import copy
import inspect
import io

import pytest
import torch
import torch.distributed as dist
from heat_nets import loss_of, make, train
from models import SMALL_BUCKETS, flat, mlp
from torch import nn

import stenograd
from stenograd import heat
from stenograd.heat import DASO, DataParallel, DataParallelMultiGPU, DataParallelOptimizer
from stenograd.heat.data_parallel import DelayedSync
from stenograd.testing.pool import RanksFailed

BOTH = pytest.mark.parametrize("blocking", [True, False], ids=["blocking", "non-blocking"])


def _start(rank, blocking):
    torch.manual_seed(7 + rank)
    before = torch.get_rng_state()
    model = nn.Sequential(mlp(rank), nn.BatchNorm1d(3))
    model[1].running_mean.fill_(rank + 5.0)
    net, _ = make(rank, blocking, model=model)
    net.close()
    assert torch.equal(torch.get_rng_state(), before), "ranks must keep their own random numbers"
    return flat(net), model[1].running_mean


@BOTH
def test_rank_0s_weights_survive_and_spread(pool, blocking):
    weights = flat(nn.Sequential(mlp(0), nn.BatchNorm1d(3)))
    for parameters, mean in pool.run(2, _start, blocking):
        assert torch.equal(parameters, weights)
        assert mean.tolist() == [5.0] * 3


def _late(rank):
    """Rank 1 starts its backward pass only when rank 0 has ended its own: blocking mode could not do that."""
    net, (optimizer,) = make(rank, False)
    loss = loss_of(net, rank, 2, 0)
    if rank == 1:
        dist.barrier()
    loss.backward()
    optimizer.step()
    if rank == 0:
        assert net.sync.in_flight
        dist.barrier()
    net.close()
    return flat(net)


def test_backward_does_not_wait_for_other_ranks(pool):
    first, second = pool.run(2, _late)
    assert torch.equal(first, second)


def _own_collectives(rank):
    """The caller's all-reduces cross the exchange in flight, on the default group and on comm alike."""
    net, (optimizer,) = make(rank, False, method="powersgd:rank=2", comm=dist.group.WORLD)
    totals = []
    for s in range(20):
        optimizer.zero_grad()
        loss = loss_of(net, rank, 2, s)
        loss.backward()
        optimizer.step()
        total = loss.detach().clone()
        dist.all_reduce(total)
        totals.append(total)
    net.close()
    return flat(net), torch.stack(totals)


def test_other_collectives_may_run_meanwhile(pool):
    (parameters, totals), (others, other_totals) = pool.run(2, _own_collectives)
    assert torch.equal(parameters, others)
    assert torch.equal(totals, other_totals)


def _subgroup(rank, blocking):
    pair, single = dist.new_group([0, 2]), dist.new_group([1])
    net, optimizers = make(rank, blocking, comm=single if rank == 1 else pair)
    assert net.comm is (single if rank == 1 else pair)
    assert net.blocking_parameter_updates is blocking
    train(net, optimizers, rank // 2, 2, range(5))
    net.eval()
    assert net.traffic.collectives > 0
    assert net.sync.world_size == (1 if rank == 1 else 2)
    net.close()
    return flat(net)


@BOTH
def test_comm_is_a_process_group(pool, blocking):
    first, alone, third = pool.run(3, _subgroup, blocking)
    assert torch.equal(first, third)
    assert not torch.equal(first, alone)


def _not_a_number(rank):
    net, (optimizer,) = make(rank, False)
    (loss_of(net, rank, 2, 0) * (float("nan") if rank == 1 else 1.0)).backward()
    net.flush()
    seen = [bool(torch.isnan(p.grad).all()) for p in net.parameters()]
    net.zero_grad()
    train(net, [optimizer], rank, 2, range(3))
    net.close()
    return all(seen), flat(net)


def test_nan_on_one_rank_is_nan_on_all(pool):
    (seen, parameters), (also, others) = pool.run(2, _not_a_number)
    assert seen
    assert also
    assert torch.isfinite(parameters).all()
    assert torch.equal(parameters, others)


def _sync_state(rank):
    """The compressor's state is settled before the averages are written."""
    net, (optimizer,) = make(rank, False, method="topk:ratio=0.1")
    loss_of(net, rank, 2, 0).backward()
    state = net.sync.state_dict()
    assert net.sync.in_flight
    assert state["step"] == 1
    net.sync.load_state_dict(state)
    optimizer.step()
    net.close()
    return flat(net)


def test_the_compressors_state_while_an_exchange_is_in_flight(pool):
    first, second = pool.run(2, _sync_state)
    assert torch.equal(first, second)
    assert not torch.equal(first, flat(mlp(0)))


def _copies(rank):
    net, optimizers = make(rank, False)
    train(net, optimizers, rank, 2, [0])
    average = copy.deepcopy(net.module)
    file = io.BytesIO()
    torch.save(net.module, file)
    file.seek(0)
    for clone in (average, torch.load(file, weights_only=False)):
        clone(torch.ones(1, 10)).sum().backward()
        clone.state_dict()
    assert optimizers[0].update_next, "a copy must not touch the original's updates"
    file = io.BytesIO()
    torch.save(net, file)
    file.seek(0)
    assert not optimizers[0].update_next
    for clone in (copy.deepcopy(net), torch.load(file, weights_only=False)):
        assert torch.equal(flat(clone), flat(net))
        clone(torch.ones(1, 10)).sum().backward()
    net.close()


def test_copies_of_the_module_are_plain_modules(pool):
    pool.run(2, _copies)


def _refusals(rank):
    net, (optimizer,) = make(rank, False)
    loss_of(net, rank, 2, 0).backward()
    with pytest.raises(
        stenograd.StenogradError, match="an optimizer stepped while gradients are still being"
    ):
        optimizer.torch_optimizer.step()
    nn.utils.clip_grad_norm_(net.parameters(), 0.01)
    with pytest.raises(stenograd.StenogradError, match="flush\\(\\) of DataParallel before clipping"):
        optimizer.step()
    optimizer.torch_optimizer.zero_grad()
    net.close()


def test_gradients_in_flight_are_not_for_use(pool):
    pool.run(2, _refusals)


def _delayed_sync(rank):
    model = mlp(rank)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    with DelayedSync(model, optimizer, bucket_bytes=SMALL_BUCKETS, timeout_s=30) as sync:
        loss = loss_of(model, rank, 2, 0)
        loss.backward(retain_graph=True)
        with pytest.raises(stenograd.StenogradError, match="a backward pass began while"):
            loss.backward()
        with pytest.raises(stenograd.StenogradError, match="a backward pass began while"), sync.no_sync():
            loss_of(model, rank, 2, 0).backward()
        assert sync.wait()
        assert not sync.wait()
        optimizer.step()
        sync.enabled = False
        loss_of(model, rank, 2, 1).backward()
        assert not sync.enabled
        assert not sync.in_flight
    return flat(model)


def test_a_sync_without_the_wrapper_refuses_a_second_pass(pool):
    first, second = pool.run(2, _delayed_sync)
    assert torch.equal(first, second)


@BOTH
def test_wrong_types(blocking):
    model = nn.Linear(2, 2)
    inner = torch.optim.SGD(model.parameters(), lr=0.1)
    outer = DataParallelOptimizer(inner)

    class DASO:
        pass

    for arguments, says in (
        ((model, None, inner, blocking), "got SGD: wrap each in DataParallelOptimizer"),
        ((model, None, [outer, inner], blocking), "got SGD: wrap"),
        ((model, None, [], blocking), "got none: wrap"),
        ((model, None, DASO(), blocking), "got DASO: use DataParallelMultiGPU"),
        ((model, None, outer, 1), "blocking_parameter_updates must be True or False, got 1"),
        ((model, 3, outer, blocking), "comm must be a process group of torch.distributed, .* got 3"),
        ((None, None, outer, blocking), r"module must be a torch.nn.Module, got None"),
    ):
        with pytest.raises(TypeError, match=says):
            DataParallel(*arguments)
    with pytest.raises(TypeError, match="optimizer must be one"):
        DataParallel(model)
    with pytest.raises(TypeError, match=r"torch_optimizer must be a torch.optim.Optimizer, got Linear"):
        DataParallelOptimizer(model)
    with pytest.raises(TypeError, match="blocking must be True or False, got 'yes'"):
        DataParallelOptimizer(inner, "yes")
    with pytest.raises(stenograd.errors.ConfigError, match="must hold the model's parameters"):
        DataParallel(nn.Linear(2, 2), None, outer, blocking)


def _dies(rank):
    import os

    net, (optimizer,) = make(rank, False, method="topk", timeout_s=20)
    if rank == 1:
        os._exit(9)
    loss_of(net, rank, 3, 0).backward()
    optimizer.step()
    for look in (net.flush, net.eval):
        with pytest.raises(stenograd.PeerLost):
            look()
    with pytest.raises(stenograd.PeerLost):
        loss_of(net, rank, 3, 1)
    with pytest.raises(stenograd.PeerLost):
        net.close()
    net.close()
    optimizer.step()
    assert torch.isfinite(loss_of(net, rank, 3, 1)), "a closed wrapper is a plain module"
    return True


def test_a_dead_peer_is_an_error_of_the_next_forward_pass(pool):
    with pytest.raises(RanksFailed) as caught:
        pool.run(3, _dies, timeout_s=60)
    assert list(caught.value.errors) == [1], caught.value
    assert "exit code 9" in caught.value.errors[1]


def _with_daso(rank):
    torch.manual_seed(7 + rank)
    before = torch.get_rng_state()
    model = mlp(rank)
    daso = DASO(torch.optim.SGD(model.parameters(), lr=0.1), 10, node_size=2, timeout_s=30)
    net = DataParallelMultiGPU(model, daso)
    assert torch.equal(torch.get_rng_state(), before)
    assert torch.equal(flat(net), flat(mlp(0))), "rank 0's weights must survive and spread"
    daso.last_batch = 1
    for s in range(2):
        daso.zero_grad()
        loss_of(net, rank, 4, s).backward()
        daso.step()
    daso.close()
    return flat(net)


def test_daso_trains_its_module(pool):
    ranks = pool.run(4, _with_daso)
    assert not torch.equal(ranks[0], flat(mlp(0)))
    for parameters in ranks[1:]:
        assert torch.equal(parameters, ranks[0])


def _foreign_comm(rank):
    model = mlp(0)
    inner = torch.optim.SGD(model.parameters(), lr=0.1)
    daso = DASO(inner, 10, node_size=1, comm=dist.group.WORLD, timeout_s=30)
    with pytest.raises(stenograd.errors.ConfigError, match="comm must be DASO's own"):
        DataParallelMultiGPU(model, daso, dist.new_group([0, 1]))
    with pytest.raises(TypeError, match="optimizer must be a DASO, got SGD"):
        DataParallelMultiGPU(model, inner)
    with pytest.raises(TypeError, match="use DataParallelMultiGPU"):
        DataParallel(model, None, daso)
    for comm in (dist.group.WORLD, None):
        daso = DASO(inner, 10, node_size=1, comm=comm, timeout_s=30)
        assert DataParallelMultiGPU(model, daso, dist.group.WORLD).comm is comm
        daso.close()


def test_the_module_of_daso_refuses_other_groups_and_optimizers(pool):
    pool.run(2, _foreign_comm)


def test_namespaces_know_torchs_names_too():
    from stenograd.heat.optim.dp_optimizer import DASO as by_its_documents

    assert by_its_documents is DASO
    import stenograd.heat.nn.functional as by_its_path
    from stenograd.heat.optim.lr_scheduler import StepLR
    from stenograd.heat.optim.utils import DetectMetricPlateau

    from stenograd.heat import nn as heat_nn
    from stenograd.heat import optim

    assert (heat_nn.DataParallel, heat_nn.DataParallelMultiGPU) == (DataParallel, DataParallelMultiGPU)
    assert (heat_nn.Linear, heat_nn.functional, by_its_path) == (nn.Linear, nn.functional, nn.functional)
    assert (optim.DASO, optim.DataParallelOptimizer) == (DASO, DataParallelOptimizer)
    assert DASO(torch.optim.SGD([torch.ones(1)]), 20, heat.MPI_WORLD).comm is None
    assert optim.utils.DetectMetricPlateau is optim.DetectMetricPlateau is DetectMetricPlateau
    assert optim.lr_scheduler.StepLR is torch.optim.lr_scheduler.StepLR is StepLR
    assert optim.AdamW is torch.optim.AdamW
    for module in (heat_nn, optim):
        with pytest.raises(AttributeError, match="has 'Nonesuch'"):
            _ = module.Nonesuch


@pytest.mark.parametrize(
    ("call", "signature"),
    [
        (
            DASO,
            "local_optimizer total_epochs comm=None warmup_epochs=4 cooldown_epochs=4 scheduler=None "
            "stability_level=0.05 max_global_skips=8 sending_chunk_size=10000000 "
            "downcast_type=torch.bfloat16 use_mpi_groups=True skip_reduction_factor=2 local_skip_factor=4 "
            "verbose=False",
        ),
        (DASO.add_scaler, "self scaler"),
        (DASO.epoch_loss_logic, "self loss loss_globally_averaged=False"),
        (DASO.set_model, "self model"),
        (DASO.step, "self"),
        (DASO.reset, "self"),
        (DataParallelOptimizer, "torch_optimizer blocking=False"),
        (DataParallelOptimizer.step, "self"),
        (DataParallelMultiGPU, "module optimizer comm=None"),
        (DataParallel, "module comm=None optimizer=() blocking_parameter_updates=False"),
    ],
)
def test_signatures_are_those_of_the_documents(call, signature):
    """`MPI_WORLD` is None here; what the documents do not name comes by its name only."""
    given = [p for p in inspect.signature(call).parameters.values() if p.kind != p.KEYWORD_ONLY]
    shown = [p.name if p.default is p.empty else f"{p.name}={p.default}" for p in given]
    assert " ".join(shown) == signature
