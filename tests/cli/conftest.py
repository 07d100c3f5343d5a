"""How these tests run the command: as real processes, or in this one where no rank is started."""

import fcntl
import os
import sys

import pytest
from cli_process import QUICK, execute, on_a_rank, stenograd_command, without_progress

import stenograd
from stenograd.cli import main


@pytest.fixture
def command():
    """Run `stenograd ARGUMENTS` as a process."""
    return lambda *arguments, **env: execute(stenograd_command(*arguments), **env)


@pytest.fixture
def here(unlaunched, capsys):
    """Run `stenograd ARGUMENTS` in this process: status, standard output, standard error."""

    def run(*arguments):
        unlaunched.setattr(sys, "argv", ["stenograd", *map(str, arguments)])
        status = main()
        out, err = capsys.readouterr()
        return status, out, without_progress(err)

    yield run
    stenograd.shutdown()


@pytest.fixture
def on_two_ranks(pool):
    """Run `stenograd ARGUMENTS` as the two ranks of a launch, and return what rank 0 prints.

    It is what `--workers 2` and the launchers lead to, without the seconds that fresh interpreters take.
    """

    def run(*arguments):
        first, second = pool.run(2, on_a_rank, arguments)
        assert [first[0], *second, first[2]] == [0, 0, "", "", ""]
        return first[1]

    return run


@pytest.fixture(scope="session")
def trained(tmp_path_factory):
    """A run of two workers over two epochs, which all test processes share; copy it before changing it."""
    base = tmp_path_factory.getbasetemp()
    base = base.parent if "PYTEST_XDIST_WORKER" in os.environ else base
    folder, told = base / "trained" / "run", base / "trained" / "output"
    (base / "trained").mkdir(exist_ok=True)
    with (base / "trained" / "lock").open("w") as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)
        if not told.exists():
            done = execute(stenograd_command("train", *QUICK, "--workers", 2, "--epochs", 2, "--out", folder))
            assert (done.returncode, done.stderr) == (0, "")
            told.write_text(done.stdout)
    return folder, told.read_text()
