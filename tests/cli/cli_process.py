"""Running the command line as real processes, free of any launcher's variables."""

import os
import subprocess
import sys
from pathlib import Path

import stenograd

QUICK = ("--method", "topk:ratio=0.05", "--batch-size", "64", "--seed", "3")
SOURCE = str(Path(stenograd.__file__).parents[1])
LAUNCHER_VARIABLES = (
    "RANK",
    "WORLD_SIZE",
    "LOCAL_",
    "MASTER_",
    "OMPI_",
    "PMI",
    "MPI_",
    "SLURM_",
    "STENOGRAD_",
)


def clean_env(**more):
    kept = {key: value for key, value in os.environ.items() if not key.startswith(LAUNCHER_VARIABLES)}
    path = os.pathsep.join(filter(None, [SOURCE, os.environ.get("PYTHONPATH")]))
    return kept | {"PYTHONPATH": path, "OMP_NUM_THREADS": "1"} | more


def execute(command, limit_s=120, **env):
    return subprocess.run(
        command, env=clean_env(**env), capture_output=True, text=True, timeout=limit_s, check=False
    )


def stenograd_command(*arguments):
    return [sys.executable, "-m", "stenograd", *map(str, arguments)]
