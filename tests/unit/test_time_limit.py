"""A test that takes too long fails, its processes end with it, and the next test finds sound ranks."""

import importlib
import os
import pickle
import shutil
import signal
import subprocess
import sys
import threading
import time
from pathlib import Path

import pytest
from support.processes import runs

from stenograd.testing.pool import RanksFailed

ROOT = Path(__file__).parents[2]
linux_only = pytest.mark.skipif(sys.platform != "linux", reason="looks for processes in /proc")

# A child, and a grandchild whose parent is gone; leaving the `with` block waits for the child.
WAITS = """
import subprocess, sys

SLEEP = "import os, time; open(sys.argv[1], 'w').write(str(os.getpid())); time.sleep(600)"


def test_waits(tmp_path):
    leave = "import subprocess, sys; subprocess.Popen([sys.executable, '-S', '-c', *sys.argv[1:]])"
    code = "import sys;" + SLEEP
    subprocess.run([sys.executable, "-S", "-c", leave, code, str(tmp_path / "orphan")], check=True)
    with subprocess.Popen([sys.executable, "-S", "-c", code, str(tmp_path / "child")]) as child:
        child.wait()


def test_next():
    pass
"""


@linux_only
def test_a_test_that_takes_too_long_fails_alone_and_leaves_no_process(tmp_path):
    shutil.copy(ROOT / "conftest.py", tmp_path)
    (tmp_path / "test_waits.py").write_text(WAITS)
    command = [sys.executable, "-m", "pytest", "-q", "--timeout", "5", "--basetemp", str(tmp_path / "base")]
    done = subprocess.run([*command, str(tmp_path)], capture_output=True, text=True, timeout=200, check=False)
    assert "Timeout" in done.stdout
    assert "1 failed, 1 passed" in done.stdout, done.stdout
    pids = {int(file.read_text()) for file in tmp_path.glob("base/*/*") if file.is_file()}
    assert len(pids) == 2
    assert not any(runs(pid) for pid in pids)


def _told(rank, seconds, folder):
    (Path(folder) / str(rank)).write_text(str(os.getpid()))
    time.sleep(seconds)
    return rank


class _TimeIsUpError(Exception):
    pass


def test_ranks_that_a_test_was_waiting_for_end_with_it_and_others_take_their_place(pool, tmp_path):
    def up(*_):
        if len(list(tmp_path.iterdir())) == 2:
            raise _TimeIsUpError
        signal.setitimer(signal.ITIMER_REAL, 0.1)

    before = signal.signal(signal.SIGALRM, up), signal.setitimer(signal.ITIMER_REAL, 0.1)
    try:
        with pytest.raises(_TimeIsUpError):
            pool.run(2, _told, 60.0, str(tmp_path))
    finally:
        signal.signal(signal.SIGALRM, before[0])
        signal.setitimer(signal.ITIMER_REAL, *before[1])
    assert not any(runs(int(file.read_text())) for file in tmp_path.iterdir())
    assert pool.run(2, _told, 0.0, str(tmp_path)) == [0, 1]


def _slow_one_after_another(rank, seconds):
    time.sleep(seconds * (rank + 1))


def test_the_time_limit_of_a_run_is_one_for_all_ranks(pool):
    """Answers after 1.2, 2.4 and 3.6 s: none is two seconds later than the one before."""
    pool.run(3, _slow_one_after_another, 0.0)  # they have started then
    with pytest.raises(RanksFailed) as caught:
        pool.run(3, _slow_one_after_another, 1.2, timeout_s=2.0)
    assert "no answer in 2 s" in caught.value.errors[2]
    assert str(pickle.loads(pickle.dumps(caught.value))) == str(caught.value)


def _stops_when_it_has_answered(rank):
    threading.Timer(0.2, os.kill, (os.getpid(), signal.SIGSTOP)).start()
    return os.getpid()


def _length(rank, data):
    return len(data)


class _Stops:
    """Stops the process that pickles it."""

    def __reduce__(self):
        os.kill(os.getpid(), signal.SIGSTOP)
        return int, ()


def _stops_while_it_answers(rank):
    return [bytes(1 << 24), _Stops()]


@linux_only
def test_a_rank_that_stops_in_the_middle_of_a_message_is_late_like_any_other(pool):
    """More than a pipe holds: a message that nobody reads, and one that is never whole."""
    data = bytes(1 << 24)
    assert pool.run(1, _length, data) == [1 << 24]
    (pid,) = pool.run(1, _stops_when_it_has_answered)
    while Path(f"/proc/{pid}/stat").read_text().rpartition(") ")[2][0] != "T":
        time.sleep(0.05)
    with pytest.raises(RanksFailed, match="rank 0: no answer in 2 s"):
        pool.run(1, _length, data, timeout_s=2.0)
    with pytest.raises(RanksFailed, match="rank 0: no answer in 2 s"):
        pool.run(1, _stops_while_it_answers, timeout_s=2.0)
    assert pool.run(1, _length, data) == [1 << 24]


def _number(_):
    return os.getpid()


def test_a_function_is_imported_from_where_the_caller_finds_it(pool, tmp_path, monkeypatch):
    """Also where that folder is younger than the ranks."""
    pool.run(2, _number)  # they have started then
    (tmp_path / "younger_than_the_ranks.py").write_text("def twice(rank, x):\n    return rank, 2 * x\n")
    monkeypatch.syspath_prepend(tmp_path)
    module = importlib.import_module("younger_than_the_ranks")
    assert pool.run(2, module.twice, 3) == [(0, 6), (1, 6)]


def test_a_rank_that_ended_between_two_runs_is_replaced(pool):
    first = pool.run(2, _number)
    os.kill(first[1], signal.SIGKILL)
    while runs(first[1]):
        time.sleep(0.01)
    second = pool.run(2, _number)
    assert second[0] == first[0]
    assert second[1] != first[1]


def test_a_program_without_a_file_is_told_so_before_any_rank_starts():
    """Each rank wrote a traceback about a file called <stdin>, and the program one about a broken pipe."""
    program = "from stenograd.testing.pool import RankPool\nRankPool(1)\n"
    done = subprocess.run([sys.executable, "-"], input=program, capture_output=True, text=True, timeout=100)
    assert (done.returncode, done.stderr.count("Traceback")) == (1, 1)
    assert "there is no <stdin>: save it as a file" in done.stderr
