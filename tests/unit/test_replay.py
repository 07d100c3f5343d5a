"""Replaying programs: known answers by hand, and properties that every cluster must have."""

import dataclasses
import itertools
import json
import math
import time

import numpy as np
import pytest
import torch

import stenograd
from stenograd.comm.gloo_framing import frames
from stenograd.data.requests import Op
from stenograd.planning.advice import Prediction, advised
from stenograd.planning.cluster import Cluster, cluster_of, message_level, ring_s
from stenograd.planning.link import Cost, assumed
from stenograd.planning.program import Collective, Event, Program
from stenograd.planning.rehearsal import periods
from stenograd.planning.replay import replay
from stenograd.planning.trial import Trial

METHODS = [
    "dense",
    "topk",
    "powersgd",
    "sign",
    "local:every=3",
    "diloco:every=4,fragments=2,delay=1",
    "gossip",
]


def cluster(rate, hop_s=0.0, *, hosts=2, per_host=1, cores=4.0, cpu=0.0, message_s=0.0, issue_s=0.0):
    cost = Cost(hop_s, hop_s, 1.0, cpu, cpu_s=message_s, issue_s=issue_s)
    costs = dict.fromkeys(("all-reduce", "all-gather", "all-to-all"), cost)
    return Cluster(
        hosts=hosts, ranks_per_host=per_host, cores=cores, up_bps=(rate,), down_bps=(rate,), costs=costs
    )


def program(*lanes, steps=1):
    return Program(method="test", world_size=2, steps=steps, idle_steps=0, lanes=tuple(map(tuple, lanes)))


def gathering(number, nbytes, compute=0.0, codec=0.0):
    about = Collective("all-to-all", nbytes, 1, 0, 2)
    return Event("issue", number, compute, codec, about)


def wire_s(nbytes, rate):
    """An all-to-all of two ranks sends half of it, in one message."""
    return 8 * (nbytes // 2 + frames(Op.SCATTER, nbytes, 2).header_bytes) / rate


def test_computing_hides_what_is_sent_meanwhile():
    """1 s, send for s, compute 3 s, wait: max(3, s) more."""
    for nbytes in (10_000_000, 10_000_000_0):
        run = program([gathering(0, nbytes, 1.0), Event("wait", 0, 3.0), Event("step", 0)])
        expected = 1 + max(3, wire_s(nbytes, 1e8))
        assert replay(run, cluster(1e8)).step_s == pytest.approx(expected)


@pytest.mark.parametrize(("cores", "seconds"), [(1.0, 1.04), (2.0, 1.0)])
def test_a_message_takes_computing_time_where_there_is_no_core_for_it(cores, seconds):
    """1 s of computing beside a message of 0.1 s that keeps 0.4 of a core busy, so that takes 0.04 s."""
    run = program([gathering(0, 8), Event("wait", 0, 1.0), Event("step", 0)])
    found = replay(run, cluster(1e15, 0.1, cores=cores, message_s=0.04))
    assert found.step_s == pytest.approx(seconds, abs=1e-6)
    alone = program([gathering(0, 8), Event("wait", 0), Event("step", 0)])
    assert replay(alone, cluster(1e15, 0.1, cores=cores, message_s=0.04)).step_s == pytest.approx(0.1)


def test_whoever_asks_for_a_collective_is_busy_with_that():
    """However many cores there are; 0.02 s, then 1 s beside a message of 0.1 s."""
    run = program([gathering(0, 8), Event("wait", 0, 1.0), Event("step", 0)])
    assert replay(run, cluster(1e15, 0.1, issue_s=0.02)).step_s == pytest.approx(1.02, abs=1e-6)


def test_collectives_at_once_share_the_link_and_a_third_one_waits():
    """Three equal ones: two at half speed end at 2 s, the third alone at 3 s; with latency a: 2 s + 2 a."""
    s = wire_s(10_000_000, 1e8)
    events = [*(gathering(i, 10_000_000) for i in range(3)), *(Event("wait", i) for i in range(3))]
    run = program([*events, Event("step", 0)])
    assert replay(run, cluster(1e8)).step_s == pytest.approx(3 * s)
    assert replay(run, cluster(1e8, 0.1)).step_s == pytest.approx(3 * s + 0.2)


def test_sites_share_a_trunk():
    """Four hosts on two sites, trunks at a tenth of the hosts' rate; all numbers by hand.

    All-to-all of rows r: each of a site's two ranks sends two rows to the other site, 4 r over the trunk. A
    ring sends every chunk over both trunks, so its beat is the trunk's: six chunks of a quarter each.
    """
    near = cluster(1e9, 1e-3, hosts=4)
    far = dataclasses.replace(near, sites=2, site_bps=1e8, site_hop_s=0.02)
    rows = Collective("all-to-all", 4_000_000, 1, 0, 4)
    sent = 3_000_000 + frames(Op.SCATTER, 4_000_000, 4).header_bytes
    assert near.transfer(rows).wire_s == pytest.approx(8 * sent / 1e9)
    assert far.transfer(rows).wire_s == pytest.approx(8 * sent * 4 / 3 / 1e8)
    assert far.transfer(rows).latency_s == pytest.approx(0.021)
    whole = Collective("all-reduce", 4_000_000, 4, 0, 4)
    sent = 6_000_000 + frames(Op.MEAN, 4_000_000, 4, itemsize=4).header_bytes
    assert far.transfer(whole).wire_s == pytest.approx(8 * sent / 1e8)
    assert far.transfer(whole).latency_s == pytest.approx(0.021)  # messages queue up: only the last waits
    alone = dataclasses.replace(far, sites=1)
    assert alone.transfer(whole) == near.transfer(whole)
    pair = Collective("exchange", 1_000_000, 1, 0, 4, peers=(1,), sources=(1,))
    other = Collective("exchange", 1_000_000, 1, 0, 4, peers=(2,), sources=(2,))
    # Rank 1 is the last of its site, so its neighbour is elsewhere; at a distance of 2 so are both ranks'.
    assert far.transfer(pair).wire_s == pytest.approx(10 * near.transfer(pair).wire_s)
    assert far.transfer(other).wire_s == pytest.approx(2 * far.transfer(pair).wire_s)
    assert (
        far.transfer(dataclasses.replace(pair, peers=(3,))).wire_s == far.transfer(pair).wire_s
    )  # the other way round


def test_ranks_of_a_host_share_its_link():
    """Two hosts of two ranks: one of a host has its neighbour elsewhere, and each two of three others."""
    shared = dataclasses.replace(cluster(1e8, hosts=2), ranks_per_host=2)
    apart = cluster(1e8, hosts=4)
    for peer, times in ((1, 1), (2, 2), (3, 1)):
        pair = Collective("exchange", 1_000_000, 1, 0, 4, peers=(peer,), sources=(peer,))
        assert shared.transfer(pair).wire_s == pytest.approx(times * apart.transfer(pair).wire_s)
    # One rank of each of three hosts, as two-level schedules have them: each has the link to itself.
    three = dataclasses.replace(shared, hosts=3)
    heads = Collective("exchange", 1_000_000, 1, 0, 3, peers=(1,), sources=(1,))
    assert three.transfer(heads).wire_s == pytest.approx(cluster(1e8, hosts=3).transfer(heads).wire_s)
    rows = Collective("all-to-all", 4_000_000, 1, 0, 4)
    assert shared.transfer(rows).wire_s == pytest.approx(4 / 3 * apart.transfer(rows).wire_s)
    assert shared.transfer(dataclasses.replace(rows, size=2)).inside


def test_a_link_that_ranks_of_a_host_have_shared_is_not_taken_for_slow():
    """All-to-all among two hosts of two ranks: 4/3 of what a rank sends has to pass a link of 12.5 MB/s."""
    link = assumed("100mbit", [0, 0, 1, 1])
    seen = dataclasses.replace(link.costs["all-to-all"], bytes_per_s=12.5e6 * 3 / 4)
    link = dataclasses.replace(link, measured=True, costs=link.costs | {"all-to-all": seen})
    rows = Collective("all-to-all", 4_000_000, 1, 0, 4)
    sent = 3_000_000 + frames(Op.SCATTER, 4_000_000, 4).header_bytes
    assert cluster_of(link, 4).transfer(rows).wire_s == pytest.approx(8 * sent * 4 / 3 / 1e8)
    assert cluster_of(link, 4, ranks_per_host=1).transfer(rows).wire_s == pytest.approx(8 * sent / 1e8)


def test_messages_to_one_neighbour_go_at_a_ring_s_rate():
    """Ranks that all send to all use half of the link here; a message to one other is not one of many."""
    near = cluster(1e8, hosts=4)
    half = dataclasses.replace(near.costs["all-to-all"], bytes_per_s=0.5)
    slow = dataclasses.replace(near, costs=near.costs | {"all-to-all": half})
    one = Collective("exchange", 1_000_000, 1, 0, 4, peers=(1,), sources=(3,))
    two = dataclasses.replace(one, peers=(1, 3), sources=(1, 3))
    assert slow.transfer(one).wire_s == near.transfer(one).wire_s
    assert slow.transfer(two).wire_s == pytest.approx(2 * near.transfer(two).wire_s)


def test_two_at_once_take_as_long_as_was_measured():
    """Two all-reduces of s seconds on a link that two at once use at four fifths: 2.5 s; one alone: s."""
    s = 8 * (1_000_000 + frames(Op.MEAN, 1_000_000, 2, itemsize=4).header_bytes) / 1e8
    one, two = [Event("issue", n, 0.0, 0.0, Collective("all-reduce", 1_000_000, 4, 0, 2)) for n in (0, 1)]
    waits = [Event("wait", 0), Event("wait", 1), Event("step", 0)]
    near = cluster(1e8)
    crowded = {op: dataclasses.replace(cost, crowding=1.25) for op, cost in near.costs.items()}
    found = replay(program([one, two, *waits]), dataclasses.replace(near, costs=crowded))
    assert found.step_s == pytest.approx(2.5 * s)
    alone = replay(program([one, waits[0], waits[2]]), dataclasses.replace(near, costs=crowded))
    assert alone.step_s == pytest.approx(s)


def test_a_token_bucket_is_full_once():
    """A bucket of 50 kB at 12.5 MB/s saves 4 ms of the first of two all-reduces, and of neither later."""
    s = 8 * (1_000_000 + frames(Op.MEAN, 1_000_000, 2, itemsize=4).header_bytes) / 1e8
    one, two = [Event("issue", n, 0.0, 0.0, Collective("all-reduce", 1_000_000, 4, 0, 2)) for n in (0, 1)]
    near = cluster(1e8)
    bucket = {op: dataclasses.replace(c, counts_as=((50_000.0, 0.0),)) for op, c in near.costs.items()}
    bucket = dataclasses.replace(near, costs=bucket)
    waits = [Event("wait", 0), Event("wait", 1), Event("step", 0)]
    assert replay(program([one, two, *waits]), bucket).step_s == pytest.approx(2 * s - 0.004)
    apart = [one, waits[0], two, *waits[1:]]
    assert replay(program(apart), bucket).step_s == pytest.approx(2 * s - 0.008)  # idle between them
    all_of_it = {op: dataclasses.replace(c, counts_as=((5e6, 0.0),)) for op, c in near.costs.items()}
    all_of_it = dataclasses.replace(near, costs=all_of_it)
    assert replay(program([one, two, *waits]), all_of_it).step_s == pytest.approx(s)


def test_threads_share_cores():
    """Two threads of 1 s each: 1 s on two cores, 2 s on one, and joining waits for the other."""
    main = [Event("post", 0), Event("join", 0, 1.0), Event("step", 0)]
    other = [Event("begin", 0), Event("done", 0, 1.0)]
    assert replay(program(main, other), cluster(1e8, cores=2.0)).step_s == pytest.approx(1)
    assert replay(program(main, other), cluster(1e8, cores=1.0)).step_s == pytest.approx(2)


def test_sending_takes_processor_time_from_computing():
    """One core, sending takes half of it: computing 1 s beside it takes 2 s as long as it sends."""
    s = wire_s(100_000_000, 1e8)  # 4 s and headers
    sent = s * 1e8 / 8
    run = program([gathering(0, 100_000_000), Event("wait", 0, 1.0), Event("step", 0)])
    half = cluster(1e8, cores=1.0, cpu=0.5 * s / sent)
    assert replay(run, half).step_s == pytest.approx(max(s, 2.0))
    run = program([gathering(0, 100_000_000), Event("step", 0, 1.0)])
    assert replay(run, half).step_s == pytest.approx(2.0)


def test_what_outlasts_its_period_is_hidden_in_the_next():
    """Sent at the end of a period and awaited at the end of the next: only what exceeds a period shows."""
    run = program([Event("wait", -1, 1.0), gathering(0, 10_000_000), Event("step", 0)])
    s = wire_s(10_000_000, 1e8)
    assert replay(run, cluster(1e8)).step_s == pytest.approx(max(s, 1.0))
    assert replay(run, cluster(1e7)).step_s == pytest.approx(10 * s)


def test_closed_form_of_rings_agrees_with_following_every_message():
    """4 to 16 ranks, equal edges, hosts of several ranks, and one slow host: within 2 %."""
    draw = np.random.default_rng(0)
    for size in range(4, 17):
        for kind in range(30):
            w, a = np.full(size, 10 ** draw.uniform(-5, -1)), np.full(size, 10 ** draw.uniform(-5, -1))
            if kind % 3 == 1:
                inside = np.arange(1, size + 1) % 2 != 0
                w, a = np.where(inside, w / 20, w), np.where(inside, a / 10, a)
            if kind % 3 == 2:
                w[draw.integers(size)] *= 5
            for steps in (size - 1, 2 * (size - 1)):
                assert ring_s(steps, w, a) == pytest.approx(message_level(steps, w, a), rel=0.02)


def test_an_all_reduce_is_what_the_textbook_says():
    """Thakur et al.: 2 (N - 1) a + 2 (N - 1) / N n b, here with headers; halves hide all but one latency."""
    for n in (2, 8):
        where = cluster(1e8, 1e-4, hosts=n)
        taken = where.transfer(Collective("all-reduce", 8_000_000, 4, 0, n))
        expected = 2 * (n - 1) / n * 8_000_000 * 8 / 1e8
        assert taken.wire_s == pytest.approx(expected, rel=0.06)
        assert taken.latency_s == pytest.approx(1e-4)
        small = cluster(1e12, 1e-4, hosts=n).transfer(Collective("all-reduce", 64, 4, 0, n))
        steps = 1 if n == 2 else 2 * (n - 1)  # two ranks send each other what is small, once
        assert small.latency_s + small.wire_s == pytest.approx(steps * 1e-4, rel=0.01)


@pytest.fixture(scope="module")
def recorded():
    torch.manual_seed(0)
    model = torch.nn.Sequential(torch.nn.Linear(60, 80), torch.nn.ReLU(), torch.nn.Linear(80, 10))
    trial = Trial(
        model,
        torch.optim.SGD(model.parameters(), 0.1),
        [torch.randn(8, 60)],
        lambda model, x: model(x).square().mean(),
    )
    return {m: periods(trial, stenograd.method(m), 4, 1, bucket_bytes=10_000)[0] for m in METHODS}


@pytest.mark.parametrize("method", METHODS)
def test_infinite_resources_give_the_recorded_computing(recorded, method):
    """The longest chain of computing: at least the training's thread, at most all threads."""
    own = recorded[method]
    lanes = [sum(e.compute_s + e.codec_s for e in lane) / own.steps for lane in own.lanes]
    free = cluster(math.inf, hosts=4, cores=1e6).without_limits().without_latency()
    found = replay(own, free).step_s
    assert lanes[0] * 0.999 <= found <= sum(lanes) * 1.001
    assert replay(own, free, slower=2.0).step_s == pytest.approx(2 * found)


@pytest.mark.parametrize("method", METHODS)
def test_better_links_never_slow_a_step(recorded, method):
    def step_s(rate, hop_s):
        return replay(recorded[method], cluster(rate, hop_s, hosts=4, cores=1.0)).step_s

    rates = [step_s(rate, 1e-3) for rate in np.geomspace(1e6, 1e11, 21)]
    hops = [step_s(1e8, hop_s) for hop_s in np.geomspace(1e-1, 1e-6, 21)]
    for series in (rates, hops):
        assert all(b <= a * (1 + 1e-6) for a, b in itertools.pairwise(series))


def test_one_worker_has_no_network():
    link = assumed("1mbit,1s", [0])
    run = program(
        [
            Event("issue", 0, 1.0, 0.0, Collective("all-reduce", 1 << 20, 4, 0, 1)),
            Event("wait", 0),
            Event("step", 0),
        ]
    )
    assert replay(run, cluster_of(link, 1)).step_s == 1.0


def test_spans_tell_where_the_time_went():
    run = program([gathering(0, 10_000_000, 1.0, 0.5), Event("wait", 0), Event("step", 0)])
    spans = replay(run, cluster(1e8), spans=True).spans
    s = wire_s(10_000_000, 1e8)
    assert [(x.kind, round(x.start_s, 6), round(x.end_s, 6)) for x in spans] == [
        ("compute", 0, 1.0),
        ("codec", 1.0, 1.5),
        ("collective", 1.5, round(1.5 + s, 6)),
        ("wait", 1.5, round(1.5 + s, 6)),
    ]


def test_a_thousand_workers_are_replayed_in_time(recorded):
    """30 methods at 8 rates in 2 s on a quiet machine; here with room for a busy one."""
    start = time.process_time()
    for rate in np.geomspace(1e7, 1e10, 8):
        where = cluster(rate, 1e-4, hosts=1024)
        for method in METHODS:
            replay(at_size(recorded[method], 1024), where)
    assert (time.process_time() - start) * 30 / len(METHODS) < 8


def at_size(own, size):
    def grown(e):
        about = e.collective
        return (
            e if about is None else dataclasses.replace(e, collective=dataclasses.replace(about, size=size))
        )

    return dataclasses.replace(own, lanes=tuple(tuple(map(grown, lane)) for lane in own.lanes))


def test_a_plan_says_that_dense_wins_where_it_does_and_survives_a_file(tmp_path):
    """At 100 Gbit/s nothing is to be saved; at 1 Mbit/s bandwidth decides, and sending less wins."""
    torch.manual_seed(0)
    model = torch.nn.Sequential(torch.nn.Linear(200, 300), torch.nn.ReLU(), torch.nn.Linear(300, 10))
    trial = Trial(
        model,
        torch.optim.SGD(model.parameters(), 0.1),
        [torch.randn(2048, 200)],  # much to compute, beside which a message more or less is nothing
        lambda m, x: m(x).square().mean(),
    )
    fast = stenograd.plan(trial, workers=2, link="100gbit", methods=["topk", "fp16"], seconds=0.5, cores=8)
    assert fast.method == "dense"
    assert fast.reason.startswith("dense wins")
    slow = fast.at("1mbit,0.1ms")
    assert slow.method == "topk"
    assert slow.predictions[0].limit == "bandwidth"
    assert "assumed" in slow.notes[0]
    rounded = dataclasses.replace(slow, accuracy="rounded")
    assert rounded.at("1mbit").method == "fp16"
    path = tmp_path / "plan.json"
    slow.save(path)
    assert stenograd.load_plan(path) == slow
    told = json.loads(path.read_text())
    told["world_size"] = 3
    path.write_text(json.dumps(told))
    with pytest.raises(stenograd.DataError, match="it was changed"):
        stenograd.load_plan(path)


def test_where_latency_decides_fewer_collectives_win():
    """50 ms a hop and small buckets: a round every 8 steps pays its latency an eighth as often."""
    model = torch.nn.Sequential(*(torch.nn.Linear(50, 50) for _ in range(6)))
    trial = Trial(
        model,
        torch.optim.SGD(model.parameters(), 0.1),
        [torch.randn(8, 50)],
        lambda m, x: m(x).square().mean(),
    )
    found = stenograd.plan(
        trial,
        workers=4,
        link="10gbit,50ms",
        methods=["topk", "local:every=8"],
        seconds=0.5,
        bucket_bytes=10_000,
    )
    assert found.method.startswith("local")
    assert found.predictions[0].limit == "latency"
    assert any("is latency" in note for note in found.notes)


@pytest.mark.parametrize(
    ("milliseconds", "chosen"),
    [
        ({"dense": 100, "topk:ratio=0.03": 50, "topk:ratio=0.01": 50.9}, "topk:ratio=0.01"),  # sends less
        ({"dense": 100, "topk:ratio=0.03": 50, "topk:ratio=0.01": 52}, "topk:ratio=0.03"),  # no tie
        ({"dense": 100, "topk:ratio=0.01": 50, "fp16": 50.9}, "fp16"),  # milder, though it sends more
        ({"dense": 100, "topk:ratio=0.01": 98}, "dense"),
        ({"dense": 100, "topk:ratio=0.01": 97}, "dense"),  # a lead of less than 5 %
    ],
)
def test_advice_among_ties(milliseconds, chosen):
    """2 % apart is a tie: the milder method wins, then the one that sends least."""
    bytes_of = {"dense": 400.0, "fp16": 200.0, "topk:ratio=0.03": 12.0, "topk:ratio=0.01": 5.0}
    saved_s = dict.fromkeys(("compute", "codec", "latency", "bandwidth", "contention", "stragglers"), 0.0)
    found = [
        Prediction(
            method=text,
            seconds=(0.9 * ms, ms, 1.1 * ms),
            moved_bytes=bytes_of[text],
            collectives=1.0,
            saved_s=saved_s,
            pays=(),
            pays_at_lowest=text != "dense",
        )
        for text, ms in milliseconds.items()
    ]
    assert advised(found, "lossy")[0] == chosen
