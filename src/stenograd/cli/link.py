"""`stenograd link`: what the network between the ranks gives."""

from __future__ import annotations

import json
import statistics
from pathlib import Path

from stenograd.cli.folder import write_json
from stenograd.cli.options import Options
from stenograd.cli.ranks import in_ranks
from stenograd.cli.report import megabytes
from stenograd.cli.table import console, show
from stenograd.comm.agreement import agree
from stenograd.comm.driver import Driver
from stenograd.errors import bad_value
from stenograd.planning.link import Cost, Link
from stenograd.planning.measure_link import measure_link
from stenograd.planning.units import rate_text, time_text

__all__ = ["run"]


def run(options: Options, seconds: float, out: Path | None, as_json: bool) -> int:
    """Measure on all ranks, and let rank 0 print and write."""

    def prepare(world_size: int) -> int:
        if world_size < 2:
            raise bad_value(
                "--workers", "must be at least 2 to measure a link", world_size, "or start it under torchrun"
            )
        return world_size

    def body(_: int, driver: Driver) -> int:
        found = measure_link(Driver.own(timeout_s=options.timeout_s), seconds)
        if out is not None:
            agree(driver, lambda: write_json(out, found.as_json()) if driver.rank == 0 else None)
        if driver.rank == 0:
            console().print_json(json.dumps(found.as_json())) if as_json else _show(found)
        return 0

    return in_ranks(options, prepare, body)


def _show(link: Link) -> None:
    ranks, hosts = len(link.hosts), max(link.hosts) + 1
    where = f"{ranks} workers on {hosts} hosts" if hosts > 1 else f"{ranks} workers on one host"
    rows = [
        (host, link.hosts.count(host), rate_text(up), rate_text(down))
        for host, (up, down) in enumerate(zip(link.up_bps, link.down_bps, strict=True))
    ]
    show(("host", "workers", "sends", "receives"), rows, f"Link of {where}, packet headers counted")
    costs = [
        (op, time_text(c.hop_s), time_text(c.busy_hop_s), rate_text(8 * c.bytes_per_s), _taken(c))
        for op, c in link.costs.items()
    ]
    heads = ("collective", "latency", "while computing", "rate", "takes from computing")
    show(heads, costs, "Through gloo, per message")
    samples = [
        (s.op, f"{s.nbytes:,}", s.at_once, time_text(statistics.median(s.seconds)))
        for s in link.samples
        if not s.busy
    ]
    show(("collective", "bytes per worker", "at once", "median"), samples, "Collectives by size")
    cold = ", ".join(f"{name} {time_text(value)}" for name, value in link.cold_s.items())
    screen = console()
    screen.print(f"latency: {time_text(link.latency_s)} one way, half a ping", soft_wrap=True)
    screen.print(f"all-reduce after silence: {cold}", soft_wrap=True)
    screen.print(f"measured in {link.seconds:.1f} s, {megabytes(link.sent_bytes)} sent by each worker")


def _taken(cost: Cost) -> str:
    return f"{time_text(cost.issue_s + cost.cpu_s)} + {1e9 * cost.cpu_s_per_byte:.2f} ns/byte"
