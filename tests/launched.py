"""What tests need that start programs by launchers, or as if none had started them."""

import os
from importlib.metadata import distribution
from pathlib import Path

import stenograd

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
# Rank r contributes r + 1, so two ranks sum to 3; the second init meets the same ranks again.
JOIN = """
import torch, torch.distributed as dist
from stenograd.launch.process_group import init, shutdown
for last in (False, True):
    world = init(timeout_s=40)
    x = torch.tensor([world.rank + 1.0])
    dist.all_reduce(x)
    if not last:
        shutdown()
        shutdown()
if world.rank == 0:
    print(world.launcher, world.world_size, world.local_world_size, x.item(), flush=True)
"""


def clean_env(**more):
    """Return the environment without any launcher's variables, and with the package to import."""
    kept = {key: value for key, value in os.environ.items() if not key.startswith(LAUNCHER_VARIABLES)}
    path = os.pathsep.join(filter(None, [SOURCE, os.environ.get("PYTHONPATH")]))
    return kept | {"PYTHONPATH": path, "OMP_NUM_THREADS": "1"} | more


def binary(package, name):
    """Find a program by its package: both packages install `bin/mpiexec`, and the later one wins."""
    return str(next(f.locate() for f in distribution(package).files or () if f.parts[-2:] == ("bin", name)))
