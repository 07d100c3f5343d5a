"""Method texts for suites, drills and benchmarks, made from the registry, so that none needs an edit."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import fields
from typing import Any

from stenograd.catalog.method import method, methods
from stenograd.catalog.registry import compressors, entries
from stenograd.compression.contract import Compressor, Feedback

__all__ = ["by_name", "configurations", "differences", "modes", "suite", "wrapped"]

# Sizes that suit models of a thousand parameters; a method that is not named here runs with its defaults.
# Random sparsification holds gradients back for 1 / ratio steps: with 0.1 and momentum such models diverge.
_SIZES: dict[str, dict[str, Any]] = {
    "topk": {"ratio": 0.1},
    "randomk": {"ratio": 0.5},
    "randomblock": {"ratio": 0.5},
    "powersgd": {"rank": 2},
    "threshold": {"value": 0.01},
    "dgc": {"ratio": 0.1, "momentum": 0.0},  # most of what walks these lists trains with SGD's momentum
}
# What the keys that all methods take do to a method that loses nothing, to one whose infinities show in the
# sum, and to one with error feedback.
_WRAPPED = (
    "dense:clip_value=0.5",
    "fp16:feedback=true",
    "fp16:clip_value=0.5,clip_norm=1.0",
    "topk:ratio=0.1,feedback_decay=0.9",
    "topk:ratio=0.1,feedback=ef21",
    "lowbit:format=int4,feedback=loco",
    "topk:ratio=0.1,dense_below=20,warmup_steps=5,clip_norm=1.0",
)


def by_name() -> list[str]:
    """Return one text per method name, sized for small models; small tensors are compressed too.

    Left out are those that deliver a momentum of their own whatever their keys: optimizers here have one.

    Example:
        >>> by_name()[:2], "topk:ratio=0.1" in by_name()
        (['bf16', 'dense'], True)
    """
    texts = [_text(name, {}) for name in methods()]
    return [text for text in texts if not method(text).compressor.own_momentum]


def differences() -> list[str]:
    """Return the texts of `by_name` that can send differences of parameters: all but those for gradients.

    Example:
        >>> "topk:ratio=0.1" in differences(), any("dgc" in text for text in differences())
        (True, False)
    """
    return [text for text in by_name() if method(text).compressor.feedback is not Feedback.OWN]


def modes() -> list[str]:
    """Return a text for every switch and word (not number) that an example of a compressor sets.

    Example:
        >>> [text for text in modes() if text.startswith("sign")]
        ['sign:majority=true,dense_below=0']
    """
    texts = []
    for name, keys in _examples():
        words = {key: value for key, value in keys.items() if isinstance(value, (bool, str))}
        texts += [_text(name, {key: value}) for key, value in words.items()]
    return list(dict.fromkeys(texts))


def wrapped() -> list[str]:
    """Return texts with the keys that every method takes: feedback, dense small tensors, warm-up, clipping.

    Example:
        >>> "fp16:feedback=true" in wrapped()
        True
    """
    return [method(text).text for text in _WRAPPED]


def suite() -> list[str]:
    """Return every method by name, in its modes and wrapped: what trains a small model in a reasonable time.

    Example:
        >>> {"dense", "powersgd:rank=2", "dense:clip_value=0.5"} <= set(suite())
        True
    """
    return list(dict.fromkeys([*by_name(), *modes(), *wrapped()]))


def configurations() -> list[str]:
    """Return every method by name, and every example of every compressor, as the text that makes it.

    Example:
        >>> {"dense", "qsgd:bits=3,block=7"} <= set(configurations())
        True
    """
    texts = [_text(name, keys, sized=False) for name, keys in _examples()]
    return list(dict.fromkeys([*by_name(), *texts]))


def _examples() -> list[tuple[str, dict[str, Any]]]:
    """Return names and keys of the examples that may run with any optimizer: its momentum acts alone."""
    found = [example for cls in compressors() for example in cls.examples()]
    return [_keys(example) for example in found if not example.own_momentum]


def _text(name: str, keys: Mapping[str, Any], *, sized: bool = True) -> str:
    """Return a method's text; small tensors are compressed too, or these models would travel densely."""
    given = {**(_SIZES.get(name, {}) if sized else {}), **keys, "dense_below": 0}
    items = ",".join(f"{k}={str(v).lower() if isinstance(v, bool) else v}" for k, v in given.items())
    return method(f"{name}:{items}").text


def _keys(example: Compressor) -> tuple[str, dict[str, Any]]:
    """Return the name and the keys that make an example."""
    for entry in entries().values():
        own = {f.name: getattr(example, f.name) for f in fields(example) if f.name not in entry.preset}
        if entry.compressor is type(example) and entry.compressor(**{**entry.preset, **own}) == example:
            usual = {f.name: f.default for f in fields(example)}
            return entry.name, {key: value for key, value in own.items() if value != usual[key]}
    raise LookupError(f"no method name makes {example}: add one to its class's names")
