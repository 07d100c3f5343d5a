"""Broken trainings, with real processes: one run of the drill for each important kind of fault."""

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

from stenograd.emulate.hosts import why_not

ROOT = Path(__file__).parents[2]
KINDS = ("kill", "stop-rank0", "one-port")
DISKS = ("disk-full",)  # mounts a disk of its own
LINKS = ("link-down",)
TIMEOUT_S = 8  # the ranks must also meet within it, beside other tests
GRACE_S = 25  # the drill allows 5 s; here six ranks share the cores with other tests

pytestmark = [
    pytest.mark.skipif(sys.platform != "linux", reason="the drill mounts and looks into /proc"),
    pytest.mark.timeout(450),  # all kinds are run in the first test, one after another
]


@pytest.fixture(scope="module")
def verdicts():
    """Run all kinds in one process, so that Python and torch start once."""
    kinds = [*KINDS, *(DISKS if os.geteuid() == 0 else ()), *(LINKS if why_not() is None else ())]
    command = [sys.executable, str(ROOT / "drills" / "faults.py"), "--json", "--seeds", "1", "--jobs", "2"]
    command += ["--kinds", ",".join(kinds), "--ranks", "3", "--timeout-s", str(TIMEOUT_S)]
    command += ["--grace-s", str(GRACE_S)]
    env = os.environ | {"PYTHONPATH": str(ROOT / "src"), "OMP_NUM_THREADS": "1"}
    done = subprocess.run(command, env=env, capture_output=True, text=True, timeout=400, check=False)
    lines = [json.loads(line) for line in done.stdout.splitlines()]
    assert [line["kind"] for line in lines] == kinds, done.stderr
    return {line["kind"]: line for line in lines}


@pytest.mark.parametrize("kind", [*KINDS, *DISKS, *LINKS])
def test_survivors_say_so_in_time_and_leave_nothing(verdicts, kind):
    """The named error on every survivor in time, and no process or half file left."""
    if kind not in verdicts:
        pytest.skip(why_not() or "mounting a disk needs root")
    assert not verdicts[kind]["wrong"], "\n".join(verdicts[kind]["wrong"])
