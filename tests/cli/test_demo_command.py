"""`stenograd demo`: two workers, three methods, three lines that say what the table shows."""

import re

from stenograd.cli import compare
from stenograd.errors import StenogradError


def test_it_trains_two_workers_and_says_what_each_method_sent(on_two_ranks):
    """0.287 MB per step are 4 bytes for each of 71,754 parameters: 2 (N - 1) / N is 1 for two workers."""
    out = on_two_ranks("demo")
    assert "2 workers" in out
    for name in ("dense", "topk:ratio=0.05", "powersgd"):
        assert re.search(rf"│ {name} +│ +9\d\.\d\d %", out), out
    same, free, slow = out.splitlines()[-3:]
    assert "dense sends 0.287 MB per step" in same
    assert "topk:ratio=0.05 sends 29 times less" in same
    assert "nearly free" in free
    assert "dense 23.0 ms" in slow  # 71,754 * 4 / 12.5e6 s


def test_without_scikit_learn_it_draws_its_digits(monkeypatch):
    def absent(name):
        raise StenogradError("the digits task needs scikit-learn")

    monkeypatch.setattr(compare.tasks, "load", absent)
    asked = []
    monkeypatch.setattr(compare, "run", lambda options, *_: asked.append(options) or 0)
    assert compare.demo() == 0
    assert [(options.task, options.workers) for options in asked] == [("glyphs", 2)]


def test_it_can_be_read_by_programs(monkeypatch, here):
    asked = []
    monkeypatch.setattr(compare, "run", lambda *words: asked.append(words[-1]) or 0)
    assert [here("demo", "--json")[0], here("demo")[0], asked] == [0, 0, [True, False]]


def test_a_method_that_failed_is_not_explained():
    assert compare.explain([compare.Result(method="dense", error="lost")]) == ""
