"""Running the command line as real processes, free of any launcher's variables, or on ranks of the pool."""

import contextlib
import io
import os
import re
import runpy
import subprocess
import sys

from launched import clean_env

from stenograd.cli import main

QUICK = ("--task", "digits", "--method", "topk:ratio=0.05", "--batch-size", "64", "--seed", "3")


def execute(command, limit_s=120, **env):
    done = subprocess.run(
        command, env=clean_env(**env), capture_output=True, text=True, timeout=limit_s, check=False
    )
    done.stderr = without_progress(done.stderr)
    return done


def without_progress(err):
    """Leave out what the first use of a kernel on a machine says, and how far a slow machine is."""
    told = re.compile(r"compiling kernels|^stenograd: .*\d s \.\.\.$")
    return "".join(line for line in err.splitlines(keepends=True) if not told.search(line))


def stenograd_command(*arguments):
    return [sys.executable, "-m", "stenograd", *map(str, arguments)]


def on_a_rank(rank, arguments):
    """Run `stenograd ARGUMENTS` as a rank that a launcher has started: status, both outputs."""
    os.environ.pop("COLUMNS", None)  # of the test in which this process was started
    return _recorded(main, "stenograd", arguments)


def script_on_a_rank(rank, script, *arguments):
    """Run a script as a rank that a launcher has started, and return what it prints."""
    path, modules = list(sys.path), set(sys.modules)
    sys.path.insert(0, str(script.parent))
    try:
        return _recorded(lambda: runpy.run_path(str(script), run_name="__main__"), str(script), arguments)[1]
    finally:
        sys.path[:] = path
        for name in set(sys.modules) - modules:  # those beside the script have names that others use too
            if str(getattr(sys.modules[name], "__file__", "")).startswith(str(script.parent)):
                del sys.modules[name]


def _recorded(function, name, arguments):
    sys.argv = [name, *map(str, arguments)]
    out, err = io.StringIO(), io.StringIO()
    with contextlib.redirect_stdout(out), contextlib.redirect_stderr(err):
        status = function()
    return status, out.getvalue(), without_progress(err.getvalue())
