"""Every measured figure of README and docs is that of its record, and a changed record is found."""

import copy
import sys
from pathlib import Path

import pytest

sys.path.append(str(Path(__file__).parents[2] / "scripts"))  # behind the tests' own folders

import figures

ROOT = figures.ROOT


def test_every_figure_is_that_of_its_record():
    assert figures.check(ROOT, rewrite=False) == []


def test_one_changed_record_breaks_the_check(monkeypatch):
    """README's milliseconds of DDP at 100 Mbit/s, in a record that says one second less."""
    changed = copy.deepcopy(figures.record("steps"))
    (run,) = (run for run in changed["results"] if (run["model"], run["rate"]) == ("mlp", "100mbit"))
    (row,) = (row for row in run["rows"] if row["rival"] == "ddp")
    row["ms"] -= 1000
    records = {"steps": changed}
    monkeypatch.setattr(
        figures, "record", lambda name, known=figures.record: records.get(name) or known(name)
    )
    faults = figures.check(ROOT, rewrite=False)
    pages = {fault.partition(":")[0] for fault in faults}
    assert {"README.md", "benchmarks/results/steps.md", "docs/two-nodes-slower-than-one.md"} <= pages
    assert any(f"{row['ms']:,.0f} ms" in fault for fault in faults)


@pytest.mark.parametrize(
    ("page", "found"),
    [
        ("A step takes 81 ms.", ["line 1: 81 ms"]),
        (
            "It is 1.11 times as fast,\nfor 5,608 MB and 3 %.",
            ["line 1: 1.11 times", "line 2: 5,608 MB", "line 2: 3 %"],
        ),
        ("| a | ms |\n|---|---:|\n| dense | 1,655 |\n", ["line 3: 1,655"]),
        ("At 100 Mbit/s, of 10 M parameters on 4 hosts in 3 steps", []),
        ("`every=30 s` and\n```\nsleep 5 s\n```\n", []),
    ],
)
def test_what_looks_measured_needs_a_record(page, found):
    assert figures.unbacked(page, []) == found


def test_a_paragraph_covers_its_figures_and_a_head_its_table():
    page = "Wait 5 s.\n\n| status | n |\n|---|---|\n| 0 | 7 |\n\nIt took 6 s.\n"
    assert figures.unbacked(page, ["! Wait 5 s", "! | status | n |"]) == ["line 7: 6 s"]


def test_words_that_a_page_lacks_are_an_error():
    with pytest.raises(ValueError, match="there 0 times, and must be once: it took"):
        figures.derived("It took 5 s.", "it took {5:.0f} ms", {})


def test_a_figure_is_rewritten_where_it_stands():
    page = "| a | 1 | 2 |\n| b | 1 | 2 |\n"
    assert figures.derived(page, "| b | {1 + 2:.1f} |", {}) == "| a | 1 | 2 |\n| b | 3.0 | 2 |\n"


def test_a_rival_that_missed_the_accuracy_in_a_seed_has_words_and_no_figure(monkeypatch):
    rows = {"to": [50.0, None], "faster": [2.0, None], "seconds": [60.0, 70.0], "scores": [0.98, 0.97]}
    monkeypatch.setattr(figures, "standings", lambda *_: {"slow": {**rows, "megabytes": [5.0, 5.0]}})
    assert figures.standing("mnist:2:100mbit", "slow") == "not in 1 of 2 seeds |  | 65 | 97.50 | 5.0"
    with pytest.raises(ValueError, match="faster of slow in mnist:2:100mbit is no figure"):
        figures.of_cell("mnist:2:100mbit", "slow", "faster")
