"""DASO on real gloo ranks: against a plain oracle, and against the traces of the original."""

import numpy as np
import pytest
import torch
from heat_loops import LAYOUTS, batch, epoch, make, weights
from heat_oracle import oracle, slopes
from support.training import descend
from torch import nn

from stenograd.heat.across import Skips

LR = 0.1
NODES = {"1x4": [[0, 1, 2, 3]], "2x2": [[0, 1], [2, 3]], "4x1": [[0], [1], [2], [3]], "3+1": [[0, 1, 2], [3]]}


class Slope(nn.Module):
    """A loss that is linear in the parameters, so that gradients are given."""

    def __init__(self, size):
        super().__init__()
        self.a = nn.Parameter(torch.arange(size - 1, dtype=torch.float64))
        self.b = nn.Parameter(torch.ones(1, dtype=torch.float64))

    def forward(self, slope):
        return self.a @ slope[:-1] + self.b @ slope[-1:]


def _combinations():
    for skip in (0, 1, 2, 3, 4, 5, 8, 20):
        for wait in sorted({0, 1, 2, skip // 2, skip - 1, skip} & set(range(skip + 1))):
            for local in (1, 2 + wait % 2) if skip else (0,):
                yield Skips(skip, local, wait)


def _combinations_for(layout):
    """Return all for two equal nodes, and some of one node, which exchanges nothing; others share them."""
    first, every = {"2x2": (0, 1), "4x1": (0, 2), "3+1": (1, 2), "1x4": (0, 8)}[layout]
    return list(_combinations())[first::every]


def _run_epochs(rank, layout, counts, size, chunk):
    """One epoch for each combination; returns what the test needs to compare."""
    model = Slope(size)
    arguments = {**LAYOUTS[layout], "sending_chunk_size": chunk, "downcast_type": torch.float}
    _, daso = make(model=model, lr=LR, warmup_epochs=0, cooldown_epochs=0, **arguments)
    start = weights(model)
    out = []
    for number, skips in enumerate(_combinations_for(layout)):
        daso._skips, daso.events, daso.last_batch = skips, [], counts[number % len(counts)] - 1
        for at in range(daso.last_batch + 1):
            descend(daso, model(slopes(rank, at, size)))
        assert daso.current_batch == 0
        assert daso._across.in_flight is None
        out.append(
            (weights(model), [(b, kind, group) for _, b, kind, group in daso.events if group is not None])
        )
        with torch.no_grad():
            nn.utils.vector_to_parameters(start.clone(), model.parameters())
        daso._across.anchor()
    daso.close()
    return out


@pytest.mark.parametrize("layout", LAYOUTS)
def test_every_epoch_ends_equal_with_nothing_in_flight_and_as_the_oracle_says(pool, layout):
    """Skips 0 to 20, waits 0 to the skip, local skips 1 to 3, 1 to 20 batches; chunks below a tensor."""
    size, counts = 11, [1, 20, 7, 2, 13, 3, 19, 5, 8, 11, 4, 17, 6, 9, 14, 10, 12, 15, 16, 18, 7]
    ranks = pool.run(4, _run_epochs, layout, counts, size, 3)
    start = torch.cat([torch.arange(size - 1, dtype=torch.float64), torch.ones(1, dtype=torch.float64)])
    for number, skips in enumerate(_combinations_for(layout)):
        want, events = oracle(NODES[layout], skips, counts[number % len(counts)], size, LR, start)
        for rank in range(4):
            got, seen = ranks[rank][number]
            assert torch.equal(got, ranks[0][number][0]), (skips, rank)
            torch.testing.assert_close(got, want[rank], rtol=1e-9, atol=1e-9)
            assert [e for e in seen if e[1] != "broadcast"] == events, skips


def _trace(rank, skips, last, layout):
    _, daso = make(warmup_epochs=0, **LAYOUTS[layout])
    model = daso._model
    daso._skips = skips
    daso.last_batch = last
    for number in range(last + 1):
        batch(rank, model, daso, number)
    daso.close()
    return [(b, kind, group) for _, b, kind, group in daso.events]


def test_trace_of_two_skips_receives_in_time(pool):
    """Heat merges at the next exchange, two batches later, with the weight for one."""
    (events, *_) = pool.run(4, _trace, Skips(2, 1, 1), 4, "2x2")
    assert [e for e in events if e[1] != "broadcast"] == [
        *((0, "send", 0), (1, "merge", 0), (2, "send", 1), (3, "merge", 1)),
        *((4, "send", 0), (4, "replace", 0)),
    ]


def test_trace_with_local_skips(pool):
    """Batch 18 merges what 16 sent (Heat misses it); no local averages in batches 3, 5, 7 and 11, 13, 15."""
    (events, *_) = pool.run(4, _trace, Skips(8, 2, 2), 19, "2x2")
    exchanges = [e for e in events if e[1] in ("send", "merge", "replace")]
    assert exchanges == [
        *((0, "send", 0), (2, "merge", 0), (8, "send", 1), (10, "merge", 1)),
        *((16, "send", 0), (18, "merge", 0), (19, "send", 1), (19, "replace", 1)),
    ]
    off = [b for b, kind, _ in events if kind == "local_off"]
    on = [b for b, kind, _ in events if kind == "local_on"]
    assert off == [3, 5, 7, 11, 13, 15]
    assert on == [4, 6, 8, 12, 14, 16]


def _warm_up(rank, layout, downcast):
    model, daso = make(seed=rank, downcast_type=downcast, warmup_epochs=2, **LAYOUTS[layout])
    seen = []
    daso.last_batch = 4
    for number in range(5):
        batch(rank, model, daso, number)
        seen.append(weights(model))
    daso.close()
    return seen


@pytest.mark.parametrize("downcast", [torch.bfloat16, torch.float])
@pytest.mark.parametrize("layout", LAYOUTS)
def test_warm_up_equals_training_on_all_ranks_whatever_the_downcast(pool, layout, downcast):
    """With equal shards, averaging in nodes and then over nodes by their size is averaging over ranks.

    Heat's blocking exchanges round all parameters to bfloat16.
    """
    from models import mlp, shards, step

    ranks = pool.run(4, _warm_up, layout, downcast)
    model = mlp(0)  # rank 0's weights count
    optimizer = torch.optim.SGD(model.parameters(), lr=0.05)
    for number in range(5):
        xs, ys = shards(number, 4)
        step(model, optimizer, torch.cat(xs), torch.cat(ys))
        for seen in ranks:
            assert torch.equal(seen[number], ranks[0][number])
            torch.testing.assert_close(seen[number], weights(model), rtol=1e-6, atol=1e-6)


def _merge(rank, wait, nodes, downcast):
    """Set parameters between sending and merging: the formula takes the old sum and the new local value."""
    model = nn.Linear(1, 1, bias=False)
    _, daso = make(model=model, lr=0.0, warmup_epochs=0, node_size=4 // nodes, downcast_type=downcast)
    daso._skips = Skips(8, 1, wait)
    daso.last_batch = 20
    sent = 2.0 * daso._across.node_number / (nodes - 1)  # mean 1 over the nodes
    seen = None
    for at in range(wait + 1):
        with torch.no_grad():
            if at == 0:
                model.weight.fill_(sent)
            elif at == wait:
                model.weight.fill_(10.0)
        descend(daso, model(torch.ones(1, 1)).sum())
        seen = model.weight.item()
    daso._across.discard()
    daso.close()
    return seen


@pytest.mark.parametrize(
    ("nodes", "wait", "merged"),
    [(2, 1, 5.5), (2, 2, 7.0), (2, 3, 7.75), (4, 1, 4.0), (4, 2, 5.5), (4, 3, 6.4)],
)
def test_merge_uses_the_sum_at_sending_and_the_weights_at_merging(pool, nodes, wait, merged):
    """10 here and mean 1 sent: (2 w 10 + n 1) / (n + 2 w)."""
    for downcast, rounding in ((torch.float, 1e-6), (torch.bfloat16, 2**-8)):
        for value in pool.run(4, _merge, wait, nodes, downcast):
            assert value == pytest.approx(merged, rel=rounding)


def _tiny_updates(rank, downcast):
    """One weight of 1 that falls by 1e-4 a batch on every rank, averaged only in the cycling phase."""
    model = nn.Linear(64, 1, bias=False)
    with torch.no_grad():
        model.weight.fill_(1.0)
    phases = {"warmup_epochs": 0, "cooldown_epochs": 0}
    _, daso = make(model=model, lr=1e-4, node_size=2, downcast_type=downcast, **phases)
    daso.last_batch = 100
    for _ in range(100):
        descend(daso, model(torch.ones(1, 64)).sum())
    seen = weights(model)
    daso._across.discard()
    daso.close()
    return seen


def test_small_updates_survive_the_downcast(pool):
    """Ranks send equal weights, so averaging changes nothing but for the delay's pull towards the past."""
    exact = pool.run(4, _tiny_updates, torch.float)
    for downcast in (torch.bfloat16, torch.half):
        for seen in (*exact, *pool.run(4, _tiny_updates, downcast)):
            torch.testing.assert_close(seen, exact[0], rtol=0, atol=2e-7)
    assert exact[0].max() < 0.994


def _epochs(rank, layout, how, local):
    model, daso = make(
        seed=rank, momentum=0.9, warmup_epochs=1, cooldown_epochs=1, total_epochs=4, global_method=how,
        local_method=local, **LAYOUTS[layout],
    )  # fmt: skip
    seen = []
    for e in range(4):
        epoch(rank, model, daso, 6, first=6 * e)
        seen.append(weights(model))
    traffic = daso.traffic_between_nodes.moved_bytes, daso.traffic.moved_bytes
    daso.close()
    return seen, traffic


_METHODS = [
    (None, "fp16"),
    ("topk:ratio=0.05", "topk:ratio=0.2"),
    ("powersgd:rank=2", "dense"),
    ("qsgd", "sign"),
]


@pytest.mark.parametrize(  # two methods on every layout, every method on two layouts
    ("layout", "how", "local"), [(at, *_METHODS[(i + k) % 4]) for i, at in enumerate(LAYOUTS) for k in (0, 1)]
)
def test_ranks_are_equal_after_every_epoch_with_any_methods(pool, layout, how, local):
    ranks = pool.run(4, _epochs, layout, how, local)
    for e in range(4):
        for seen, _ in ranks:
            assert torch.equal(seen[e], ranks[0][0][e])
    assert torch.isfinite(ranks[0][0][-1]).all()
    assert (ranks[0][1][0] > 0) == (layout != "1x4")


def _chunks(rank, chunk, frozen):
    from models import mlp

    model = mlp(3)
    if frozen:
        model[0].weight.requires_grad_(False)
        model[4].bias.requires_grad_(False)
    before = model[0].weight.clone()
    _, daso = make(
        model=model, warmup_epochs=1, node_size=2, sending_chunk_size=chunk, downcast_type=torch.float
    )
    for e in range(3):
        epoch(rank, model, daso, 5, first=5 * e)
    kept = torch.equal(before, model[0].weight)
    sizes = [part.stop - part.start for part in next(iter(daso._across._averagers.values())).chunks]
    daso.close()
    return weights(model), kept, sizes


@pytest.mark.parametrize("frozen", [False, True])
def test_chunks_change_nothing_and_frozen_parameters_stay(pool, frozen):
    """A parameter over three chunks, and frozen ones before trained ones. The remainder goes first."""
    whole = pool.run(4, _chunks, 10_000_000, frozen)
    total = sum(whole[0][2])
    for chunk in (97, total, total + 1):
        cut = pool.run(4, _chunks, chunk, frozen)
        for (got, kept, sizes), (want, _, _) in zip(cut, whole, strict=True):
            torch.testing.assert_close(got, want, rtol=1e-6, atol=1e-7)
            assert kept == frozen
            assert sizes == [total % chunk] * (total % chunk > 0) + [chunk] * (total // chunk)


def _both_meanings(rank, offset):
    model, daso = make(seed=rank, warmup_epochs=0, node_size=2)
    seen = []
    for e in range(3):
        daso.last_batch = 6 + offset
        for number in range(6):
            batch(rank, model, daso, 6 * e + number)
        daso.epoch_loss_logic(1.0)
        seen.append((daso.epoch, daso.current_batch, weights(model)))
    daso.close()
    return seen


def test_last_batch_may_be_the_index_or_the_number(pool):
    """With the number, `epoch_loss_logic` does the last exchange; the weights differ by no rule."""
    for offset in (-1, 0):
        ranks = pool.run(4, _both_meanings, offset)
        for seen in ranks:
            assert [(e, b) for e, b, _ in seen] == [(1, 0), (2, 0), (3, 0)]
            for (_, _, got), (_, _, want) in zip(seen, ranks[0], strict=True):
                assert torch.equal(got, want)


def _random_walks(rank):
    """Ranks' generators and loaders stay their own."""
    torch.manual_seed(rank)
    before = torch.get_rng_state()
    model, daso = make(seed=rank, warmup_epochs=0, node_size=2)
    epoch(rank, model, daso, 4)
    daso.close()
    return torch.equal(before, torch.get_rng_state())


def test_random_numbers_are_left_alone(pool):
    assert pool.run(4, _random_walks) == [True] * 4


def _skips_by_losses(rank, losses):
    """The skips after each epoch, of ranks that each have losses of their own."""
    _, daso = make(warmup_epochs=0, cooldown_epochs=0, node_size=1)
    told = []
    for loss in losses[rank]:
        daso.epoch_loss_logic(np.float32(loss))
        told.append(daso.state_dict()["skips"])
    daso.close()
    return told


def test_skips_follow_the_mean_of_the_ranks_losses(pool):
    """Falling on one rank, rising on the other; their mean stays, so both skip less, and at the same time."""
    falling = [10.0 - epoch for epoch in range(8)]
    (first, second), (best, _) = (
        pool.run(2, _skips_by_losses, losses)
        for losses in ([falling, [10.0 - loss for loss in falling]], [falling, falling])
    )
    assert first == second
    assert best == best[:1] * 8
    assert first != best
