"""`stenograd simulate`: a plan at other numbers of workers."""

from __future__ import annotations

import json
from collections.abc import Sequence
from dataclasses import asdict
from pathlib import Path

from stenograd.catalog.method import method
from stenograd.cli.compare import split_methods
from stenograd.cli.table import console, show
from stenograd.errors import bad_value
from stenograd.planning.advice import DENSE
from stenograd.planning.plan import VALIDATED, load_plan
from stenograd.planning.scale import MERGED, TWO_LEVELS, Point, parse_place, scaled, sizes_of
from stenograd.planning.units import time_text

__all__ = ["run"]

_SHOWN = 6  # methods in the table, the fastest at the largest size; all are in --json
_MUCH = 0.3  # of a step: then a ring's latency is what to change


def run(
    plan: Path,
    workers: str,
    hosts: str | None,
    inside: str | None,
    between: str | None,
    slow: str | None,
    site: str | None,
    methods: Sequence[str] | None,
    as_json: bool,
) -> int:
    """Extrapolate and print."""
    found = load_plan(plan)
    most, place = parse_place(hosts, inside, between, slow, site)
    sizes = sizes_of(workers)
    if most is not None and max(sizes) > most:
        raise bad_value("--workers", f"must be at most the {most} of --hosts", max(sizes), "give more hosts")
    texts = [method(text).text for text in split_methods(methods)] if methods else None
    points = scaled(found, sizes, place, texts)
    if as_json:
        console().print_json(json.dumps([asdict(point) for point in points]))
        return 0
    floor_s = found.profile.floor_s
    last = points[-1].seconds
    named = sorted((t for t in last if t not in (DENSE, MERGED, TWO_LEVELS)), key=lambda t: last[t])
    columns = [t for t in (DENSE, MERGED, TWO_LEVELS) if any(t in p.seconds for p in points)]
    columns += named if methods else named[:_SHOWN]
    rows = [(p.workers, *(_cell(p, text, floor_s) for text in columns), f"{p.latency:.0%}") for p in points]
    title = f"{found.work['name'] or 'training'}: ms per step, and its share that computes"
    show(("workers", *columns, "dense: latency"), rows, title)
    for line in _remarks(points, found.programs[DENSE].world_size):
        console().print(f"- {line}", soft_wrap=True)
    return 0


def _cell(point: Point, text: str, floor_s: float) -> str:
    seconds = point.seconds.get(text)
    return "" if seconds is None else f"{1e3 * seconds:.4g} ({min(floor_s / seconds, 1):.0%})"


def _remarks(points: Sequence[Point], recorded: int) -> list[str]:
    lines = [
        f"recorded with {recorded} workers; real runs were compared up to {VALIDATED} workers, and the rest "
        "is arithmetic on these parts"
    ]
    late = next((p for p in points if p.latency > _MUCH), None)
    if late is None:
        return [*lines, f"latency stays below {_MUCH:.0%} of a dense step"]
    last = points[-1]
    lines.append(f"from {late.workers} workers on, more than {_MUCH:.0%} of a dense step is a ring's latency")
    for text in (MERGED, TWO_LEVELS):
        if text in last.seconds:
            instead = f"{time_text(last.seconds[text])} instead of {time_text(last.seconds[DENSE])}"
            lines.append(f"at {last.workers} workers, {text} and nothing hidden: {instead}")
    return lines
