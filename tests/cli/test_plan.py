"""`stenograd plan` and `link` on the command line."""

import json
import queue
import shutil
import sys
import time

import pytest
from cli_process import QUICK, on_a_rank

from stenograd.cli import plan as cli_plan
from stenograd.planning import plan as planning
from stenograd.planning.link import assumed
from stenograd.planning.plan import Plan
from stenograd.planning.trial import load_trial

PLAN = (
    "plan",
    "--task",
    "digits",
    "--batch-size",
    64,
    "--workers",
    2,
    "--link",
    "1mbit,0.1ms",
    "--seconds",
    1,
)


@pytest.fixture
def planned(here, tmp_path):
    """A plan for the run of `trained`, and what was printed."""
    folder = tmp_path / "plan"
    status, out, err = here(*PLAN, "--method", "topk:ratio=0.05", "--out", folder)
    assert (status, err) == (0, "")
    return folder, out


def test_a_plan_says_what_pays_and_keeps_it(planned, here):
    """At 1 Mbit/s a dense step sends 287 kB in 2.3 s, top-k of 5 % a seventeenth of that."""
    folder, out = planned
    told = json.loads((folder / "plan.json").read_text())
    assert told["method"] == "topk:ratio=0.05"
    assert {p["method"] for p in told["predictions"]} == {"dense", "topk:ratio=0.05"}
    assert "times as fast as dense, which is limited by bandwidth" in out
    assert "is assumed, not measured" in out
    assert (folder / "plan.png").read_bytes()[:8] == b"\x89PNG\r\n\x1a\n"
    status, again, _ = here("plan", "--plan", folder / "plan.json", "--json")
    assert status == 0
    assert json.loads(again)["predictions"] == told["predictions"]


def test_an_open_run_is_planned_as_if_all_were_there(here):
    method = "diloco:every=30,quorum=0.75,grace=5.0"
    status, out, _ = here(*PLAN, "--method", method, "--json")
    assert status == 0
    told = json.loads(out)
    assert method in {p["method"] for p in told["predictions"]}, told["notes"]


def test_a_check_compares_with_a_run(planned, here, trained):
    """The bytes agree to the byte; the time does within any tolerance that is large enough, and no other."""
    folder, _ = planned
    run, _ = trained
    check = ("plan", "--plan", folder / "plan.json", "--check", run)
    status, out, _ = here(*check, "--tolerance", 1e9)
    assert status == 0
    sent = next(line for line in out.splitlines() if "sent per step" in line)
    assert "+0%" in sent
    status, out, _ = here(*check, "--tolerance", 1e-9)
    assert status == 1
    assert "not as predicted, mostly by its" in out


def test_a_check_of_rare_rounds_compares_means(here, trained, tmp_path):
    """Three of four steps send nothing: their median would be off where the mean is as predicted."""
    plan, run = tmp_path / "plan", shutil.copytree(trained[0], tmp_path / "run")
    assert here(*PLAN, "--method", "local:every=4", "--out", plan)[0] == 0
    told = json.loads((plan / "plan.json").read_text())["predictions"]
    mean = next(p["seconds"][1] for p in told if p["method"] == "local:every=4")
    identity = json.loads((run / "run.json").read_text())
    identity["identity"]["method"] = "local:every=4"
    (run / "run.json").write_text(json.dumps(identity))
    steps = json.loads((run / "steps.json").read_text())
    for rank in steps["ranks"]:
        rank["means_s"]["step"], rank["quantiles_s"]["step"]["0.5"] = mean, mean / 10
    (run / "steps.json").write_text(json.dumps(steps))
    status, out, _ = here("plan", "--plan", plan / "plan.json", "--check", run, "--tolerance", 0.01)
    assert (status, "the mean step took +0% of what was predicted: as predicted" in out) == (0, True)


def test_a_check_counts_what_steps_sent(here, on_two_ranks, tmp_path):
    """Evaluation in the middle of a round averages the model, too, which was taken for the steps' own."""
    plan, run, method = tmp_path / "plan", tmp_path / "run", "local:every=8"
    words = [method if word == QUICK[3] else word for word in QUICK]
    on_two_ranks("train", *words, "--epochs", 2, "--out", run)
    assert here(*PLAN, "--method", method, "--out", plan)[0] == 0
    check = ("plan", "--plan", plan / "plan.json", "--check", run, "--tolerance", 1e9)
    status, out, _ = here(*check, "--json")
    sent = json.loads(out)["check"]["seconds and bytes"]["sent per step"]
    assert (status, sent["measured"]) == (0, pytest.approx(sent["predicted"], rel=1e-3))
    (run / "steps.json").write_text('{"ranks": []}')  # as of an open run
    status, _, err = here(*check)
    assert (status, "holds no finished run (it timed no steps)" in err) == (2, True)


def test_a_saved_plan_is_read_for_another_link_and_accuracy(planned, here):
    """A faster link shortens a dense step; what cannot be changed afterwards is refused."""
    saved = ("plan", "--plan", planned[0] / "plan.json")
    status, out, _ = here(*saved, "--accuracy", "exact", "--json")
    assert (status, json.loads(out)["method"]) == (0, "dense")
    status, fast, _ = here(*saved, "--link", "100gbit", "--json")
    dense = [
        next(p["seconds"][1] for p in json.loads(text)["predictions"] if p["method"] == "dense")
        for text in (fast, (planned[0] / "plan.json").read_text())
    ]
    assert (status, dense[0] < dense[1]) == (0, True)
    for more in (("--method", "sign"), ("--cores", 2), ("--ranks-per-host", 2)):
        status, _, err = here(*saved, *more)
        assert (status, f"{more[0]} does nothing with --plan" in err) == (2, True)


def test_a_saved_plan_is_shown_and_written_once_under_a_launcher(planned, on_two_ranks, tmp_path):
    out = on_two_ranks("plan", "--plan", planned[0] / "plan.json", "--out", tmp_path / "again")
    assert "times as fast as dense" in out
    assert (tmp_path / "again" / "plan.json").exists()


def test_a_trial_imports_from_its_folder_and_reads_no_arguments_of_ours(here, tmp_path):
    (tmp_path / "mymodel.py").write_text("import torch\nmake = lambda: torch.nn.Linear(4, 2)\n")
    script = tmp_path / "train_lazy.py"
    script.write_text(
        "import argparse, torch, stenograd\n"
        "args = argparse.ArgumentParser().parse_args()\n"
        "def build():\n"
        "    from mymodel import make\n"
        "    model = make()\n"
        "    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)\n"
        "    return stenograd.Trial(model, optimizer, [torch.ones(2, 4)], lambda model, x: model(x).sum())\n"
    )
    asked = ("--workers", 2, "--link", "1gbit", "--seconds", 1, "--method", "topk")
    status, _, err = here("plan", "--trial", f"{script}:build", *asked)
    assert (status, err) == (0, "")


def test_what_a_trial_prints_is_no_part_of_the_json(here, tmp_path):
    script = tmp_path / "talks.py"
    script.write_text(
        "import torch, stenograd\n"
        "def loss(model, x):\n"
        "    print('a step')\n"
        "    return model(x).sum()\n"
        "def build():\n"
        "    print('reading')\n"
        "    model = torch.nn.Linear(4, 2)\n"
        "    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)\n"
        "    return stenograd.Trial(model, optimizer, [torch.ones(2, 4)], loss)\n"
    )
    asked = ("--workers", 2, "--link", "1gbit", "--seconds", 1, "--method", "topk", "--json")
    status, out, err = here("plan", "--trial", f"{script}:build", *asked)
    assert (status, json.loads(out)["predictions"][0]["method"]) == (0, "dense")
    assert err.startswith("reading\na step\n")


def test_a_trial_s_file_does_not_stand_in_for_a_module_of_its_name(tmp_path, monkeypatch):
    """Whoever imports `queue` afterwards, such as a DataLoader, gets Python's."""
    (tmp_path / "queue.py").write_text(
        "import torch, stenograd\n"
        "def build():\n"
        "    model = torch.nn.Linear(4, 2)\n"
        "    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)\n"
        "    return stenograd.Trial(model, optimizer, [torch.ones(2, 4)], lambda model, x: model(x).sum())\n"
    )
    monkeypatch.setattr(sys, "path", [*sys.path])
    monkeypatch.setitem(sys.modules, "queue", queue)
    load_trial(f"{tmp_path / 'queue.py'}:build")
    assert sys.modules["queue"] is queue


def test_a_saved_plan_is_worked_out_for_other_numbers_of_workers(planned, here):
    """Dense is a ring's 2 (N - 1) / N times 287 kB at 1 Mbit/s: 2.3 s with two workers, 4.5 s with 64."""
    folder, _ = planned
    arguments = ("plan", "--plan", folder / "plan.json", "--workers", "1024,2,64")
    status, out, err = here(*arguments, "--json")
    assert (status, err) == (0, "")
    sizes = json.loads(out)["sizes"]
    assert [one["workers"] for one in sizes] == [2, 64, 1024]
    for p in json.loads((folder / "plan.json").read_text())["predictions"]:
        assert sizes[0]["seconds"][p["method"]] == pytest.approx(p["seconds"][1])
    dense = [one["seconds"]["dense"] for one in sizes]
    assert 1.7 < dense[1] / dense[0] < 2.4
    assert dense[2] > dense[1]  # a ring's headers and latencies
    status, out, _ = here(*arguments)
    assert status == 0
    said = " ".join(out.split())
    assert "- on paper: beyond 8 workers nothing was compared with real runs" in said
    assert "with more than 2, methods are taken to do what they do with 2" in said  # as the plan was for


def test_sizes_are_recorded_and_keys_chosen_for_the_link(here):
    """At 1 Mbit/s a round takes seconds, so the rarest rounds that are tried take 3 % less than others."""
    some = [word if word != 2 else "2,4" for word in PLAN]
    status, out, err = here(*some, "--method", "local,topk:ratio=0.05", "--json")
    assert (status, err) == (0, "")
    told = json.loads(out)
    assert {p["method"] for p in told["predictions"]} == {
        "dense",
        "local",
        "local:every=128",
        "topk:ratio=0.05",
    }
    assert [one["workers"] for one in told["sizes"]] == [2, 4]
    assert told["method"] == "local:every=128"
    assert "values that you did not write" in told["notes"][0]


def test_sizes_are_worked_out_from_the_most_that_is_recorded(here, monkeypatch):
    """Those of one worker, which sends nothing, or of two, whose methods do less, tell nothing of many."""
    asked, rehearsed, real, rehearse = [], [], cli_plan.plan, planning.rehearse
    monkeypatch.setattr(cli_plan, "RECORDED", 4)
    monkeypatch.setattr(planning, "RECORDED", 4)
    monkeypatch.setattr(cli_plan, "plan", lambda *a, **m: asked.append(m["workers"]) or real(*a, **m))
    monkeypatch.setattr(planning, "rehearse", lambda *a, **m: rehearsed.append(a[2]) or rehearse(*a, **m))
    words = ["1,8,16" if word == 2 else word for word in PLAN]
    status, out, err = here(*words, "--method", "sign", "--json")
    assert (status, err, asked, rehearsed) == (0, "", [1, 8], [1, 4])
    one, *others = (one["seconds"]["dense"] for one in json.loads(out)["sizes"])
    assert all(other > 2.0 > one for other in others)  # 2 x 7 / 8 of 287 kB take 4 s at 1 Mbit/s


def test_sizes_are_planned_for_hosts_like_those_of_the_measured_link(here, tmp_path, monkeypatch):
    """Eight workers beside four on two hosts are on four, not on eight of which each has a link to itself."""
    link, asked, real = tmp_path / "link.json", [], cli_plan.plan
    link.write_text(json.dumps(assumed("1mbit", [0, 0, 1, 1]).as_json()))

    def noted(*args, **more):
        asked.append((more["workers"], more["ranks_per_host"]))
        return real(*args, **more)

    monkeypatch.setattr(cli_plan, "plan", noted)
    words = ("--link", link, "--workers", "4,8", "--seconds", 1, "--method", "sign", "--batch-size", 64)
    status, _, err = here("plan", *words)
    assert (status, err, asked) == (0, "", [(4, 2), (8, 2)])


def test_a_plan_without_matplotlib_says_why_there_is_no_picture(planned, here, tmp_path, monkeypatch):
    monkeypatch.setitem(sys.modules, "matplotlib.figure", None)
    status, out, _ = here("plan", "--plan", planned[0] / "plan.json", "--out", tmp_path / "again")
    assert (status, "pip install stenograd[plots]" in " ".join(out.split())) == (0, True)
    assert [path.name for path in (tmp_path / "again").iterdir()] == ["plan.json"]


def _plans_where_rank_0_cannot_write(rank, words):
    def full(plan, path):
        raise OSError(28, "No space left on device")

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(Plan, "save", full)
        start = time.monotonic()
        return on_a_rank(rank, words), time.monotonic() - start


def test_ranks_end_together_where_rank_0_cannot_write_the_plan(pool, tmp_path):
    """The others waited for its answer until the timeout, and then blamed its silence."""
    words = ["plan", *PLAN[1:5], *PLAN[7:], "--method", "sign", "--timeout-s", 50, "--out", tmp_path]
    for (status, _, err), seconds in pool.run(2, _plans_where_rank_0_cannot_write, words):
        assert (status, "No space left on device" in err) == (1, True), err
        assert seconds < 40


def test_a_link_is_measured_between_two_ranks(on_two_ranks, tmp_path):
    path = tmp_path / "link.json"
    out = on_two_ranks("link", "--seconds", 2, "--out", path)
    assert "Link of 2 workers on 1 host" in out
    assert json.loads(path.read_text())["measured"]
