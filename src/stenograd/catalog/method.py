"""Methods as text: `topk:ratio=0.01` becomes a compressor with its wrappers, and prints as itself."""

from __future__ import annotations

import difflib
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, fields
from typing import Any, get_type_hints

from stenograd.catalog.registry import Entry, entries
from stenograd.catalog.wrappers import Clip, PerSize, Warmup
from stenograd.compression.contract import Compressor
from stenograd.compression.error_feedback import ErrorFeedback
from stenograd.errors import MethodError

__all__ = ["WRAPPER_KEYS", "Method", "method", "methods"]

# Keys that every method takes, with their types: they choose the wrappers.
WRAPPER_KEYS: dict[str, type] = {
    "feedback": bool,
    "dense_below": int,
    "warmup_steps": int,
    "clip_value": float,
    "clip_norm": float,
}
_WORD = 1 << 63  # a seed may have 64 bits; counts have narrower bounds of their own
_TRUTH = {
    "true": True,
    "yes": True,
    "on": True,
    "1": True,
    "false": False,
    "no": False,
    "off": False,
    "0": False,
}


@dataclass(frozen=True, kw_only=True)
class Method:
    """How gradients are exchanged. Make one with `stenograd.method`; it prints as the text that makes it.

    Args:
        text: canonical text, with every key that differs from its default.
        compressor: the compressor with its wrappers, from the outside in: clip, warm-up, error feedback,
            dense small tensors, codec.
    """

    text: str
    compressor: Compressor

    def __str__(self) -> str:
        return self.text


def methods() -> list[str]:
    """Return the names that `stenograd.method` knows, sorted.

    Example:
        >>> "topk" in methods()
        True
    """
    return sorted(entries())


def method(text: str | Method | Compressor) -> Method:
    r"""Make a method from text `NAME[:KEY=VALUE[,KEY=VALUE...]]`.

    Besides a compressor's own keys (its fields) every method takes `feedback` (error feedback; on for
    biased compressors), `dense_below` (tensors with fewer elements travel densely; 1024 for sign, else 0),
    `warmup_steps` (dense exchanges before compression starts), `clip_value` and `clip_norm` (applied to the
    local gradient).

    Args:
        text: the text; a Method is returned as it is, and a Compressor is taken as given, unwrapped.

    Raises:
        MethodError: unknown name or key, a value of the wrong type or outside its range.

    Example:
        >>> print(method("topk:ratio=0.05,warmup_steps=100"))
        topk:ratio=0.05,warmup_steps=100
        >>> method("topk:ratio=2")
        Traceback (most recent call last):
        stenograd.errors.MethodError: ratio must be in (0, 1], got 2.0: use 0.01 to send 1 %
    """
    if isinstance(text, Method):
        return text
    if isinstance(text, Compressor):
        return Method(text=repr(text), compressor=text)
    if not isinstance(text, str):
        raise MethodError(
            f"a method is text, a Method or a Compressor, got {text!r}: write 'topk:ratio=0.01'"
        )
    name, _, rest = (part.strip() for part in text.partition(":"))
    table = entries()
    if name not in table:
        raise MethodError(f"unknown method {name!r}{_hint(name, table)} methods: {', '.join(sorted(table))}")
    entry = table[name]
    given = _parse(entry, rest)
    own = {k: v for k, v in given.items() if k not in WRAPPER_KEYS}
    codec = entry.compressor(**{**entry.preset, **own})
    return Method(text=_canonical(entry, codec, given), compressor=_wrap(codec, given))


def _wrap(codec: Compressor, given: Mapping[str, Any]) -> Compressor:
    stack = codec
    if below := given.get("dense_below", codec.default_dense_below):
        stack = PerSize(inner=stack, below=below)
    if given.get("feedback", codec.biased):
        stack = ErrorFeedback(inner=stack)
    if "warmup_steps" in given:
        stack = Warmup(inner=stack, steps=given["warmup_steps"])
    if "clip_value" in given or "clip_norm" in given:
        stack = Clip(inner=stack, value=given.get("clip_value"), norm=given.get("clip_norm"))
    return stack


def _parse(entry: Entry, rest: str) -> dict[str, Any]:
    hints = get_type_hints(entry.compressor)
    kinds = {
        f.name: hints[f.name] for f in fields(entry.compressor) if f.name not in entry.preset
    } | WRAPPER_KEYS
    given: dict[str, Any] = {}
    for item in filter(None, (part.strip() for part in rest.split(","))):
        key, equals, value = (part.strip() for part in item.partition("="))
        if key not in kinds:
            keys = ", ".join(kinds)
            raise MethodError(f"{entry.name} has no key {key!r}{_hint(key, kinds)} keys: {keys}")
        if not equals or not value:
            raise MethodError(f"{entry.name}: key {key!r} has no value: write {key}=VALUE")
        if key in given:
            raise MethodError(f"{entry.name}: key {key!r} is given twice: keep one")
        given[key] = _value(entry.name, key, kinds[key], value)
    return given


def _value(name: str, key: str, kind: type, value: str) -> Any:
    try:
        parsed = _TRUTH[value.lower()] if kind is bool else kind(value)
    except (KeyError, ValueError) as cause:
        wanted = "true or false" if kind is bool else f"of type {kind.__name__}"
        raise MethodError(f"{name}: {key} must be {wanted}, got {value!r}: correct the value") from cause
    if kind is int and not -_WORD <= parsed < _WORD:
        raise MethodError(f"{name}: {key} must be from -2^63 to 2^63 - 1, got {value}: correct the value")
    return parsed


def _canonical(entry: Entry, codec: Compressor, given: Mapping[str, Any]) -> str:
    own = {f.name: getattr(codec, f.name) for f in fields(codec) if f.name not in entry.preset}
    defaults = {f.name: f.default for f in fields(codec)}
    shown = {k: v for k, v in own.items() if v != defaults[k] or k in given}
    usual = {"feedback": codec.biased, "dense_below": codec.default_dense_below}
    shown |= {k: given[k] for k in WRAPPER_KEYS if k in given and given[k] != usual.get(k)}
    items = ",".join(f"{k}={str(v).lower() if isinstance(v, bool) else v}" for k, v in shown.items())
    return f"{entry.name}:{items}" if items else entry.name


def _hint(word: str, known: Iterable[str]) -> str:
    near = difflib.get_close_matches(word, list(known), n=1)
    return f": did you mean {near[0]!r}?" if near else ":"
