"""From options to a training on every rank: values checked, data loaded, recipe made, workers started."""

from __future__ import annotations

import os
import sys
from collections.abc import Callable
from contextlib import AbstractContextManager, nullcontext
from dataclasses import asdict, dataclass, replace
from typing import Any, TypeVar

import torch

from stenograd import devices, tasks
from stenograd.catalog.method import Method
from stenograd.cli.options import Options
from stenograd.errors import ConfigError, bad_value, check_count
from stenograd.exchange.buckets import assign
from stenograd.launch.detect import OPEN_VARIABLE
from stenograd.launch.local_workers import python, run_local, usable_cores
from stenograd.launch.process_group import World, detect, init
from stenograd.tasks import Recipe, Task
from stenograd.wire.agreement import agree
from stenograd.wire.driver import Driver

__all__ = ["Setup", "check_option", "check_options", "in_ranks", "make_setup"]

T = TypeVar("T")

_MOST_WORKERS = 4096  # processes on one machine, some 200 MB each
_MOST_THREADS = 1024  # PyTorch crashed with 100,000
_LONGEST_S = 31_536_000  # a year
_RECIPE_KEYS = ("batch_size", "lr", "momentum", "weight_decay")


@dataclass(frozen=True, kw_only=True)
class Setup:
    """A training that can start.

    Attributes:
        options: what the command line said.
        task: data and model.
        recipe: the task's, with the options applied.
        epochs: number of epochs, 0 to evaluate only.
        steps: steps in an epoch, equal on every rank.
        world_size: number of ranks.
        device: where the model lives.
    """

    options: Options
    task: Task
    recipe: Recipe
    epochs: int
    steps: int
    world_size: int
    device: torch.device

    def identity(self, method: Method) -> dict[str, Any]:
        """Return what must be equal for a run to be continued bit for bit.

        The number of epochs is part of it only where the learning rate depends on it.
        """
        recipe = asdict(self.recipe)
        if self.recipe.min_lr is None or self.epochs == 0:
            del recipe["epochs"]
        return {
            "task": self.task.name,
            "method": method.text,
            "world_size": self.world_size,
            "seed": self.options.seed,
            "shards": str(self.options.shards),
            "bucket_bytes": self.options.bucket_bytes,
            "train_size": self.task.train_size,
            "eval_size": self.task.eval_size,
            "recipe": recipe,
        }


def make_setup(options: Options, world_size: int) -> Setup:
    """Load the task and check everything that can be checked without the other ranks.

    Raises:
        ConfigError: an option breaks its rule.
        DataError: a data file is missing or damaged, or there are fewer samples than ranks.
    """
    check_options(options)
    task = tasks.load(str(options.task), options.data)
    changes: dict[str, Any] = {k: v for k in _RECIPE_KEYS if (v := getattr(options, k)) is not None}
    if options.epochs:
        changes["epochs"] = options.epochs
    recipe = replace(task.recipe, **changes)
    return Setup(
        options=options,
        task=task,
        recipe=recipe,
        epochs=recipe.epochs if options.epochs is None else options.epochs,
        steps=tasks.steps_per_epoch(task.train_size, world_size, recipe.batch_size, recipe.steps_per_epoch),
        world_size=world_size,
        device=torch.device(str(options.device)),
    )


def check_option(name: str, got: int | None, most: int = 2**31 - 1) -> None:
    """Refuse a count that is not in [1, most]; None is no count.

    Raises:
        ConfigError: naming the option.
    """
    if got is not None:
        check_count(name, got, "use 1 or more" if got < 1 else "use less", most=most)


def check_options(options: Options) -> None:
    """Check what needs no data.

    Raises:
        ConfigError: an option breaks its rule.
    """
    check_option("--threads", options.threads, _MOST_THREADS)
    if options.epochs is not None and options.epochs < 0:
        raise bad_value("--epochs", "must be at least 0", options.epochs, "use 0 to evaluate only")
    check_option("--epochs", options.epochs or None)
    check_option("--batch-size", options.batch_size)
    if not 0 <= options.seed < 2**63:
        raise bad_value("--seed", "must be from 0 to 2^63 - 1", options.seed, "use 0, 1, 2, ...")
    if not 0 < options.timeout_s <= _LONGEST_S:
        rule = f"must be above 0 and at most {_LONGEST_S} (a year)"
        raise bad_value("--timeout-s", rule, options.timeout_s, "leave it at 300")
    if options.device == "cuda" and not devices.count():
        raise ConfigError("--device cuda needs a CUDA device, and this PyTorch sees none: use --device cpu")
    assign({}, options.bucket_bytes)  # for its check of the size alone, before any rank starts


def in_ranks(
    options: Options,
    prepare: Callable[[int], T],
    body: Callable[[T, Driver], int],
    around: Callable[[], AbstractContextManager[object]] = nullcontext,
    **launch: Any,
) -> int:
    """Run a command's body on every rank, and return the exit status.

    Without a launcher, `--workers N` starts N copies of this command line; they find their ranks as under
    any launcher. What can be checked is checked before that, so that an error comes once and at once.

    Args:
        options: the command line's.
        prepare: checks options and loads data for a world size, without communication.
        body: the work, given what `prepare` returned and a driver for messages between ranks.
        around: what a rank does the work in, from when all have met.
        launch: `open_run` and `keep` of `run_local`.

    Raises:
        ConfigError: `--workers` contradicts the launcher.
        StenogradError: whatever `prepare` or `body` raised.
    """
    check_option("--workers", options.workers)
    world = detect(os.environ)
    if world.launcher == "alone" and options.workers is not None and options.workers > 1:
        check_option("--workers", options.workers, _MOST_WORKERS)
        prepare(options.workers)  # here too, so an error is told once and starts no processes
        if sys.stderr.isatty():  # each imports torch, which takes seconds
            print(f"stenograd: starting {options.workers} workers ...", file=sys.stderr, flush=True)
        argv = [*python("from stenograd.cli import main; sys.exit(main())"), *sys.argv[1:]]
        # Until then they can save that they were asked to stop.
        limit_s = options.timeout_s
        env = {key: value for key, value in os.environ.items() if key != OPEN_VARIABLE}  # a run of their own
        return run_local(argv, options.workers, timeout_s=limit_s, stop_s=limit_s, env=env, **launch)
    if options.workers not in (None, world.world_size):
        raise ConfigError(
            f"--workers must be the launcher's world size {world.world_size} ({world.launcher}), "
            f"got {options.workers}: leave it out under a launcher"
        )
    if world.world_size == 1:
        ready = prepare(1)  # an error need not wait for the group
        _join(world, options)
        with around():
            return body(ready, Driver(timeout_s=options.timeout_s))
    _join(world, options)
    driver = Driver(timeout_s=options.timeout_s)
    with around():
        # one rank's error (its disk, its device) ends all
        return body(agree(driver, lambda: prepare(world.world_size)), driver)


def _join(world: World, options: Options) -> None:
    init(timeout_s=options.timeout_s)
    if options.threads is not None:
        torch.set_num_threads(options.threads)
    elif "OMP_NUM_THREADS" not in os.environ:  # mpiexec and srun leave each rank all cores
        torch.set_num_threads(max(1, usable_cores() // world.local_world_size))
