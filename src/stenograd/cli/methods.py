"""`stenograd methods`: every method with its cost and its keys, on simulated workers, or one explained.

What is explained stands in the docstrings of the classes in the registry, and nowhere else.
"""

from __future__ import annotations

import inspect
import math
import re
from collections.abc import Mapping
from dataclasses import fields
from typing import Any

import torch

from stenograd.catalog.method import METHOD_KEYS, Method, method, method_names
from stenograd.catalog.presets import PRESETS
from stenograd.catalog.registry import Entry, entries, schedules
from stenograd.cli.setup import check_option
from stenograd.cli.table import counted, fewer, say, show, show_json, working
from stenograd.compression.feedback import ErrorFeedback
from stenograd.errors import bad_value
from stenograd.exchange.buckets import assign
from stenograd.exchange.simulate import exchange
from stenograd.wire.requests import Op
from stenograd.wire.traffic import Traffic

__all__ = ["explain", "run"]

_DENSE_BYTES = 4  # float32
_MOST_WORKERS = 1024
_FEEDBACK = (
    "error feedback: what a message loses is added to the next; ef21, ef21-sgdm and loco are other kinds"
)
_MOST_ELEMENTS = 1 << 30  # 4 GiB, of which some methods make two more copies


def run(size: int, workers: int, as_json: bool = False) -> int:
    """Print the methods, and return the exit status."""
    _check(size, workers)
    found = {}
    with working("simulating the methods", len(entries())) as tick:
        for name, entry in sorted(entries().items()):
            found[name] = _about(name, entry, size, workers)
            tick()
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
            fewer(received["compression"]),
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
    keys += [(name, "", "stands for", one.text.replace(",", ", ")) for name, one in sorted(PRESETS.items())]
    title = "keys, as in topk:ratio=0.05,warmup_steps=100"
    show(("method", "feedback", "what it sends", "key=default"), keys, title)
    return 0


def explain(name: str, size: int, workers: int, as_json: bool = False) -> int:
    """Print what one method does, its keys, its paper and an example, and return the exit status.

    Raises:
        ConfigError: there is no such name.
    """
    _check(size, workers)
    if name not in method_names():
        method(name.partition(":")[0])  # raises, with the names that are like it
        advice = f"leave out its keys: stenograd methods {name.partition(':')[0]}"
        raise bad_value("NAME", "must be a method's name alone", name, advice)
    found = _explained(name)
    if name in entries():
        with working(f"simulating {name}"):
            found["cost"] = _cost(method(name), size, workers)
    if as_json:
        show_json(found)
        return 0
    say(f"{name}: {found['what_it_sends']}")
    if "stands_for" in found:
        say(f"Stands for {found['stands_for']}; keys that you give replace those.")
    say(f"\n{found['about']}\n")
    if "cost" in found:
        cost, ranks = found["cost"], counted(workers, "worker")
        say(
            f"For a float32 tensor of {size:,} elements each of {ranks} sends {cost['moved_bytes']:,} bytes "
            f"per step, {cost['compression']:.1f} times less than dense training."
        )
    for title, keys in (("Keys", found["keys"]), ("Keys that every compressor takes", found["shared_keys"])):
        rows = [(key, _text(one["default"]), one["meaning"]) for key, one in keys.items()]
        if rows:
            show(("key", "default", "meaning"), rows, title)
    if found["reference"]:
        say(f"Paper: {found['reference']}")
    say(f"Example: {found['example']}")
    return 0


def _check(size: int, workers: int) -> None:
    check_option("--size", size)
    check_option("--workers", workers, _MOST_WORKERS)
    if size * workers > _MOST_ELEMENTS:
        rule = f"times --workers must be at most {_MOST_ELEMENTS}, for each is simulated with its numbers"
        raise bad_value("--size", rule, size, f"use {_MOST_ELEMENTS // workers} or less")


def _explained(name: str) -> dict[str, Any]:
    """Return what the registry and the docstrings say of a compressor, a schedule or a preset."""
    found: dict[str, Any] = {"name": name}
    base, reference = name, ""
    if name in PRESETS:
        found["stands_for"], reference = PRESETS[name].text, PRESETS[name].reference
        base = re.split("[:/]", PRESETS[name].text)[0]
    (cls, preset), is_schedule = (schedules()[base], True) if base in schedules() else (_found(base), False)
    meanings, how = _meanings(cls), method(name)
    own = how.schedule if is_schedule else cls(**preset)
    keys = {f.name: getattr(own, f.name) for f in fields(cls) if f.name not in preset}
    example = name if not keys else f"{name}:{next(iter(keys))}={_text(next(iter(keys.values())))}"
    momentum = " --momentum 0" if how.own_momentum else ""
    shared = {
        "feedback": isinstance(how.compressor, ErrorFeedback),
        "feedback_decay": 1.0,
        **{key: getattr(how, key) for key in METHOD_KEYS if hasattr(how, key)},
    }
    meant = {**_meanings(Method), "feedback_decay": _meanings(ErrorFeedback)["decay"], "feedback": _FEEDBACK}
    doc = inspect.getdoc(cls) or ""
    return {
        **found,
        "what_it_sends": cls.summary,
        "about": " ".join(doc.partition("\n\n")[0].split()),
        "keys": {key: {"default": value, "meaning": meanings.get(key, "")} for key, value in keys.items()},
        "shared_keys": {key: {"default": shared[key], "meaning": meant[key]} for key in METHOD_KEYS},
        "reference": reference or _section(doc, "References?"),
        "example": f"stenograd train --method {example} --workers 2{momentum}",
    }


def _found(name: str) -> tuple[type[Any], Mapping[str, Any]]:
    return entries()[name].compressor, entries()[name].preset


def _meanings(cls: type) -> dict[str, str]:
    """Return what docstrings say of a class's arguments; a base class speaks where its heir refers to it."""
    found: dict[str, str] = {}
    for one in reversed(cls.__mro__):
        lines = inspect.cleandoc(one.__doc__ or "").splitlines()
        args = "\n".join(lines).partition("\nArgs:\n")[2].partition("\n\n")[0]
        for names, text in re.findall(r"^    (\w[\w, ]*): ((?:.*\n?)(?:     .*\n?)*)", args, re.MULTILINE):
            if not text.startswith("see `"):
                found |= dict.fromkeys(re.split(", *", names), " ".join(text.split()))
    return found


def _section(doc: str, title: str) -> str:
    """Return a section at the end of a docstring as one line, or nothing."""
    found = re.search(rf"^{title}: (.*)", doc, re.MULTILINE | re.DOTALL)
    return " ".join(found[1].split()) if found else ""


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
    ranks = [
        torch.randn(size, generator=generator, dtype=torch.float32, device="cpu") for _ in range(workers)
    ]
    tensors = {
        str(i): torch.empty(shape, dtype=torch.float32, device="meta")
        for i, shape in enumerate(_shapes(size))
    }
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
    return ", ".join(f"{key}={_text(value)}" for key, value in keys.items())


def _text(value: Any) -> str:
    """Write a value as a method's text has it; None and the empty word are no value."""
    return "" if value is None else str(value).lower() if isinstance(value, bool) else str(value)
