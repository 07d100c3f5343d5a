"""The ledger against the network interfaces' own counters, for every method, at 2, 3 and 4 emulated hosts.

    python benchmarks/count_bytes.py --hosts 2 3 4

Needs what `stenograd emulate` needs. For every method it trains a 1.9 M parameter network for some steps
and prints the means over the hosts, in kB a step: bytes counted, headers and acknowledgements as the ledger
estimates them, what the interfaces sent (`tx_bytes`), and the difference between the two, over all hosts
and for the host where it is largest. `acks` is what packets without data took, from the kernel's counters.

The hosts' interfaces send packets of at most 1,500 bytes, each counted with its headers. Elsewhere a counter
may see up to 64 kB under one header before the hardware cuts it (segmentation offload).
"""

from __future__ import annotations

import argparse
import json
import sys
import time
from pathlib import Path
from typing import Any

import stenograd
from stenograd.catalog.method import for_any_optimizer
from stenograd.emulate.hosts import Hosts, HostsError

METHODS = for_any_optimizer()
STEPS = 20
_INTERFACE = "eth0"
_SETTLE_S = 0.3  # until the last packets are counted
_ACK_BYTES = 66


def main() -> None:
    """Run the measurement on each number of hosts and print one table."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--hosts", type=int, nargs="+", default=[2, 3, 4])
    parser.add_argument("--rate", default="1gbit", help="none, or like 100mbit or 1gbit")
    parser.add_argument("--methods", nargs="+", default=METHODS)
    parser.add_argument("--rank", action="store_true", help=argparse.SUPPRESS)
    args = parser.parse_args()
    if args.rank:
        run_rank(args.methods)
        return
    print("| method | hosts | counted | headers | acks | interface | difference % | of one host |")
    print("|---|---:|---:|---:|---:|---:|---:|---:|")
    worst = 0.0
    for count in args.hosts:
        try:
            rows = measured(count, args.rate, args.methods)
        except (HostsError, ValueError) as error:
            raise SystemExit(f"count_bytes: {error}") from None
        for row in rows:
            worst = max(worst, abs(show(count, row)))
    print(f"largest difference over all hosts: {worst:.2f} %")


def measured(count: int, rate: str, methods: list[str]) -> list[dict[str, Any]]:
    """Return what rank 0 printed: a method and all ranks' counts each."""
    # Without this a piece of 64 kB leaves under one header, which no wire would do.
    cut = f"ip link set dev {_INTERFACE} gso_max_segs 1 && exec "
    command = cut + " ".join([sys.executable, __file__, "--rank", "--methods", *methods])
    with Hosts(count, rate) as hosts:
        output = hosts.run(["sh", "-c", command], timeout_s=280)[0]
    return [json.loads(line) for line in output.splitlines() if line.startswith("{")]


def show(count: int, row: dict[str, Any]) -> float:
    """Print a line of the table and return the difference over all hosts, in percent."""
    ranks = row["ranks"]
    kb = {key: sum(r[key] for r in ranks) / count / STEPS / 1e3 for key in ranks[0]}
    off = [100 * ((r["counted"] + r["headers"]) / r["interface"] - 1) for r in ranks]
    total = 100 * ((kb["counted"] + kb["headers"]) / kb["interface"] - 1)
    figures = " | ".join(f"{kb[key]:,.1f}" for key in ("counted", "headers", "acks", "interface"))
    print(f"| {row['method']} | {count} | {figures} | {total:+.2f} | {max(off, key=abs):+.2f} |", flush=True)
    return total


def run_rank(methods: list[str]) -> None:
    """Measure each method; rank 0 prints a line of JSON with all ranks' counts."""
    import torch

    from stenograd.comm.agreement import everyone
    from stenograd.comm.driver import Driver

    world = stenograd.init(timeout_s=60)
    torch.manual_seed(0)
    for method in methods:
        counts = measure(method)
        ranks = [json.loads(text) for text in everyone(Driver(timeout_s=60), json.dumps(counts))]
        if world.rank == 0:
            print(json.dumps({"method": method, "ranks": ranks}), flush=True)


def measure(method: str) -> dict[str, int]:
    """Return this rank's counts over some steps of one method."""
    import torch
    from torch import nn

    model = nn.Sequential(
        nn.Linear(784, 1024), nn.ReLU(), nn.Linear(1024, 1024), nn.ReLU(), nn.Linear(1024, 10)
    )
    optimizer = torch.optim.SGD(model.parameters(), lr=1e-3)
    x = torch.randn(32, 784)
    with stenograd.distribute(model, optimizer, method, timeout_s=60) as sync:
        for step in range(STEPS + 1):
            optimizer.zero_grad()
            model(x).square().mean().backward()
            optimizer.step()
            if step == 0:  # attaching and warming up are not counted
                time.sleep(_SETTLE_S)
                before = counters(sync.traffic)
        time.sleep(_SETTLE_S)
        return {key: value - before[key] for key, value in counters(sync.traffic).items()}


def counters(traffic: Any) -> dict[str, int]:
    """Return the ledger's totals and the kernel's counters of this host, in bytes."""
    tcp = kernel_counters("snmp", "Tcp") | kernel_counters("netstat", "TcpExt")
    return {
        "counted": traffic.moved_bytes,
        "headers": traffic.header_bytes,
        "interface": int(Path(f"/sys/class/net/{_INTERFACE}/statistics/tx_bytes").read_text()),
        "acks": _ACK_BYTES * (tcp["OutSegs"] - tcp["TCPOrigDataSent"]),
    }


def kernel_counters(file: str, protocol: str) -> dict[str, int]:
    """Read one protocol's two lines, names and values, of /proc/net."""
    lines = [line.split() for line in Path(f"/proc/net/{file}").read_text().splitlines()]
    names, values = (words[1:] for words in lines if words[0] == f"{protocol}:")
    return dict(zip(names, map(int, values), strict=True))


if __name__ == "__main__":
    main()
