"""Measuring a link between real ranks, and the fit on samples that are known."""

import json
import time

import pytest

from stenograd.comm.driver import Driver
from stenograd.errors import ConfigError
from stenograd.planning.link import OPS, Sample, assumed, from_json, hops, load_link, wire_bytes
from stenograd.planning.measure_link import _fitted, _rates, measure_link
from stenograd.planning.timed import Computing, Timed, per_second


def _measured(rank, seconds):
    found = measure_link(Driver.own(), seconds)
    return found.as_json(), found.seconds


def test_two_ranks_agree_on_what_they_measured(pool):
    """One host: one rate each way; every collective was timed, alone, twice at once, and while computing."""
    (first, taken), (second, _) = pool.run(2, _measured, 2.0)
    for key in ("hosts", "up_bps", "down_bps", "costs"):
        if key != "costs":
            assert first[key] == second[key]
    assert first["hosts"] == (0, 0)
    assert first["up_bps"][0] > 1e5  # on a busy machine even a message of a few bytes may take a while
    samples = first["samples"]
    assert {s["op"] for s in samples} == set(OPS)
    assert {s["at_once"] for s in samples} == {1, 2}
    assert {s["op"] for s in samples if s["busy"]} in (set(OPS), set())  # none where cores are short
    assert all(s["lost_s"] == 0 for s in samples if not s["busy"])
    assert all(cost["hop_s"] > 0 and cost["bytes_per_s"] > 0 for cost in first["costs"].values())
    assert from_json(json.loads(json.dumps(first))).as_json() == first
    assert taken < 60


def _rates_of_three(rank):
    timed = Timed(Driver.own())
    return *_rates(timed, [0, 1, 2], 0.6, 0.0), *timed.passed_on([0, 1, 2], 1 << 14), timed.sent_bytes


def test_three_hosts_get_a_rate_each_way_that_all_ranks_agree_on(pool):
    """As if each of three ranks had a host; each sends at least sixteen messages to each other."""
    found = pool.run(3, _rates_of_three)
    assert [rates[:-1] for rates in found[1:]] == [found[0][:-1]] * 2
    up, down, *passed, _ = found[0]
    assert len(up) == len(down) == len(passed) == 3
    assert min(*up, *down) > 1e5
    assert min(passed) > 1e4
    assert all(sent > 2 * 16 * 1024 for *_, sent in found)


@pytest.mark.parametrize("op", OPS)
def test_a_fit_finds_the_line_that_samples_lie_on(op):
    """4 ranks, seconds = hops * 0.2 ms + bytes / 12.5 MB/s."""
    sizes = [64, 1 << 12, 1 << 16, 1 << 20]

    def seconds(nbytes):
        return 2e-4 * hops(OPS[op], 64, 4) + wire_bytes(OPS[op], nbytes, 4) / 12.5e6

    samples = [Sample(op, n, 1, (seconds(n),) * 3, (0.0,) * 3) for n in sizes]
    # Beside computing: latencies twice as long, five times in large messages; 3 ms of computing lost, and 2
    # ns per byte. Of three windows one was disturbed.
    for n in (64, 1 << 16):
        apart = wire_bytes(OPS[op], n, 4) - wire_bytes(OPS[op], 64, 4)
        for lost_s in (3e-3, 3e-3, -1.0):
            takes = 2 * seconds(n) if n == 64 else seconds(n) + 4 * 2e-4 * hops(OPS[op], 64, 4)
            lost_s += 2e-9 * apart
            samples.append(Sample(op, n, 1, (takes,), (0.0,), True, lost_s, 1e-3))
    # Two at once take a fifth longer than one after the other.
    both = 2e-4 * hops(OPS[op], 1 << 16, 4) + 1.2 * 2 * wire_bytes(OPS[op], 1 << 16, 4) / 12.5e6
    samples.append(Sample(op, 1 << 16, 2, (both,) * 3, (0.0,) * 3))
    cost = _fitted(op, samples, 4)
    assert cost.crowding == pytest.approx(1.2, rel=0.05)
    assert cost.bytes_per_s == pytest.approx(12.5e6, rel=1e-6)
    assert cost.hop_s == pytest.approx(seconds(64) / hops(OPS[op], 64, 4))
    slowed = cost.hop_s + 4 * 2e-4 * hops(OPS[op], 64, 4) / hops(OPS[op], 1 << 16, 4)
    assert cost.busy_hop_s == pytest.approx(max(2 * cost.hop_s, slowed))
    assert cost.cpu_s_per_byte == pytest.approx(2e-9)
    assert cost.cpu_s == pytest.approx(2e-3 / {"all-reduce": 6}.get(op, 3))  # messages of each of 4 ranks
    assert cost.issue_s == pytest.approx(1e-3)  # of the 3 ms: in the thread that asks


@pytest.mark.parametrize("op", OPS)
def test_where_nothing_was_measured_beside_computing_processor_time_counts(op):
    """3 ms of the process for the smallest collective, 1 of them in the thread that asks."""
    samples = [
        Sample(op, n, 1, (1e-3 + n / 1e6,) * 3, (3e-3,) * 3, own_s=1e-3) for n in (64, 1 << 16, 1 << 20)
    ]
    cost = _fitted(op, samples, 4)
    assert cost.busy_hop_s == cost.hop_s
    assert cost.crowding == 1
    assert cost.cpu_s == pytest.approx(2e-3 / {"all-reduce": 6}.get(op, 3))
    assert cost.issue_s == pytest.approx(1e-3)


def test_what_is_computed_is_told_in_seconds_alone():
    """As much as the clock shows, but for what else runs on this machine."""
    with Computing() as computing:
        assert 0 < computing.alone(0.2) < 1.1
        before, start = computing.done_s(), time.perf_counter()
        time.sleep(0.2)
        done_s, taken = computing.done_s() - before, time.perf_counter() - start
    assert 0.3 * taken < done_s < 3 * taken
    after = computing.done_s()
    time.sleep(0.02)
    assert computing.done_s() == after


def test_a_token_bucket_does_not_make_a_link_look_faster():
    """Three ranks at 1 MB/s behind a bucket of 16 kB, which passes at once: the rate is 1 MB/s, too."""
    sizes = [64, 1 << 12, 1 << 16, 1 << 18, 1 << 20]

    def seconds(nbytes):
        return 1e-3 + max(wire_bytes(OPS["all-reduce"], nbytes, 3) - 16_384, 0) / 1e6

    samples = [Sample("all-reduce", n, 1, (seconds(n),) * 3, (0.0,) * 3) for n in sizes]
    samples.append(Sample("all-reduce", 64, 1, (1e-3,), (0.0,), True))
    cost = _fitted("all-reduce", samples, 3)
    assert cost.bytes_per_s == pytest.approx(1e6)
    assert cost.counted(wire_bytes(OPS["all-reduce"], 1 << 12, 3)) == pytest.approx(0, abs=1)
    assert cost.counted(3e6) == pytest.approx(3e6 - 16_384)


def test_streams_give_a_rate_though_a_rank_is_held_up_and_one_ends_early():
    """Two senders share 1,000 messages/s; the first gets 600 of them, so the other is alone at the end.

    The receiver is held up for 3 ms, in which two messages come that it notices late.
    """
    first = [at / 600 for at in range(1, 17)]
    alone = [first[-1] + at / 1000 for at in range(1, 6)]
    second = [at / 400 for at in range(1, 12)] + alone
    first[8], first[9] = first[9] + 1e-3, first[9] + 1e-3
    assert per_second([first, second], 2) == pytest.approx(1000, rel=0.05)


def test_a_receiver_that_was_held_up_does_not_make_a_link_look_fast():
    """15 messages more in 0.19 s, though all but the first were noticed within a microsecond."""
    held_up = [0.01] + [0.2 + at * 1e-7 for at in range(15)]
    assert per_second([held_up], 4) == pytest.approx(15 / 0.19, rel=0.01)


def test_streams_that_follow_each_other_count_as_a_whole():
    """Ten messages in a second, then ten of another sender: 18 more than the two first ones in 1.9 s."""
    streams = [[at / 10 for at in range(1, 11)], [1 + at / 10 for at in range(1, 11)]]
    assert per_second(streams, 1) == pytest.approx(18 / 1.9, rel=0.01)


def test_a_link_needs_two_ranks_and_time():
    with pytest.raises(ConfigError, match="at least 2"):
        measure_link(Driver(), 10)


def test_an_assumed_link_survives_a_file(tmp_path):
    link = assumed("100mbit/20mbit,5ms", [0, 1])
    assert link.bps == 20e6
    path = tmp_path / "link.json"
    path.write_text(json.dumps(link.as_json()))
    assert load_link(path) == link
