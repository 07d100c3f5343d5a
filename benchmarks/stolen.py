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
import time

import torch
import torch.distributed as dist

from stenograd.emulate.hosts import Hosts, parse_rate
from stenograd.planning.timed import Computing

_LASTS_S, _ALONE_S, _REPEATS = 0.35, 0.5, 5


def measure(nbytes: int) -> None:
    """Let this rank count beside all-reduces of so many bytes; rank 0 prints what was lost."""
    torch.set_num_threads(1)
    dist.init_process_group("gloo")
    tensor = torch.zeros(nbytes // 4)
    dist.all_reduce(tensor)
    with Computing() as computing:
        for _ in range(_REPEATS):
            computing.alone(_ALONE_S)
            dist.barrier()
            start, before_s = time.perf_counter(), computing.done_s()
            dist.all_reduce(tensor)
            took_s = time.perf_counter() - start
            if dist.get_rank() == 0:
                print(f"{took_s:.3f} s, of which {1 - (computing.done_s() - before_s) / took_s:.0%} are lost")
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
