"""Scripts of the framework tests as fresh processes, because frameworks keep global state."""

import contextlib
import json
import os
import signal
import socket
import subprocess
import sys
import tempfile
import time
from pathlib import Path

import stenograd

HERE = Path(__file__).parent
SOURCE = str(Path(stenograd.__file__).parents[1])
LAUNCHER_VARIABLES = (
    "RANK",
    "WORLD_SIZE",
    "LOCAL_",
    "NODE_RANK",
    "GROUP_",
    "MASTER_",
    "TORCHELASTIC_",
    "OMPI_",
    "PMI",
    "MPI_",
    "SLURM_",
    "STENOGRAD_",
    "ACCELERATE_",
)


def run_ranks(script, world_size, *, args=(), timeout_s=180, launcher="torchrun"):
    """Run a script of this folder and return what each rank printed as JSON on its last line, in rank order.

    launcher: "torchrun" starts world_size processes, each with the variables that torchrun sets; "none"
    starts one without any, which starts the others itself, and returns its one answer in a list. The first
    process that fails ends all, and what it wrote is in the AssertionError.
    """
    torchrun, port = launcher == "torchrun", _free_port()
    command = [sys.executable, str(HERE / script), *map(str, args)]
    processes, deadline = [], time.monotonic() + timeout_s
    with tempfile.TemporaryDirectory(prefix="stenograd-frameworks-") as folder:
        try:
            for rank in range(world_size if torchrun else 1):
                env = _clean() | (_torchrun(rank, world_size, port) if torchrun else {})
                with Path(folder, f"out{rank}").open("w") as out, Path(folder, f"err{rank}").open("w") as err:
                    processes.append(
                        subprocess.Popen(command, env=env, stdout=out, stderr=err, start_new_session=True)
                    )
            codes = _wait(processes, deadline)
        finally:
            for process in processes:
                _kill(process)
        for rank, code in enumerate(codes):
            others_failed = code is None and any(codes)
            if code != 0 and not others_failed:
                said = "\n".join(Path(folder, f"{n}{rank}").read_text()[-8000:] for n in ("out", "err"))
                how = "did not end in time" if code is None else f"ended with {code}"
                raise AssertionError(f"rank {rank} {how}:\n{said}")
        lines = [Path(folder, f"out{rank}").read_text().strip().splitlines() for rank in range(len(codes))]
    return [json.loads(mine[-1]) for mine in lines]


def _torchrun(rank, world_size, port):
    here = {"RANK": rank, "LOCAL_RANK": rank, "WORLD_SIZE": world_size, "LOCAL_WORLD_SIZE": world_size}
    where = {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": port, "GROUP_RANK": 0, "ROLE_RANK": rank}
    # By the run's name frameworks tell that they were launched.
    return {name: str(value) for name, value in (here | where | {"TORCHELASTIC_RUN_ID": "test"}).items()}


def _clean():
    kept = {name: value for name, value in os.environ.items() if not name.startswith(LAUNCHER_VARIABLES)}
    path = os.pathsep.join(filter(None, [SOURCE, str(HERE), os.environ.get("PYTHONPATH")]))
    return kept | {"PYTHONPATH": path, "OMP_NUM_THREADS": "1"}


def _free_port():
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return probe.getsockname()[1]


def _wait(processes, deadline):
    """Wait until all have ended, or one has failed, or time is up; return their exit codes."""
    while True:
        codes = [process.poll() for process in processes]
        if any(codes) or None not in codes or time.monotonic() > deadline:
            return codes
        time.sleep(0.05)


def _kill(process):
    """End the process and what it has started."""
    with contextlib.suppress(ProcessLookupError):
        os.killpg(process.pid, signal.SIGKILL)
    process.wait()
