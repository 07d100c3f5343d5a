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

import subprocess
import time
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import torch
from harness import Place, command_line, main, number, publish, table

import stenograd
from stenograd.catalog.method import for_any_optimizer

METHODS = for_any_optimizer()
STEPS = 20
_INTERFACE = "eth0"
_SETTLE_S = 0.3  # until the last packets are counted
_ACK_BYTES = 66
_KINDS = ("counted", "headers", "acks", "interface")


def measure(rank: int, methods: list[str]) -> dict[str, dict[str, int]]:
    """Be a rank; return its counts over some steps of each method."""
    # Without this a piece of 64 kB leaves under one header, which no wire would do.
    subprocess.run(["ip", "link", "set", "dev", _INTERFACE, "gso_max_segs", "1"], check=True)
    torch.manual_seed(0)
    return {method: _counts(method) for method in methods}


def _counts(method: str) -> dict[str, int]:
    layers = [torch.nn.Linear(784, 1024), torch.nn.ReLU(), torch.nn.Linear(1024, 1024), torch.nn.ReLU()]
    model = torch.nn.Sequential(*layers, torch.nn.Linear(1024, 10))
    optimizer = torch.optim.SGD(model.parameters(), lr=1e-3)
    x, before = torch.randn(32, 784), dict.fromkeys(_KINDS, 0)
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
    tcp = _kernel_counters("snmp", "Tcp") | _kernel_counters("netstat", "TcpExt")
    return {
        "counted": traffic.moved_bytes,
        "headers": traffic.header_bytes,
        "acks": _ACK_BYTES * (tcp["OutSegs"] - tcp["TCPOrigDataSent"]),
        "interface": int(Path(f"/sys/class/net/{_INTERFACE}/statistics/tx_bytes").read_text()),
    }


def _kernel_counters(file: str, protocol: str) -> dict[str, int]:
    """Read one protocol's two lines, names and values, of /proc/net."""
    lines = [line.split() for line in Path(f"/proc/net/{file}").read_text().splitlines()]
    names, values = (words[1:] for words in lines if words[0] == f"{protocol}:")
    return dict(zip(names, map(int, values), strict=True))


def row(method: str, ranks: list[dict[str, int]]) -> list[str]:
    """Return a line of the table; the last but one cell is the difference over all hosts, in percent."""
    kb = {key: sum(rank[key] for rank in ranks) / len(ranks) / STEPS / 1e3 for key in _KINDS}
    off = [100 * ((rank["counted"] + rank["headers"]) / rank["interface"] - 1) for rank in ranks]
    total = 100 * ((kb["counted"] + kb["headers"]) / kb["interface"] - 1)
    worst = max(off, key=abs)
    return [method, str(len(ranks)), *(number(kb[key]) for key in _KINDS), f"{total:+.2f}", f"{worst:+.2f}"]


def count_bytes() -> None:
    """Run the measurement on each number of hosts and print one table."""
    parser = command_line(__doc__, "count_bytes")
    parser.add_argument("--hosts", type=int, nargs="+", default=[2, 3, 4])
    parser.add_argument("--rate", default="1gbit", help="none, or like 100mbit or 1gbit")
    parser.add_argument("--methods", nargs="+", default=METHODS)
    args = parser.parse_args()
    told = []
    for hosts in args.hosts:
        ranks = Place(hosts, rate=args.rate, gated=False).run(measure, args.methods)
        told.append({"hosts": hosts, "ranks": ranks})
    publish(args, "Bytes counted against those of the interfaces", told, summary(told))


def summary(told: Sequence[Mapping[str, Any]]) -> str:
    """Format a line for each method and number of hosts."""
    lines = [row(m, [rank[m] for rank in run["ranks"]]) for run in told for m in run["ranks"][0]]
    head = ["method", "hosts", *_KINDS, "difference %", "of one host"]
    worst = max(abs(float(line[-2])) for line in lines)
    return f"{table(head, lines)}\n\nLargest difference over all hosts: {worst:.2f} %"


if __name__ == "__main__":
    main(count_bytes)
