"""Scripts of the framework tests in processes of their own, because frameworks keep global state."""

import json
import os
import socket
import tempfile
import time
from multiprocessing.connection import wait
from pathlib import Path

import forked
from launched import SOURCE, clean_env

HERE = Path(__file__).parent


def run_ranks(script, world_size, *, args=(), timeout_s=300, launcher="torchrun"):
    """Run a script of this folder and return what each rank printed as JSON on its last line, in rank order.

    launcher: "torchrun" starts world_size processes, each with the variables that torchrun sets; "none"
    starts one without any, which starts the others itself, and returns its one answer in a list. The first
    process that fails ends all, and what it wrote is in the AssertionError.
    """
    torchrun, port = launcher == "torchrun", _free_port()
    path = os.pathsep.join(filter(None, [SOURCE, str(HERE), os.environ.get("PYTHONPATH")]))
    command, started, deadline = [str(HERE / script), *map(str, args)], [], time.monotonic() + timeout_s
    with tempfile.TemporaryDirectory(prefix="stenograd-frameworks-") as folder:
        try:
            for rank in range(world_size if torchrun else 1):
                env = clean_env(PYTHONPATH=path) | (_torchrun(rank, world_size, port) if torchrun else {})
                place = Path(folder, str(rank))
                place.mkdir()
                started.append(forked.start(command, HERE, place, env))
            codes = _wait([process for process, _ in started], deadline)
        finally:
            for process, _ in started:
                forked.kill(process)
        said = [[file.read_text() if file.exists() else "" for file in files] for _, files in started]
    for rank, code in enumerate(codes):
        others_failed = code is None and any(codes)
        if code != 0 and not others_failed:
            how = "did not end in time" if code is None else f"ended with {code}"
            raise AssertionError(f"rank {rank} {how}:\n" + "\n".join(text[-8000:] for text in said[rank]))
    return [json.loads(out.strip().splitlines()[-1]) for out, _ in said]


def _torchrun(rank, world_size, port):
    here = {"RANK": rank, "LOCAL_RANK": rank, "WORLD_SIZE": world_size, "LOCAL_WORLD_SIZE": world_size}
    where = {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": port, "GROUP_RANK": 0, "ROLE_RANK": rank}
    # By the run's name frameworks tell that they were launched.
    return {name: str(value) for name, value in (here | where | {"TORCHELASTIC_RUN_ID": "test"}).items()}


def _free_port():
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return probe.getsockname()[1]


def _wait(processes, deadline):
    """Wait until all have ended, or one has failed, or time is up; return their exit codes."""
    while True:
        codes = [process.exitcode for process in processes]
        left = deadline - time.monotonic()
        if any(codes) or None not in codes or left < 0:
            return codes
        wait([p.sentinel for p, code in zip(processes, codes, strict=True) if code is None], left)
