"""The ledger on real ranks: what is counted under which label, and that nothing is left out."""

import io
import json
import time
from collections import Counter
from types import SimpleNamespace

import pytest
import torch
from torch import nn

import stenograd
from stenograd.simulate import ranks
from stenograd.wire.driver import Driver, Pipeline
from stenograd.wire.finite import Finite
from stenograd.wire.messages import Several
from stenograd.wire.requests import Op, Request, exchange, gather, mean, scatter, summed
from stenograd.wire.traffic import ATTACH, CONTROL, TRAINING, Entry, Label, Tally, Traffic

STEPS = 3
_BYTES = ("payload_bytes", "moved_bytes", "inside_bytes", "across_bytes", "header_bytes")
TOTALS = {"collectives": "count", **{name: name for name in (*_BYTES, "wait_s", "encode_s", "decode_s")}}


def _model():
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(30, 20), nn.Linear(20, 10))


def _trained(rank, method):
    model = _model()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    with stenograd.distribute(model, optimizer, method, bucket_bytes=1000) as sync:
        for _ in range(STEPS):
            optimizer.zero_grad()
            model(torch.randn(4, 30)).square().mean().backward()
            optimizer.step()
        return sync.traffic, sync.method.text, len(sync._exchange.buckets)


def _check_sums(traffic):
    counted = [e for e in traffic.entries() if e.kind != ATTACH]
    for total, field in TOTALS.items():
        assert getattr(traffic, total) == sum(getattr(e, field) for e in counted), total
    assert all(e.wait_s > 0 for e in counted)
    for e in traffic.entries():
        assert e.inside_bytes + e.across_bytes in (0, e.moved_bytes)


@pytest.mark.parametrize("method", ["dense", "topk:ratio=0.1", "powersgd:rank=1", "qsgd"])
def test_every_bucket_and_round_has_its_entry(pool, method):
    """A step has one collective for each bucket and round; its flags travel with the last bucket."""
    for traffic, text, buckets in pool.run(3, _trained, method):
        _check_sums(traffic)
        training = [e for e in traffic.entries() if e.kind == TRAINING]
        assert buckets > 1
        assert {e.bucket for e in training} == set(range(buckets))
        assert {e.method for e in training} == {text}
        assert all(e.count == STEPS for e in training)
        for bucket in range(buckets):
            rounds = [e.round for e in training if e.bucket == bucket]
            assert rounds == list(range(len(rounds)))
        assert not [e for e in traffic.entries() if e.kind == CONTROL]
        # All ranks of the pool share a host and know it since attaching.
        assert traffic.inside_bytes == traffic.moved_bytes > 0
        assert traffic.wait_s > 0
        assert traffic.encode_s > 0
        assert traffic.decode_s > 0


def test_dense_training_by_hand(pool):
    """830 parameters in float32 and 21 flags on 3 ranks: 4 for tensors, 8 for the pass's number, 8 for what
    steps have in common, and one for ranks that ran out of inputs."""
    for traffic, _, _ in pool.run(3, _trained, "dense"):
        sums = Counter()
        for e in traffic.entries():
            sums[e.kind] += e.payload_bytes
        assert sums[TRAINING] == STEPS * 4 * (30 * 20 + 20 + 20 * 10 + 10 + 21)
        assert traffic.payload_bytes == sums[TRAINING]
        attach = {e.op: e for e in traffic.entries() if e.kind == ATTACH}
        assert attach["broadcast"].count == 1
        assert attach["all-gather"].payload_bytes > 0


def _large(rank):
    model = nn.Linear(600, 600, bias=False)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    with stenograd.distribute(model, optimizer, "dense") as sync:
        model(torch.randn(4, 600)).square().mean().backward()
        return sync.traffic


def test_flags_of_a_large_dense_bucket_travel_by_themselves(pool):
    """1.44 MB would have to be copied to carry 18 flags."""
    for traffic in pool.run(2, _large):
        _check_sums(traffic)
        training, control = (e for e in traffic.entries() if e.kind != ATTACH)
        assert (training.kind, training.payload_bytes) == (TRAINING, 4 * 600 * 600)
        assert (control.kind, control.bucket, control.op, control.payload_bytes) == (
            CONTROL,
            None,
            "all-reduce",
            72,
        )


def _slow(silent):
    """Compute for 0.05 s before each request and after the last; silent ones send nothing."""
    for op in (*silent[:1], Op.MEAN, *silent[1:]):
        time.sleep(0.05)
        yield Request(op, (torch.full((1,), Finite.BOUNDED, dtype=torch.int32 if op is Op.READ else None),))
    time.sleep(0.05)


@pytest.mark.parametrize(
    ("silent", "before", "after"),
    [((), 1, 1), ((Op.READ,), 2, 1), ((Op.READ, Op.READ), 2, 2), ((Op.READ, Op.COMMIT), 2, 2)],
)
def test_all_computing_is_counted(silent, before, after):
    """Also what comes before a request that sends nothing; what a collective follows is encoding."""

    def rank_of(driver):
        driver.run(_slow(silent))
        return driver.traffic

    (traffic,) = ranks(1, rank_of)
    assert traffic.encode_s >= 0.05 * before
    assert traffic.decode_s >= 0.05 * after


def test_packing_all_of_several_is_counted():
    first, second = (SimpleNamespace(tally=Tally(), start=start) for start in (1.0, 2.0))
    assert Several([first, second]).start == 2.0
    assert Several([first, second]).tally is first.tally


def _in_a_part(rank):
    """Give a part in any order: hosts follow the numbers that its ranks have in it."""
    driver = Driver(timeout_s=30) if isinstance(rank, int) else rank  # a simulated one
    driver.traffic.hosts = ["a", "b", "c"]
    (part,) = driver.split([[2, 0]])
    if part is None:
        return None
    received = [int(other) for (other,) in part.run(gather(torch.tensor([driver.rank])))]
    return part.rank, received, [part.name_of(r) for r in range(2)], list(part.traffic.hosts)


def test_a_part_numbers_its_ranks_in_ascending_order(pool):
    real = pool.run(3, _in_a_part)
    assert real == [(0, [0, 2], [0, 2], ["a", "c"]), None, (1, [0, 2], [0, 2], ["a", "c"])]
    assert [found and found[:3] for found in ranks(3, _in_a_part)] == [found and found[:3] for found in real]


def _a_sum_and_a_broadcast(rank):
    driver = Driver(timeout_s=30) if isinstance(rank, int) else rank  # a simulated one
    driver.run(summed(mean(torch.ones(300))))
    driver.broadcast(torch.ones(10), 1, counted=True)
    return [(e.op, e.count, e.payload_bytes, e.moved_bytes) for e in driver.traffic.entries()]


def test_simulated_ranks_count_as_real_ones(pool):
    """A sum was an operation of its own there, and a broadcast a gather, to which each rank handed all."""
    real = pool.run(3, _a_sum_and_a_broadcast)
    assert ranks(3, _a_sum_and_a_broadcast) == real
    assert [entries[1] for entries in real] == [
        ("broadcast", 1, 0, 0),
        ("broadcast", 1, 40, 80),
        ("broadcast", 1, 0, 0),
    ]


def _every_op(rank, world_size):
    driver = Driver(timeout_s=30)
    driver.traffic.hosts = ["a", "a", "b"][:world_size]
    others = [r for r in range(world_size) if r != rank]
    asked = {
        "mean": mean(torch.ones(300)),
        "gather": gather(torch.ones(5)),
        "scatter": scatter(torch.ones(world_size, 2)),
        "exchange": exchange([torch.ones(7)], others),
    }
    pipeline = Pipeline(driver)
    for bucket, (name, rounds) in enumerate(asked.items()):
        pipeline.add(rounds, Label(bucket=bucket, method=name))
    pipeline.finish()
    driver.broadcast(torch.ones(10), world_size - 1, counted=True)
    return driver.traffic


def test_every_operation_with_two_hosts(pool):
    """Ranks 0 and 1 share a host. The all-reduce sends to the rank before, the small all-gather to all.

    Broadcasting from rank 2: it sends to 0 and then to 1, each 40 bytes.
    """
    moved = {"mean": 1600, "gather": 40, "scatter": 16, "exchange": 56}
    across = [
        {"mean": 1600, "gather": 20, "scatter": 8, "exchange": 28, "": 0},
        {"mean": 0, "gather": 20, "scatter": 8, "exchange": 28, "": 0},
        {"mean": 1600, "gather": 40, "scatter": 16, "exchange": 56, "": 80},
    ]
    for rank, traffic in enumerate(pool.run(3, _every_op, 3)):
        _check_sums(traffic)
        entries = {e.method: e for e in traffic.entries()}
        assert {name: entries[name].moved_bytes for name in moved} == moved
        assert {name: e.across_bytes for name, e in entries.items()} == across[rank]
        assert [e.op for e in traffic.entries()] == [*(op.value for op in _order()), "broadcast"]
        assert all(e.messages > 0 and e.header_bytes > 0 for name, e in entries.items() if name)


def _order():
    return [Op.MEAN, Op.GATHER, Op.SCATTER, Op.EXCHANGE]


def test_two_ranks_count_every_operation(pool):
    for traffic in pool.run(2, _every_op, 2):
        _check_sums(traffic)
        assert traffic.collectives == 5
        assert traffic.payload_bytes == 1200 + 20 + 16 + 28 + (40 if traffic.rank == 1 else 0)


def _ledger():
    traffic = Traffic(rank=1)
    for step in range(4):
        traffic.count(Op.GATHER, 100 + step, 2, label=Label(bucket=0, method="topk"))
        traffic.count(Op.MEAN, 8, 2, label=Label(CONTROL))
    traffic.count(Op.GATHER, 1000, 2, label=Label(ATTACH))
    return traffic


def test_json_lines_come_back(tmp_path):
    traffic, path = _ledger(), tmp_path / "traffic.jsonl"
    traffic.write_jsonl(path, step=1)
    traffic.write_jsonl(str(path), step=2)
    records = [json.loads(line) for line in path.read_text().splitlines()]
    assert [r.pop("step") for r in records] == [1, 1, 1, 2, 2, 2]
    assert {r.pop("rank") for r in records} == {1}
    assert [Entry(**r) for r in records] == 2 * traffic.entries()
    stream = io.StringIO()
    traffic.write_jsonl(stream)
    assert len(stream.getvalue().splitlines()) == 3


def test_scalars_for_tensorboard():
    class Writer:
        def __init__(self):
            self.seen = {}

        def add_scalar(self, tag, value, step):
            self.seen[tag] = (value, step)

    writer = Writer()
    _ledger().to_tensorboard(writer, 7)
    assert writer.seen["traffic/payload_bytes"] == (406 + 32, 7)
    assert writer.seen["traffic/count"] == (8, 7)
    assert writer.seen["traffic/bucket0/moved_bytes"] == (406, 7)
    assert not any("bucket1" in tag for tag in writer.seen)


def test_ledgers_add_up_and_do_not_grow():
    one, two = _ledger(), _ledger()
    both = one + two
    assert both.payload_bytes == 2 * one.payload_bytes
    assert len(both.entries()) == len(one.entries()) == 3
    assert sum(e.moved_bytes for e in both.entries() if e.kind == ATTACH) == 2000
