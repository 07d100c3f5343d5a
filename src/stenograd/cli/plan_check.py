"""Compares a run with what was predicted for it, and says which input was off."""

from __future__ import annotations

import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from stenograd.cli.table import console, show
from stenograd.errors import DataError, bad_value, first_line
from stenograd.planning.plan import Plan
from stenograd.planning.replay import replay

__all__ = ["check_run"]


def check_run(plan: Plan, folder: Path, tolerance: float) -> int:
    """Print how a run of `stenograd train --out` compares with a plan; return 1 if it is off, else 0.

    Args:
        plan: with a prediction for the run's method.
        folder: of the run.
        tolerance: by how much the mean step may differ, as a share above 0.

    Raises:
        DataError: the folder holds no finished run.
        ConfigError: the run is of another method, number of workers or bucket size than the plan.
    """
    if not tolerance > 0:
        raise bad_value("--tolerance", "must be above 0", tolerance, "leave it at 0.25")
    identity, versions, rank = _read(folder)
    _check_same(plan, identity)
    for name, own in {**versions, "threads": rank["machine"]["threads"]}.items():
        if name in plan.made and plan.made[name] != own:
            console().print(f"{name} differs: {plan.made[name]} when planning, {own} in the run")
    text = identity["method"]
    prediction = next(p for p in plan.predictions if p.method == text)
    means, steps = rank["means_s"], rank["steps"]
    sent = sum(e["moved_bytes"] for e in rank["ledger"] if e["kind"] != "attach") / steps
    took, waited = means["step"], means["wait"]  # as predicted: a median knows nothing of rare rounds
    free = replay(plan.programs[text], plan.cluster.without_latency().without_limits())
    own = free.step_s * plan.slowness.at[1]
    rows = [
        _row("step, mean", prediction.seconds[1], took, 1e3, "ms"),
        _row("step, 90 %", prediction.seconds[2], rank["quantiles_s"]["step"]["0.9"], 1e3, "ms"),
        _row("computing", own, took - waited, 1e3, "ms"),
        _row("waiting", max(prediction.seconds[1] - own, 0.0), waited, 1e3, "ms"),
        _row("sent per step", prediction.moved_bytes, sent, 1e-6, "MB"),
    ]
    show(("what", "predicted", "measured", "difference"), rows, f"{text}, {steps} steps of {folder}")
    off = took / prediction.seconds[1] - 1
    gaps = {"computing": took - waited - own, "waiting": waited - prediction.seconds[1] + own}
    blame = max(gaps, key=lambda name: abs(gaps[name]))
    verdict = "as predicted" if abs(off) <= tolerance else f"not as predicted, mostly by its {blame}"
    console().print(f"the mean step took {off:+.0%} of what was predicted: {verdict}", soft_wrap=True)
    return 0 if abs(off) <= tolerance else 1


def _row(what: str, predicted: float, measured: float, unit: float, name: str) -> tuple[str, str, str, str]:
    share = f"{measured / predicted - 1:+.0%}" if predicted else ""
    return what, f"{unit * predicted:.3g} {name}", f"{unit * measured:.3g} {name}", share


def _read(folder: Path) -> tuple[Mapping[str, Any], Mapping[str, Any], Mapping[str, Any]]:
    """Return what a run was, its versions, and what its slowest rank measured."""
    try:
        run = json.loads((folder / "run.json").read_text())
        ranks = json.loads((folder / "steps.json").read_text())["ranks"]
        return (
            run["identity"],
            run["versions"],
            max(ranks, key=lambda rank: rank["means_s"]["step"]),
        )
    except (OSError, ValueError, KeyError, TypeError) as cause:
        raise DataError(
            f"{folder}: holds no finished run ({first_line(cause)}): give the folder of stenograd train --out"
        ) from cause


def _check_same(plan: Plan, identity: Mapping[str, Any]) -> None:
    for name, planned, own in (
        ("workers", plan.world_size, identity["world_size"]),
        ("bucket_bytes", plan.work["bucket_bytes"], identity["bucket_bytes"]),
    ):
        if planned != own:
            raise bad_value(f"the run's {name}", f"must be the plan's {planned}", own, "plan for that run")
    if identity["method"] not in plan.programs:
        known = ", ".join(plan.programs)
        raise bad_value("the run's method", f"must be one of {known}", identity["method"], "plan for it")
