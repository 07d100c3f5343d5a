"""Extrapolations of plans, their report, and what they refuse."""

import dataclasses
import re
from html.parser import HTMLParser

import pytest
import torch

import stenograd
from stenograd.errors import ConfigError
from stenograd.planning.plan import predicted
from stenograd.planning.rehearsal import Profile
from stenograd.planning.report import page
from stenograd.planning.scale import MERGED, TWO_LEVELS, parse_place, scaled, sizes_of
from stenograd.planning.trial import load_trial
from stenograd.planning.units import parse_link

VOID = {"meta", "path", "use", "br"}


@pytest.fixture(scope="module")
def plan():
    torch.manual_seed(0)
    model = torch.nn.Sequential(torch.nn.Linear(100, 100), torch.nn.ReLU(), torch.nn.Linear(100, 10))
    trial = stenograd.Trial(
        model,
        torch.optim.SGD(model.parameters(), 0.1),
        [torch.randn(16, 100)],
        lambda model, x: model(x).square().mean(),
    )
    methods = ["topk", "local:every=4"]
    found = stenograd.plan(trial, workers=2, link="1gbit,0.1ms", methods=methods, seconds=0.5, name="<small>")
    # Steps that all take the same: what else runs on this machine would slow the slowest of 1,024 workers.
    steady = Profile((2e-3,) * 5, (2e-3,) * 5, found.profile.parameters)
    return predicted(dataclasses.replace(found, profile=steady))


def test_a_ring_of_a_thousand_is_latency_and_two_levels_shorten_it(plan):
    """Around 1,024 ranks twice: 128 hops of 0.35 ms between hosts, 896 of 0.14 ms inside them, 340 ms.

    A hop takes 0.15 ms (inside 0.1 ms) and the latency of 0.1 ms (0.02 ms) there and back. In two levels:
    2 * 127 hops between hosts and 2 * 7 inside.
    """
    _, place = parse_place("128x8", "20gbit,0.02ms", None, None)
    small, large = scaled(plan, [8, 1024], place)
    ring_s, levels_s = 2 * (128 * 0.35e-3 + 896 * 0.14e-3), 2 * 127 * 0.35e-3 + 14 * 0.14e-3
    assert small.latency < large.latency
    computing = sum(e.compute_s + e.codec_s for e in plan.programs["dense"].lanes[0])
    assert ring_s < large.seconds["dense"] - computing < ring_s * 1.2
    assert levels_s < large.seconds[TWO_LEVELS] - computing < levels_s * 1.2
    assert large.seconds[MERGED] <= large.seconds["dense"] * 1.01
    assert large.seconds["local:every=4"] < large.seconds["dense"]


def test_slow_workers_slow_all(plan):
    """With probability 1 every step computes twice as long; with 0 none does."""
    usual, never, always = (
        scaled(plan, [64], parse_place(None, None, None, slow)[1], ["topk"])[0].seconds["dense"]
        for slow in (None, "0%:2x", "100%:2x")
    )
    assert never == usual
    assert usual < always <= 2 * usual


def test_a_slow_line_between_sites_slows_all_and_must_fit(plan):
    """A line of 1 Mbit/s between two sites of two hosts: about the dense bytes of a ring at that rate."""
    (near,) = scaled(plan, [4], parse_place(None, None, "1gbit", None)[1], ["topk"])
    (far,) = scaled(plan, [4], parse_place(None, None, "1gbit", None, "2:1mbit,20ms")[1], ["topk"])
    sent = sum(2 * 3 / 4 * c.nbytes for c in plan.programs["dense"].moved)
    assert far.seconds["dense"] > near.seconds["dense"] + 8 * sent / 1e6 * 0.9
    assert far.seconds["topk"] > near.seconds["topk"]
    with pytest.raises(ConfigError, match="--site must deal out the 4 hosts"):
        scaled(plan, [4], parse_place(None, None, None, None, "3:1mbit")[1])


def test_the_plans_own_size_gives_its_prediction(plan):
    (same,) = scaled(plan, [2], parse_place(None, None, None, None)[1])
    for prediction in plan.predictions:
        assert same.seconds[prediction.method] == pytest.approx(prediction.seconds[1])


@pytest.mark.parametrize(
    ("step_s", "cores", "times"),
    [(2e-3, 1.0, 2.0), (2e-3, 0.5, 1.0), (2e-3, 0.25, 1.0), (3e-3, 0.5, 1.5), (1e-3, 0.5, 1.0)],
)
def test_a_share_of_a_core_is_not_counted_twice(plan, step_s, cores, times):
    """Steps of 1 ms of processor time: the replay doubles them on half a core, so the clock's 2 ms do not."""
    profile = Profile((step_s,) * 5, (1e-3,) * 5, 1)
    found = dataclasses.replace(plan, profile=profile, cores=cores)
    assert found.slowness.at == pytest.approx((times,) * 3)


class _Strict(HTMLParser):
    """Collects what a browser would trip over: tags that do not close in order, and names used twice."""

    def __init__(self):
        super().__init__()
        self.open, self.names, self.tags = [], [], []

    def handle_starttag(self, tag, attrs):
        self.tags.append(tag)
        self.names += [value for key, value in attrs if key == "id"]
        if tag not in VOID:
            self.open.append(tag)

    def handle_startendtag(self, tag, attrs):
        self.names += [value for key, value in attrs if key == "id"]

    def handle_endtag(self, tag):
        if tag not in VOID:
            assert self.open.pop() == tag


def test_a_step_takes_the_mean_of_the_slowest(plan):
    """Steps take 1, 1, 1 or 2 s, each as often: both workers take 1 s in 9 of 16 cases, else it is 2 s."""
    steps = (1.0, 2.0, 1.0, 1.0)
    found = dataclasses.replace(plan, profile=Profile(steps, steps, 1), cores=1.0, world_size=2)
    low, middle, high = found.slowness.at
    assert middle == pytest.approx((9 * 1 + 7 * 2) / 16)
    assert low == pytest.approx(1.0)
    assert middle < high <= 2.0


def test_ranks_that_were_measured_together_tell_what_the_slowest_takes(plan):
    """Steps of 1 s alone, of 1, 1.5 and 2 s together: their mean counts, whatever the number of workers."""
    profile = Profile((1.0,) * 4, (1.0,) * 4, 1, (1.0, 2.0, 1.5))
    found = dataclasses.replace(plan, profile=profile, cores=1.0, world_size=8)
    low, middle, high = found.slowness.at
    assert middle == pytest.approx(1.5)
    assert 1.0 <= low < middle < high <= 2.0


def test_the_report_is_one_small_file_that_needs_nothing_else(plan):
    text = page(plan)
    assert text == page(plan)
    assert len(text.encode()) < 500_000
    found = _Strict()
    found.feed(text)
    assert found.open == []
    assert len(found.names) == len(set(found.names))
    assert "script" not in found.tags
    assert not re.search(r'(?:src|href)="(?!#)', text)
    assert "&lt;small&gt;" in text
    assert found.tags.count("svg") == found.tags.count("details") == text.count('role="img"') == 3
    for svg in re.findall(r"<svg.*?</svg>", text, re.DOTALL):
        title, what = re.search(r'aria-labelledby="(\S+) (\S+)"', svg).groups()
        assert f'<title id="{title}">' in svg
        assert f'<desc id="{what}">' in svg


@pytest.mark.parametrize(
    ("call", "message"),
    [
        (lambda: sizes_of("8..2"), "--workers must be a span from 1 upwards"),
        (lambda: sizes_of("many"), "--workers must be numbers"),
        (lambda: parse_place("128", None, None, None), "--hosts must be HOSTSxWORKERS"),
        (lambda: parse_place(None, None, None, "1%"), "--slow must be PERCENT%:FACTORx"),
        (lambda: parse_place(None, None, None, None, "100mbit"), "--site must be SITES:LINK"),
        (lambda: parse_place(None, None, "1gbps", None), "write 1gbit"),
        (lambda: parse_link("1gbit,1ms,2ms"), "RATE or RATE,LATENCY"),
        (lambda: parse_link("1gbit,5"), "latency must be a number and us, ms or s"),
        (lambda: load_trial("train.py"), "must be FILE.py:FUNCTION"),
        (lambda: load_trial("nowhere.py:build"), "must name a file that exists"),
        (lambda: load_trial("math:pi"), "must name a function"),
        (lambda: load_trial("os:getpid"), r"must return a stenograd.Trial"),
    ],
)
def test_wrong_input_is_refused_with_its_rule(call, message):
    with pytest.raises(ConfigError, match=message):
        call()


def test_a_trial_comes_from_a_file(tmp_path):
    path = tmp_path / "mine.py"
    path.write_text(
        "import torch, stenograd\n"
        "def build():\n"
        "    model = torch.nn.Linear(2, 1)\n"
        "    optimizer = torch.optim.SGD(model.parameters(), 0.1)\n"
        "    return stenograd.Trial(model, optimizer, [torch.ones(1, 2)], lambda m, x: m(x).sum())\n"
    )
    assert load_trial(f"{path}:build").model.in_features == 2
