"""The thread by which gloo moves a group's messages, in real ranks."""

import os
from pathlib import Path

import pytest

from stenograd.wire.driver import Driver

TASKS = Path("/proc/self/task")


def _loops():
    return {int(t.name) for t in TASKS.iterdir() if (t / "comm").read_text().strip() == "gloo_tcp_loop"}


def _policies(rank, world_size):
    """The scheduling of gloo's threads that there were, and of those of a group of ours."""
    before = _loops()
    driver = Driver.own(timeout_s=30)
    found = [{os.sched_getscheduler(t) for t in some} for some in (before, _loops() - before)]
    driver.close()
    return found


@pytest.mark.skipif(not hasattr(os, "SCHED_BATCH"), reason="the system has no such policy")
def test_the_thread_of_a_group_of_ours_interrupts_nobody(pool):
    for programs, ours in pool.run(2, _policies, 2):
        if not programs:
            pytest.skip("this torch's gloo gives its threads no name")
        assert os.SCHED_OTHER in programs  # the program's own group is left alone
        assert ours == {os.SCHED_BATCH}
