"""Programs in processes of their own, forks of one with torch imported: that takes a second, not four."""

import contextlib
import os
import runpy
import signal
import sys
import tempfile
import warnings
from importlib.machinery import PathFinder
from pathlib import Path
from subprocess import CompletedProcess


def python(arguments, cwd, env=None, strict=False, limit_s=300):
    """Do as `subprocess.run([sys.executable, *arguments])` does, for a script or for `-c CODE` and arguments.

    Args:
        arguments: as an interpreter takes them.
        cwd: folder to run in.
        env: the environment, or None for this process's.
        strict: whether every warning is an error.
        limit_s: seconds until the process is killed.
    """
    with tempfile.TemporaryDirectory() as folder:
        process, files = start(arguments, cwd, folder, env, strict)
        try:
            process.join(limit_s)
        finally:
            kill(process)
        out, err = (file.read_text() if file.exists() else "" for file in files)
    return CompletedProcess(arguments, process.exitcode, out, err)


def start(arguments, cwd, folder, env=None, strict=False):
    """Start what `python` runs; return the process and its two files in `folder`, of what it prints."""
    from stenograd.testing.pool import start_context

    files = [Path(folder) / name for name in ("stdout", "stderr")]
    environment = {**(os.environ if env is None else env), "OMP_NUM_THREADS": "1"}
    job = [list(map(str, arguments)), str(cwd), environment, strict, [*map(str, files)]]
    process = start_context().Process(target=_main, args=job)
    process.start()
    return process, files


def kill(process):
    """End a process that `start` has started, and all that it has started itself."""
    with contextlib.suppress(ProcessLookupError):
        os.killpg(process.pid, signal.SIGKILL)
    process.kill()
    process.join()


def _main(arguments, cwd, environment, strict, files):
    os.setsid()  # so that all that it starts can be ended with it
    for stream, name in zip((1, 2), files, strict=True):
        os.dup2(os.open(name, os.O_CREAT | os.O_WRONLY), stream)
    os.environ.clear()
    os.environ.update(environment)
    os.chdir(cwd)
    sys.path[:0] = ["", *filter(None, environment.get("PYTHONPATH", "").split(os.pathsep))]
    _forget_another_copy()
    if strict:
        warnings.simplefilter("error")
    if arguments[0] == "-c":
        sys.argv = ["-c", *arguments[2:]]
        exec(compile(arguments[1], "<string>", "exec"), {"__name__": "__main__"})
    else:
        sys.path[0] = str(Path(arguments[0]).parent)
        sys.argv = arguments
        runpy.run_path(arguments[0], run_name="__main__")


def _forget_another_copy():
    """This process was forked from one that has Stenograd imported; PYTHONPATH may name a copy of it."""
    loaded, wanted = sys.modules.get("stenograd"), PathFinder.find_spec("stenograd", sys.path)
    if loaded is not None and wanted is not None and wanted.origin != loaded.__file__:
        for name in [name for name in sys.modules if name.partition(".")[0] == "stenograd"]:
            del sys.modules[name]
