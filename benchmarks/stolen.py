"""How much computing an emulated link takes from the ranks, beside an all-reduce that uses all of it.

    python benchmarks/stolen.py --rate 100mbit [--single-packets]

Each of two hosts counts matrix products, first alone and then beside the all-reduce. What is lost, as a share
of the time that the all-reduce takes, is printed for several repetitions. `--single-packets` lets the kernel
send packets one by one, which the token bucket then times one by one. Needs root and iproute2.
"""

from __future__ import annotations

import argparse
import os
import subprocess
import sys
import threading
import time

import torch
import torch.distributed as dist

from stenograd.emulate.hosts import Hosts, parse_rate

_LASTS_S, _ALONE_S, _REPEATS = 0.35, 0.5, 5


class Counter:
    """A thread that multiplies matrices until it is told to stop."""

    def __init__(self) -> None:
        self.count, self.stop = 0, threading.Event()
        threading.Thread(target=self._work, daemon=True).start()

    def _work(self) -> None:
        a, out = torch.ones(64, 64), torch.empty(64, 64)
        while not self.stop.is_set():
            for _ in range(10):
                torch.mm(a, a, out=out)  # releases Python's lock
            self.count += 1


def measure(nbytes: int) -> None:
    """Let this rank count beside all-reduces of so many bytes; rank 0 prints what was lost."""
    torch.set_num_threads(1)
    dist.init_process_group("gloo")
    tensor, counter = torch.zeros(nbytes // 4), Counter()
    dist.all_reduce(tensor)
    for _ in range(_REPEATS):
        start, before = time.perf_counter(), counter.count
        time.sleep(_ALONE_S)
        per_s = (counter.count - before) / (time.perf_counter() - start)
        dist.barrier()
        start, before = time.perf_counter(), counter.count
        dist.all_reduce(tensor)
        took = time.perf_counter() - start
        if dist.get_rank() == 0:
            print(f"{took:.3f} s, of which {1 - (counter.count - before) / (per_s * took):.0%} are lost")
    counter.stop.set()
    dist.barrier()
    dist.destroy_process_group()


def main() -> None:
    """Start two hosts, or be a rank on one of them."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--rate", default="100mbit")
    parser.add_argument("--single-packets", action="store_true")
    args = parser.parse_args()
    bits_per_s = parse_rate(args.rate)
    if bits_per_s is None:
        parser.error("--rate must be limited, such as 100mbit")
    if "RANK" in os.environ:
        if args.single_packets:
            subprocess.run(["ip", "link", "set", "dev", "eth0", "gso_max_segs", "1"], check=True)
        measure(int(bits_per_s / 8 * _LASTS_S))
        return
    command = [sys.executable, "-W", "ignore", __file__, "--rate", args.rate]
    with Hosts(2, args.rate) as hosts:
        quiet = {"TORCH_CPP_LOG_LEVEL": "ERROR"}
        print(hosts.run([*command, *["--single-packets"] * args.single_packets], env=quiet, timeout_s=60)[0])


if __name__ == "__main__":
    main()
