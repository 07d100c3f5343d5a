"""Who runs a command: this process alone, the ranks of a launcher, or workers that it starts itself."""

from __future__ import annotations

import os
import sys
from collections.abc import Callable
from typing import TypeVar

import torch

from stenograd.cli.options import Options
from stenograd.cli.setup import check_option
from stenograd.comm.agreement import agree
from stenograd.comm.driver import Driver
from stenograd.errors import ConfigError
from stenograd.launch.local_workers import python, run_local
from stenograd.launch.process_group import World, detect, init

__all__ = ["in_ranks"]

T = TypeVar("T")
_MOST_WORKERS = 4096  # processes on one machine, some 200 MB each


def in_ranks(options: Options, prepare: Callable[[int], T], body: Callable[[T, Driver], int]) -> int:
    """Run a command's body on every rank, and return the exit status.

    Without a launcher, `--workers N` starts N copies of this command line; they find their ranks as under
    any launcher. What can be checked is checked before that, so that an error comes once and at once.

    Args:
        options: the command line's.
        prepare: checks options and loads data for a world size, without communication.
        body: the work, given what `prepare` returned and a driver for messages between ranks.

    Raises:
        ConfigError: `--workers` contradicts the launcher.
        StenogradError: whatever `prepare` or `body` raised.
    """
    check_option("--workers", options.workers)
    world = detect(os.environ)
    if world.launcher == "alone" and options.workers is not None and options.workers > 1:
        check_option("--workers", options.workers, _MOST_WORKERS)
        prepare(options.workers)  # here too, so an error is told once and starts no processes
        argv = [*python("from stenograd.cli import main; sys.exit(main())"), *sys.argv[1:]]
        return run_local(argv, options.workers, timeout_s=options.timeout_s)
    if options.workers not in (None, world.world_size):
        raise ConfigError(
            f"--workers must be the launcher's world size {world.world_size} ({world.launcher}), "
            f"got {options.workers}: leave it out under a launcher"
        )
    if world.world_size == 1:
        ready = prepare(1)  # an error need not wait for the group
        _join(world, options)
        return body(ready, Driver(timeout_s=options.timeout_s))
    _join(world, options)
    driver = Driver(timeout_s=options.timeout_s)
    # one rank's error (its disk, its device) ends all
    return body(agree(driver, lambda: prepare(world.world_size)), driver)


def _join(world: World, options: Options) -> None:
    init(timeout_s=options.timeout_s)
    if options.threads is not None:
        torch.set_num_threads(options.threads)
    elif "OMP_NUM_THREADS" not in os.environ:  # mpiexec and srun leave each rank all cores
        cores = len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1
        torch.set_num_threads(max(1, cores // world.local_world_size))
