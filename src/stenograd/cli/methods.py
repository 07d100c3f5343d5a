"""`stenograd methods`: every method with its cost and its keys, measured on simulated workers."""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import fields
from typing import Any

import torch

from stenograd.catalog.method import METHOD_KEYS, Method, method
from stenograd.catalog.presets import PRESETS
from stenograd.catalog.registry import Entry, entries, schedules
from stenograd.cli.setup import check_option
from stenograd.cli.table import counted, show, show_json
from stenograd.errors import bad_value
from stenograd.exchange.buckets import assign
from stenograd.exchange.simulate import exchange
from stenograd.wire.requests import Op
from stenograd.wire.traffic import Traffic

__all__ = ["run"]

_DENSE_BYTES = 4  # float32
_MOST_WORKERS = 1024
_MOST_ELEMENTS = 1 << 30  # 4 GiB, of which some methods make two more copies


def run(size: int, workers: int, as_json: bool = False) -> int:
    """Print the methods, and return the exit status."""
    check_option("--size", size)
    check_option("--workers", workers, _MOST_WORKERS)
    if size * workers > _MOST_ELEMENTS:
        rule = f"times --workers must be at most {_MOST_ELEMENTS}, for each is simulated with its numbers"
        raise bad_value("--size", rule, size, f"use {_MOST_ELEMENTS // workers} or less")
    found = {name: _about(name, entry, size, workers) for name, entry in sorted(entries().items())}
    if as_json:
        show_json(found)
        return 0
    rows, ranks = counted(_nearly_square(size)[0], "row"), counted(workers, "worker")
    title = f"one float32 tensor of {size:,} elements ({rows}), {ranks}; bytes per step and worker"
    head = ("method", "payload bytes", "moved bytes", "bits per element", "compression")
    costs = [
        (
            name,
            f"{received['payload_bytes']:,}",
            f"{received['moved_bytes']:,}",
            f"{received['bits_per_element']:.3g}",
            f"{received['compression']:.1f}x",
        )
        for name, received in found.items()
    ]
    show(head, costs, title)
    shared = ", ".join(f"{key} ({kind.__name__})" for key, kind in METHOD_KEYS.items())
    keys = [
        (
            name,
            "on" if received["feedback"] else "off",
            received["what_it_sends"],
            _listed(received["keys"]) or "none of its own",
        )
        for name, received in found.items()
    ]
    keys.append(("all of them", "", "", shared))
    for name, (cls, _) in sorted(schedules().items()):
        defaults = {f.name: f.default for f in fields(cls)}
        keys.append((name, "", "a schedule, before a slash", _listed(defaults)))
    keys += [(name, "", "stands for", text.replace(",", ", ")) for name, text in sorted(PRESETS.items())]
    title = "keys, as in topk:ratio=0.05,warmup_steps=100"
    show(("method", "feedback", "what it sends", "key=default"), keys, title)
    return 0


def _cost(how: Method, size: int, workers: int) -> dict[str, float]:
    """Measure what a method sends for a tensor of normally distributed elements, nearly square.

    Returns:
        "payload_bytes" that a worker hands to collectives, "moved_bytes" that it sends because of that,
        "bits_per_element" of the payload, and "compression": bytes moved by dense training for each that this
        method moves (of the payload, for a single worker).

    Example:
        >>> _cost(method("fp16"), 1000, 2)["bits_per_element"]
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
    ours, other = (t.payload_bytes if single else t.moved_bytes for t in (sent, dense))
    return {
        "payload_bytes": sent.payload_bytes,
        "moved_bytes": sent.moved_bytes,
        "bits_per_element": 8 * sent.payload_bytes / size,
        "compression": other / ours if ours else math.inf,
    }


def _about(name: str, entry: Entry, size: int, workers: int) -> dict[str, Any]:
    """Return what a method costs, its own keys, and whether it has error feedback unless told otherwise."""
    return {
        **_cost(method(name), size, workers),
        "feedback": entry.compressor(**entry.preset).feedback.biased,
        "keys": {f.name: f.default for f in fields(entry.compressor) if f.name not in entry.preset},
        "what_it_sends": entry.compressor.summary,
    }


def _nearly_square(size: int) -> tuple[int, int]:
    rows = math.isqrt(size)
    return rows, size // rows


def _shapes(size: int) -> list[torch.Size]:
    """Cut a matrix and, where size has no such factors, a short vector."""
    rows, columns = _nearly_square(size)
    rest = size - rows * columns
    return [torch.Size((rows, columns)), *([torch.Size((rest,))] if rest else [])]


def _listed(keys: Mapping[str, Any]) -> str:
    return ", ".join(f"{key}={str(v).lower() if isinstance(v, bool) else v}" for key, v in keys.items())
