"""`stenograd rendezvous`, and the options of open runs."""

import contextlib
import json
import re
import subprocess
import sys
from dataclasses import fields
from itertools import islice
from types import SimpleNamespace

import pytest
from launched import clean_env

from stenograd.checkpoint.files import check_rank, read_manifest, saved_steps
from stenograd.cli import train
from stenograd.cli.folder import RunFolder
from stenograd.cli.loop import Progress, Row, endless
from stenograd.cli.open import _Work
from stenograd.cli.options import TrainOptions
from stenograd.cli.setup import make_setup
from stenograd.errors import ConfigError
from stenograd.launch.detect import World
from stenograd.launch.local_workers import run_local
from stenograd.launch.membership import Membership
from stenograd.launch.plans import Arrival


def test_a_rendezvous_says_what_to_export_and_workers_meet_there():
    command = [sys.executable, "-m", "stenograd", "rendezvous", "--port", "0"]
    pipes = {"stdout": subprocess.PIPE, "stderr": subprocess.PIPE, "text": True}
    with subprocess.Popen(command, env=clean_env(), **pipes) as process, contextlib.ExitStack() as stack:
        stack.callback(process.kill)
        (port,) = re.fullmatch(r"export STENOGRAD_OPEN=\S+:(\d+)\n", process.stdout.readline()).groups()
        member = Membership(f"127.0.0.1:{port}", World(0, 1, 0, 1, "alone"), 10.0)
        member.enter({})
        assert member.meet(Arrival(0, -1), 0.5, 0.0).ranks == (0,)
        member.close()
        process.terminate()  # SIGINT is ignored where a shell starts tests in the background
        assert process.wait(20) == 0
        assert "The run lives as long as this process" in process.stderr.read()


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["train", "--keep", "--workers", "2"], "--keep needs a method with a quorum, got dense"),
        (["train", "--keep", "--method", "diloco:quorum=0.5"], "--keep does nothing without --workers"),
        (
            ["train", "--method", "diloco:quorum=0.5", "--save-steps", "5", "--out", "/proc/self"],
            "--save-steps does nothing with a quorum",
        ),
        (["rendezvous", "--port", "70000"], "--port must be from 0 to 65535, got 70000"),
    ],
)
def test_wrong_options_are_refused(arguments, message, capsys, monkeypatch):
    from stenograd.cli import main

    monkeypatch.setattr(sys, "argv", ["stenograd", *arguments])
    assert main() == 2
    assert message in capsys.readouterr().err


def test_workers_that_are_to_be_started_again_must_form_an_open_run():
    with pytest.raises(ConfigError, match="keep must be False without open_run"):
        run_local([sys.executable, "-c", ""], 2, keep=True)


def test_a_worker_that_cannot_start_is_given_up_and_its_status_returned(capfd):
    code = "import sys; sys.exit(3)"
    assert run_local([sys.executable, "-c", code], 2, open_run=True, keep=True) == 3
    said = capfd.readouterr().err
    assert said.count("it is started again") == 2 * 4
    assert said.count("the others go on") == 2


def test_one_that_succeeds_is_enough(capfd):
    code = "import os, sys, time; r = int(os.environ['RANK']); time.sleep(1 - r); sys.exit(r)"
    assert run_local([sys.executable, "-c", code], 2, open_run=True) == 0
    assert "worker 1 exited with status 1; the others go on" in capfd.readouterr().err


def test_a_new_run_does_not_go_on_in_the_folder_of_an_old_one(tmp_path):
    command = [sys.executable, "-m", "stenograd", "train", "--task", "digits", "--epochs", "1"]
    command += ["--method", "local:every=4,quorum=0.5", "--out", str(tmp_path / "out")]
    done = [
        subprocess.run(
            command,
            env=clean_env(STENOGRAD_OPEN=str(tmp_path / store), OMP_NUM_THREADS="1"),
            capture_output=True,
            text=True,
            timeout=100,
        )
        for store in ("first", "second")
    ]
    assert [one.returncode for one in done] == [0, 2], done
    assert "--out must not hold a run" in done[1].stderr


def test_workers_without_a_launcher_train_on_batches_of_their_own():
    """Each is the start of one, so all have one shard; the first has it in the order of a fixed world."""
    setup, fixed = make_setup(TrainOptions(), 1), Progress(epoch=1)
    fixed.join(1)
    first, second = (list(islice(endless(setup, rank, 1), setup.steps)) for rank in (0, 1))
    assert [batch.tolist() for batch in first] == [batch.tolist() for batch in fixed.batches(setup, 0)]
    samples = [[int(sample) for batch in batches for sample in batch] for batches in (first, second)]
    assert samples[0] != samples[1]
    assert sorted(samples[0]) == sorted(samples[1])


def test_what_a_shell_has_exported_is_for_its_workers_alone(here, unlaunched, tmp_path):
    """Others have a world of their own: as ranks of the run they would fix how many begin it."""
    store, begun = tmp_path / "store", []
    unlaunched.setenv("STENOGRAD_OPEN", str(store))
    unlaunched.setattr("stenograd.cli.setup.run_local", lambda *_, env, **__: begun.append(env) or 0)
    asked = ("train", "--workers", 2, "--method", "diloco:quorum=0.5")
    status, _, err = here(*asked)
    assert (status, "--workers does nothing where STENOGRAD_OPEN names the run" in err) == (2, True)
    before = {"identity": {}, "options": {"workers": 2, "method": "diloco:quorum=0.5"}}
    (tmp_path / "run.json").write_text(json.dumps(before))
    assert train._remembered(TrainOptions(out=tmp_path, resume=True)).workers is None
    assert here(*asked[:3])[0] == 0
    assert "STENOGRAD_OPEN" not in begun[0]
    plan = ("plan", "--workers", 2, "--link", "1mbit", "--method", "sign", "--seconds", 1)
    for words, found in ((plan, "times as fast as dense"), (("doctor",), "works")):
        unlaunched.setenv("STENOGRAD_OPEN", str(store))
        status, out, _ = here(*words)
        assert (status, found in out, store.exists()) == (0, True, False), out


def _row(epoch):
    values = {f.name: 1 for f in fields(Row)}
    return Row(**values | {"epoch": epoch})


def _here(now=0, claimed=()):
    """Return what a worker knows of an open run in which it is alone."""
    done = {*claimed}
    return SimpleNamespace(
        now=now, turn=lambda what: contextlib.nullcontext(), claim=done.add, claimed=lambda what: what in done
    )


def test_a_worker_that_evaluates_for_too_long_writes_over_no_later_epoch(tmp_path, capsys):
    """Its checkpoint has a lower number than that of who spoke meanwhile, which it deleted."""
    folder, saved = RunFolder(tmp_path, {}), []
    folder.append(_row(1))
    work = object.__new__(_Work)
    work._folder, work._setup = folder, SimpleNamespace(epochs=3)
    work._sync = SimpleNamespace(members=(0, 1), round=4)
    work._here = _here()
    work._row = lambda epoch, score: _row(epoch)
    folder.save = lambda trainer, rows: saved.append([row.epoch for row in rows])
    work.trainer = SimpleNamespace(taken=0)
    work._evaluated = lambda: folder.append(_row(3))  # another worker
    work._end_epoch(2)
    assert ([row.epoch for row in folder.rows()], saved) == ([1, 3], [])
    work._evaluated = lambda: None
    work._end_epoch(4)
    assert ([row.epoch for row in folder.rows()], saved) == ([1, 3, 4], [[1, 3, 4]])
    assert "epoch 2/3" in capsys.readouterr().out


def test_checkpoints_are_numbered_by_rounds_and_none_replaces_that_of_a_later_one():
    """By steps, what a worker saves that has just come would count as older, and deletes what does not."""
    work, saved = object.__new__(_Work), []
    work._rows, work._here = [], _here(now=7)
    work.trainer = SimpleNamespace(taken=2)
    folder = SimpleNamespace(save=lambda trainer, rows: saved.append(trainer.taken))
    for number in (7, 5, 7):  # a worker that has missed rounds is asked to stop, as all are
        work._sync = SimpleNamespace(round=number)
        work._save(folder)
    assert saved == [7, 7]


def test_epochs_after_the_checkpoint_that_is_resumed_are_trained_again(tmp_path):
    """A crash in a save leaves such an epoch, which would count as over: nobody would save after it."""
    folder, work = RunFolder(tmp_path, {}), object.__new__(_Work)
    folder.append(_row(1))
    folder.append(_row(2))
    work._folder, work._begins, work._ready = folder, True, SimpleNamespace(about={})
    work._before, work._rows = folder.rows(), [_row(1)]
    work._begin()
    assert [row.epoch for row in folder.rows()] == [1]
    work._before = []  # others have been faster
    work._rows = []
    work._begin()
    assert [row.epoch for row in folder.rows()] == [1]


SAVING = """
import sys, torch, stenograd
world = stenograd.init()
model = torch.nn.Linear(4, 2)
optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
with stenograd.distribute(model, optimizer, "local:every=1,quorum=0.5,grace=0.1") as sync:
    for step in range(1, 21):
        model(torch.ones(1, 4)).sum().backward()
        optimizer.step()
        stenograd.save_checkpoint(sys.argv[1], step=step, model=model, optimizer=optimizer, sync=sync)
"""


def test_two_workers_that_save_at_the_same_moment_leave_a_whole_checkpoint(tmp_path, capfd):
    assert run_local([sys.executable, "-c", SAVING, str(tmp_path)], 2, open_run=True) == 0
    assert "exited" not in capfd.readouterr().err
    newest = saved_steps(tmp_path)[-1]
    manifest = read_manifest(tmp_path, newest)
    assert (newest, manifest.world_size) == (20, 1)
    check_rank(tmp_path, manifest, 0)
    assert not list(tmp_path.glob(".*.part"))


PATCHED = """
import os, signal, sys, time
from stenograd.cli import main
from stenograd.cli.loop import Trainer
from stenograd.cli.open import _Work
if os.environ["RANK"] == "{rank}":
    {patch}
sys.exit(main())
"""
LOST = "_Work._evaluated = lambda self: os.kill(os.getpid(), signal.SIGKILL)"
SLOW = "take = Trainer.take_step; Trainer.take_step = lambda *a: (time.sleep(0.5), take(*a))[1]"


@pytest.mark.parametrize(("rank", "patch"), [(0, LOST), (1, SLOW)], ids=["lost", "slow"])
def test_one_worker_writes_the_results(tmp_path, capfd, rank, patch):
    """Also where the first is lost before it has, and where another has missed the last rounds."""
    words = ["train", "--task", "digits", "--epochs", "1", "--out", str(tmp_path / "out")]
    words += ["--method", "local:every=4,quorum=0.5,grace=0.1"]
    code = PATCHED.format(rank=rank, patch=patch)
    assert run_local([sys.executable, "-c", code, *words], 2, open_run=True) == 0
    assert capfd.readouterr().out.count(" rounds: eval accuracy") == 1
    rows = RunFolder(tmp_path / "out", {}).rows()
    assert [row.epoch for row in rows] == [1]
    result = json.loads((tmp_path / "out" / "result.json").read_text())
    assert result["eval_accuracy"] == rows[0].eval_accuracy
