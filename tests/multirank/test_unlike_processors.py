"""Two ranks whose libraries use other instructions, as on machines of two generations."""

import json
import os
import platform
import subprocess
import sys
from contextlib import ExitStack
from pathlib import Path

import pytest
from support.processes import free_port

import stenograd
from stenograd.schedules import EveryStep
from stenograd.testing.methods import configurations

OLD = {"ATEN_CPU_CAPABILITY": "default", "MKL_ENABLE_INSTRUCTIONS": "SSE4_2"}
METHODS = [m for m in configurations() if isinstance(stenograd.method(m).schedule, EveryStep)]


@pytest.mark.skipif(platform.machine() not in ("x86_64", "AMD64"), reason="the variables are for this kind")
def test_averages_are_equal_on_processors_of_different_kinds():
    """Each rank multiplies factors by itself, so the order and the rounding must not be the library's."""
    script, where = str(Path(__file__).with_name("unlike_ranks.py")), {"WORLD_SIZE": "2"}
    where |= {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(free_port()), "OMP_NUM_THREADS": "1"}
    with ExitStack() as stack:
        started = []
        for rank in range(2):
            env = os.environ | where | {"RANK": str(rank), "LOCAL_RANK": str(rank)} | (OLD if rank else {})
            command = [sys.executable, script, *METHODS]
            process = subprocess.Popen(command, env=env, stdout=subprocess.PIPE, text=True)
            started.append(stack.enter_context(process))
            stack.callback(process.kill)
        written = [process.communicate(timeout=240)[0] for process in started]
    assert [process.returncode for process in started] == [0, 0]
    found = [json.loads(text.splitlines()[-1]) for text in written]
    assert len(found[0]) == 2 * len(METHODS)
    assert [mine[:2] for mine, other in zip(*found, strict=True) if mine != other] == []
