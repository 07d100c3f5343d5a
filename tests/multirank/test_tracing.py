"""Traces of real ranks: one file that Perfetto reads, with all that happened on every rank."""

import json
import time

import pytest
import torch
from models import buckets_of
from torch import nn

import stenograd
from stenograd.errors import ConfigError
from stenograd.tracing import Phases, Tracer, as_json, clock_offsets
from stenograd.wire.driver import Driver

STEPS = 3
SPANS = {"forward", "backward", "wait", "encode", "collective", "decode", "step"}


def _train(model, optimizer, steps):
    for _ in range(steps):
        optimizer.zero_grad()
        model(torch.randn(4, 30)).square().mean().backward()
        optimizer.step()


def _sync(**options):
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(30, 20), nn.Linear(20, 10))
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    return model, optimizer, stenograd.distribute(model, optimizer, "topk:ratio=0.1", bucket_bytes=1000)


def _traced(rank, path):
    model, optimizer, sync = _sync()
    with sync:
        _train(model, optimizer, 1)
        with sync.trace(path):
            _train(model, optimizer, STEPS)
        _train(model, optimizer, 1)
        return sync._driver.tracer, len(model._forward_hooks), buckets_of(sync)


def test_a_trace_of_two_ranks(pool, tmp_path):
    path = tmp_path / "trace.json"
    (tracer, hooks, buckets), _ = pool.run(2, _traced, str(path))
    assert tracer is None
    assert hooks == 0
    assert [file.name for file in tmp_path.iterdir()] == ["trace.json"]
    trace = json.loads(path.read_text())
    assert set(trace) == {"traceEvents", "displayTimeUnit", "otherData"}
    names = [e for e in trace["traceEvents"] if e["ph"] == "M"]
    assert [e["args"]["name"] for e in names if e["name"] == "process_name"] == ["rank 0", "rank 1"]
    events = [e for e in trace["traceEvents"] if e["ph"] == "X"]
    instants = [e for e in trace["traceEvents"] if e["ph"] == "i"]
    assert len(events) + len(instants) + len(names) == len(trace["traceEvents"])
    for rank in (0, 1):
        mine = [e for e in events if e["pid"] == rank]
        assert {e["name"] for e in mine} == SPANS
        count = {kind: sum(e["name"] == kind for e in mine) for kind in SPANS}
        assert {count[kind] for kind in ("forward", "backward", "wait", "step")} == {STEPS}
        assert count["collective"] == STEPS * buckets  # the last one carries the flags
        _check_rows(mine, {(e["pid"], e["tid"]) for e in names if e["name"] == "thread_name"})
        _check_instants(mine, [e for e in instants if e["pid"] == rank], buckets)
    assert min(e["ts"] for e in events) == 0
    assert trace["otherData"]["dropped_events"] == [0, 0]


def _check_rows(events, named):
    """In a row events follow each other; only the wait lies inside its backward pass."""
    rows = {}
    for e in events:
        assert e["dur"] >= 0
        assert (e["pid"], e["tid"]) in named
        rows.setdefault(e["tid"], []).append(e)
    for row in rows.values():
        last = 0.0
        for e in sorted((e for e in row if e["name"] != "wait"), key=lambda e: e["ts"]):
            assert e["ts"] >= last - 0.01
            last = e["ts"] + e["dur"]
    backward = [e for e in events if e["name"] == "backward"]
    for wait in (e for e in events if e["name"] == "wait"):
        assert any(b["ts"] <= wait["ts"] <= wait["ts"] + wait["dur"] <= b["ts"] + b["dur"] for b in backward)


def _check_instants(events, instants, buckets):
    """In each backward pass gradients become ready, then their bucket full, and then it leaves."""
    backward = sorted((e["ts"], e["ts"] + e["dur"]) for e in events if e["name"] == "backward")
    sent = [e for e in events if e["name"] == "collective"]
    for begin, end in backward:
        inside = [e for e in instants if begin <= e["ts"] <= end]
        ready, full = ([e for e in inside if e["name"] == kind] for kind in ("ready", "full"))
        assert sorted(e["args"]["parameter"] for e in ready) == ["0.bias", "0.weight", "1.bias", "1.weight"]
        assert [e["args"]["bucket"] for e in full] == list(range(buckets))
        for filled in full:
            bucket = filled["args"]["bucket"]
            assert max(e["ts"] for e in ready if e["args"]["bucket"] == bucket) <= filled["ts"]
            (its,) = [e for e in sent if e["args"]["bucket"] == bucket and begin <= e["ts"] <= end]
            assert filled["ts"] <= its["ts"]
    assert len(instants) == len(backward) * (4 + buckets)
    for e in sent:
        assert 0 <= 1e6 * e["args"]["arrived_s"] <= e["dur"] + 0.001


def _late(rank, path):
    """Rank 1 sleeps before its backward pass, so rank 0's messages arrive long after they were issued."""
    model, optimizer, sync = _sync()
    with sync:
        _train(model, optimizer, 1)
        with sync.trace(path):
            loss = model(torch.randn(4, 30)).square().mean()
            time.sleep(0.5 * rank)
            loss.backward()
            time.sleep(0.5)


def test_a_collective_arrives_when_the_last_rank_has_sent(pool, tmp_path):
    """Also if nobody takes it yet: what is said of rank 0's first is no shorter than rank 1 was late."""
    path = tmp_path / "trace.json"
    pool.run(2, _late, str(path))
    events = json.loads(path.read_text())["traceEvents"]
    first = {e["pid"]: e for e in reversed(events) if e["name"] == "collective"}
    assert 0.4e6 < 1e6 * first[0]["args"]["arrived_s"] <= first[0]["dur"] + 0.001
    assert first[1]["args"]["arrived_s"] < 0.4


def _failing(rank, path):
    model, optimizer, sync = _sync()
    with sync:
        for bad in (0, -1, True, 1.5):
            with pytest.raises(ConfigError, match="max_events must be"):
                sync.trace(path, max_events=bad)
        nowhere = path + "/nowhere/t"
        with pytest.raises(ConfigError, match=r"trace must be a file.*nowhere"), sync.trace(nowhere):
            pass
        with pytest.warns(UserWarning, match="full with 5 events"), sync.trace(path, max_events=5):
            _train(model, optimizer, 2)
        with pytest.raises(ZeroDivisionError), sync.trace(path + ".error"):
            _train(model, optimizer, 1 // (rank - rank))
        _train(model, optimizer, 1)
        with sync.trace(path + ".outer"):
            _train(model, optimizer, 1)
            with pytest.raises(ConfigError, match="trace inside another one"), sync.trace(path + ".inner"):
                pass
            _train(model, optimizer, 1)
        return buckets_of(sync)


def test_what_goes_wrong(pool, tmp_path):
    """A bad path fails on both ranks; a full trace says so; after an error each rank leaves its own.

    One that is refused inside of another takes nothing from it.
    """
    buckets, _ = pool.run(2, _failing, str(tmp_path / "t"))
    full = json.loads((tmp_path / "t").read_text())
    assert sum(e["ph"] in ("X", "i") for e in full["traceEvents"]) == 10
    assert all(dropped > 0 for dropped in full["otherData"]["dropped_events"])
    outer = [e["name"] for e in json.loads((tmp_path / "t.outer").read_text())["traceEvents"]]
    assert outer.count("collective") >= 2 * 2 * buckets
    names = ["t", "t.error.rank0", "t.error.rank1", "t.outer"]
    assert sorted(file.name for file in tmp_path.iterdir()) == names


def _due(rank, folder, text):
    """Rank 1 skips the last step of each trace, as GradScaler does, and so still has a round to hold."""
    torch.manual_seed(0)
    model = nn.Linear(3, 2)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    with stenograd.distribute(model, optimizer, text, timeout_s=20) as sync:
        rounds = []
        for number in range(2):
            with sync.trace(f"{folder}/{number}.json"):
                for step in range(4):
                    optimizer.zero_grad()
                    model(torch.ones(1, 3)).sum().backward()
                    if (rank, step) != (1, 3):
                        optimizer.step()
                    time.sleep(0.05 * rank)
            rounds.append(sync.round)
        return rounds


@pytest.mark.parametrize(
    ("text", "rounds"),
    [("local:every=2", [2, 4]), ("diloco:every=4", [1, 2]), ("gossip", [4, 8]), ("local:every=0.05s", None)],
)
def test_a_round_that_is_due_is_held_before_ranks_meet_for_a_trace(pool, tmp_path, text, rounds):
    """The others wait in it, and would take what is gathered for the trace for a part of it."""
    first, second = pool.run(2, _due, str(tmp_path), text)
    assert first == second == (rounds or first)


@pytest.mark.parametrize("where", ["forward", "backward", "exchange"])
def test_a_phase_that_failed_is_forgotten(where):
    """What comes after a pause begins after it."""
    model, seen, fails = nn.Sequential(nn.Linear(2, 1)), [], [where]

    def fail(at):
        if at in fails:
            fails.clear()
            raise RuntimeError(at)

    queue = torch.autograd.Variable._execution_engine.queue_callback
    model[0].register_forward_pre_hook(lambda *_: fail("forward"))
    model[0].bias.register_hook(lambda grad: fail("backward"))
    model[0].weight.register_hook(lambda grad: queue(lambda: fail("exchange")))
    phases = Phases(model, [], lambda kind, start, end: seen.append((kind, start)))
    phases.watch()
    with pytest.raises(RuntimeError, match=where):
        model(torch.ones(1, 2)).sum().backward()
    seen.clear()
    again = time.perf_counter()
    model(torch.ones(1, 2)).sum().backward()
    phases.close()
    assert [kind for kind, _ in seen] == ["forward", "wait", "backward"]
    assert all(start > again for _, start in seen)


def _offsets(rank):
    shift = 100.0 * rank
    clock = time.perf_counter
    time.perf_counter = lambda: clock() + shift
    try:
        return clock_offsets(Driver(timeout_s=30))
    finally:
        time.perf_counter = clock


def test_clocks_that_differ_are_aligned(pool):
    """Ranks of one machine share a clock; shifted by 100 s a rank, offsets are that, within the bound."""
    for offsets in pool.run(3, _offsets):
        for rank, (offset, error) in enumerate(offsets):
            assert abs(offset - 100.0 * rank) <= error + 1e-9
            assert error < 1.0


def test_aligned_events_begin_together():
    trace = as_json([(0.0, [("step", 5.0, 6.0, {})]), (100.0, [("step", 105.0, 105.5, {})])])
    steps = [e for e in trace["traceEvents"] if e["ph"] == "X"]
    assert [(e["pid"], e["ts"], e["dur"]) for e in steps] == [(0, 0.0, 1e6), (1, 0.0, 5e5)]


def test_overlapping_collectives_take_rows_of_their_own():
    tracer = Tracer()
    for start, end in [(0.0, 2.0), (1.0, 3.0), (2.0, 4.0)]:
        tracer.add("collective", start, end)
    steps = [e for e in as_json([(0.0, tracer.events)])["traceEvents"] if e["ph"] == "X"]
    assert [e["tid"] for e in steps] == [2, 3, 2]
