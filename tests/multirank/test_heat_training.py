"""DASO around the rest of a training script: scalers, schedulers, buffers, saving, faults, bad input."""

import gc
import io
import time
import warnings
from itertools import chain

import pytest
import torch
from heat_loops import LAYOUTS, batch, epoch, make, weights
from models import mlp, shards
from support.training import descend
from torch import nn

from stenograd.errors import LaunchError, StenogradError
from stenograd.heat.across import Skips
from stenograd.heat.daso import DASO
from stenograd.heat.data_parallel import DataParallelMultiGPU
from stenograd.launch.detect import World
from stenograd.simulate import ranks
from stenograd.wire.node_layout import Layout, _placed, _placed_part, find_layout


def _scaled(rank, unscaled):
    """Rank 2's gradient overflows in batch 3: all must skip exactly that step."""
    model = mlp(0)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.05, momentum=0.9)
    schedule = torch.optim.lr_scheduler.ExponentialLR(optimizer, 0.5)
    daso = DASO(optimizer, 10, scheduler=schedule, warmup_epochs=0, node_size=2, timeout_s=30)
    daso.set_model(model)
    scaler = torch.amp.GradScaler("cpu", init_scale=1024.0)
    daso.add_scaler(scaler)
    daso.last_batch = 9
    rates, kept = [], []
    for number in range(6):
        daso.zero_grad()
        xs, ys = shards(number, 4)
        loss = scaler.scale(nn.functional.mse_loss(model(xs[rank]), ys[rank]))
        if rank == 2 and number == 3:
            loss = loss * float("inf")
        loss.backward()
        if unscaled:
            scaler.unscale_({"optimizer": optimizer, "daso": daso}[unscaled])
        before = weights(model)
        daso._across.discard()  # merges would move the parameters too
        daso.step()
        rates.append(optimizer.param_groups[0]["lr"])
        kept.append(torch.equal(before, weights(model)))
    daso.close()
    return rates, kept, scaler.get_scale(), daso.skipped, weights(model)


def test_all_ranks_skip_the_step_in_which_one_overflows(pool):
    """The scheduler halves the rate after each applied step: five times in six batches.

    The program may unscale, to clip: by the optimizer, or by DASO, which shows the same groups.
    """
    runs = [pool.run(4, _scaled, who) for who in (None, "optimizer", "daso")]
    for rank, (rates, kept, scale, skipped, end) in enumerate(chain(*runs)):
        assert rates == [0.025, 0.0125, 0.00625, 0.00625, 0.003125, 0.0015625]
        assert kept[3]
        assert sum(kept) == 1
        assert (scale, skipped) == (512.0, 1)
        assert torch.equal(end, runs[0][rank % 4][-1])


def _switched_off(rank):
    model, daso = make(node_size=1, warmup_epochs=0)
    daso.add_scaler(torch.amp.GradScaler("cpu", enabled=False))
    daso.last_batch = 5
    for number in range(6):
        descend(daso, model(torch.ones(2, 10)).square().mean() * (torch.nan if rank and number == 2 else 1.0))
    _, other = make(node_size=1, warmup_epochs=0)
    other.add_scaler(torch.amp.GradScaler("cpu", enabled=False))
    other.load_state_dict(daso.state_dict())
    daso.close()
    other.close()
    return daso.skipped, other.skipped, weights(model)


def test_a_scaler_that_is_switched_off_changes_nothing(pool):
    """A bad gradient costs its rank one step, and nobody else anything; it is counted in what is saved."""
    (*first, one), (*second, other) = pool.run(2, _switched_off)
    assert (first, second) == ([0, 0], [1, 1])
    assert torch.equal(one, other)
    assert one.isfinite().all()


def _scheduled(rank, factory):
    model = mlp(0)
    optimizer = torch.optim.SGD(model.parameters(), lr=1.0)
    make_one = lambda o: torch.optim.lr_scheduler.StepLR(o, 2, 0.1)  # noqa: E731
    daso = DASO(optimizer, 10, scheduler=make_one if factory else make_one(optimizer), timeout_s=30)
    daso.set_model(model)
    with warnings.catch_warnings():
        warnings.simplefilter("error")  # torch warns where a scheduler steps before the optimizer
        epoch(rank, model, daso, 4, world_size=2)
    daso.close()
    return optimizer.param_groups[0]["lr"], not torch.equal(weights(model), weights(mlp(0)))


@pytest.mark.parametrize("factory", [False, True])
def test_a_scheduler_steps_once_after_the_optimizer(pool, factory):
    """In Heat the scheduler would step instead of the optimizer."""
    assert pool.run(2, _scheduled, factory) == [(pytest.approx(0.01), True)] * 2


def _reset(rank):
    model, daso = make(warmup_epochs=1, node_size=2, local_method="topk:ratio=0.3", total_epochs=8)
    start = weights(model)
    results = []
    for _ in range(2):
        for e in range(3):
            epoch(rank, model, daso, 5, first=5 * e)
        for number in range(2):  # leave in the middle, with an exchange on its way
            daso.last_batch = 4
            batch(rank, model, daso, number)
        results.append((weights(model), list(daso.events)))
        descend(daso, model(torch.ones(2, 10)).sum() * torch.nan)
        assert daso.skipped == 1
        nn.utils.vector_to_parameters(start.clone(), model.parameters())
        daso.reset()
        assert (daso.epoch, daso.current_batch, daso.skipped, daso.last_batch, daso.events) == (
            0,
            0,
            0,
            4,
            [],
        )
    daso.close()
    return results


def test_a_reset_run_equals_a_new_one(pool):
    for first, second in pool.run(4, _reset):
        assert torch.equal(first[0], second[0])
        assert first[1] == second[1]


def _resumed(rank, layout, stops, how):
    """Train 4 epochs of 7 batches; go on in new objects from what was saved after each number of `stops`."""
    arguments = {
        "warmup_epochs": 1,
        "cooldown_epochs": 1,
        "total_epochs": 4,
        "momentum": 0.9,
        **LAYOUTS[layout],
    }
    arguments |= {"global_method": how, "local_method": "topk:ratio=0.3"}

    def go_on(model, daso, seen, stops=()):
        while seen < 28:
            daso.last_batch = 6
            batch(rank, model, daso, seen)
            seen += 1
            if seen in stops:
                files[seen] = io.BytesIO()
                torch.save({"model": model.state_dict(), "daso": daso.state_dict()}, files[seen])
            if seen % 7 == 0:
                daso.epoch_loss_logic(1.0)
        daso.close()
        return weights(model)

    files, ends = {}, {}
    whole = go_on(*make(seed=rank, **arguments), 0, stops)
    for seen, file in files.items():
        file.seek(0)
        saved = torch.load(file, weights_only=True)
        model, daso = make(seed=50 + rank, **arguments)
        model.load_state_dict(saved["model"])
        daso.load_state_dict(saved["daso"])
        if seen % 7 == 0:
            daso.epoch_loss_logic(1.0)
        ends[seen] = go_on(model, daso, seen)
    return whole, ends


@pytest.mark.parametrize(("layout", "how"), [("2x2", None), ("3+1", "topk:ratio=0.1")])
def test_a_resumed_run_equals_an_uninterrupted_one_in_every_phase(pool, layout, how):
    """Batches 3 (warm-up), 8 (with an exchange on its way), 10, 14 (an epoch's end), 25 (cool-down)."""
    for whole, ends in pool.run(4, _resumed, layout, (3, 8, 10, 14, 25), how):
        for stop_at, end in ends.items():
            assert torch.equal(end, whole), stop_at
        assert len(ends) == 5


def _trained_later(rank, node_size, added):
    """From the second epoch on the first layer learns, too; before that it is frozen."""
    model = mlp(0)
    model[0].requires_grad_(False)
    held = [p for p in model.parameters() if p.requires_grad or not added]
    optimizer = torch.optim.SGD(held, lr=0.05)
    daso = DASO(optimizer, 10, warmup_epochs=1, node_size=node_size, timeout_s=30)
    daso.set_model(model)
    epoch(rank, model, daso, 4)
    model[0].requires_grad_(True)
    if added:
        optimizer.add_param_group({"params": list(model[0].parameters())})
    if node_size == 2 or not added:
        daso.last_batch = 3
        with pytest.raises(
            StenogradError, match=r"call daso\.set_model\(model\) anew, on all ranks and between"
        ):
            batch(rank, model, daso, 4)
        daso.set_model(model)
    for first in (4, 8):
        epoch(rank, model, daso, 4, first=first)
    daso.close()
    return weights(model), torch.equal(model[0].weight, mlp(0)[0].weight)


@pytest.mark.parametrize("added", [True, False])
@pytest.mark.parametrize("node_size", [2, 4])
def test_parameters_that_train_later_are_averaged_or_refused(pool, node_size, added):
    """On one node the engine takes an added group by itself; between nodes it was never averaged."""
    (first, kept), *others = pool.run(4, _trained_later, node_size, added)
    assert not kept
    assert all(torch.equal(first, end) for end, _ in others)


class _Normed(nn.Module):
    def __init__(self):
        super().__init__()
        self.linear, self.norm = nn.Linear(10, 3), nn.BatchNorm1d(3)

    def forward(self, x):
        return self.norm(self.linear(x))


def _buffers(rank, wanted):
    torch.manual_seed(0)
    model = _Normed()
    _, daso = make(model=model, warmup_epochs=1, node_size=2, average_buffers=wanted)
    epoch(rank, model, daso, 3)
    daso.close()
    return model.norm.running_mean.clone(), model.norm.num_batches_tracked.item()


def test_buffers_are_averaged_at_the_end_of_an_epoch_if_wanted(pool):
    own = [mean for mean, _ in pool.run(4, _buffers, False)]
    averaged = pool.run(4, _buffers, True)
    assert not torch.equal(own[0], own[1])
    for mean, batches in averaged:
        torch.testing.assert_close(mean, torch.stack(own).mean(0))
        assert batches == 3


def _slow_link(rank):
    """Sending must not wait for the peers: rank 1 comes two seconds late."""
    model, daso = make(warmup_epochs=0, node_size=1)
    daso.last_batch = 20
    batch(rank, model, daso, 0, 2)
    daso._across.merge()  # the first exchange sets up connections
    daso.current_batch = 4
    if rank == 1:
        time.sleep(2.0)
    came = time.monotonic()
    batch(rank, model, daso, 1, 2)
    sent = time.monotonic()
    batch(rank, model, daso, 2, 2)
    merged = time.monotonic()
    daso._across.discard()
    daso.close()
    return came, sent, merged


def test_sending_goes_on_while_training_does(pool):
    """Rank 0 has sent before rank 1 comes, and merges after that, by the clock that both share."""
    (_, sent, merged), (came, *_) = pool.run(2, _slow_link)
    assert sent < came < merged


def _subgroup(rank):
    import torch.distributed as dist

    group = dist.new_group([1, 2, 3])
    if rank == 0:
        return None
    model, daso = make(seed=rank, comm=group, nodes=[[0, 1], [2]], warmup_epochs=1)
    for e in range(2):
        epoch(daso._driver.rank, model, daso, 4, first=4 * e, world_size=3)
    assert daso.comm is group
    daso.close()
    return weights(model)


def test_a_process_group_can_train_alone(pool):
    ranks = pool.run(4, _subgroup)
    assert all(torch.equal(seen, ranks[1]) for seen in ranks[1:])


def _in_turn(rank, world_size, how):
    """Train with one DASO, then with a second on the same model, which must equal one on a fresh model."""
    results = []
    for fresh in (False, True):
        model = mlp(0)
        optimizer = torch.optim.SGD(model.parameters(), lr=0.05)
        first = DASO(optimizer, 10, warmup_epochs=0, node_size=world_size // 2, timeout_s=30)
        if not fresh:
            first.set_model(model)
            first.last_batch = 9
            for number in range(5):  # batch 4 sends what is not merged yet
                batch(rank, model, first, number, world_size)
            if how == "reset":
                first.reset()
            elif how == "forgotten":
                first = None
                gc.collect()
            model.load_state_dict(mlp(0).state_dict())
        if how == "other optimizer":
            optimizer = torch.optim.SGD(model.parameters(), lr=0.05)
        kept = {"downcast_type": torch.half, "use_mpi_groups": False, "sending_chunk_size": 50}
        second = DASO(optimizer, 10, warmup_epochs=0, node_size=world_size // 2, timeout_s=30, **kept)
        net = DataParallelMultiGPU(model, second)
        for e in range(2):
            epoch(rank, net, second, 6, first=6 * e, world_size=world_size)
        results.append((weights(model), second.traffic.moved_bytes))
        if first is not None and not fresh:
            for call in (first.step, first.state_dict, first.reset):
                with pytest.raises(
                    StenogradError, match="DASO was replaced: another one was given its model"
                ):
                    call()
            first.close()  # takes nothing from the second
            batch(rank, model, second, 0, world_size)
            first.set_model(model)  # takes it back
            first.last_batch = 9
            batch(rank, model, first, 0, world_size)
            with pytest.raises(StenogradError, match="was replaced"):
                second.step()
            first.close()
        second.close()
    return results


@pytest.mark.parametrize(
    ("world_size", "how"), [(4, "as it was"), (2, "reset"), (4, "forgotten"), (2, "other optimizer")]
)
def test_a_second_daso_takes_over_from_the_first(pool, world_size, how):
    """Heat's own test makes two in turn on one optimizer and closes none. The second was refused."""
    ranks = pool.run(world_size, _in_turn, world_size, how)
    for (again, sent), (alone, sent_alone) in ranks:
        assert torch.equal(again, alone)
        assert sent == sent_alone
        assert torch.equal(again, ranks[0][0][0])


def _split(rank):
    """27 parameters on two nodes: chunks of 10 at most, the remainder first."""
    model = nn.Linear(8, 3)
    said = []
    for chunk, node_size in ((10, 1), (27, 1), (10, 2)):
        optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
        daso = DASO(optimizer, 10, node_size=node_size, sending_chunk_size=chunk, timeout_s=30)
        assert (daso.split, daso.split_inds) == (None, None)
        daso.set_model(model)
        said.append((daso.split_val, daso.split, daso.split_inds))
        daso.close()
    return said


def test_split_says_what_is_sent_at_once(pool):
    """On one node nothing is sent."""
    cuts = [slice(0, 7), slice(7, 17), slice(17, 27)]
    assert pool.run(2, _split) == [[(10, True, cuts), (27, False, None), (10, False, None)]] * 2


def _without_cycles(rank):
    optimizer = torch.optim.SGD(mlp(0).parameters(), lr=0.1)
    with warnings.catch_warnings(record=True) as seen:
        warnings.simplefilter("always")
        DASO(optimizer, 8, warmup_epochs=4, cooldown_epochs=4)
        count = len(seen)
        DASO(optimizer, 9, warmup_epochs=4, cooldown_epochs=4)
    return count, len(seen), str(seen[0].message)


def test_a_plan_without_cycles_warns_once(pool):
    (before, after, message) = pool.run(1, _without_cycles)[0]
    assert (before, after) == (1, 1)
    assert "never skips" in message


def test_nodes_follow_from_hosts_or_from_local_ranks():
    def places(*rows):
        return [{"host": host, "local": local, "size": size} for host, local, size in rows]

    by_host = _placed(places(("a", 0, 2), ("b", 0, 2), ("a", 1, 2), ("b", 1, 2)))  # round robin
    assert by_host == Layout(((0, 2), (1, 3)))
    one_host = _placed(places(("a", 0, 2), ("a", 1, 2), ("a", 0, 1)))  # emulated nodes of 2 and 1
    assert one_host == Layout(((0, 1), (2,)))
    with pytest.raises(LaunchError, match="nodes="):
        _placed(places(("a", 0, 2), ("a", 0, 2), ("a", 1, 2), ("a", 1, 2)))
    assert World(0, 1, 0, 1, "alone").one_host


@pytest.mark.parametrize(
    ("size", "rows", "found"),
    [
        (4, (("a", 1, 0), ("a", 3, 0)), ((0, 1),)),
        (4, (("a", 1, 0), ("a", 2, 0), ("b", 0, 4), ("b", 3, 4)), ((0, 1), (2, 3))),
        (2, (("a", 0, 0), ("a", 0, 2), ("a", 1, 2)), ((0,), (1, 2))),  # one host plays several
        (2, (("a", 0, 0), ("a", 1, 1)), ((0, 1),)),  # ranks 0 and 2, dealt out to hosts a, b, a, b
        (2, (("a", 0, 0), ("b", 0, 1)), ((0,), (1,))),
        (3, (("a", 0, 0), ("a", 1, 1), ("b", 1, 2)), None),
    ],
)
def test_nodes_of_a_part_of_the_world(size, rows, found):
    """A row is a rank's host, its number there, and the world's number of the first rank there."""
    told = [{"host": host, "local": local, "size": size, "first": first} for host, local, first in rows]
    if found is not None:
        assert _placed_part(told) == Layout(found)
        return
    with pytest.raises(LaunchError, match="nodes="):
        _placed_part(told)


def _layout_of_a_part(driver):
    (part,) = driver.split([[0, 1]])
    world = World(driver.rank, driver.world_size, driver.rank, driver.world_size, "torchrun")
    return part and find_layout(part, world).nodes


def test_a_group_that_is_a_part_of_a_host_is_one_node():
    assert ranks(4, _layout_of_a_part) == [((0, 1),), ((0, 1),), None, None]


def test_groups_and_weights_of_uneven_nodes():
    layout = Layout(((0, 1, 2), (3,)))
    assert [layout.group(i) for i in range(layout.group_count)] == [(0, 3), (1, 3), (2, 3)]
    assert layout.weights == (1.5, 0.5)
    assert Skips(4, 1, 1).is_local_sync(0, 9)
