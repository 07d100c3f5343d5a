"""Any two choices of a program work together on real ranks, or are refused with what to write instead."""

import re

import pytest
import torch
from compositions import (
    CUT,
    REFUSED,
    STEPS,
    Row,
    begin,
    bereaved_to,
    built,
    copies,
    covering_rows,
    evaluated,
    go_on,
    on_rank,
    resumed,
    simulated,
)

from stenograd.testing.pool import RanksFailed

ROWS = covering_rows()


def rows(*events):
    return [pytest.param(row, id=" ".join(row)) for row in ROWS if row.event in events]


def equal(states, others):
    for rank, (mine, theirs) in enumerate(zip(states, others, strict=True)):
        for name, value in theirs.items():
            assert torch.equal(mine[name], value), (rank, name)


def check_invariants(row, done):
    """What the ranks have in common is equal, and better than where they began."""
    equal([d["common"] for d in done[1:]], [done[0]["common"]] * (len(done) - 1))
    if row.when == "each step":
        equal([d["own"] for d in done[1:]], [done[0]["own"]] * (len(done) - 1))
    assert done[0]["loss"] < evaluated(built(row)[0]) - 0.02


def check_against_one_process(row, done):
    """Any training equals ranks that are threads bit for bit, and a dense one, in float64, copies."""
    if row.codec == "dense":
        wide = row._replace(precision="float64", event="one NaN" if row.event == "one NaN" else "nothing")
        rounding = 1e-3 if "Muon" in row.optimizer else 1e-8  # it computes in bfloat16
        for found, model in zip(simulated(wide), copies(wide).run(STEPS).models, strict=True):
            torch.testing.assert_close(found["own"], model.state_dict(), rtol=0, atol=rounding)
    threads = simulated(row._replace(event="nothing") if row.event == "resumed" else row)
    equal([d["own"] for d in done], [d["own"] for d in threads])
    equal([d["common"] for d in done], [d["common"] for d in threads])
    assert [d["round"] for d in done] == [d["round"] for d in threads]
    if row.event != "resumed":  # messages of several tensors are padded, so that each can be read in place
        for mine, declared in zip(done, threads, strict=True):
            assert 0 <= mine["payload"] - declared["payload"] <= 8 * declared["collectives"]


@pytest.mark.parametrize("row", rows("nothing"))
def test_training(pool, row):
    done = pool.run(row.world, on_rank, row)
    check_invariants(row, done)
    check_against_one_process(row, done)


@pytest.mark.parametrize("row", rows("resumed"))
def test_a_training_that_is_saved_in_mid_round_goes_on_bit_for_bit(pool, tmp_path, row):
    done = pool.run(row.world, resumed, row, tmp_path)
    check_invariants(row, done)
    check_against_one_process(row, done)


@pytest.mark.filterwarnings("ignore:a gradient ")
@pytest.mark.parametrize("row", rows("one NaN"))
def test_one_nan_costs_one_step(pool, row):
    """Of all ranks where each step averages gradients, of a node with two levels, else of one rank."""
    done = pool.run(row.world, on_rank, row)
    check_invariants(row, done)
    check_against_one_process(row, done)
    if row.precision != "GradScaler":  # which skips by itself
        spoilt = {"each step": row.world}.get(row.when, 2 if row.whom == "nodes" else 1)
        assert sum(d["skipped"] for d in done) == spoilt


@pytest.mark.parametrize("row", rows("4 to 2"))
def test_two_ranks_go_on_where_four_stopped(pool, tmp_path, row):
    """All start from one place; what is owed, and what ranks did by themselves, is kept."""
    saved = pool.run(4, begin, row, tmp_path)
    started, done = zip(*pool.run(2, go_on, row, tmp_path), strict=True)
    check_invariants(row, done)
    equal([started[1]["own"]], [started[0]["own"]])
    for name in started[0]["owed"].keys() & saved[0]["owed"].keys():
        before = sum(d["owed"][name].double() for d in saved)
        after = sum(d["owed"][name].double() for d in started)
        torch.testing.assert_close(after, before, rtol=1e-5, atol=1e-7)
    wide = copies(row._replace(precision="float64")).run(CUT)
    rounding = 2e-2 if row.precision == "bfloat16" else 1e-5
    for name, value in wide.ended().items() if row.codec == "dense" and row.when != "streaming" else ():
        found = started[0]["own"][name].double()
        torch.testing.assert_close(found, value, rtol=rounding, atol=rounding)


def test_rounds_between_nodes_go_on_with_as_many_ranks_only(pool, tmp_path):
    row = Row(when="diloco", whom="nodes", event="4 to 2")
    pool.run(4, begin, row, tmp_path)
    with pytest.raises(RanksFailed) as failed:
        pool.run(2, go_on, row, tmp_path)
    _, message = REFUSED["nodes", "4 to 2"]
    assert all(re.search(f"CheckpointError: .*{message}", text) for text in failed.value.errors.values())


@pytest.mark.parametrize("row", rows("killed"))
def test_a_killed_rank_is_named_or_dropped(pool, tmp_path, row):
    with pytest.raises(RanksFailed) as failed:
        pool.run(row.world, bereaved_to, tmp_path, row)
    assert list(failed.value.errors) == [row.world - 1], failed.value
    done = [torch.load(tmp_path / str(rank)) for rank in range(row.world - 1)]
    if not row.drops:
        assert done == [(row.world - 1,)] * (row.world - 1)
        return
    check_invariants(row, done)
    assert [d["world"] for d in done] == [row.world - 1] * (row.world - 1)
    assert all(event["lost"] == [row.world - 1] for d in done for event in d["events"])
    assert all(len(d["events"]) == 1 for d in done)


def test_every_pair_is_covered_or_refused():
    """What no row has is what is refused: the table has nothing else in it, and nothing is forgotten."""
    axes = {axis: {getattr(row, axis) for row in ROWS} for axis in Row._fields}
    covered = {(a, b) for row in ROWS for i, a in enumerate(row) for b in row[i + 1 :]}
    names = list(axes)
    every = {
        (a, b) for i, one in enumerate(names) for two in names[i + 1 :] for a in axes[one] for b in axes[two]
    }
    assert every - covered == set(REFUSED)
    assert len(ROWS) <= 40
