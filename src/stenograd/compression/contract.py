"""The compressor contract: how an averaged tensor is written on the wire.

A compressor is a frozen description (a ratio, a rank, ...). All that changes from step to step lives in a
`State`, made by `init` and replaced, never modified, by `rounds`. So one object serves every bucket, a step
can be taken back by keeping the old state, and saving the states saves everything.
"""

from __future__ import annotations

import math
from abc import ABC, abstractmethod
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any, ClassVar, NamedTuple, TypeAlias

import torch
from torch import Tensor

from stenograd.data.requests import Rounds, gather, gather_ragged, means, settle
from stenograd.errors import TensorTypeError

__all__ = [
    "Codec",
    "Compressor",
    "Exchange",
    "Payload",
    "Site",
    "State",
    "all_bounded",
    "average_of",
    "require_floating",
]

# Tensors that decide the next exchange. A tensor is either flat like x, element for element (a residual),
# or belongs to the i-th tensor of x and is called "NAME/i" (PowerSGD's "q/3"). Keys are equal on all ranks.
State: TypeAlias = Mapping[str, Tensor]
_BOUND = 1e30
Payload: TypeAlias = tuple[Tensor, ...]


@dataclass(frozen=True, slots=True)
class Site:
    """Where and when an exchange happens; everything a compressor may know besides the numbers.

    Args:
        shapes: shapes of the tensors that lie one after another in the flat x.
        rank: this rank; only private randomness and bookkeeping may depend on it.
        world_size: number of ranks.
        step: number of exchanges applied before this one, equal on every rank.
        key: tells this x from others of the same step (a bucket's place); equal on every rank.
        scaled: whether x is divided by the world size already; only where the compressor takes it so.
        spare: memory that the average may take, flat like x; see `memory`.
        settles: whether a compressor may ask by `wire.settle` if the step can still be taken back, and if
            not, write the average where the residual was. So no third tensor like x is needed.
    """

    shapes: tuple[torch.Size, ...]
    rank: int = 0
    world_size: int = 1
    step: int = 0
    key: int = 0
    scaled: bool = False
    spare: Tensor | None = field(default=None, compare=False, repr=False)
    settles: bool = False

    def memory(self, x: Tensor) -> Tensor:
        """Return unset memory like x for the average: kept from step to step where there is some.

        Fresh memory of some megabytes costs more, in page faults, than the arithmetic that fills it.
        """
        spare = self.spare
        if spare is None or (spare.dtype, spare.shape) != (x.dtype, x.shape):
            return torch.empty_like(x)
        return spare

    def generator(self, seed: int, *, shared: bool, device: torch.device | str = "cpu") -> torch.Generator:
        """Return a fresh generator for this step: equal on all ranks if shared, else private to the rank."""
        words = (seed, self.step, self.key, -1 if shared else self.rank)
        mixed = 0x9E3779B97F4A7C15
        for word in words:  # splitmix64 over the words, so near seeds give unrelated streams
            mixed = (mixed + (word & 0xFFFFFFFFFFFFFFFF) + 0x9E3779B97F4A7C15) & 0xFFFFFFFFFFFFFFFF
            mixed = ((mixed ^ (mixed >> 30)) * 0xBF58476D1CE4E5B9) & 0xFFFFFFFFFFFFFFFF
            mixed = ((mixed ^ (mixed >> 27)) * 0x94D049BB133111EB) & 0xFFFFFFFFFFFFFFFF
            mixed ^= mixed >> 31
        return torch.Generator(device=device).manual_seed(mixed & 0x7FFFFFFFFFFFFFFF)

    @property
    def numels(self) -> list[int]:
        """Number of elements of each tensor in x."""
        return [math.prod(shape) for shape in self.shapes]


class Exchange(NamedTuple):
    """What a compressor returns.

    average: flat tensor with x's length and dtype, equal on every rank bit for bit; may live in x's memory.
    state: the next state, with the same keys and shapes as the one given.
    error: what of this rank's x is not in the average, or None where it was not asked for. Unless the
        compressor votes, `average = mean over ranks of (x - error)`. Mostly `x - error` is x as the others
        decoded it; where a rank compresses what it has averaged, it keeps that loss too, times the world
        size. It may live in x's memory, and so may a state made of it: whoever owns x must not fill it
        again before copying or replacing it.
    finite: whether every rank's x was finite, equal on every rank (a 0-d bool tensor); None where that shows
        in the average.
    overflow: whether it is known that the average is not finite though every rank's x was, equal on every
        rank.
    """

    average: Tensor
    state: State
    error: Tensor | None = None
    finite: Tensor | None = None
    overflow: bool = False


@dataclass(frozen=True, kw_only=True)
class Compressor(ABC):
    """Base of everything that can stand between a gradient and the wire.

    A subclass in a module of `stenograd.compressors` is found by itself: its `names` become methods, its
    fields become their keys, and its `examples()` are walked by the conformance suite.
    """

    # Method names, each with the field values that the name stands for.
    names: ClassVar[Mapping[str, Mapping[str, Any]]] = {}
    # One line for `stenograd methods`.
    summary: ClassVar[str] = ""
    # What `dense_below` is where a method's text does not say.
    default_dense_below: ClassVar[int] = 0

    @property
    def biased(self) -> bool:
        """Whether it loses the same things again and again, so that error feedback is on unless refused.

        False for unbiased codecs, where `E[decode(encode(x))] = x`, and for rounding to 8 bits or finer.
        """
        return False

    @property
    def lossless(self) -> bool:
        """Whether the average is exact, so that there is no error to feed back."""
        return False

    @property
    def delta(self) -> float:
        """Contraction: `||error||^2 <= (1 - delta) ||x||^2` for every x; 0 where none is promised."""
        return 0.0

    @property
    def amplifies(self) -> bool:
        """Whether what is sent may be so much larger than x that error feedback diverges."""
        return False

    @property
    def votes(self) -> bool:
        """Whether the average is something else than the mean of what the ranks sent."""
        return False

    @property
    def propagates(self) -> bool:
        """Whether a non-finite input makes the average non-finite and no state can be harmed by it."""
        return False

    def detects(self, world_size: int) -> bool:
        """Whether its exchanges tell by themselves if a rank's x was not finite (`Exchange.finite`).

        Then nobody need look through x before, nor agree with the other ranks on what was found.
        """
        return False

    @property
    def takes_scaled(self) -> bool:
        """Whether x may come divided by the world size (`Site.scaled`), which saves a pass over it."""
        return False

    @property
    def bulky(self) -> bool:
        """Whether it sends so much that the last gradients of a pass are better sent by themselves.

        Then only they are on the wire when there is nothing left to compute; a collective is the price.
        """
        return False

    def one_round(self, world_size: int) -> bool:
        """Whether it asks for one collective only, so that nobody need wait between two of them."""
        return False

    def settles(self, world_size: int) -> bool:
        """Whether it asks by `wire.settle` in every exchange, where `Site.settles` lets it."""
        return False

    @classmethod
    def examples(cls) -> Iterator[Compressor]:
        """Yield the configurations that the conformance suite shall test."""
        yield cls()

    def init(self, like: Tensor, site: Site) -> State:
        """Create the state for a flat x like `like` (its values do not matter)."""
        require_floating(like)
        return {}

    @abstractmethod
    def rounds(self, x: Tensor, state: State, site: Site, *, want_error: bool = False) -> Rounds[Exchange]:
        """Average flat x over the ranks.

        Args:
            x: flat tensor; handed over, so it may be overwritten.
            state: as `init` or the last exchange left it; never modified.
            site: where and when.
            want_error: whether the exchange must carry `error`.
        """

    def corrected(self, x: Tensor, residual: Tensor, state: State, site: Site) -> Rounds[Exchange]:
        """Average `x + residual` over the ranks, with the error: what error feedback asks for.

        Override it where one pass over memory can add, encode and keep the error. x may be overwritten, the
        residual not, unless `wire.settle` says so: it is still needed if the step is taken back.
        """
        return (yield from self.rounds(x.add_(residual), state, site, want_error=True))


@dataclass(frozen=True, kw_only=True)
class Codec(Compressor):
    """A compressor with one message a rank: write `encode` and `decode`, and the rest is done here.

    For speed, override `encode_error` too: one pass that adds the residual, encodes, and leaves the error.

    linear: payloads may be averaged as they are, so one all-reduce suffices; otherwise they are gathered
        and every rank decodes all of them, in rank order.
    ragged: payload lengths differ from rank to rank.
    """

    linear: ClassVar[bool] = False
    ragged: ClassVar[bool] = False

    def one_round(self, world_size: int) -> bool:
        """Ragged payloads tell their lengths first."""
        return not self.ragged

    @abstractmethod
    def encode(self, x: Tensor, site: Site) -> Payload:
        """Write flat x as tensors for the wire, in memory of their own unless the codec is lossless."""

    @abstractmethod
    def decode(self, payload: Payload, like: Tensor, site: Site) -> Tensor:
        """Read a payload back as a flat tensor like `like` (length, dtype, device)."""

    def error(self, x: Tensor, payload: Payload, site: Site) -> Tensor:
        """Return `x - decode(encode(x))`; override where it is cheaper than decoding."""
        return x - self.decode(payload, x, site)

    def encode_error(self, x: Tensor, residual: Tensor | None, site: Site) -> tuple[Payload, Tensor]:
        """Encode `x + residual` and return what that loses; x may be overwritten, the residual not."""
        if residual is not None:
            x.add_(residual)
        payload = self.encode(x, site)
        return payload, self.error(x, payload, site)

    def finite(self, payloads: Sequence[Payload]) -> Tensor | None:
        """Tell from all ranks' messages whether all they hold was finite; None if that is not known."""
        return None

    def bounded(self, payloads: Sequence[Payload]) -> Tensor:
        """Tell from all ranks' messages whether their mean is surely finite; False if that is not known."""
        return torch.tensor(False)

    def combine(self, payloads: Sequence[Payload], like: Tensor, site: Site) -> Tensor:
        """Return the mean of all ranks' decoded payloads, summed in rank order."""
        return average_of(self.decode(p, like, site) for p in payloads)

    def rounds(self, x: Tensor, state: State, site: Site, *, want_error: bool = False) -> Rounds[Exchange]:
        """Encode, send, decode; see `Compressor.rounds`."""
        return (yield from self.exchange(x, None, state, site, want_error))

    def corrected(self, x: Tensor, residual: Tensor, state: State, site: Site) -> Rounds[Exchange]:
        """Encode with the residual, send, decode; see `Compressor.corrected`."""
        return (yield from self.exchange(x, residual, state, site, True))

    def exchange(
        self, x: Tensor, residual: Tensor | None, state: State, site: Site, want_error: bool
    ) -> Rounds[Exchange]:
        """Average `x + residual`: all of `rounds` and `corrected`; override it for other collectives."""
        error: Tensor | None = None
        if want_error:
            payload, error = self.encode_error(x, residual, site)
        else:
            payload = self.encode(x, site)
        if self.linear:
            average = self.decode((yield from means(payload, scaled=site.scaled)), x, site)
            return Exchange(average, state, error)
        everyone = yield from (gather_ragged(*payload, most=x.numel()) if self.ragged else gather(*payload))
        if site.settles and (yield from settle(self.bounded(everyone))):
            site = replace(site, spare=x if error is None else residual)
        return Exchange(self.combine(everyone, x, site), state, error, self.finite(everyone))


def all_bounded(tensors: Iterable[Tensor]) -> Tensor:
    """Tell whether no magnitude exceeds 1e30 (NaN does): then no sum over ranks leaves the range of float32.

    Example:
        >>> bool(all_bounded([torch.ones(2), torch.empty(0)])), bool(all_bounded([torch.tensor([2e38])]))
        (True, False)
    """
    ends = [torch.stack(torch.aminmax(t)).abs().amax() for t in tensors if t.numel()]
    return torch.stack([end <= _BOUND for end in ends]).all() if ends else torch.tensor(True)


def average_of(tensors: Iterable[Tensor]) -> Tensor:
    """Mean of one or more tensors, summed in order so that every rank gets the same bits.

    Example:
        >>> import torch
        >>> average_of([torch.tensor([1.0]), torch.tensor([2.0])])
        tensor([1.5000])
    """
    total, count = None, 0
    for t in tensors:
        total = t.clone() if total is None else total.add_(t)
        count += 1
    if total is None:
        raise ValueError("the mean of no tensors is not defined: give at least one")
    return total.div_(count)


def require_floating(x: Tensor) -> None:
    """Raise unless x holds real floating-point numbers."""
    if not x.is_floating_point():
        raise TensorTypeError(
            f"compression needs real floating-point tensors, got {x.dtype}: "
            "convert it, or leave it out of the optimizer"
        )
