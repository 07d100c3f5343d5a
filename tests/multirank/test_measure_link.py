"""Measuring a link between real ranks."""

import json
from functools import partial
from types import SimpleNamespace
from unittest import mock

import pytest

from stenograd.errors import ConfigError
from stenograd.planning import link as measures
from stenograd.planning.link import _lasted_s, _Timed, assumed, from_json, load_link, measure_link
from stenograd.wire.driver import Driver


def _measured(rank, seconds):
    return measure_link(Driver.own(), seconds).as_json()


def test_two_ranks_agree_on_what_they_measured(pool):
    """One host: one rate, alone and both ways at once; a flow is at least sixteen messages of a kilobyte."""
    first, second = pool.run(2, _measured, 2.0)
    for key in ("hosts", "alone_bps", "together_bps", "hop_s", "latency_s"):
        assert first[key] == second[key], key
    assert first["hosts"] == (0, 0)
    assert len(first["alone_bps"]) == len(first["together_bps"]) == 1
    assert first["together_bps"][0] > 1e5  # on a busy machine even a message of a few bytes may take a while
    # Two ranks that keep each other from looking found a flow all at once, at 1,500 Gbit/s on two cores.
    assert first["together_bps"][0] < 5e11
    assert 0 < first["latency_s"] < 10
    assert 0 < first["hop_s"] < 10
    assert first["sent_bytes"] > 2 * 16 * 1024
    assert from_json(json.loads(json.dumps(first))).as_json() == first
    assert first["seconds"] < 60


def _rates_of_three(rank):
    timed = _Timed(Driver.own())
    pairs = [(0, 1), (1, 2), (2, 0)]
    return timed.rates(pairs[:1], 0.3, 0.0), timed.rates(pairs, 0.3, 0.0)


def test_three_hosts_get_rates_that_all_ranks_agree_on(pool):
    """As if each of three ranks had a host."""
    found = pool.run(3, _rates_of_three)
    assert found[1:] == [found[0]] * 2
    alone, together = found[0]
    assert (len(alone), len(together)) == (1, 3)
    assert min(*alone, *together) > 1e4


def test_a_flow_that_waited_for_a_core_does_not_end_the_search_for_a_size():
    """The first of them stalls for 50 ms at a kilobyte, and no other does."""
    timed, sizes = _Timed(Driver()), []

    def flow(_):
        sizes.append(timed._nbytes)
        lasted_s = 16 * timed._nbytes / 1e8 + 0.05 * (len(sizes) == 1)
        return [16 * timed._nbytes / lasted_s], lasted_s

    with mock.patch.object(timed, "_flow", flow):
        assert timed.rates([(0, 1)], 0.33, 0.0) == [pytest.approx(1e8)]
    assert sizes[:4] == [1024] * 3 + [64 * 1024]
    assert sizes[-1] > 1e8 / 16 * 0.08 / 3


def _by_a_set_clock(rank):
    """Collectives of 30 ms, and messages of which two in a row take 10 ms."""
    clock = [0.0]

    def passes(seconds):
        clock[0] += seconds

    with mock.patch.object(measures, "time", SimpleNamespace(perf_counter=lambda: clock[0])):
        timed = _Timed(Driver.own())
        timed._meet = partial(passes, 0.03)
        hop_s = timed.hop_s()
        timed._message = lambda *_: SimpleNamespace(wait=partial(passes, 0.01))
        return hop_s, timed.one_way_s(0, 2)


def test_a_hop_is_a_share_of_a_collective_and_a_way_half_of_there_and_back(pool):
    """In an all-reduce of three ranks four messages wait for one another."""
    assert pool.run(3, _by_a_set_clock) == [(pytest.approx(0.03 / 4), pytest.approx(0.005))] * 3


def test_a_link_needs_two_ranks_and_time():
    with pytest.raises(ConfigError, match="at least 2"):
        measure_link(Driver(), 10)


def test_an_assumed_link_survives_a_file(tmp_path):
    link = assumed("100mbit/20mbit,5ms", [0, 1])
    assert link.bps == 20e6
    path = tmp_path / "link.json"
    path.write_text(json.dumps(link.as_json()))
    assert load_link(path) == link


def test_a_flow_that_a_rank_sees_all_at_once_took_its_share_of_the_time():
    """Sixteen messages, of which the first four are its beginning: twelve sixteenths of 80 ms are 60."""
    assert _lasted_s([5.0 * (at + 1) for at in range(16)]) == 60
    assert _lasted_s([79.0] * 8 + [80.0] * 8) == 60
