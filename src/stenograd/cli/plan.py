"""`stenograd plan`: what a training's steps will take, and which method to use."""

from __future__ import annotations

import json
import math
import os
from collections.abc import Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import torch
from torch import nn

from stenograd.checkpoint.files import write_atomically
from stenograd.cli.compare import split_methods
from stenograd.cli.folder import make_folder
from stenograd.cli.options import Options
from stenograd.cli.plan_check import check_run
from stenograd.cli.plan_learn import load_weights, show_learning, tried
from stenograd.cli.ranks import in_ranks
from stenograd.cli.setup import make_setup
from stenograd.cli.table import console, show
from stenograd.comm.agreement import agree, everyone
from stenograd.comm.driver import Driver
from stenograd.errors import ConfigError, bad_value, check_count
from stenograd.launch.process_group import detect
from stenograd.planning.advice import check_accuracy
from stenograd.planning.link import Link, load_link
from stenograd.planning.measure_link import measure_link
from stenograd.planning.plan import Plan, default_cores, load_plan, plan, predicted, with_ranks
from stenograd.planning.report import page
from stenograd.planning.trial import Trial, first_batches, load_trial
from stenograd.planning.units import rate_text, time_text

__all__ = ["Asked", "run", "show_plan"]

# Shares of the time: for the link, and for training together on all ranks; methods are rehearsed in the rest.
_LINK, _TOGETHER = 1 / 3, 0.1
_LEAST_S = 2.0  # to measure a link


@dataclass(frozen=True, kw_only=True)
class Asked:
    """What `stenograd plan` was asked for.

    Attributes:
        options: the training's, where no trial is given.
        trial: FILE.py:FUNCTION; None for the task of the options.
        methods: to look at; None for all.
        link: text or a file; None to measure it between the ranks of a launcher.
        accuracy: what a recommended method may do to gradients.
        ranks_per_host: None for those of the launcher, or 1.
        cores: of each worker; None for a share of this machine's.
        seconds: about how long to measure and rehearse.
        out: folder for plan.json and report.html.
        as_json: whether to print JSON.
        check: a run's folder to compare with, instead of a recommendation alone.
        plan: a plan's file to check, instead of a new one.
        tolerance: by how much a checked run's step may differ, as a share.
        learn: whether to train virtual workers, too, under the recommended method or those named.
        learn_steps, learn_seeds, learn_workers: how long, how often, and the most workers.
        learn_from: weights to begin with: a file of torch.save(model.state_dict()), or a run's folder.
    """

    options: Options
    trial: str | None = None
    methods: Sequence[str] | None = None
    link: str | None = None
    accuracy: str | None = None
    ranks_per_host: int | None = None
    cores: float | None = None
    seconds: float = 30.0
    out: Path | None = None
    as_json: bool = False
    check: Path | None = None
    plan: Path | None = None
    tolerance: float = 0.25
    learn: bool = False
    learn_steps: int = 300
    learn_seeds: int = 3
    learn_workers: int = 8
    learn_from: Path | None = None


def run(asked: Asked) -> int:
    """Plan, and return the exit status: 1 where a checked run is not as predicted."""
    _check(asked)
    alone = detect(os.environ).launcher == "alone"
    if asked.learn and (not alone or (asked.link is None and asked.plan is None)):
        raise ConfigError(
            "--learn trains virtual workers on one machine, so it needs --link or --plan and no launcher: "
            "measure the link first, by stenograd link --out"
        )
    if asked.plan is not None:
        return _told(asked, _saved(asked, asked.plan))
    if asked.link is not None and alone:
        workers = 2 if asked.options.workers is None else asked.options.workers
        return _told(asked, _made(asked, _link(asked.link), workers, None)[0])
    return in_ranks(asked.options, lambda world_size: world_size, lambda _, driver: _measured(asked, driver))


def _check(asked: Asked) -> None:
    """Refuse what would be found out only after measuring."""
    if asked.accuracy is not None:
        check_accuracy(asked.accuracy)
    counts = {"--workers": asked.options.workers, "--ranks-per-host": asked.ranks_per_host}
    for name, count in (counts | {"--learn-workers": asked.learn_workers}).items():
        if count is not None:
            check_count(name, count, "leave it out")
    for name, value in {"--cores": asked.cores, "--seconds": asked.seconds}.items():
        if value is not None and not 0 < value < math.inf:
            raise bad_value(name, "must be above 0 and finite", value, "leave it out")
    if asked.learn_from is not None and not asked.learn:
        raise ConfigError("--learn-from needs --learn: it says what virtual workers begin with")
    if asked.out is not None:
        make_folder(asked.out)


def _saved(asked: Asked, path: Path) -> Plan:
    """Return the plan in a file, for the link and the accuracy that are asked for now."""
    given = {
        "--workers": asked.options.workers,
        "--ranks-per-host": asked.ranks_per_host,
        "--cores": asked.cores,
        "--trial": asked.trial,
        "--methods": None if asked.learn else asked.methods,
    }
    for name, value in given.items():
        if value is not None:
            raise bad_value(
                name, "must be left out with --plan", value, "plan anew, or use stenograd simulate"
            )
    found = load_plan(path)
    if asked.accuracy is not None:
        found = predicted(replace(found, accuracy=asked.accuracy))
    return found if asked.link is None else found.at(_link(asked.link))


def _measured(asked: Asked, driver: Driver) -> int:
    """Measure the link between these ranks if none is given, rehearse on all at once, and tell on rank 0."""
    if driver.world_size < 2:
        raise ConfigError(
            "a plan needs a link: give --link 1gbit,0.2ms and --workers, or start it under torchrun on the "
            "machines that will train"
        )
    if asked.link is None:
        if asked.seconds * _LINK < _LEAST_S:
            wanted = f"must be at least {_LEAST_S / _LINK:g} to measure a link, too"
            raise bad_value("--seconds", wanted, asked.seconds, "leave it at 30, or give --link")
        link: str | Link = measure_link(Driver.own(timeout_s=asked.options.timeout_s), asked.seconds * _LINK)
    else:
        link = _link(asked.link)
    found, trial = agree(driver, lambda: _made(asked, link, driver.world_size, driver))
    found = with_ranks(found, trial, driver, asked.seconds * _TOGETHER)
    status = _told(asked, found) if driver.rank == 0 else 0
    return max(int(text) for text in everyone(driver, str(status)))


def _link(text: str) -> str | Link:
    path = Path(text)
    return load_link(path) if path.suffix == ".json" or path.is_file() else text


def _made(asked: Asked, link: str | Link, workers: int, driver: Driver | None) -> tuple[Plan, Trial]:
    """Return a plan, and the trial that it is of."""
    name, trial = _trial(asked, workers)
    trial = replace(trial, batches=first_batches(trial))  # once: an iterator would give others every time
    per_host = asked.ranks_per_host
    if per_host is None:
        per_host = link.hosts.count(0) if isinstance(link, Link) and len(link.hosts) == workers else 1
    here = detect(os.environ).local_world_size if driver is not None else per_host
    found = plan(
        trial,
        workers=workers,
        link=link,
        methods=split_methods(asked.methods) if asked.methods else None,
        accuracy=asked.accuracy or "lossy",
        ranks_per_host=per_host,
        cores=default_cores() / here if asked.cores is None else asked.cores,
        seconds=asked.seconds * (1 - _LINK - _TOGETHER),
        bucket_bytes=asked.options.bucket_bytes,
        name=name,
    )
    return found, trial


def _trial(asked: Asked, workers: int) -> tuple[str, Trial]:
    """Return the user's trial, or a task's as one, with the weights to begin with."""
    name, trial = _unloaded(asked, workers)
    if asked.learn_from is not None:
        load_weights(trial.model, asked.learn_from)
    return name, trial


def _unloaded(asked: Asked, workers: int) -> tuple[str, Trial]:
    if asked.trial is not None:
        return asked.trial, load_trial(asked.trial)
    setup = make_setup(asked.options, workers)
    model = setup.task.model(asked.options.seed).to(setup.device)
    size, count = setup.recipe.batch_size, setup.task.train_size
    starts = range(0, max(count - size, 0) + 1, size)
    batches = (setup.task.train_batch(torch.arange(at, min(at + size, count))) for at in starts)

    def loss(model: nn.Module, batch: Any) -> torch.Tensor:
        inputs, targets = (part.to(setup.device) for part in batch)
        return setup.task.loss(model, inputs, targets)[0]

    return asked.options.task, Trial(model, setup.recipe.make_optimizer(model), batches, loss)


def _told(asked: Asked, found: Plan) -> int:
    learning = None
    if not asked.as_json:
        show_plan(found)
    if asked.learn:
        name, trial = _trial(asked, found.world_size)
        if name != found.work["name"]:
            raise ConfigError(
                f"the plan is for {found.work['name'] or 'a training without a name'}, --learn would train "
                f"{name}: give the --trial or --task that the plan was made with"
            )
        learning = tried(found, trial, asked)
        if not asked.as_json:
            show_learning(found, learning)
    if asked.out is not None:
        found.save(asked.out / "plan.json")
        write_atomically(asked.out / "report.html", page(found, learning).encode())
        if learning is not None:
            write_atomically(asked.out / "learned.json", json.dumps(learning.as_json(), indent=1).encode())
    if asked.as_json:
        told = found.as_json()
        kept = {k: told[k] for k in ("method", "reason", "notes", "predictions")}
        console().print_json(
            json.dumps(kept | ({} if learning is None else {"learning": learning.as_json()}))
        )
    return 0 if asked.check is None else check_run(found, asked.check, asked.tolerance)


def show_plan(found: Plan) -> None:
    """Print predictions, the recommendation and its reason, and what was assumed."""
    hosts = found.world_size // found.ranks_per_host
    link = "measured" if found.link.measured else "assumed"
    hop = time_text(found.link.costs["all-reduce"].hop_s)
    title = (
        f"{found.work['name'] or 'training'}: {found.work['parameters']:,} parameters, "
        f"{found.world_size} workers on {hosts} hosts, {link} link {rate_text(found.link.bps)}, {hop} a hop; "
        f"a step without exchange takes {time_text(found.profile.floor_s)}"
    )
    rows = [
        (
            p.method,
            f"{1e3 * p.seconds[1]:.3g}",
            f"{1e3 * p.seconds[0]:.3g} to {1e3 * p.seconds[2]:.3g}",
            f"{p.moved_bytes / 1e6:.3g}",
            f"{p.collectives:.3g}",
            p.limit,
            "-" if p.method == "dense" else p.pays_text,
            "recommended" if p.method == found.method else "",
        )
        for p in sorted(found.predictions, key=lambda p: p.seconds[1])
    ]
    head = ("method", "ms/step", "80 %", "MB/step", "messages", "limit", "faster than dense", "")
    show(head, rows, title)
    screen = console()
    screen.print(found.reason, soft_wrap=True)
    for note in found.notes:
        screen.print(f"- {note}", soft_wrap=True)
