"""Method texts for suites and benchmarks, made from the registry, so that none needs an edit."""

from __future__ import annotations

from collections.abc import Mapping
from contextlib import suppress
from dataclasses import fields
from typing import Any

from stenograd.catalog.method import Method, method, methods
from stenograd.catalog.presets import PRESETS
from stenograd.catalog.registry import compressors, entry_of, schedules
from stenograd.compression.contract import Compressor, Feedback
from stenograd.compression.feedback import ErrorFeedback
from stenograd.compressors.identity import Identity
from stenograd.compressors.topk import TopK
from stenograd.errors import MethodError
from stenograd.schedules.schedule import Schedule

__all__ = ["by_name", "coded", "configurations", "differences", "modes", "scheduled", "suite", "wrapped"]

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
    return [text for text in texts if not method(text).own_momentum]


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


def scheduled() -> list[str]:
    """Return every example of every schedule, dense and with top-k where that may be, and every preset.

    Ranks meet after a few steps, so that a short training holds several rounds.

    Example:
        >>> {"local:every=2", "diloco:every=2/topk:ratio=0.5", "gossip:graph=ring"} <= set(scheduled())
        True
    """
    texts = []
    for example in (example for cls, _ in schedules().values() for example in cls.examples()):
        for codec in (Identity(), TopK(ratio=0.5)):
            with suppress(MethodError):
                texts.append(Method(compressor=codec, schedule=example).text)
    return list(dict.fromkeys([*texts, *map(_often, PRESETS)]))


def coded() -> list[str]:
    """Return every method by name and in its modes, behind the first example of each schedule that takes it.

    Example:
        >>> [text for text in coded() if text.endswith("/bf16")]
        ['diloco:every=2/bf16', 'gossip:graph=ring,consensus=0.3/bf16', 'local:every=2/bf16']
    """
    texts = []
    for how in map(method, [*by_name(), *modes()]):
        codec = how.compressor
        if isinstance(codec, ErrorFeedback):  # which schedules put around it by a rule of their own
            codec = codec.inner
        for cls, _ in schedules().values():
            for example in cls.examples():
                with suppress(MethodError):
                    texts.append(Method(compressor=codec, dense_below=how.dense_below, schedule=example).text)
                    break
    return list(dict.fromkeys(texts))


def _often(preset: str) -> str:
    """Return a preset whose rounds begin soon and are short."""
    usual: Schedule = method(preset).schedule
    return method(f"{preset}:every=2{',after=3' if getattr(usual, 'after', 0) else ''}").text


def _examples() -> list[tuple[str, dict[str, Any]]]:
    """Return names and keys of the examples that may run with any optimizer: its momentum acts alone."""
    found = [example for cls in compressors() for example in cls.examples()]
    return [_keys(example) for example in found if not Method(example).own_momentum]


def _text(name: str, keys: Mapping[str, Any], *, sized: bool = True) -> str:
    """Return a method's text; small tensors are compressed too, or these models would travel densely."""
    given = {**(_SIZES.get(name, {}) if sized else {}), **keys, "dense_below": 0}
    items = ",".join(f"{k}={str(v).lower() if isinstance(v, bool) else v}" for k, v in given.items())
    return method(f"{name}:{items}").text


def _keys(example: Compressor) -> tuple[str, dict[str, Any]]:
    """Return the name and the keys that make an example."""
    entry = entry_of(example)
    if entry is None:
        raise LookupError(f"no method name makes {example}: add one to its class's names")
    own = {f.name: (getattr(example, f.name), f.default) for f in fields(example)}
    return entry.name, {k: v for k, (v, usual) in own.items() if v != usual and k not in entry.preset}
