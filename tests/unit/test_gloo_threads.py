"""How gloo's threads share a core: which of a process's threads are changed, and what if they may not be."""

import os
import threading
from pathlib import Path

import pytest

from stenograd.launch.process_group import waiting_loops

pytestmark = pytest.mark.skipif(not hasattr(os, "SCHED_BATCH"), reason="the system has no such policy")


class _Thread:
    """A thread that has some name for the kernel, until it is let go."""

    def __init__(self, name):
        self._go = threading.Event()
        named = threading.Event()

        def live():
            self.number = threading.get_native_id()
            Path(f"/proc/self/task/{self.number}/comm").write_text(name)
            named.set()
            self._go.wait()

        self._thread = threading.Thread(target=live)
        self._thread.start()
        named.wait()

    @property
    def policy(self):
        return os.sched_getscheduler(self.number)

    def end(self):
        self._go.set()
        self._thread.join()


@pytest.fixture
def start():
    threads = []

    def make(name):
        threads.append(_Thread(name))
        return threads[-1]

    yield make
    for thread in threads:
        thread.end()


def test_only_gloos_new_threads_wait(start):
    earlier = start("gloo_tcp_loop")
    with waiting_loops():
        loop, other = start("gloo_tcp_loop"), start("pt_gloo_runloop")
    later = start("gloo_tcp_loop")
    assert loop.policy == os.SCHED_BATCH
    assert {earlier.policy, other.policy, later.policy} == {os.SCHED_OTHER}
    assert os.sched_getscheduler(0) == os.SCHED_OTHER


def test_where_it_is_not_allowed_nothing_changes(start, monkeypatch):
    def refuse(*_):
        raise PermissionError("not allowed in this container")

    monkeypatch.setattr(os, "sched_setscheduler", refuse)
    with waiting_loops():
        loop = start("gloo_tcp_loop")
    assert loop.policy == os.SCHED_OTHER


def test_an_error_while_connecting_is_passed_on(start):
    with pytest.raises(RuntimeError, match="no peer"), waiting_loops():
        raise RuntimeError("no peer")
