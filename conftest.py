"""What holds for all tests: a time limit that ends a test's processes, too, and frameworks may be missing."""

import contextlib
import os
import signal
import sys
import time
from importlib.util import find_spec
from pathlib import Path

import pytest

_MODULES = {"lightning": "lightning", "accelerate": "accelerate", "transformers": "transformers.py"}
collect_ignore = [f"src/stenograd/{path}" for name, path in _MODULES.items() if find_spec(name) is None]

if find_spec("hypothesis"):
    from hypothesis import settings as of_examples

    # A test's limit is pytest's: on a busy machine any one example may take a second.
    of_examples.register_profile("stenograd", deadline=None)
    of_examples.load_profile("stenograd")

_OWNER = "TESTS_OF_PROCESS"  # inherited by all that tests start, also by what outlives its parent
os.environ[_OWNER] = str(os.getpid())


@pytest.hookimpl(wrapper=True, optionalhook=True)
def pytest_timeout_set_timer(item, settings):
    """When a test's time is up, kill the processes that it has started: its end may wait for theirs."""
    began = time.clock_gettime(time.CLOCK_BOOTTIME) if sys.platform == "linux" else 0.0
    taken = yield
    fail = signal.getsignal(signal.SIGALRM)

    def end(*arguments):
        for pid in _started_since(began):
            with contextlib.suppress(ProcessLookupError):
                os.kill(pid, signal.SIGKILL)
        fail(*arguments)

    if sys.platform == "linux" and callable(fail):
        signal.signal(signal.SIGALRM, end)
    return taken


def _started_since(began):
    """Yield the processes that this one's tests have started since a time, in seconds since booting."""
    mine = f"{_OWNER}={os.getpid()}".encode()
    for folder in Path("/proc").glob("[0-9]*"):
        with contextlib.suppress(OSError):  # it has just ended, or is another user's
            ticks = int((folder / "stat").read_text().rpartition(") ")[2].split()[19])
            started = ticks / os.sysconf("SC_CLK_TCK")
            if started > began and mine in (folder / "environ").read_bytes().split(b"\0"):
                yield int(folder.name)
