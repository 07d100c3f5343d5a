"""`stenograd rendezvous`, and the options of open runs."""

import contextlib
import re
import subprocess
import sys

import pytest
from launched import clean_env

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
