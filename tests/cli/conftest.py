"""How these tests run the command: as real processes, or in this one where no rank is started."""

import os
import sys

import pytest
from cli_process import LAUNCHER_VARIABLES, QUICK, execute, laconic_command

from laconic.cli import main


@pytest.fixture
def command():
    """Run `laconic ARGUMENTS` as a process."""
    return lambda *arguments, **env: execute(laconic_command(*arguments), **env)


@pytest.fixture
def here(monkeypatch, capsys):
    """Run `laconic ARGUMENTS` in this process: status, standard output, standard error."""
    for key in list(os.environ):
        if key.startswith(LAUNCHER_VARIABLES):
            monkeypatch.delenv(key)

    def run(*arguments):
        monkeypatch.setattr(sys, "argv", ["laconic", *map(str, arguments)])
        status = main()
        out, err = capsys.readouterr()
        return status, out, err

    return run


@pytest.fixture(scope="session")
def trained(tmp_path_factory):
    """A run of two workers over two epochs; copy it before changing it."""
    folder = tmp_path_factory.mktemp("trained") / "run"
    done = execute(laconic_command("train", *QUICK, "--workers", 2, "--epochs", 2, "--out", folder))
    assert (done.returncode, done.stderr) == (0, "")
    return folder, done.stdout
