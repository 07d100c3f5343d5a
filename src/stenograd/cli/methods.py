"""`stenograd methods`: every method with its cost and its keys, measured on simulated workers."""

from __future__ import annotations

import math
from dataclasses import asdict, dataclass, fields
from typing import Any

import torch

from stenograd.catalog.method import METHOD_KEYS, Method, method
from stenograd.catalog.presets import PRESETS
from stenograd.catalog.registry import Entry, entries, schedules
from stenograd.cli.report import counted
from stenograd.cli.setup import check_option
from stenograd.cli.table import show, show_json
from stenograd.comm.simulate import exchange
from stenograd.comm.traffic import Traffic
from stenograd.data.buckets import assign
from stenograd.data.requests import Op
from stenograd.errors import bad_value

__all__ = ["Cost", "cost", "run"]

_DENSE_BYTES = 4  # float32
_MOST_WORKERS = 1024
_MOST_ELEMENTS = 1 << 30  # 4 GiB, of which some methods make two more copies


@dataclass(frozen=True, slots=True)
class Cost:
    """What one exchange costs a worker.

    Attributes:
        payload_bytes: handed to collectives.
        moved_bytes: sent because of that.
        bits_per_element: of the payload.
        compression: bytes moved by dense training for each that this method moves (of the payload, for a
            single worker).
    """

    payload_bytes: int
    moved_bytes: int
    bits_per_element: float
    compression: float


def run(size: int, workers: int, as_json: bool = False) -> int:
    """Print the methods, and return the exit status."""
    check_option("--size", size)
    check_option("--workers", workers, _MOST_WORKERS)
    if size * workers > _MOST_ELEMENTS:
        rule = f"times --workers must be at most {_MOST_ELEMENTS}, for each is simulated with its numbers"
        raise bad_value("--size", rule, size, f"use {_MOST_ELEMENTS // workers} or less")
    rows, ranks = counted(_nearly_square(size)[0], "row"), counted(workers, "worker")
    title = f"one float32 tensor of {size:,} elements ({rows}), {ranks}; bytes per step and worker"
    head = ("method", "payload bytes", "moved bytes", "bits per element", "compression")
    found = sorted(entries().items())
    if as_json:
        show_json({name: _told(name, entry, size, workers) for name, entry in found})
        return 0
    show(head, [_cells(name, entry, size, workers) for name, entry in found], title)
    keys = [_about(name, entry) for name, entry in found]
    plans = [
        (
            name,
            "",
            "a schedule, before a slash",
            ", ".join(f"{f.name}={_text(f.default)}" for f in fields(cls)),
        )
        for name, (cls, _) in sorted(schedules().items())
    ]
    plans += [(name, "", "stands for", text.replace(",", ", ")) for name, text in sorted(PRESETS.items())]
    shared = ", ".join(f"{key} ({kind.__name__})" for key, kind in METHOD_KEYS.items())
    title = "keys, as in topk:ratio=0.05,warmup_steps=100"
    rest = [("all of them", "", "", shared), *plans]
    show(("method", "feedback", "what it sends", "key=default"), [*keys, *rest], title)
    return 0


def cost(how: Method, size: int, workers: int) -> Cost:
    """Measure what a method sends for a tensor of normally distributed elements, nearly square.

    Example:
        >>> cost(method("fp16"), 1000, 2).bits_per_element
        16.0
    """
    sent = Traffic()
    generator = torch.Generator(device="cpu").manual_seed(0)
    ranks = [torch.randn(size, generator=generator, device="cpu") for _ in range(workers)]
    tensors = {str(i): torch.empty(shape, device="meta") for i, shape in enumerate(_shapes(size))}
    start = 0
    for bucket in assign(tensors, _DENSE_BYTES * size, tail=False, dense_below=how.dense_below):
        stop = start + sum(bucket.numels)
        exchange(
            how.compressors(bucket.dense)[-1],
            [x[start:stop] for x in ranks],
            shapes=bucket.shapes,
            spy=lambda request: sent.count(request.op, request.nbytes, workers),
        )
        start = stop
    dense = Traffic()
    dense.count(Op.MEAN, _DENSE_BYTES * size, workers)
    single = workers == 1
    ours, theirs = (t.payload_bytes if single else t.moved_bytes for t in (sent, dense))
    compression = theirs / ours if ours else math.inf
    return Cost(sent.payload_bytes, sent.moved_bytes, 8 * sent.payload_bytes / size, compression)


def own_keys(entry: Entry) -> str:
    """Return the keys that a method does not share with the others, with their defaults."""
    own = [f for f in fields(entry.compressor) if f.name not in entry.preset]
    return ", ".join(f"{f.name}={_text(f.default)}" for f in own)


def _cells(name: str, entry: Entry, size: int, workers: int) -> list[str]:
    how = method(name)
    spent = cost(how, size, workers)
    return [
        name,
        f"{spent.payload_bytes:,}",
        f"{spent.moved_bytes:,}",
        f"{spent.bits_per_element:.3g}",
        f"{spent.compression:.1f}x",
    ]


def _about(name: str, entry: Entry) -> tuple[str, ...]:
    return (
        name,
        "on" if _feeds(entry) else "off",
        entry.compressor.summary,
        own_keys(entry) or "none of its own",
    )


def _feeds(entry: Entry) -> bool:
    """Whether a method has error feedback unless told otherwise."""
    return entry.compressor(**entry.preset).feedback.biased


def _told(name: str, entry: Entry, size: int, workers: int) -> dict[str, Any]:
    how = method(name)
    keys = {f.name: f.default for f in fields(entry.compressor) if f.name not in entry.preset}
    about = {"feedback": _feeds(entry), "keys": keys, "what_it_sends": entry.compressor.summary}
    return {**asdict(cost(how, size, workers)), **about}


def _nearly_square(size: int) -> tuple[int, int]:
    rows = math.isqrt(size)
    return rows, size // rows


def _shapes(size: int) -> list[torch.Size]:
    """Cut a matrix and, where size has no such factors, a short vector."""
    rows, columns = _nearly_square(size)
    rest = size - rows * columns
    return [torch.Size((rows, columns)), *([torch.Size((rest,))] if rest else [])]


def _text(value: Any) -> str:
    return str(value).lower() if isinstance(value, bool) else str(value)
