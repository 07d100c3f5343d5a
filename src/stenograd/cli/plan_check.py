"""Compares a run with what was predicted for it, and says which input was off."""

from __future__ import annotations

import json
from collections.abc import Collection, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from stenograd.cli.table import say, show
from stenograd.errors import DataError, bad_value, first_line
from stenograd.planning.plan import Plan
from stenograd.reading import read_regular

__all__ = ["Run", "check_run", "read_run"]


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
            raise bad_value("the run's method", f"must be one of {known}", own, f"plan it: --methods {own}")


def read_run(folder: Path) -> Run:
    """Read what a run was, and what its slowest rank measured.

    Raises:
        DataError: the folder holds no finished run.
    """
    try:
        run = json.loads(read_regular(folder / "run.json"))
        ranks = json.loads(read_regular(folder / "steps.json"))["ranks"]
        slowest = max(ranks, key=lambda rank: rank["means_s"]["step"])
        return Run(folder=folder, identity=run["identity"], versions=run["versions"], slowest=slowest)
    except (OSError, ValueError, KeyError, TypeError, RecursionError) as cause:
        raise DataError(
            f"{folder}: holds no finished run ({first_line(cause)}): give the folder of stenograd train --out"
        ) from cause


def check_run(plan: Plan, run: Run, tolerance: float, quiet: bool) -> dict[str, Any]:
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
    sent = sum(e["moved_bytes"] for e in rank["ledger"] if e["kind"] != "attach") / steps
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
        rows = [(what, *_cells(*cells)) for what, cells in values.items()]
        show(("what", "predicted", "measured", "difference"), rows, f"{text}, {steps} steps of {run.folder}")
        say(f"the mean step took {off:+.0%} of what was predicted: {verdict}")
    told = {what: {"predicted": cells[0], "measured": cells[1]} for what, cells in values.items()}
    return {"as_predicted": as_predicted, "verdict": verdict, "seconds and bytes": told, "differ": differ}


def _cells(predicted: float, measured: float, unit: float, name: str) -> tuple[str, str, str]:
    share = f"{measured / predicted - 1:+.0%}" if predicted else ""
    return f"{unit * predicted:.3g} {name}", f"{unit * measured:.3g} {name}", share
