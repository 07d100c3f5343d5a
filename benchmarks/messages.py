"""Time of gloo's all-to-all and all-gather against messages that are offered first, between emulated hosts.

    python benchmarks/messages.py --cells 2:100mbit 3:100mbit 4:50mbit --kib 32 512 2048

Every cell HOSTS:RATE prints the median milliseconds of the slowest rank; "link" is what the bytes need at the
rate. Needs root and iproute2.
"""

from __future__ import annotations

import argparse
import os
import statistics
import sys
import time
from collections.abc import Callable
from typing import Any

import torch
import torch.distributed as dist

import stenograd
from stenograd.comm.messages import swap
from stenograd.emulate.hosts import Hosts, parse_rate

_TURNS = 7
_HEADERS = 1.048  # of packets, on top of the bytes


def rank(kib: list[int]) -> None:
    """Time every size on this rank; rank 0 prints."""
    torch.set_num_threads(1)
    world = stenograd.init(timeout_s=120)
    for size in (each << 10 for each in kib):
        rows = torch.zeros(world.world_size, size, dtype=torch.uint8)
        into = torch.empty_like(rows)
        ways: dict[str, Callable[[], Any]] = {
            "all-to-all": lambda: dist.all_to_all_single(into, rows, async_op=True),  # noqa: B023
            "all-gather": lambda: dist.all_gather(list(into), rows[0], async_op=True),  # noqa: B023
            "messages": lambda: swap(None, world.rank, rows, into),  # noqa: B023
        }
        found: dict[str, list[float]] = {name: [] for name in ways}
        for _ in range(_TURNS):
            for name, way in ways.items():
                found[name].append(slowest_ms(way))
        if world.rank == 0:
            medians = ", ".join(f"{name} {statistics.median(ms):.1f}" for name, ms in found.items())
            print(f"{size >> 10} KiB for each other rank, ms: {medians}", flush=True)


def slowest_ms(way: Callable[[], Any]) -> float:
    """Return the milliseconds of the slowest rank."""
    dist.barrier()
    dist.barrier()  # the first may find ranks that come late
    start = time.perf_counter()
    way().wait()
    taken = torch.tensor(1e3 * (time.perf_counter() - start))
    dist.all_reduce(taken, dist.ReduceOp.MAX)
    return taken.item()


def main() -> None:
    """Time all cells."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--cells", nargs="+", default=["2:100mbit"], metavar="HOSTS:RATE")
    parser.add_argument("--kib", nargs="+", type=int, default=[32, 512, 2048], help="for each other rank")
    args = parser.parse_args()
    if "RANK" in os.environ:
        rank(args.kib)
        return
    for cell in args.cells:
        count, _, rate = cell.partition(":")
        bps, least = parse_rate(rate), (int(count) - 1) * 8192e3 * _HEADERS
        print(f"{count} hosts, {rate}" + (f": link {least / bps:.3f} ms a KiB" if bps else ""))
        with Hosts(int(count), rate) as hosts:
            command = [sys.executable, __file__, "--kib", *map(str, args.kib)]
            print(hosts.run(command, env={"TORCH_CPP_LOG_LEVEL": "ERROR"})[0], end="")


if __name__ == "__main__":
    main()
