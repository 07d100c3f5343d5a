"""`stenograd plan`: what a training's steps will take, and which method to use."""

from __future__ import annotations

import json
import math
import os
import sys
from collections import Counter
from collections.abc import Collection, Mapping, Sequence
from contextlib import AbstractContextManager, nullcontext, redirect_stdout
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path
from typing import Any

import torch
from torch import nn

from stenograd.cli.compare import chosen_methods, split_methods
from stenograd.cli.folder import make_folder
from stenograd.cli.options import PlanOptions
from stenograd.cli.pictures import draw_plan
from stenograd.cli.setup import check_options, in_ranks, make_setup
from stenograd.cli.table import Display, counted, note, say, show, show_json, working
from stenograd.errors import ConfigError, DataError, bad_value, check_count, first_line
from stenograd.launch.local_workers import usable_cores
from stenograd.launch.process_group import detect
from stenograd.planning.advice import DENSE
from stenograd.planning.link import (
    Link,
    load_link,
    measure_link,
    number_text,
    parse_link,
    rate_text,
    time_text,
)
from stenograd.planning.plan import (
    RECORDED,
    VALIDATED,
    Plan,
    default_methods,
    load_plan,
    plan,
    predicted,
    with_ranks,
)
from stenograd.planning.trial import Trial, first_batches, load_trial
from stenograd.reading import read_regular
from stenograd.sync.handshake import own_host
from stenograd.wire.agreement import agree, everyone
from stenograd.wire.driver import Driver

__all__ = ["Run", "read_run", "run"]

# Shares of the time: for the link, and for training together on all ranks; methods are rehearsed in the rest.
_LINK, _TOGETHER = 1 / 3, 0.1
_LEAST_S = 2.0  # to measure a link
# Options of a training, which a trial brings itself and a plan has settled.
_OF_A_TASK = ("task", "data", "batch_size", "lr", "momentum", "weight_decay", "seed", "device")
_MOST_WORKERS = 1 << 20
_COLUMNS = 6  # methods beside dense in the table of sizes, the fastest at the largest; all are in --json


@dataclass(frozen=True, kw_only=True)
class Run:
    """A finished run of `stenograd train --out`.

    Attributes:
        folder: where it lies.
        identity: what was trained and how.
        versions: of the packages.
        slowest: what its slowest rank measured.
    """

    folder: Path
    identity: Mapping[str, Any]
    versions: Mapping[str, Any]
    slowest: Mapping[str, Any]

    def require(self, workers: int, bucket_bytes: int, methods: Collection[str]) -> None:
        """Refuse a plan that has no prediction for this run.

        Args:
            workers: of the plan.
            bucket_bytes: of the plan.
            methods: texts of those that it predicts.

        Raises:
            ConfigError: the run is of another number of workers, bucket size or method.
        """
        for name, planned, own in (
            ("workers", workers, self.identity["world_size"]),
            ("bucket_bytes", bucket_bytes, self.identity["bucket_bytes"]),
        ):
            if planned != own:
                rule = f"must be the plan's {planned}"
                raise bad_value(f"the run's {name}", rule, own, "plan for that run")
        own = self.identity["method"]
        if own not in methods:
            known = ", ".join(methods)
            raise bad_value("the run's method", f"must be one of {known}", own, f"plan it: --method {own}")


def read_run(folder: Path) -> Run:
    """Read what a run was, and what its slowest rank measured.

    Raises:
        DataError: the folder holds no finished run.
    """
    try:
        run = json.loads(read_regular(folder / "run.json"))
        ranks = json.loads(read_regular(folder / "steps.json"))["ranks"]
        if not any(rank["steps"] for rank in ranks):  # of an open run, or one that only evaluated
            raise ValueError("it timed no steps")
        slowest = max(ranks, key=lambda rank: rank["means_s"]["step"])
        return Run(folder=folder, identity=run["identity"], versions=run["versions"], slowest=slowest)
    except (OSError, ValueError, KeyError, TypeError, RecursionError) as cause:
        raise DataError(
            f"{folder}: holds no finished run ({first_line(cause)}): give the folder of stenograd train --out"
        ) from cause


@dataclass(frozen=True, kw_only=True)
class _Job:
    """A plan to make, after everything that can be wrong with it was looked at.

    Attributes:
        name: of the training.
        trial: the training, with the few batches that are used.
        workers: number of ranks.
        methods: texts as they were written; dense among them or not.
        run: to compare with; None for none.
    """

    name: str
    trial: Trial
    workers: int
    methods: list[str]
    run: Run | None


def run(asked: PlanOptions) -> int:
    """Plan, and return the exit status: 1 where a checked run is not as predicted."""
    sizes, link = _check(asked), _link(asked)
    if asked.plan is not None:
        if detect(os.environ).rank:  # of a launch, whose rank 0 says and writes it
            return 0
        found = load_plan(asked.plan)
        if asked.accuracy is not None:
            found = predicted(replace(found, accuracy=str(asked.accuracy)))
        if link is not None:
            found = found.at(link)
        run = None if asked.check is None else read_run(asked.check)
        if run is not None:
            run.require(found.world_size, found.work["bucket_bytes"], [p.method for p in found.predictions])
        return _shown(asked, found, run, [found.sized(size) for size in sizes])
    if detect(os.environ).launcher != "alone":
        if len(sizes) > 1:
            raise ConfigError("several --workers are planned by one process: leave them out under a launcher")
        options = replace(asked, workers=next(iter(sizes), None))
        return in_ranks(options, partial(_job, asked, link), partial(_measured, asked, link))
    asked.refuse(["timeout_s"], "where one process plans alone")
    if asked.threads is not None:
        torch.set_num_threads(asked.threads)
    if link is None:
        raise ConfigError(
            "a plan needs the network between your hosts: give --link 1gbit,0.2ms and --workers, or start it "
            "under torchrun on the machines that will train, where it measures"
        )
    if not sizes and isinstance(link, Link):
        sizes = [len(link.hosts)]
    if not sizes:
        raise ConfigError("--link needs --workers: say how many will train, such as --workers 4")
    first, *others = sizes
    per_host = _per_host(asked, link, first)
    asked = replace(asked, ranks_per_host=per_host)  # the same hosts for all sizes, as on paper
    for size in sizes:
        _check_hosts(size, per_host)
    job = _job(asked, link, first)
    with working(_rehearsing(job)), _aside(asked):
        plans = [_made(asked, job, link, None, len(sizes))]
    for size in others:
        other = replace(job, workers=size)
        if plans[-1].world_size >= RECORDED:  # nothing more would be recorded
            plans.append(plans[-1].sized(size))
            continue
        with working(_rehearsing(other)), _aside(asked):
            plans.append(_made(asked, other, link, None, len(sizes)))
    return _shown(asked, plans[0], job.run, plans[1:])


def _check(asked: PlanOptions) -> list[int]:
    """Refuse what would be found out only after measuring, and what would do nothing; return the sizes."""
    check_options(asked)
    sizes = _sizes(asked.sizes) if asked.sizes is not None else []
    if asked.ranks_per_host is not None:
        check_count("--ranks-per-host", asked.ranks_per_host, "leave it out")
    numbers = {"--cores": asked.cores, "--seconds": asked.seconds, "--tolerance": asked.tolerance}
    for name, value in numbers.items():
        if value is not None and not 0 < value < math.inf:
            raise bad_value(name, "must be above 0 and finite", value, "leave it out")
    if asked.check is None:
        asked.refuse(["tolerance"], "without --check")
    if asked.trial is not None:
        asked.refuse(_OF_A_TASK, "with --trial, which brings its own training")
    if asked.plan is not None:
        fixed = ["ranks_per_host", "cores", "seconds", "bucket_bytes", "timeout_s", "threads"]
        asked.refuse(
            [*fixed, "trial", "methods", *_OF_A_TASK], "with --plan, where it is settled: plan anew, or"
        )
    if asked.out is not None:
        make_folder(asked.out)
    return sizes


def _sizes(text: str) -> list[int]:
    """Return numbers of workers in order, each once."""
    try:
        found = sorted({int(part) for part in text.split(",")})
    except ValueError:
        raise bad_value(
            "--workers", "must be numbers separated by commas", text, "write 8 or 2,64,1024"
        ) from None
    for size in found:
        check_count("--workers", size, "write 8 or 2,64,1024", most=_MOST_WORKERS)
    return found


def _job(asked: PlanOptions, link: str | Link | None, workers: int) -> _Job:
    """Load and check everything before a rank is asked or a step is measured."""
    if link is None and workers < 2:
        raise ConfigError("a link is measured between two ranks or more: give --link 1gbit,0.2ms")
    if link is None and asked.seconds * _LINK < _LEAST_S:
        wanted = f"must be at least {_LEAST_S / _LINK:g} to measure a link, too"
        raise bad_value("--seconds", wanted, asked.seconds, "leave it at 30, or give --link")
    known = chosen_methods(asked.methods) if asked.methods else default_methods()
    _check_hosts(workers, _per_host(asked, link, workers))
    run = None if asked.check is None else read_run(asked.check)
    if run is not None:
        run.require(workers, asked.bucket_bytes, list(dict.fromkeys([DENSE, *known])))
    with _aside(asked):
        name, trial = _trial(asked, workers)
        batches = first_batches(trial)  # once: an iterator would give others every time
    trial = replace(trial, batches=batches)
    methods = split_methods(asked.methods) if asked.methods else known
    return _Job(name=name, trial=trial, workers=workers, methods=methods, run=run)


def _aside(asked: PlanOptions) -> AbstractContextManager[object]:
    """Let what the user's training prints go to standard error, where the output is to be JSON alone."""
    return redirect_stdout(sys.stderr) if asked.as_json else nullcontext()


def _rehearsing(job: _Job) -> str:
    return f"rehearsing {counted(len(job.methods), 'method')} for {counted(job.workers, 'worker')}"


def _per_host(asked: PlanOptions, link: str | Link | None, workers: int) -> int:
    if asked.ranks_per_host is not None:
        return asked.ranks_per_host
    return _alike(link.hosts) if isinstance(link, Link) and len(link.hosts) == workers else 1


def _alike(hosts: Sequence[object]) -> int:
    """Return how many workers each host has, given every worker's host."""
    counts = [*Counter(hosts).values()]
    if len({*counts}) > 1:
        raise ConfigError(
            f"hosts must have as many workers each for a plan, got {', '.join(map(str, counts))}: start as "
            "many on each, or give --ranks-per-host to plan as if it were so"
        )
    return counts[0]


def _check_hosts(workers: int, per_host: int) -> None:
    if workers % per_host:
        raise bad_value("--ranks-per-host", f"must divide the {workers} workers", per_host, "leave it at 1")


def _measured(asked: PlanOptions, given: str | Link | None, job: _Job, driver: Driver) -> int:
    """Measure the link between these ranks if none is given, rehearse on all at once, and tell on rank 0."""
    display = Display(driver.rank)
    if asked.ranks_per_host is None and not isinstance(given, Link):
        hosts = everyone(driver, own_host())
        per_host = _alike(hosts)  # else a link would be measured for nothing
        if len({*hosts}) > 1:  # a link that is described is not within one host
            asked = replace(asked, ranks_per_host=per_host)
    with display.bar("measuring the link"):
        link = given or measure_link(Driver.own(timeout_s=asked.timeout_s), asked.seconds * _LINK)
    with display.bar(_rehearsing(job)), _aside(asked):
        found = agree(driver, lambda: _made(asked, job, link, driver))
    with display.bar("training together on all ranks"), _aside(asked):
        found = with_ranks(found, job.trial, driver, asked.seconds * _TOGETHER)
    tell = partial(_shown, asked, found, job.run, []) if driver.rank == 0 else lambda: 0
    status = agree(driver, tell)  # a report that rank 0 cannot write must fail everywhere
    # all ranks exit with the same status: a launcher takes another for a failure
    return max(int(text) for text in everyone(driver, str(status)))


def _link(asked: PlanOptions) -> str | Link | None:
    """Return the link as text that can be read, or as it was measured; None where none is given."""
    if asked.link is None:
        return None
    path = Path(asked.link)
    # Also by its suffix, so that a missing file is named as one, and not as a rate that is malformed.
    if path.suffix == ".json" or path.is_file():
        return load_link(path)
    parse_link(asked.link)
    return asked.link


def _made(asked: PlanOptions, job: _Job, link: str | Link, driver: Driver | None, shares: int = 1) -> Plan:
    workers, per_host = job.workers, _per_host(asked, link, job.workers)
    # Under a launcher all its ranks on this host rehearse at once, and share the cores.
    here = detect(os.environ).local_world_size if driver is not None else per_host
    return plan(
        job.trial,
        workers=workers,
        link=link,
        methods=job.methods,
        accuracy=str(asked.accuracy or "lossy"),
        ranks_per_host=per_host,
        cores=usable_cores() / here if asked.cores is None else asked.cores,
        seconds=asked.seconds * (1 - _LINK - _TOGETHER) / shares,
        bucket_bytes=asked.bucket_bytes,
        name=job.name,
    )


def _trial(asked: PlanOptions, workers: int) -> tuple[str, Trial]:
    """Return the user's trial, or a task's as one."""
    if asked.trial is not None:
        return asked.trial, load_trial(asked.trial)
    setup = make_setup(asked, workers)
    model = setup.task.model(asked.seed).to(setup.device)
    size, count = setup.recipe.batch_size, setup.task.train_size
    starts = range(0, max(count - size, 0) + 1, size)
    batches = (setup.task.train_batch(torch.arange(at, min(at + size, count), device="cpu")) for at in starts)

    def loss(model: nn.Module, batch: Any) -> torch.Tensor:
        inputs, targets = (part.to(setup.device) for part in batch)
        return setup.task.loss(model, inputs, targets)[0]

    return str(asked.task), Trial(model, setup.recipe.make_optimizer(model), batches, loss)


def _shown(asked: PlanOptions, found: Plan, run: Run | None, others: Sequence[Plan]) -> int:
    """Print and write the plan, what it is with other numbers of workers, and how a run compares."""
    quiet, out = asked.as_json, asked.out
    received = found.as_json()
    shown = {key: received[key] for key in ("method", "reason", "notes", "predictions")}
    if not quiet:
        _show_plan(found)
    if others:
        plans = sorted({p.world_size: p for p in [found, *others]}.values(), key=lambda p: p.world_size)
        shown["sizes"] = [
            {
                "workers": p.world_size,
                "method": p.method,
                "seconds": {one.method: one.seconds[1] for one in p.predictions},
            }
            for p in plans
        ]
        if not quiet:
            _show_sizes(shown["sizes"], RECORDED if asked.plan is None else found.world_size)
    if out is not None:
        found.save(out / "plan.json")
        note(f"wrote {out / 'plan.json'}", quiet)
        note(draw_plan(found, out / "plan.png"), quiet)
    checked = None if run is None else _check_run(found, run, asked.tolerance, quiet)
    if checked is not None:
        shown["check"] = checked
    if quiet:
        show_json(shown)
    return 0 if checked is None or checked["as_predicted"] else 1


def _show_sizes(sizes: Sequence[dict[str, Any]], recorded: int) -> None:
    """Print ms per step by number of workers and method, as far as methods are the same at all of them.

    Args:
        sizes: ascending, as in the JSON.
        recorded: the most workers of which it is known what methods do.
    """
    last = sizes[-1]["seconds"]
    common = [text for text in last if all(text in one["seconds"] for one in sizes)]
    columns = [DENSE, *sorted((t for t in common if t != DENSE), key=lambda t: last[t])[:_COLUMNS]]
    rows = [
        (one["workers"], *(number_text(1e3 * one["seconds"][text]) for text in columns), one["method"])
        for one in sizes
    ]
    title = "ms per step by number of workers"
    show(("workers", *columns, "recommended"), rows, title, spare=columns[:0:-1])  # the slowest first
    say(
        f"- on paper: beyond {VALIDATED} workers nothing was compared with real runs, and with more than "
        f"{recorded}, methods are taken to do what they do with {recorded}"
    )


def _show_plan(found: Plan) -> None:
    """Print predictions, the recommendation and its reason, and what was assumed."""
    hosts = found.world_size // found.ranks_per_host
    where = f"{counted(found.world_size, 'worker')} on {counted(hosts, 'host')}"
    link = "measured" if found.link.measured else "assumed"
    title = (
        f"{found.work['name'] or 'training'}: {found.work['parameters']:,} parameters, "
        f"{where}, {link} link {rate_text(found.link.bps)}, {time_text(found.link.hop_s)} a hop; "
        f"a step without exchange takes {time_text(found.profile.floor_s)}"
    )
    rows = [
        (
            p.method,
            number_text(1e3 * p.seconds[1]),
            f"{number_text(1e3 * p.seconds[0])} to {number_text(1e3 * p.seconds[2])}",
            number_text(p.moved_bytes / 1e6),
            number_text(p.collectives),
            p.limit,
            "-" if p.method == DENSE else p.pays_text,
            "recommended" if p.method == found.method else "",
        )
        for p in sorted(found.predictions, key=lambda p: p.seconds[1])
    ]
    head = ("method", "ms/step", "80 %", "MB/step", "messages", "limit", "faster than dense", "")
    show(head, rows, title, spare=("messages", "limit", "MB/step", "80 %"))
    say(found.reason)
    for line in found.notes:
        say(f"- {line}")


def _check_run(plan: Plan, run: Run, tolerance: float, quiet: bool) -> dict[str, Any]:
    """Compare a run with a plan that has a prediction for it.

    Args:
        plan: the plan.
        run: the run.
        tolerance: by how much the mean step may differ, as a share above 0.
        quiet: whether to print nothing.

    Returns:
        Predicted and measured values, and whether they agree as "as_predicted".
    """
    text, rank = run.identity["method"], run.slowest
    versions = {**run.versions, "threads": rank["machine"]["threads"]}
    differ = [
        f"{name} differs: {plan.made[name]} when planning, {own} in the run"
        for name, own in versions.items()
        if name in plan.made and plan.made[name] != own
    ]
    prediction = next(p for p in plan.predictions if p.method == text)
    means, steps = rank["means_s"], rank["steps"]
    # Earlier runs have the ledger alone, which also holds what evaluation between rounds has sent.
    ledger = sum(e["moved_bytes"] for e in rank["ledger"] if e["kind"] != "attach")
    sent = rank.get("moved_bytes", ledger) / steps
    took, waited = means["step"], means["wait"]  # as predicted: a median knows nothing of rare rounds
    own_s = prediction.parts_s["computing"] + prediction.parts_s["coding"]
    late_s = rank["quantiles_s"]["step"]["0.9"]
    values = {  # predicted, measured
        "step, mean": (prediction.seconds[1], took, 1e3, "ms"),
        "step, 90 %": (prediction.seconds[2], late_s, 1e3, "ms"),
        "computing": (own_s, took - waited, 1e3, "ms"),
        "waiting": (max(prediction.seconds[1] - own_s, 0.0), waited, 1e3, "ms"),
        "sent per step": (prediction.moved_bytes, sent, 1e-6, "MB"),
    }
    off = took / prediction.seconds[1] - 1
    gaps = {"computing": took - waited - own_s, "waiting": waited - prediction.seconds[1] + own_s}
    blame = max(gaps, key=lambda name: abs(gaps[name]))
    as_predicted = abs(off) <= tolerance
    verdict = "as predicted" if as_predicted else f"not as predicted, mostly by its {blame}"
    if not quiet:
        for line in differ:
            say(line)
        rows = [(what, *_compared(*cells)) for what, cells in values.items()]
        show(("what", "predicted", "measured", "difference"), rows, f"{text}, {steps} steps of {run.folder}")
        say(f"the mean step took {off:+.0%} of what was predicted: {verdict}")
    received = {what: {"predicted": cells[0], "measured": cells[1]} for what, cells in values.items()}
    return {"as_predicted": as_predicted, "verdict": verdict, "seconds and bytes": received, "differ": differ}


def _compared(predicted: float, measured: float, unit: float, name: str) -> tuple[str, str, str]:
    share = f"{measured / predicted - 1:+.0%}" if predicted else ""
    return f"{number_text(unit * predicted)} {name}", f"{number_text(unit * measured)} {name}", share
