"""The formula of a step: known answers by hand, and properties that every network must have."""

import dataclasses
import itertools
import math
import sys
from pathlib import Path

import numpy as np
import pytest
import torch

import stenograd
from stenograd.errors import ConfigError, StenogradError
from stenograd.planning import formula
from stenograd.planning.advice import Prediction, advised, best_keys, open_keys, predict, variants
from stenograd.planning.formula import Network, network_of, step_s
from stenograd.planning.link import assumed
from stenograd.planning.program import Collective, Event, Program, at_size, with_ratio
from stenograd.planning.rehearsal import record
from stenograd.planning.trial import Trial
from stenograd.wire.gloo import frames
from stenograd.wire.requests import Op

sys.path.append(str(Path(__file__).parents[2] / "benchmarks"))  # behind the tests' own folders

import plan_validation

METHODS = [
    "dense",
    "topk",
    "powersgd",
    "sign",
    "local:every=3",
    "diloco:every=4,fragments=2,delay=1",
    "gossip",
]
ISSUE_S = formula._ISSUE_S


def network(rate, hop_s=0.0, *, hosts=2, per_host=1, cores=4.0):
    return Network(hosts=hosts, ranks_per_host=per_host, bps=rate, hop_s=hop_s, cores=cores)


def program(*lanes, **shape):
    """Three equal periods, of which the first does not count."""
    repeated = []
    counts = {kind: sum(e.kind == kind for lane in lanes for e in lane) for kind in ("issue", "post")}
    for lane in lanes:
        shifted = [
            e._replace(number=e.number + turn * counts["issue" if e.kind in ("issue", "wait") else "post"])
            for turn in range(3)
            for e in lane
        ]
        repeated.append(tuple(shifted))
    return Program(method="test", world_size=2, lanes=tuple(repeated), **shape)


def sending(number, nbytes, compute=0.0):
    return Event("issue", number, compute, Collective("all-to-all", nbytes, 1, 2))


def wire_s(nbytes, rate):
    """An all-to-all of two ranks sends half of it, in one message."""
    return 8 * (nbytes // 2 + frames(Op.SCATTER, nbytes, 2).header_bytes) / rate


@pytest.mark.parametrize("nbytes", [10_000_000, 100_000_000])
def test_computing_hides_what_is_sent_meanwhile(nbytes):
    """1 s, send for s, compute 3 s, wait: max(3, s) more, and what asking takes."""
    run = program([sending(0, nbytes, 1.0), Event("wait", 0, 3.0), Event("step")])
    expected = 1 + ISSUE_S + max(3, wire_s(nbytes, 1e8))
    assert step_s(run, network(1e8), 0.0) == pytest.approx(expected)


def test_latency_shows_where_nothing_is_computed():
    """What is sent in s and comes 0.1 s later; while 1 s is computed 0.1 s of it are hidden."""
    s = wire_s(10_000_000, 1e8)
    run = program([sending(0, 10_000_000), Event("wait", 0), Event("step")])
    assert step_s(run, network(1e8, 0.1), 0.0) == pytest.approx(ISSUE_S + s + 0.1)
    run = program([sending(0, 8), Event("wait", 0, 1.0), Event("step")])
    assert step_s(run, network(1e12, 0.1), 0.0) == pytest.approx(ISSUE_S + 1.0)


def test_the_link_sends_one_thing_after_another():
    """Three equal ones end at 3 s; of their latencies only the last one's shows."""
    s = wire_s(10_000_000, 1e8)
    events = [*(sending(i, 10_000_000) for i in range(3)), *(Event("wait", i) for i in range(3))]
    run = program([*events, Event("step")])
    assert step_s(run, network(1e8, 0.1), 0.0) == pytest.approx(ISSUE_S + 3 * s + 0.1)


@pytest.mark.parametrize(("cores", "seconds"), [(2.0, 1.0), (1.0, 2.0)])
def test_threads_compute_at_once_where_there_are_cores(cores, seconds):
    """Two threads of 1 s each."""
    main = [Event("post", 0), Event("join", 0, 1.0), Event("step")]
    other = [Event("begin", 0), Event("done", 0, 1.0)]
    assert step_s(program(main, other), network(1e8, cores=cores), 0.0) == pytest.approx(seconds)


def test_what_outlasts_its_period_is_hidden_in_the_next():
    """Sent at the end of a period and awaited at the end of the next: only what exceeds a period shows."""
    lane = [e for n in range(4) for e in (Event("wait", n - 1, 1.0), sending(n, 10_000_000), Event("step"))]
    run = Program(method="test", world_size=2, lanes=(tuple(lane),))
    s = wire_s(10_000_000, 1e8)
    assert step_s(run, network(1e8), 0.0) == pytest.approx(max(s, 1.0) + ISSUE_S)
    assert step_s(run, network(1e7), 0.0) == pytest.approx(10 * s + ISSUE_S, rel=1e-3)


def test_idle_steps_only_compute():
    """One step of 1 s with s seconds of sending, and 7 of 0.5 s: a mean of (1 + s + 3.5) / 8."""
    run = program([sending(0, 10_000_000, 1.0), Event("wait", 0), Event("step")], idle=7)
    expected = (1 + ISSUE_S + wire_s(10_000_000, 1e8) + 3.5) / 8
    assert step_s(run, network(1e8), 0.5) == pytest.approx(expected)
    assert run.moved_bytes == 5_000_000 / 8
    assert step_s(run, network(1e12), 0.5, slower=2) == pytest.approx(2 * 4.5 / 8, rel=1e-3)


def test_a_program_that_waits_for_what_never_comes_is_refused():
    with pytest.raises(StenogradError, match="waits for what never comes"):
        step_s(
            Program(method="test", world_size=2, lanes=((Event("wait", 0), sending(0, 8), Event("step")),)),
            network(1e8),
            0.0,
        )


def test_an_all_reduce_is_what_the_textbook_says():
    """Thakur et al.: 2 (N - 1) a + 2 (N - 1) / N n b, here with headers; halves hide all but one latency."""
    for n in (2, 8):
        taken = network(1e8, 1e-4, hosts=n).transfer(Collective("all-reduce", 8_000_000, 4, n))
        expected = 2 * (n - 1) / n * 8_000_000 * 8 / 1e8
        assert taken.sending_s == pytest.approx(expected, rel=0.06)
        assert taken.latency_s == pytest.approx(1e-4)
        small = network(1e12, 1e-4, hosts=n).transfer(Collective("all-reduce", 64, 4, n))
        steps = 1 if n == 2 else 2 * (n - 1)  # two ranks send each other what is small, once
        assert small.latency_s + small.sending_s == pytest.approx(steps * 1e-4, rel=0.01)


def test_ranks_of_a_host_share_its_link():
    """Two hosts of two ranks: one of a host has its neighbour elsewhere, and each two of three others."""
    shared, apart = network(1e8, hosts=2, per_host=2), network(1e8, hosts=4)
    for peer, times in ((1, 1), (2, 2), (3, 1)):
        pair = Collective("exchange", 1_000_000, 1, 4, (peer,))
        assert shared.transfer(pair).sending_s == pytest.approx(times * apart.transfer(pair).sending_s)
    rows = Collective("all-to-all", 4_000_000, 1, 4)
    assert shared.transfer(rows).sending_s == pytest.approx(4 / 3 * apart.transfer(rows).sending_s)
    # Among the two ranks of one host it is the loopback device's 10 Gbit/s.
    inside = shared.transfer(rows._replace(size=2))
    three = dataclasses.replace(shared, hosts=3)
    assert three.transfer(rows._replace(size=2)).sending_s == inside.sending_s < 0.01


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
    return {m: record(trial, stenograd.method(m), 4, 3, bucket_bytes=10_000) for m in METHODS}


@pytest.mark.parametrize("method", METHODS)
def test_better_links_never_slow_a_step_and_the_best_gives_the_computing(recorded, method):
    own = recorded[method]

    def took(rate, hop_s, cores=1.0):
        return step_s(own, network(rate, hop_s, hosts=4, cores=cores), 1e-3)

    # Which of two threads comes first on one core, or is first to send, may change: a little for the worse.
    rates = [took(rate, 1e-3) for rate in np.geomspace(1e6, 1e11, 21)]
    hops = [took(1e8, hop_s) for hop_s in np.geomspace(1e-1, 1e-6, 21)]
    for series in (rates, hops):
        assert all(b <= a * 1.05 for a, b in itertools.pairwise(series))
    free = took(1e18, 0.0, cores=8.0)
    lanes = [sum(e.compute_s for e in lane) for lane in own.lanes]
    assert free <= 3 * (sum(lanes) / own.periods / own.steps + 1e-3) + ISSUE_S * len(own.collectives)


@pytest.mark.parametrize("method", METHODS)
def test_programs_survive_json(recorded, method):
    own = recorded[method]
    assert (
        Program.from_json(dataclasses.asdict(own) | {"lanes": [list(map(list, lane)) for lane in own.lanes]})
        == own
    )
    assert own.periods == 3


def test_more_ranks_on_paper_send_what_real_ones_send():
    """From 8 to 16 no method here works otherwise; a ring's bytes are 2 (N - 1) / N of the model's.

    With a bias, which travels densely, one thread scatters what another gathers.
    """
    for text, bias in (("sign", True), ("sign", False), ("topk", False), ("qsgd", False), ("dense", False)):
        model = torch.nn.Linear(400, 400, bias=bias)
        trial = Trial(
            model, torch.optim.SGD(model.parameters(), 0.1), [torch.ones(2, 400)], lambda m, x: m(x).mean()
        )
        few, many = (record(trial, stenograd.method(text), size, 2) for size in (8, 16))
        assert at_size(few, 16).moved_bytes == pytest.approx(many.moved_bytes, rel=0.05), text
    wide = at_size(record(trial, stenograd.method("dense"), 2, 2), 1024)
    assert wide.moved_bytes == pytest.approx(2 * 1023 / 1024 * 640_000, rel=0.01)


def small_plan(workers, *methods):
    model = torch.nn.Linear(30, 30)
    trial = Trial(
        model, torch.optim.SGD(model.parameters(), 0.1), [torch.ones(4, 30)], lambda m, x: m(x).mean()
    )
    return stenograd.plan(trial, workers=workers, link="10mbit", methods=methods, seconds=0.2)


def test_what_a_plan_does_not_tell_of_more_workers_is_said():
    """One sends nothing, and groups inside and across nodes grow by other rules."""
    with pytest.raises(ConfigError, match="a single worker sends nothing, got 4: plan for 2 or more"):
        small_plan(1, "fp16").sized(4)
    two = "local:every=2,inside=dense,node_size=2"
    few = small_plan(4, two)
    assert [p.method for p in few.predictions] == ["dense", two]
    many = few.sized(8)
    assert ([p.method for p in many.predictions], [*many.left_out]) == (["dense"], [two])
    assert f"{two} is left out: two levels cannot be worked out on paper" in " ".join(many.notes)


def test_what_pays_on_the_slowest_links_only_never_pays_elsewhere():
    """A second of computing for 82 kbit less: at 1 kbit/s that takes 5 s, not 86, and was never ahead."""
    dense = program([sending(0, 20_000), Event("wait", 0), Event("step")])
    few = program([sending(0, 200, 1.0), Event("wait", 0), Event("step")])
    _, found = predict({"dense": dense, "few": few}, network(1e3), 0.0, 1.0)
    assert 10 * found.seconds[1] < step_s(dense, network(1e3), 0.0)
    assert found.pays_text == "below 75 kbit/s"


def test_one_worker_has_no_network():
    about = Collective("all-reduce", 1 << 20, 4, 1)
    run = program([Event("issue", 0, 1.0, about), Event("wait", 0), Event("step")])
    assert step_s(run, network_of(assumed("1mbit,1s", [0]), 1), 0.0) == 1.0


def test_keys_that_were_written_stay():
    assert open_keys("topk:ratio=0.01") == []
    assert open_keys("local:every=8/topk") == ["ratio"]
    assert open_keys("local:every=2,inside=dense,node_size=2") == []


def test_values_that_send_most_among_the_fastest_are_chosen():
    """On a fast link rounds may be frequent, and on a slow one they must be rare; by hand from the formula.

    A round takes c = 0.1 s of sending where a step takes 0.1 s: H steps take 0.1 + c / H each. Within 3 % of
    H = 128 (0.10078) lies H = 64 (0.10156) and 32 (0.10313), but not 16 (0.10625).
    """
    nbytes = 2_500_000
    rounds = program([sending(0, nbytes, 0.1), Event("wait", 0), Event("step")])
    rounds = dataclasses.replace(rounds, method="local", idle=7)
    rate = wire_s(nbytes, 1.0) / 0.1
    texts = [p.method for p in variants(rounds, ["every"])]
    assert texts[1:] == [f"local:every={n}" if n != 8 else "local" for n in (4, 8, 16, 32, 64, 128)]
    assert best_keys([*variants(rounds, ["every"])], network(rate), 0.1, 1.0).method == "local:every=32"
    assert best_keys([*variants(rounds, ["every"])], network(1e4 * rate), 0.1, 1.0).method == "local:every=4"
    # A share of 0.01 takes 1 ms where a step takes 100: within 3 % of 0.001 lies 0.03, but not 0.1.
    sparse = program([sending(0, 1_000_000, 0.1), Event("decoded", 0, 2e-4), Event("wait", 0), Event("step")])
    sparse = dataclasses.replace(sparse, method="topk")
    rate = wire_s(1_000_000, 1.0) / 1e-3
    ratios = [p.method.partition("=")[2] for p in variants(sparse, ["ratio"])]
    assert ratios[1:] == ["0.3", "0.1", "0.03", "", "0.003", "0.001"]
    for times, best in ((1.0, "topk:ratio=0.03"), (1e3, "topk:ratio=0.3"), (1e-4, "topk:ratio=0.001")):
        assert best_keys([*variants(sparse, ["ratio"])], network(times * rate), 0.1, 1.0).method == best
    more = with_ratio(sparse, 10)
    assert more.moved_bytes == 10 * sparse.moved_bytes
    assert more.lanes[0][1].compute_s == pytest.approx(1e-4 + 10 * 1e-4)  # a half of it is for any size


def prediction(method, seconds):
    spread = (0.9 * seconds, seconds, 1.1 * seconds)
    parts = {"computing": 1.0, "coding": 0.0, "latency": 0.0, "bandwidth": 0.0}
    return Prediction(
        method=method,
        seconds=spread,
        moved_bytes=1e6,
        collectives=1,
        parts_s=parts,
        pays_below_bps=math.inf,
    )


@pytest.mark.parametrize(
    ("seconds", "accuracy", "answer"),
    [
        ({"dense": 1.0, "fp16": 0.6, "topk": 0.3}, "lossy", "topk"),
        ({"dense": 1.0, "fp16": 0.6, "topk": 0.3}, "rounded", "fp16"),
        ({"dense": 1.0, "fp16": 0.6, "topk": 0.3}, "exact", "dense"),
        ({"dense": 1.0, "fp16": 0.301, "topk": 0.3}, "lossy", "fp16"),  # a tie: the milder one
        ({"dense": 1.0, "fp16": 0.97, "topk": 2.0}, "lossy", "dense"),  # 3 % is within the error
        ({"dense": 1.0, "topk": 0.85}, "lossy", "dense"),  # ranges overlap
    ],
)
def test_the_fastest_that_accuracy_admits_is_recommended(seconds, accuracy, answer):
    found, reason = advised([prediction(text, s) for text, s in seconds.items()], accuracy)
    assert found == answer
    assert reason.startswith("dense wins" if answer == "dense" else answer)


def test_the_benchmark_counts_errors_regret_and_keys():
    """Errors 10 % and 20 %; topk is chosen and 1.25 times the best; every=16 takes 10 % more than 4."""
    turns = {"none": [1.0], "dense": [2.0], "topk": [1.0], "fp16": [0.8], "local:every=4": [1.0]}
    turns["local:every=16"] = [1.1]
    told = {"seconds": {"dense": (1, 2.2, 3), "topk": (2, 1.2, 3), "fp16": (0, 0.8, 1)}, "turns_s": turns}
    told |= {"method": "topk", "chosen": {"local": "local:every=16", "topk": "topk"}, "plan_s": 9.0}
    found = plan_validation.summary({"cnn:2:1gbit": told})
    assert found["median error"] == pytest.approx(0.1)
    assert found["90 % within"] == pytest.approx(0.2)
    assert found["regret"] == pytest.approx(0.25)
    assert found["inside the interval"] == pytest.approx(2 / 3)
    assert found["chosen keys, beyond the best of the grid"]["cnn:2:1gbit local:every=16"] == pytest.approx(
        0.1
    )
