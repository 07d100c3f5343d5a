"""Time of gloo's all-to-all and all-gather against messages that are offered first, between emulated hosts.

    python benchmarks/messages.py --cells 2:100mbit 3:100mbit 4:50mbit --kib 32 512 2048

For every cell HOSTS:RATE the median milliseconds of the slowest rank; "link" is what the bytes need at the
rate. Needs root and iproute2.
"""

from __future__ import annotations

import statistics
import time
from collections.abc import Callable
from typing import Any

import torch
import torch.distributed as dist
from harness import Place, command_line, main, number, publish, slowest, table

from stenograd.emulate.hosts import parse_rate
from stenograd.wire.messages import swap

_TURNS = 7
_HEADERS = 1.048  # of packets, on top of the bytes
_WAYS = ("all-to-all", "all-gather", "messages")


def measure(rank: int, kib: list[int]) -> dict[int, dict[str, float]]:
    """Time every size on this rank."""
    found = {}
    for size in kib:
        rows = torch.zeros(dist.get_world_size(), size << 10, dtype=torch.uint8)
        into = torch.empty_like(rows)
        ways: dict[str, Callable[[], Any]] = {
            "all-to-all": lambda: dist.all_to_all_single(into, rows, async_op=True),  # noqa: B023
            "all-gather": lambda: dist.all_gather(list(into), rows[0], async_op=True),  # noqa: B023
            "messages": lambda: swap(None, rank, rows, into),  # noqa: B023
        }
        taken = [{name: _slowest_ms(way) for name, way in ways.items()} for _ in range(_TURNS)]
        found[size] = {name: statistics.median(turn[name] for turn in taken) for name in ways}
    return found


def _slowest_ms(way: Callable[[], Any]) -> float:
    dist.barrier()
    dist.barrier()  # the first may find ranks that come late
    start = time.perf_counter()
    way().wait()
    return slowest(1e3 * (time.perf_counter() - start))


def messages() -> None:
    """Time all cells."""
    parser = command_line(__doc__)
    parser.add_argument("--cells", nargs="+", default=["2:100mbit"], metavar="HOSTS:RATE")
    parser.add_argument("--kib", nargs="+", type=int, default=[32, 512, 2048], help="for each other rank")
    args = parser.parse_args()
    told, lines = {}, []
    for cell in args.cells:
        hosts, _, rate = cell.partition(":")
        bps = parse_rate(rate)
        told[cell] = Place(int(hosts), rate=rate).run(measure, args.kib)[0]
        for size, ms in told[cell].items():
            link = size * (int(hosts) - 1) * 8192e3 * _HEADERS / bps if bps else None
            lines.append([cell, str(size), number(link), *(number(ms[way]) for way in _WAYS)])
    publish(args, "Messages", told, table(["cell", "KiB for each other rank", "link, ms", *_WAYS], lines))


if __name__ == "__main__":
    main(messages)
