"""`stenograd plan`, `simulate` and `link` on the command line."""

import json
import shutil

import pytest

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
    status, out, err = here(*PLAN, "--methods", "topk:ratio=0.05", "--out", folder)
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
    assert (folder / "report.html").read_text().startswith("<!DOCTYPE html>")
    status, again, _ = here("plan", "--plan", folder / "plan.json", "--json")
    assert status == 0
    assert json.loads(again)["predictions"] == told["predictions"]


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
    assert here(*PLAN, "--methods", "local:every=4", "--out", plan)[0] == 0
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


def test_a_saved_plan_is_read_for_another_link_and_accuracy(planned, here):
    """At 100 Gbit/s nothing that costs computing pays; what cannot be changed afterwards is refused."""
    saved = ("plan", "--plan", planned[0] / "plan.json")
    for more in (("--link", "100gbit"), ("--accuracy", "exact")):
        status, out, _ = here(*saved, *more, "--json")
        assert (status, json.loads(out)["method"]) == (0, "dense")
    for more in (("--workers", 64), ("--methods", "sign"), ("--cores", 2), ("--ranks-per-host", 2)):
        status, _, err = here(*saved, *more)
        assert (status, f"{more[0]} must be left out with --plan" in err) == (2, True)


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
    asked = ("--workers", 2, "--link", "1gbit", "--seconds", 1, "--methods", "topk")
    status, _, err = here("plan", "--trial", f"{script}:build", *asked)
    assert (status, err) == (0, "")


def test_virtual_workers_tell_what_a_method_does_to_learning(planned, here, trained, tmp_path):
    """It begins with the weights of a run, which have learned; nothing is claimed about the end."""
    folder, _ = planned
    learn = ("plan", "--plan", folder / "plan.json", "--task", "digits", "--batch-size", 64, "--learn")
    few = ("--learn-steps", 10, "--learn-seeds", 2, "--out", folder)
    status, out, err = here(*learn, *few, "--learn-from", trained[0])
    assert (status, err) == (0, "")
    words = " ".join(out.split())
    assert "training 2 virtual workers for 10 steps, 2 times for dense and each of 1 methods" in words
    assert "- topk:ratio=0.05: " in words
    assert "where training ends is not predicted: stenograd compare trains to the end" in words
    told = json.loads((folder / "learned.json").read_text())
    assert (told["workers"], told["results"][0]["method"]) == (2, "topk:ratio=0.05")
    assert told["first"] < 2.27  # ln 10 = 2.30 for a new model
    assert "<h2>Learning</h2>" in (folder / "report.html").read_text()
    status, out, _ = here(*learn, *few[:4], "--json")
    assert (status, json.loads(out)["learning"]["steps"]) == (0, 10)  # nothing but JSON
    other = ("plan", "--plan", folder / "plan.json", "--task", "glyphs", "--learn")
    status, _, err = here(*other)
    assert (status, "the plan is for digits, --learn would train glyphs" in err) == (2, True)
    (tmp_path / "empty").mkdir()
    status, _, err = here(*learn, "--learn-from", tmp_path / "empty")
    assert (status, "--learn-from" in err) == (2, True)


def test_a_plan_is_extrapolated(planned, here):
    folder, _ = planned
    arguments = ("simulate", folder / "plan.json", "--workers", "2..8", "--json")
    status, out, err = here(*arguments)
    assert (status, err) == (0, "")
    points = json.loads(out)
    assert [point["workers"] for point in points] == [2, 4, 8]
    told = json.loads((folder / "plan.json").read_text())["predictions"]
    for p in told:
        assert points[0]["seconds"][p["method"]] == pytest.approx(p["seconds"][1])
    status, out, _ = here(*arguments[:-1])
    assert status == 0
    assert "recorded with 2 workers" in out


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ((*PLAN, "--accuracy", "perfect"), "accuracy must be one of exact, rounded, lossy"),
        (("plan", "--workers", 2, "--link", "1gbps"), "write 1gbit"),
        ((*PLAN[:5], "--link", "1gbit", "--workers", 0), "--workers must be"),
        ((*PLAN, "--cores", 0), "--cores must be above 0"),
        ((*PLAN, "--ranks-per-host", 0), "--ranks-per-host must be"),
        ((*PLAN[:-1], "nan"), "--seconds must be above 0 and finite"),
        ((*PLAN, "--learn-from", "x.pt"), "--learn-from needs --learn"),
        (("plan",), "give --link 1gbit,0.2ms and --workers"),
        (("plan", "--learn"), "needs --link or --plan and no launcher"),
        (("plan", "--trial", "x.py", "--link", "1gbit"), "must be FILE.py:FUNCTION"),
        (("simulate", "nowhere.json"), "cannot be read as a plan"),
        (("link",), "--workers must be at least 2 to measure a link"),
    ],
)
def test_wrong_options_are_refused(here, arguments, message):
    status, _, err = here(*arguments)
    assert status == 2
    assert message in err


def test_a_link_is_measured_between_two_ranks(on_two_ranks, tmp_path):
    path = tmp_path / "link.json"
    out = on_two_ranks("link", "--seconds", 2, "--out", path)
    assert "Link of 2 workers on one host" in out
    assert json.loads(path.read_text())["measured"]
