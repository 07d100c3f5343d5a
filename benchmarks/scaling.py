"""Bytes and processor time of one rank against the number of ranks, simulated in one process.

    python benchmarks/scaling.py --elements 1000000

For `sign` and `qsgd` bytes are told as a multiple of one coded vector, for `topk` of k words of 4 bytes, k
being the elements that a rank selects. Milliseconds are its own, encoding and decoding: the processor time
of the simulated exchange divided by the number of ranks; the median of some exchanges.
"""

from __future__ import annotations

import statistics
import time

import torch
from harness import command_line, main, number, publish, table

import stenograd
from stenograd.compression.contract import Site
from stenograd.simulate import run
from stenograd.wire.requests import Request
from stenograd.wire.traffic import moved_bytes

METHODS = ("sign:dense_below=0", "qsgd:bits=4", "topk:ratio=0.01")
RANKS = (2, 3, 4, 8, 16, 32, 64)


def coded_bytes(name: str, n: int) -> float:
    """Return the bytes of one vector in the method's code; for top-k, those of k words."""
    sizes = {"sign": n / 8 + 4 * n / 1024, "qsgd": n / 2 + 4 * n / 512, "topk": 4 * n / 100}
    return sizes[name.split(":")[0]]


def measure(name: str, ranks: int, n: int, rounds: int) -> tuple[float, float]:
    """Return the bytes that a rank sends and the milliseconds it computes, in one exchange."""
    compressor = stenograd.method(name).compressor
    shapes = (torch.Size((n,)),)
    xs = [torch.randn(n, generator=torch.Generator().manual_seed(rank)) for rank in range(ranks)]
    states = None
    sent: list[int] = []
    taken_ms: list[float] = []

    def spy(request: Request) -> None:
        sent[-1] += moved_bytes(request.op, request.nbytes, ranks)

    for step in range(rounds):
        common = {"shapes": shapes, "world_size": ranks, "step": step}
        sites = [Site(**common, rank=r, buffer=torch.empty(n)) for r in range(ranks)]
        flats = [x.clone() for x in xs]
        states = states or [compressor.init(x, s) for x, s in zip(flats, sites, strict=True)]
        sent.append(0)
        start = time.process_time()
        todo = zip(flats, states, sites, strict=True)
        done = run([compressor.exchange(x, None, state, site) for x, state, site in todo], spy=spy)
        taken_ms.append((time.process_time() - start) * 1e3 / ranks)
        states = [exchange.state for exchange in done]
    return statistics.median(sent[1:]), statistics.median(taken_ms[1:])


def scaling() -> None:
    """Measure all and print a table."""
    parser = command_line(__doc__)
    parser.add_argument("--elements", type=int, default=1_000_000)
    parser.add_argument("--rounds", type=int, default=5)
    args = parser.parse_args()
    torch.set_num_threads(1)
    rows = {
        (name, ranks): measure(name, ranks, args.elements, args.rounds) for name in METHODS for ranks in RANKS
    }
    lines = [
        [name, str(ranks), number(sent, 0), number(sent / coded_bytes(name, args.elements), 2), number(ms, 2)]
        for (name, ranks), (sent, ms) in rows.items()
    ]
    head = ["method", "ranks", "bytes", "x coded", "ms a rank"]
    publish(args, "Bytes and computing time by ranks", lines, table(head, lines))


if __name__ == "__main__":
    main(scaling)
