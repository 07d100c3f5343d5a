"""Wrong input: one line on standard error, the right status, before any worker starts."""

import os
import re
import shutil
import sys

import pytest
from cli_process import QUICK, execute

from stenograd.cli.folder import RunFolder
from stenograd.cli.plan import read_run
from stenograd.errors import CheckpointError, DataError
from stenograd.planning.link import load_link
from stenograd.planning.plan import load_plan

PIPE, ENDLESS = "a pipe", "a link to /dev/zero"

PLAN = ["plan", "--batch-size", "64", "--workers", "2", "--link", "1mbit,0.1ms", "--seconds", "1"]
TRIAL = ["plan", "--trial", "x.py:f", "--link", "1gbit", "--workers", "2"]
CASES = {
    "no such command": (["nonsense"], "No such command"),
    "no such option": (["train", "--foo"], "No such option"),
    "not a number": (["train", "--epochs", "x"], "--epochs"),
    "unknown method": (["train", "--method", "topq"], "did you mean 'topk'"),
    "unknown key": (["train", "--method", "topk:ration=0.1"], "did you mean 'ratio'"),
    "value out of range": (
        ["train", "--method", "topk:ratio=2", "--workers", "2"],
        "ratio must be in (0, 1]",
    ),
    "unknown task": (["train", "--task", "cifar"], "Invalid value for '--task'"),
    "no data": (["train", "--task", "mnist"], "--data"),
    "data for digits": (["train", "--data", "x"], "data must be None"),
    "missing folder": (["train", "--task", "mnist", "--data", "nowhere"], "nowhere: expected a folder"),
    "missing text": (["train", "--task", "text", "--data", "nowhere.txt"], "nowhere.txt"),
    "negative epochs": (["train", "--epochs", "-1"], "--epochs must be at least 0"),
    "bad batch": (["train", "--batch-size", "0"], "--batch-size must be at least 1"),
    "bad rate": (["train", "--lr", "0"], "lr must be finite and > 0"),
    "bad momentum": (["train", "--momentum", "1"], "momentum must be in [0, 1)"),
    "bad decay": (["train", "--weight-decay", "-1"], "weight_decay must be"),
    "bad seed": (["train", "--seed", "-1"], "--seed must be"),
    "bad shards": (["train", "--shards", "odd"], "Invalid value for '--shards'"),
    "bad bucket": (["train", "--bucket-bytes", "0"], "bucket_bytes"),
    "bad timeout": (["train", "--timeout-s", "0"], "--timeout-s must be"),
    "bad threads": (["train", "--threads", "0"], "--threads must be"),
    "bad device": (["train", "--device", "tpu"], "Invalid value for '--device'"),
    "no worker": (["train", "--workers", "0"], "--workers must be at least 1"),
    "more workers than samples": (["train", "--workers", "2000"], "1437 samples for 2000 ranks"),
    "resume without a folder": (["train", "--resume"], "--resume needs --out"),
    "bad save interval": (["train", "--save-every", "0"], "--save-every must be"),
    "bad step interval": (["train", "--save-steps", "0"], "--save-steps must be"),
    "steps without a folder": (["train", "--save-steps", "5"], "--save-steps needs --out"),
    "out is a file": (["train", "--out", __file__], "--out must be a folder"),
    "out cannot be written": (
        ["compare", "--method", "dense", "--epochs", "1", "--out", "/proc/self"],
        "--out must be a folder that can be",
    ),
    "compare nothing": (["compare", "--method", ","], "--method must name"),
    "compare no epochs": (["compare", "--epochs", "0"], "--epochs must be at least 1"),
    "one bad method of two": (
        ["compare", "--method", "dense", "--method", "foo", "--workers", "2"],
        "unknown method 'foo'",
    ),
    "a method with keys": (["methods", "topk:ratio=0.1"], "stenograd methods topk"),
    "no such name": (["methods", "topq"], "did you mean 'topk'"),
    "tensor of nothing": (["methods", "--size", "0"], "--size must be at least 1"),
    "no size at all": (["methods", "--size", ""], "--size"),
    "not a count": (["methods", "--size", "nan"], "--size"),
    "size beyond memory": (["methods", "--size", "99999999999999"], "--size must be at most 2147483647"),
    "size times workers": (
        ["methods", "--size", "2000000000", "--workers", "1000"],
        "--size times --workers must be at most 1073741824",
    ),
    "a crowd": (["methods", "--workers", "1000000"], "--workers must be at most 1024"),
    "a million processes": (["train", "--workers", "1000000"], "--workers must be at most 4096"),
    "block beyond int64": (["train", "--method", f"sign:block={10**22}"], "sign: block must be from -2^63"),
    "block beyond int32": (
        ["train", "--method", "qsgd:block=4294967296"],
        "block must be at most 2147483647",
    ),
    "rank beyond int32": (["train", "--method", "powersgd:rank=2147483648"], "rank must be at most"),
    "seed beyond int64": (["train", "--method", f"randomk:seed=-{10**22}"], "seed must be from -2^63"),
    "no number": (["train", "--method", "topk:ratio=nan"], "ratio must be in (0, 1], got nan"),
    "no method": (["train", "--method", ""], "unknown method ''"),
    "endless": (["train", "--epochs", f"{10**25}"], "--epochs must be at most"),
    "everything at once": (["train", "--batch-size", f"{10**25}"], "--batch-size must be at most"),
    "patient": (["train", "--timeout-s", "1e300"], "--timeout-s must be above 0 and at most 31536000"),
    "no time": (["train", "--timeout-s", "nan"], "--timeout-s must be above 0"),
    "many threads": (["train", "--threads", "100000"], "--threads must be at most 1024"),
    "more threads": (["train", "--threads", "99999999999"], "--threads must be at most 1024"),
    "out is empty": (["train", "--out", ""], "'--out': it is empty"),
    "data is empty": (["train", "--task", "text", "--data", ""], "'--data': it is empty"),
    "trace is empty": (["train", "--trace", ""], "'--trace': it is empty"),
    "no folder for checkpoints": (["train", "--save-every", "2"], "--save-every needs --out"),
    "a method with =": (["train", "--method", "topk=0.05"], "write topk:ratio=0.05"),
    "a method with a blank": (["train", "--method", "topk ratio=0.05"], "write topk:ratio=0.05"),
    "percent": (["train", "--method", "topk:ratio=5%"], "write ratio=0.05"),
    "methods apart": (["compare", "--method", "dense", "topk"], "of its own: --method dense --method topk"),
    "no unit": (["emulate", "--rate", "100", "--", "true"], "write 100mbit"),
    "no hosts": (["emulate", "--hosts", "0", "--", "true"], "--hosts must be at least 1"),
    "a lone worker": (["link"], "--workers must be at least 2 to measure a link"),
    "nothing to plan for": (["plan"], "give --link 1gbit,0.2ms and --workers"),
    "no link": (["plan", "--workers", "4"], "give --link 1gbit,0.2ms and --workers"),
    "no workers": (["plan", "--link", "1gbit"], "--link needs --workers"),
    "a wrong unit": (["plan", "--workers", "2", "--link", "1gbps"], "write 1gbit"),
    "a slash": (["plan", "--workers", "2", "--link", "100mbit/0.2ms"], "write 100mbit,0.2ms"),
    "a mere number": (["plan", "--workers", "2", "--link", "100"], "write 100mbit"),
    "no such plan": (["plan", "--plan", "nowhere.json"], "cannot be read as a plan"),
    "a range of workers": (["plan", "--link", "1gbit", "--workers", "2..8"], "separated by commas"),
    "workers of no plan": (["plan", "--link", "1gbit", "--workers", "0"], "--workers must be"),
    "uneven hosts": (
        ["plan", "--link", "1mbit", "--workers", "8,12", "--ranks-per-host", "8"],
        "divide the 12 workers, got 8",
    ),
    "two methods to train": (
        ["train", "--method", "dense", "--method", "topk"],
        "--method is given more than once: give it once; stenograd compare takes several",
    ),
    "two seeds": (["compare", "--seed", "1", "--seed", "2"], "--seed is given more than once: give it once"),
    "two sizes": (["methods", "topk", "--size", "1", "--size", "2"], "--size is given more than once"),
    "hosts twice": (["emulate", "--hosts", "2", "--hosts", "3", "x"], "--hosts is given more than once"),
    "an empty plan": (["plan", "--plan", ""], "Invalid value for '--plan': it is empty"),
    "an empty file": (["link", "--out", ""], "Invalid value for '--out': it is empty"),
    "accuracy": ([*PLAN, "--accuracy", "perfect"], "Invalid value for '--accuracy'"),
    "no cores": ([*PLAN, "--cores", "0"], "--cores must be above 0"),
    "no ranks": ([*PLAN, "--ranks-per-host", "0"], "--ranks-per-host must be"),
    "no seconds": ([*PLAN[:-2], "--seconds", "nan"], "--seconds must be above 0 and finite"),
    "epochs of a plan": ([*PLAN, "--epochs", "3"], "No such option: --epochs"),
    "what was learnt": ([*PLAN, "--learn-from", "x.pt"], "--learn-from is no more: use stenograd compare"),
    "learning": (["plan", "--learn"], "--learn is no more: use stenograd compare"),
    "simulation": (["simulate", "plan.json"], "use stenograd plan --plan PLAN --workers 2,64,1024"),
    "no function": ([*TRIAL[:2], "x.py", *TRIAL[3:]], "must be FILE.py:FUNCTION"),
    "a task beside a trial": ([*TRIAL, "--task", "digits"], "--task does nothing"),
    "a rate beside a trial": ([*TRIAL, "--lr", "0.1"], "--lr does nothing"),
    "threads beside a plan": (["plan", "--plan", "p.json", "--threads", "2"], "--threads does nothing"),
    "seconds beside a plan": (["plan", "--plan", "p.json", "--seconds", "2"], "--seconds does nothing"),
    "a timeout of one process": ([*PLAN, "--timeout-s", "9"], "--timeout-s does nothing"),
    "a tolerance of nothing": ([*PLAN, "--tolerance", "0.5"], "--tolerance does nothing"),
}


@pytest.mark.parametrize("case", CASES)
def test_one_line_and_status_2(case, here):
    arguments, reason = CASES[case]
    status, out, err = here(*arguments)
    assert (status, out, err.count("\n")) == (2, "", 1), err
    assert err.startswith("stenograd: error: ")
    assert err.count(reason) == 1, err


def test_a_trace_is_no_folder(here, tmp_path):
    status, _, err = here("train", "--epochs", "0", "--trace", tmp_path)
    assert (status, err.count("\n"), "the trace must be a file, got the folder" in err) == (2, 1, True)


def test_debug_shows_the_traceback(here, monkeypatch):
    monkeypatch.setenv("STENOGRAD_DEBUG", "1")
    with pytest.raises(ValueError, match="--seed must be"):
        here("train", "--seed", "-1")


def test_workers_against_the_launcher(here, monkeypatch):
    for key, value in {
        "RANK": "0",
        "WORLD_SIZE": "3",
        "MASTER_ADDR": "localhost",
        "MASTER_PORT": "1",
    }.items():
        monkeypatch.setenv(key, value)
    status, _, err = here("train", "--workers", "2")
    assert (status, "world size 3 (torchrun), got 2" in err) == (2, True)


def test_a_host_that_lacks_the_run_says_so(here, monkeypatch, tmp_path):
    """Only rank 0 would have, which is on another host and waits for this one."""
    launch = {"RANK": "1", "WORLD_SIZE": "2", "LOCAL_RANK": "0", "LOCAL_WORLD_SIZE": "1"}
    for key, value in {**launch, "MASTER_ADDR": "localhost", "MASTER_PORT": "1"}.items():
        monkeypatch.setenv(key, value)
    status, _, err = here("train", "--resume", "--out", tmp_path / "nowhere")
    assert (status, "nowhere holds none" in err) == (2, True)


def test_a_run_is_not_written_over(here, trained):
    folder, _ = trained
    before = {path.name: path.read_bytes() for path in folder.iterdir()}
    status, _, err = here("train", *QUICK, "--workers", 2, "--out", folder)
    assert (status, "--resume continues it" in err) == (2, True)
    assert {path.name: path.read_bytes() for path in folder.iterdir()} == before


@pytest.mark.parametrize(
    ("change", "reason"),
    [
        (("--seed", "4"), "seed is 3 there and 4 now"),
        (("--method", "sign"), "method is topk:ratio=0.05 there and sign now"),
        (("--lr", "0.01"), "recipe.lr is 0.05 there and 0.01 now"),
        (("--task", "text"), "task is digits there and text now"),
    ],
)
def test_another_run_is_not_continued(here, trained, change, reason):
    words = [word for at in range(0, len(QUICK), 2) if QUICK[at] != change[0] for word in QUICK[at : at + 2]]
    status, _, err = here("train", *words, "--workers", 2, *change, "--out", trained[0], "--resume")
    assert (status, err.count("\n")) == (2, 1)
    assert "run.json" in err
    assert reason in err


def test_damaged_run_json(here, trained, tmp_path):
    folder = shutil.copytree(trained[0], tmp_path / "run")
    (folder / "run.json").write_text("{")
    status, _, err = here("train", *QUICK, "--workers", 2, "--out", folder, "--resume")
    assert (status, "run.json: cannot be read" in err) == (2, True)


def test_version_and_help(command, here):
    done = command("--version")
    assert (done.returncode, done.stdout.split()[0], done.stderr) == (0, "stenograd", "")
    for name in ("train", "compare", "methods", "doctor"):
        status, out, err = here(name, "--help")
        assert (status, err, f"stenograd {name}" in out) == (0, "", True)
    options = here("train", "--help")[1]
    assert "--workers" in options
    assert not re.search(r"--(keep|resume) +[<\w]*bool", options, re.I)
    assert "compare" in here()[1]


def test_help_needs_no_torch(command):
    """Importing torch takes seconds; asking for help should not."""
    code = "import sys, stenograd.cli; sys.exit('torch' in sys.modules)"
    assert execute([sys.executable, "-c", code]).returncode == 0


def test_a_programs_own_modules_do_not_stand_in_for_pythons(tmp_path, monkeypatch):
    """In the folder where workers start; `python -m` would look there first."""
    for name in ("queue", "json", "types", "random"):
        (tmp_path / f"{name}.py").write_text("raise SystemExit('the wrong module')\n")
    monkeypatch.chdir(tmp_path)
    start = "import sys; sys.path.remove(''); from stenograd.cli import main; sys.exit(main())"
    ran = execute([sys.executable, "-c", start, "train", *QUICK, "--epochs", "0", "--workers", "2"])
    assert ran.returncode == 0, ran.stderr


@pytest.mark.parametrize("read", ["link", "plan", "run", "options"])
@pytest.mark.parametrize("text", ["", "3", "[]", "null", '{"identity": 3}', "[" * 100_000, PIPE, ENDLESS])
def test_what_is_no_file_of_ours_is_named(tmp_path, read, text):
    """Whoever reads JSON; a pipe or /dev/zero ends, too."""
    readers = {
        "link": lambda: load_link(tmp_path / "link.json"),
        "plan": lambda: load_plan(tmp_path / "plan.json"),
        "run": lambda: read_run(tmp_path),
        "options": lambda: RunFolder(tmp_path, {}).check(resume=True),
    }
    for name in ("link.json", "plan.json", "run.json", "steps.json"):
        file = tmp_path / name
        if text == PIPE:
            os.mkfifo(file)
        elif text == ENDLESS:
            file.symlink_to("/dev/zero")
        else:
            file.write_text(text)
    with pytest.raises((DataError, CheckpointError), match=str(tmp_path)):
        readers[read]()
