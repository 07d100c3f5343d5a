"""The threads and ports by which gloo moves messages, in real ranks."""

import os
from collections import Counter
from pathlib import Path

import pytest
import torch

import stenograd
from stenograd.wire.driver import Driver

TASKS = Path("/proc/self/task")
pytestmark = pytest.mark.skipif(not TASKS.exists(), reason="the system does not tell")


def _policies():
    """How many of gloo's threads have each policy of scheduling."""
    threads = [t for t in TASKS.iterdir() if (t / "comm").read_text().strip() == "gloo_tcp_loop"]
    return Counter(os.sched_getscheduler(int(t.name)) for t in threads)


def _ports():
    """At how many ports this process listens."""
    ours = set()
    for number in os.listdir("/proc/self/fd"):
        try:
            ours.add(os.readlink(f"/proc/self/fd/{number}"))
        except OSError:  # the listing's own
            continue
    tables = [Path(f"/proc/net/{name}").read_text() for name in ("tcp", "tcp6")]
    rows = [row.split() for table in tables for row in table.splitlines()]
    return sum(row[3] == "0A" and f"socket:[{row[9]}]" in ours for row in rows)


def _made(rank, world_size):
    """What there is with one group of ours, and with four models more, whose ranks average."""
    before = _ports()
    drivers = [Driver.own(timeout_s=30)]
    found = [(_ports() - before, _policies())]
    for _ in range(4):
        model = torch.nn.Linear(3, 2)
        optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
        drivers.append(stenograd.distribute(model, optimizer, "sign", timeout_s=30))
        model(torch.full((1, 3), rank + 1.0)).sum().backward()
        found.append((_ports() - before, _policies()))
    for driver in drivers:
        driver.close()
    return found


@pytest.mark.skipif(not hasattr(os, "SCHED_BATCH"), reason="the system has no such policy")
def test_groups_of_ours_share_a_port_and_a_thread_that_interrupts_nobody(pool):
    for found in pool.run(2, _made, 2):
        if not found[0][1]:
            pytest.skip("this torch's gloo gives its threads no name")
        for ports, policies in found:
            assert ports <= 1
            assert policies[os.SCHED_OTHER] >= 1  # the program's own group is left alone
            assert policies[os.SCHED_BATCH] == 1
