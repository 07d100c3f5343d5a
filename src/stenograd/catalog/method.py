"""Methods as text: `topk:ratio=0.01` becomes a compressor and what acts around it, and prints as itself."""

from __future__ import annotations

import difflib
import math
import re
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import KW_ONLY, dataclass, fields, replace
from types import MappingProxyType
from typing import Any, TypeAlias, get_type_hints

import torch
from torch import Tensor

from stenograd.catalog.presets import PRESETS, spelled_out
from stenograd.catalog.registry import Entry, entries, entry_of, name_of, schedules
from stenograd.compression.codec import message_share, one_message
from stenograd.compression.contract import Average, Compressor, Facts, Feedback, Payload, Site
from stenograd.compression.feedback import EF21, ErrorFeedback, LoCo, Wrapper
from stenograd.compression.means import small_means, small_rounds
from stenograd.compressors.identity import Identity
from stenograd.errors import MethodError, bad_value, check_count
from stenograd.schedules.every_step import EveryStep
from stenograd.schedules.schedule import Schedule, What
from stenograd.wire.finite import norm_of
from stenograd.wire.requests import Rounds

__all__ = ["METHOD_KEYS", "Method", "MethodLike", "for_any_optimizer", "method", "method_names", "methods"]

# Keys that every method takes, with their types.
METHOD_KEYS: dict[str, type] = {
    "feedback": bool,
    "feedback_decay": float,
    "dense_below": int,
    "warmup_steps": int,
    "clip_value": float,
    "clip_norm": float,
}
# Other words for feedback, each with what it puts around a compressor.
_FEEDBACKS: dict[str, Callable[[Compressor], Compressor]] = {
    "ef21": lambda codec: EF21(inner=codec),
    "ef21-sgdm": lambda codec: EF21(inner=codec, eta=0.1),
    "loco": lambda codec: LoCo(inner=codec),
}
_DENSE, _EVERY_STEP = Identity(), EveryStep()
_MATRIX = Site(shapes=(torch.Size((64, 64)),))  # what compressors treat as they treat most
_ITS_OWN: Any = None  # stands for the compressor's own value until a method is made
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


@dataclass(frozen=True)
class Method:
    """How tensors are averaged: a compressor, a schedule and what acts around them.

    Objects mean what their texts mean, so editors can complete what `stenograd.method` reads. A method prints
    as the text that makes it.

    Args:
        compressor: what writes them; left out, they travel densely. Error feedback is put around it where it
            is on by default, unless something is around it already.
        dense_below: tensors with fewer elements travel densely, in buckets of their own: biases and scales
            are few and sensitive, and compressing them saves nothing. 0 for none; left out, the compressor's
            own default.
        warmup_steps: number of dense exchanges before compression starts; skipped (non-finite) ones do not
            count. State of the compressor waits untouched. 0 for none.
        clip_value: largest magnitude of an element of this rank's tensors, before they are compressed:
            `x <- clamp(x, -value, value)`. What clipping takes away is not fed back. None for no limit.
        clip_norm: largest L2 norm of each tensor, after that: `x <- x * min(1, norm / ||x||)`. It is taken
            tensor by tensor, so that it does not depend on buckets. None for no limit.
        schedule: what is averaged and when; gradients in every backward pass, unless a text says otherwise.
        text: canonical text, with every key that differs from its default; made where it is empty. Where it
            is given, the compressor is taken as it is.

    Raises:
        MethodError: a value is outside its range, or the schedule cannot use the compressor.

    Example:
        >>> from stenograd.compressors import TopK
        >>> from stenograd.schedules import DiLoCo
        >>> print(Method(TopK(0.05), schedule=DiLoCo(every=10)))
        diloco:every=10/topk:ratio=0.05
        >>> Method(TopK(0.05)) == method("topk:ratio=0.05")
        True

    Reference: Lin et al., "Deep Gradient Compression", ICLR 2018 (warm-up, which there ramps up the ratio).
    """

    compressor: Compressor = _DENSE
    _: KW_ONLY
    dense_below: int = _ITS_OWN
    warmup_steps: int = 0
    clip_value: float | None = None
    clip_norm: float | None = None
    schedule: Schedule = _EVERY_STEP
    text: str = ""

    def __post_init__(self) -> None:
        if self.dense_below is _ITS_OWN:
            object.__setattr__(self, "dense_below", self._written_by().default_dense_below)  # frozen
        for key in ("dense_below", "warmup_steps"):
            if getattr(self, key) != 0:
                check_count(key, getattr(self, key), "leave it out for none", MethodError)
        for key in ("clip_value", "clip_norm"):
            bound = getattr(self, key)
            if bound is not None and not (bound > 0 and math.isfinite(bound)):
                raise bad_value(
                    key, "must be positive and finite", bound, "leave it out for none", MethodError
                )
        if not self.text:
            feeds = _feeds(self._codec(), self.schedule)
            if feeds and not isinstance(self.compressor, ErrorFeedback):
                object.__setattr__(self, "compressor", ErrorFeedback(inner=self.compressor))
            object.__setattr__(self, "text", _text_of(self, feeds))
            # Last, because `each_round` reads the text that was just made.
            self.schedule.check(self.each_round())

    def __str__(self) -> str:
        return self.text

    @property
    def averages_gradients(self) -> bool:
        """Whether ranks exchange gradients and stay replicas; else their parameters differ in between."""
        return self.schedule.what is What.GRADIENTS

    @property
    def clips(self) -> bool:
        """Whether this rank's tensors are clipped before they are compressed."""
        return self.clip_value is not None or self.clip_norm is not None

    @property
    def lossless(self) -> bool:
        """Whether every element travels in its own precision."""
        return self.compressor.feedback is Feedback.EXACT

    @property
    def votes(self) -> bool:
        """Whether what comes out is not the mean of what was sent, as when the ranks vote."""
        return not self._codec().facts(_MATRIX).average.is_mean

    @property
    def divides_by_senders(self) -> bool:
        """Whether an element's average is the mean over those ranks only that sent it."""
        return self._codec().facts(_MATRIX).average is Average.SENDERS

    @property
    def own_momentum(self) -> bool:
        """Whether what is delivered has momentum in it, so that the optimizer must have none."""
        return self.moves(*_MATRIX.shapes)

    def moves(self, shape: torch.Size) -> bool:
        """Return whether what is delivered of a tensor of this shape has momentum in it."""
        return self._delivers(shape).has_momentum

    def directs(self, *shapes: torch.Size) -> bool:
        """Return whether what is delivered of a tensor of one of these shapes is a direction."""
        return any(self._delivers(shape) is Average.DIRECTION for shape in shapes)

    def _delivers(self, shape: torch.Size) -> Average:
        return self.compressor.facts(Site(shapes=(shape,))).average

    @property
    def amplifies(self) -> bool:
        """Whether what is sent is scaled up to be right on average, so that errors are larger than it."""
        return self._codec().feedback is Feedback.NEVER

    @property
    def forgets(self) -> bool:
        """Whether it has no error feedback where differences of parameters need it."""
        return self._codec().feedback is Feedback.ON and self.compressor is self._codec()

    @property
    def accumulates(self) -> bool:
        """Whether it keeps gradients, or an estimate of them, in a way that fits gradients only."""
        return self._codec().feedback is Feedback.OWN

    @property
    def one_message(self) -> bool:
        """Whether each rank writes one message, of a length known before, that others read by itself."""
        return one_message(self._codec())

    def _codec(self) -> Compressor:
        return self.compressor.inner if isinstance(self.compressor, ErrorFeedback) else self.compressor

    def _written_by(self) -> Compressor:
        """Return what writes the messages, without whatever is around it."""
        codec = self._codec()
        return codec.inner if isinstance(codec, Wrapper) else codec

    def each_round(self) -> Method:
        """Return what is exchanged whenever the schedule says so: the same method for every step.

        Without a schedule it is the method itself.

        Example:
            >>> print(method("local:every=4/topk").each_round())
            topk
        """
        if isinstance(self.schedule, EveryStep):
            return self
        _, slash, codec = self.text.partition("/")
        return replace(self, schedule=EveryStep(), text=codec if slash else "dense")

    def require_every_step(self, what: str) -> None:
        """Refuse a schedule where somebody else decides what is averaged and when.

        Raises:
            MethodError: the method has a schedule.
        """
        if not isinstance(self.schedule, EveryStep):
            raise MethodError(
                f"{what} takes a method without a schedule, got {self.text!r}: pass the model and its "
                "optimizer to stenograd.distribute, or leave out what stands before the slash"
            )

    def sends_all(self, world_size: int) -> bool:
        """Return whether every element travels, in one all-reduce."""
        return self.compressor.facts(Site(shapes=(), world_size=world_size)).linear

    def share(self, world_size: int, device: torch.device | str = "cpu") -> float:
        """Return about how large a message is beside what it stands for; 0 where it depends on the values.

        Example:
            >>> [round(method(name).share(2), 3) for name in ("dense", "fp16", "topk", "powersgd")]
            [1.0, 0.5, 0.008, 0.0]
        """
        return message_share(self._written_by(), device) or float(self.sends_all(world_size))

    def compressors(self, dense: bool) -> tuple[Compressor, Compressor]:
        """Return what writes a bucket while the method warms up, and afterwards.

        Args:
            dense: whether it is a bucket of small tensors (`Bucket.dense`).
        """
        later = _SmallDense() if dense else self.compressor
        return later if dense or not self.warmup_steps else Identity(), later

    def clip(self, x: Tensor, numels: Sequence[int]) -> None:
        """Clip tensors of so many elements that lie one after another in the flat x, in place.

        Example:
            >>> x = torch.tensor([3.0, 4.0, -9.0])
            >>> method("dense:clip_norm=1").clip(x, [2, 1])
            >>> x
            tensor([ 0.6000,  0.8000, -1.0000])
        """
        # Values first: the norm to keep below is that of what is sent.
        if self.clip_value is not None:
            most = min(self.clip_value, torch.finfo(x.dtype).max)  # torch refuses what x cannot hold
            x.clamp_(-most, most)
        if self.clip_norm is not None:
            for part in x.split(list(numels)):
                norm = norm_of(part)
                # Unlike clamping this hides no infinity, whose norm is infinite: 0 * inf is NaN.
                part.mul_(torch.where(norm > self.clip_norm, self.clip_norm / norm, 1.0))


@dataclass(frozen=True, kw_only=True)
class _SmallDense(Identity):
    """Dense averaging of few numbers, which is not compared with DDP's bit for bit, so it may be sooner."""

    def facts(self, site: Site) -> Facts:
        """Two hops where a ring takes more."""
        nbytes = sum(site.numels) * site.dtype.itemsize
        return Facts(rounds=small_rounds(nbytes, site.world_size, site.device), linear=True)

    def reduce(self, payload: Payload, site: Site) -> Rounds[Payload]:
        """Average the codes of all ranks."""
        return small_means(payload, site.world_size)


# What can be made a method: text, or objects that mean what their texts mean.
MethodLike: TypeAlias = str | Method | Compressor | Schedule


def methods() -> list[str]:
    """Return the names that `stenograd.method` knows, sorted.

    Example:
        >>> "topk" in methods()
        True
    """
    return sorted(entries())


def method_names() -> list[str]:
    """Return every name that a method's text may begin with: compressors, schedules and presets.

    Example:
        >>> {"topk", "local", "slowmo"} <= set(method_names())
        True
    """
    return sorted([*entries(), *schedules(), *PRESETS])


def for_any_optimizer() -> list[str]:
    """Return the names of methods that, with their defaults, do not deliver a momentum of their own.

    The others need an optimizer without momentum.

    Example:
        >>> "topk" in for_any_optimizer(), "demo" in for_any_optimizer()
        (True, False)
    """
    return [name for name in methods() if not method(name).own_momentum]


def method(text: MethodLike) -> Method:
    r"""Make a method from text `[SCHEDULE[:KEYS]/]NAME[:KEY=VALUE[,KEY=VALUE...]]`.

    A schedule says what is averaged and when (`local:every=8/topk`); a schedule alone sends all of it, and
    without one gradients are averaged in every backward pass. Names such as `slowmo` stand for a schedule
    with certain values, and print as what they stand for.

    Besides a compressor's own keys (its fields) every method takes `feedback` (error feedback; on for
    biased compressors; `ef21`, `ef21-sgdm` or `loco` for what `compression.feedback` has
    instead), `feedback_decay` (what is owed is multiplied by it at every step; 1), `dense_below` (tensors
    with fewer elements travel densely; 1024 for sign, else 0), `warmup_steps` (dense exchanges before
    compression starts), `clip_value` and `clip_norm` (applied to the local gradient).

    Args:
        text: the text; a Method is returned as it is, and a Compressor or a Schedule means what its text
            means, so `TopK(ratio=0.05)` has error feedback. Write `topk:ratio=0.05,feedback=false` for none.

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
        return Method(text)
    if isinstance(text, Schedule):
        return Method(schedule=text)
    if not isinstance(text, str):
        raise MethodError(
            "a method is text, or a Method, Compressor or Schedule made of one, "
            f"got {text!r}: write 'topk:ratio=0.01'"
        )
    text = spelled_out(text)
    first, slash, codec_text = text.partition("/")
    schedule_name = first.partition(":")[0].strip()
    if slash or schedule_name in schedules():
        schedule, shown = _schedule(first)
        if "/" in codec_text or codec_text.partition(":")[0].strip() in {**schedules(), **PRESETS}:
            raise MethodError(f"a method has one schedule and one slash, got {text!r}: leave out the second")
        inner = _plain(codec_text if slash else "dense", schedule)
        schedule.check(inner)
        shown = shown if inner.text == "dense" else f"{shown}/{inner.text}"
        # Given a text, `__post_init__` takes the compressor as it is, so feedback is not put around it again.
        return replace(inner, schedule=schedule, text=shown)
    return _plain(text, _EVERY_STEP)


def _plain(text: str, schedule: Schedule) -> Method:
    """Make the method for what stands after a schedule and a slash."""
    name, _, rest = (part.strip() for part in text.partition(":"))
    table = entries()
    if name not in table:
        raise _unknown("method", text, name, method_names())
    entry = table[name]
    given = _parse(entry.name, entry.compressor, entry.preset, rest, METHOD_KEYS)
    own = {k: v for k, v in given.items() if k not in METHOD_KEYS}
    codec = entry.compressor(**{**entry.preset, **own})
    feeds = _feeds(codec, schedule)
    fed = _with_feedback(codec, given, feeds)
    if "warmup_steps" in given:  # dense_below=0 has a meaning, this has none
        check_count("warmup_steps", given["warmup_steps"], "leave it out for none", MethodError)
    around = {"dense_below": codec.default_dense_below, **given}
    kept = {key: around[key] for key in METHOD_KEYS if key in around and not key.startswith("feedback")}
    return Method(compressor=fed, text=_canonical(entry, codec, given, feeds), **kept)


def _feeds(codec: Compressor, schedule: Schedule) -> bool:
    """Tell whether error feedback is on by default; pseudo-gradients need it less often than gradients."""
    pseudo = schedule.what is What.PSEUDO_GRADIENTS
    return codec.feedback is Feedback.ON if pseudo else codec.feedback.biased


def _text_of(made: Method, feeds: bool) -> str:
    """Return the text that makes a method which was made of objects, as far as they have names."""
    codec = made.compressor
    keys: dict[str, Any] = {key: getattr(made, key) for key in METHOD_KEYS if hasattr(made, key)}
    if isinstance(codec, ErrorFeedback):
        keys |= {"feedback": True, "feedback_decay": codec.decay}
        codec = codec.inner
    elif isinstance(codec, EF21 | LoCo):
        words = (word for word, put_around in _FEEDBACKS.items() if put_around(codec.inner) == codec)
        codec, keys = codec.inner, {**keys, "feedback": next(words, None)}
    else:
        keys["feedback"] = False
    entry = entry_of(codec)
    given = {k: v if k == "feedback" else METHOD_KEYS[k](v) for k, v in keys.items() if v is not None}
    if not made.warmup_steps:
        # A text that says warmup_steps=0 would be refused when it is read again.
        del given["warmup_steps"]
    if entry is None or keys["feedback"] is None:
        shown = [f"{key}={value}" for key, value in given.items() if value and not key.startswith("feedback")]
        text = ",".join([repr(made.compressor), *shown])
    else:
        text = _canonical(entry, codec, given, feeds)
    if isinstance(made.schedule, EveryStep):
        return text
    before = _schedule_text(made.schedule)
    return before if text == "dense" else f"{before}/{text}"


def _with_feedback(codec: Compressor, given: Mapping[str, Any], feeds: bool) -> Compressor:
    """Put what corrects it around a compressor where its method's keys, or itself, ask for it."""
    chosen = given.get("feedback", feeds)
    if chosen is True:
        return ErrorFeedback(inner=codec, decay=given.get("feedback_decay", 1.0))
    if "feedback_decay" in given:
        decay = given["feedback_decay"]
        raise bad_value("feedback_decay", "needs error feedback", decay, "add feedback=true", MethodError)
    return _FEEDBACKS[chosen](codec) if chosen else codec


def _schedule(text: str) -> tuple[Schedule, str]:
    """Make a schedule from what stands before the slash, with its canonical text."""
    name, _, rest = (part.strip() for part in text.partition(":"))
    table = schedules()
    if name not in table:
        raise _unknown("schedule", text, name, sorted(table))
    cls, preset = table[name]
    given = _parse(name, cls, preset, rest, {})
    schedule = cls(**{**preset, **given})
    return schedule, _schedule_text(schedule, given)


def _schedule_text(schedule: Schedule, given: Mapping[str, Any] = MappingProxyType({})) -> str:
    """Write a schedule, with the keys that are not what they usually are, or were given."""
    found = name_of(schedule, schedules())
    if found is None:
        return repr(schedule)
    name, own = found
    return _written(name, own, {f.name: f.default for f in fields(schedule)}, given)


def _parse(
    entry: str, cls: type, preset: Mapping[str, Any], rest: str, more: Mapping[str, type]
) -> dict[str, Any]:
    hints = get_type_hints(cls)
    kinds = {f.name: hints[f.name] for f in fields(cls) if f.name not in preset} | dict(more)
    given: dict[str, Any] = {}
    defaults = {f.name: f.default for f in fields(cls)}
    for item in filter(None, (part.strip() for part in rest.split(","))):
        key, equals, value = (part.strip() for part in item.partition("="))
        if key == "every" and "seconds" in kinds and value.endswith("s"):
            key, value = "seconds", value[:-1]  # every=30s
        if key == "grace" and value.endswith("s"):
            value = value[:-1]
        if key not in kinds:
            keys = ", ".join(kinds)
            raise MethodError(f"{entry} has no key {key!r}{_hint(key, kinds)} keys: {keys}")
        if not equals or not value:
            raise MethodError(f"{entry}: key {key!r} has no value: write {key}=VALUE")
        if key in given:
            raise MethodError(f"{entry}: key {key!r} is given twice: keep one")
        given[key] = _value(entry, key, kinds[key], value, defaults.get(key))
    return given


def _value(name: str, key: str, kind: type, value: str, default: Any) -> Any:
    if key == "feedback" and value in _FEEDBACKS:
        return value
    try:
        parsed = _TRUTH[value.lower()] if kind is bool else kind(value)
    except (KeyError, ValueError) as cause:
        words = f"true or false, or {' or '.join(_FEEDBACKS)}" if key == "feedback" else "true or false"
        wanted, right = {bool: (words, "true"), int: ("a whole number", default or 1)}.get(
            kind, ("a number", _without_percent(value) or default or 1)
        )
        raise MethodError(f"{name}: {key} must be {wanted}, got {value!r}: write {key}={right}") from cause
    if kind is int and not -_WORD <= parsed < _WORD:
        raise MethodError(f"{name}: {key} must be from -2^63 to 2^63 - 1, got {value}: take a smaller one")
    return parsed


def _canonical(entry: Entry, codec: Compressor, given: Mapping[str, Any], feeds: bool) -> str:
    own = {f.name: getattr(codec, f.name) for f in fields(codec) if f.name not in entry.preset}
    defaults = {f.name: f.default for f in fields(codec)}
    usual = {"feedback": feeds, "feedback_decay": 1.0, "dense_below": codec.default_dense_below}
    around = {k: given[k] for k in METHOD_KEYS if k in given and given[k] != usual.get(k)}
    return _written(entry.name, own, defaults, given, around)


def _written(
    name: str,
    own: Mapping[str, Any],
    defaults: Mapping[str, Any],
    given: Mapping[str, Any],
    more: Mapping[str, Any] = MappingProxyType({}),
) -> str:
    """Write a name with the keys that are not what they usually are, or were given."""
    # As if it had been read: an object may hold 1 where a key is 1.0.
    typed = {k: float(v) if isinstance(defaults[k], float) else v for k, v in own.items()}
    shown = {k: v for k, v in typed.items() if v != defaults[k] or k in given} | dict(more)
    items = ",".join(f"{k}={str(v).lower() if isinstance(v, bool) else v}" for k, v in shown.items())
    return f"{name}:{items}" if items else name


def _unknown(what: str, text: str, name: str, known: Sequence[str]) -> MethodError:
    """Return the error for a name that is not in a list; where a known one begins it, with the syntax."""
    found = re.match(r"[\w-]*", name)
    word = found[0] if found else ""
    rest = text.strip()[len(word) :].strip(" =:,()[]")
    if word in known and word != name:
        entry = entries().get(word)
        cls: Any = entry.compressor if entry else schedules().get(word, (None,))[0]
        key = fields(cls)[0].name if cls and fields(cls) else None
        keys = rest if "=" in rest else f"{key}={rest}" if key and rest else ""
        right = f"{word}:{keys}" if keys else word
        return MethodError(f"a {what} is written NAME:KEY=VALUE,KEY=VALUE, got {text!r}: write {right}")
    syntax = "write NAME:KEY=VALUE, such as " + ("topk:ratio=0.05" if what == "method" else "local:every=8")
    return MethodError(f"unknown {what} {name!r}{_hint(name, known)} {syntax}; {what}s: {', '.join(known)}")


def _without_percent(value: str) -> float | None:
    """Return a share that was written as a percentage.

    Example:
        >>> _without_percent("5%"), _without_percent("five")
        (0.05, None)
    """
    match = re.fullmatch(r"(\d+(?:\.\d+)?)\s*%", value)
    return float(match[1]) / 100 if match else None


def _hint(word: str, known: Iterable[str]) -> str:
    near = difflib.get_close_matches(word, list(known), n=1)
    return f": did you mean {near[0]!r}?" if near else ":"
