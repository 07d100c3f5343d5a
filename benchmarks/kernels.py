"""Each CPU kernel against `copy_` of the same size: one thread, interleaved, medians.

    python benchmarks/kernels.py --elements 10000000 --rounds 15

Memory that a kernel writes its result to is allocated before, as in training, where a buffer lives on; the
residual is restored before each call. `ratio` compares processor times, which other processes on the machine
change less than wall-clock times.
"""

from __future__ import annotations

import math
import statistics
import time
from collections.abc import Callable
from typing import Any

import torch
from harness import command_line, main, number, publish, table

from stenograd.kernels import lowrank
from stenograd.kernels.indices import pack_indices, unpack_indices
from stenograd.kernels.quantize import qsgd_decode_mean, qsgd_encode_feedback
from stenograd.kernels.scatter import scatter_mean
from stenograd.kernels.select import select, select_feedback
from stenograd.kernels.sign import sign_decode_mean, sign_encode_feedback
from stenograd.kernels.values import pack_values, unpack_values
from stenograd.wire.finite import not_bounded

GOALS = {
    "top-k 1 %: encode with feedback": 1.8,
    "top-k 1 %: decode and average 4": 0.8,
    "sign: encode with feedback": 1.4,
    "qsgd 4 bit: encode with feedback": 2.4,
}

_COLUMNS = 2048  # of the matrix that is approximated


def cases(n: int) -> tuple[dict[str, Callable[[], object]], Callable[[], object]]:
    """Return what to time, and what to do before each."""
    g = torch.Generator().manual_seed(0)
    x, lost = torch.randn(n, generator=g) * 0.1, torch.randn(n, generator=g)
    r, out, k = lost.clone(), torch.zeros(n), math.ceil(n / 100)
    sparse = [select(torch.randn(n, generator=g), k) for _ in range(4)]
    signs = [sign_encode_feedback(x, None, 1024, [n])] * 4
    codes = [qsgd_encode_feedback(x, None, 4, 512, [n], 0)] * 4
    places, values = sparse[0]
    packed, coded = pack_indices(places, n), pack_values(values, "int8")
    rare = x * (torch.rand(n, generator=g) < 0.005)
    few, kept = x[:100].clone(), lost[:100].clone()
    matrix, rows = x.clone(), n // _COLUMNS
    place = (0, rows * _COLUMNS, 1, rows, _COLUMNS)
    left, right = (torch.randn(1, 4, size, generator=g) for size in (rows, _COLUMNS))
    return {
        "copy_": lambda: out.copy_(x),
        "top-k 1 %: encode with feedback": lambda: select_feedback(x, r, k),
        "top-k 1 %: encode": lambda: select(x, k),
        "top-k 1 %: encode, 99.5 % zeros": lambda: select(rare, k),
        "top-k 1 %: decode and average 4": lambda: scatter_mean(sparse, n, out),
        "top-k 1 %: decode and average 3": lambda: scatter_mean(sparse[:3], n, out),
        "sign: encode with feedback": lambda: sign_encode_feedback(x, r, 1024, [n]),
        "sign: decode and average 4": lambda: sign_decode_mean(signs, 1024, [n], out),
        "qsgd 4 bit: encode with feedback": lambda: qsgd_encode_feedback(x, r, 4, 512, [n], 1),
        "qsgd 4 bit: decode and average 4": lambda: qsgd_decode_mean(codes, 4, 512, [n], out),
        "rank 4: add and project rows": lambda: lowrank.project_rows(matrix, lost, place, right),
        "rank 4: project columns": lambda: lowrank.project_columns(matrix, place, left),
        "rank 4: write the product": lambda: lowrank.expand(out, place, (left, right)),
        "rank 4: take the product out": lambda: lowrank.take_out(matrix, place, (left, right)),
        "places 1 %: pack": lambda: pack_indices(places, n),
        "places 1 %: unpack": lambda: unpack_indices(packed, n, k),
        "values 1 % as int8: pack": lambda: pack_values(values, "int8"),
        "values 1 % as int8: unpack": lambda: unpack_values(coded, "int8", k),
        "finite check": lambda: not_bounded(x),
        "torch.aminmax": lambda: torch.aminmax(x),
        "torch.add": lambda: torch.add(x, lost, out=out),
        "zero_": lambda: out.zero_(),
        "100 elements, 100 times: top-k encode": hundred(lambda: select_feedback(few, kept, 1)),
        "100 elements, 100 times: sign encode": hundred(lambda: sign_encode_feedback(few, kept, 1024, [100])),
        "100 elements, 100 times: qsgd encode": hundred(
            lambda: qsgd_encode_feedback(few, kept, 4, 512, [100], 1)
        ),
    }, lambda: r.copy_(lost)


def hundred(function: Callable[[], object]) -> Callable[[], object]:
    """Return a function that calls another a hundred times."""
    return lambda: [function() for _ in range(100)]


def kernels() -> None:
    """Measure and print."""
    parser = command_line(__doc__)
    parser.add_argument("--elements", type=int, default=10_000_000)
    parser.add_argument("--rounds", type=int, default=15)
    args = parser.parse_args()
    torch.set_num_threads(1)
    functions, prepare = cases(args.elements)
    times: dict[str, list[tuple[float, float]]] = {name: [] for name in functions}
    for _ in range(args.rounds + 1):
        for name, function in functions.items():
            prepare()
            wall, cpu = time.perf_counter(), time.thread_time()
            function()
            cpu, wall = time.thread_time() - cpu, time.perf_counter() - wall
            times[name].append((wall * 1e3, cpu * 1e3))
    rows = [row(name, times[name][1:], times["copy_"][1:]) for name in functions]
    figures = ("wall_ms", "cpu_ms", "ratio")
    lines = [[r["kernel"], *(number(r[key], 3) for key in figures), str(r["goal"] or "")] for r in rows]
    body = table(["kernel", "ms", "processor ms", "x copy_", "goal"], lines)
    publish(args, f"Kernels on {args.elements:,} elements", rows, body)


def row(name: str, mine: list[tuple[float, float]], copies: list[tuple[float, float]]) -> dict[str, Any]:
    """Return the figures of one kernel."""
    wall, cpu = (statistics.median(column) for column in zip(*mine, strict=True))
    return {
        "kernel": name,
        "wall_ms": round(wall, 4),
        "cpu_ms": round(cpu, 4),
        "ratio": round(cpu / statistics.median(c for _, c in copies), 3),
        "goal": GOALS.get(name),
    }


if __name__ == "__main__":
    main(kernels)
