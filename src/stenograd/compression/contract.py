"""The compressor contract: how a tensor that is averaged over the ranks is written on the wire.

A compressor is a coroutine, `exchange`, and a few `Facts` that the engine asks for once per bucket. It is a
frozen description (a ratio, a rank, ...). All that changes from step to step lives in a `State`, made by
`init` and replaced, never modified. So one object serves every bucket, a step can be taken back by keeping
the old state, and saving the states saves everything.
"""

from __future__ import annotations

import math
from abc import ABC, abstractmethod
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass, field
from enum import Enum
from typing import Any, ClassVar, NamedTuple, TypeAlias

import torch
from torch import Tensor

from stenograd.errors import ConfigError, TensorTypeError
from stenograd.wire.requests import Rounds

__all__ = [
    "Average",
    "Compressor",
    "Exchange",
    "Facts",
    "Feedback",
    "Kind",
    "Payload",
    "Replaced",
    "Site",
    "State",
    "StateKind",
    "average_of",
    "require_floating",
]

# Tensors that decide the next exchange. A tensor is either flat like x, element for element (a residual),
# or belongs to the i-th tensor of x and is called "NAME/i" (PowerSGD's "q/3"). Keys are equal on all ranks.
State: TypeAlias = Mapping[str, Tensor]
Payload: TypeAlias = tuple[Tensor, ...]
_CPU = torch.device("cpu")


class Feedback(Enum):
    """Whether error feedback suits a compressor."""

    ON = "on"  # it loses the same things again and again: on unless the method says feedback=false
    GRADIENTS = "gradients"  # as ON, but not for differences after many steps, of which it loses too little
    OFF = "off"  # unbiased, `E[decode(encode(x))] = x`, or rounding to 8 bits or finer: off unless asked for
    OWN = "own"  # it keeps what it has not sent in its state, so there is nothing left to feed back
    NEVER = "never"  # what is sent is so much larger than x that residuals would diverge
    EXACT = "exact"  # nothing is lost: the average is the mean of x

    @property
    def biased(self) -> bool:
        """Whether it is on for gradients unless a method says otherwise."""
        return self in (Feedback.ON, Feedback.GRADIENTS)


class Average(Enum):
    """What a compressor delivers."""

    MEAN = "mean"  # of what the ranks have sent: `mean over ranks of (x - error)`
    SENDERS = "senders"  # of each element, over those ranks only that have sent it
    VOTE = "vote"  # of the ranks, about signs
    VELOCITY = "velocity"  # the mean of what has momentum in it, so that the optimizer must have none
    DIRECTION = "direction"  # made of momenta, so that the optimizer must have none

    @property
    def is_mean(self) -> bool:
        """Whether it is the mean of what the ranks have sent."""
        return self in (Average.MEAN, Average.VELOCITY)

    @property
    def has_momentum(self) -> bool:
        """Whether the optimizer must have no momentum."""
        return self in (Average.VELOCITY, Average.DIRECTION)


class Kind(Enum):
    """What becomes of state that differs from rank to rank when the number of ranks changes."""

    SUM = "sum"  # it is owed: new ranks share the sum evenly
    MEAN = "mean"  # it is an estimate: new ranks start from the mean
    CLEAR = "clear"  # it starts again from zeros: what it holds is small, and forgotten in any case


@dataclass(frozen=True, slots=True)
class Replaced:
    """State that starts again as a copy of other state, of the key `by`, which is equal on all ranks."""

    by: str


StateKind: TypeAlias = Kind | Replaced


@dataclass(frozen=True, slots=True)
class Site:
    """Where and when an exchange happens: everything that a compressor may know besides the numbers.

    Args:
        shapes: shapes of the tensors that lie one after another in the flat x.
        rank: this rank; only private randomness and bookkeeping may depend on it.
        world_size: number of ranks.
        step: number of exchanges applied before this one, equal on every rank.
        key: tells this x from others of the same step (the bucket's number); equal on every rank.
        dtype: of x.
        device: where x lives.
        buffer: memory that the average may take, flat like x; see `out`.
        error: whether the exchange must tell what was lost (`Exchange.error`).
        frees_residual: whether the average may take the residual's memory once the step is committed; only
            where `Facts.frees_residual` says so, and nobody needs the old state afterwards.
    """

    shapes: tuple[torch.Size, ...]
    rank: int = 0
    world_size: int = 1
    step: int = 0
    key: int = 0
    dtype: torch.dtype = torch.float32
    device: torch.device = _CPU
    buffer: Tensor | None = field(default=None, compare=False, repr=False)
    error: bool = False
    frees_residual: bool = False

    def out(self, like: Tensor) -> Tensor:
        """Return unset memory like x for the average, kept from step to step where there is some.

        Fresh memory of some megabytes costs more, in page faults, than the arithmetic that fills it.
        """
        buffer = self.buffer
        if buffer is None or (buffer.dtype, buffer.shape) != (like.dtype, like.shape):
            return torch.empty_like(like)
        return buffer

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
    """What an exchange returns.

    Attributes:
        average: flat tensor with x's length and dtype, equal on every rank bit for bit; may live in x's
            memory.
        state: the next state, with the same keys and shapes as the one given.
        error: what of this rank's x is not in the average, or None where it was not asked for. Where
            `Facts.average` is a mean, `average = mean over ranks of (x - error)`. Mostly `x - error` is x as
            the others decoded it; where a rank compresses what it has averaged, it keeps that loss too, times
            the world size. It may live in x's memory, and so may a state made of it: whoever owns x must not
            fill it again before copying or replacing it.
        finite: what the messages told (`Finite`, a 0-d uint8 tensor equal on every rank), or None if they
            tell nothing. Where it is not BOUNDED the step does not count.
    """

    average: Tensor
    state: State
    error: Tensor | None = None
    finite: Tensor | None = None


@dataclass(frozen=True, slots=True, kw_only=True)
class Facts:
    """What the engine must know of a bucket's exchanges; equal on all ranks and at every step.

    Args:
        rounds: collectives that an exchange asks for, one after another.
        linear: codes add up: NaN and infinity show in the average, there is no state that they could harm, x
            may be cut anywhere, and where it takes one round, x may come divided by the world size while
            `MEAN` is answered by a sum (`wire.requests.summed`).
        finite: `Exchange.finite` tells whether every rank's x was finite, so that nobody need look through x
            before, nor agree with the other ranks on what was found.
        frees_residual: an exchange that may do so (`Site.frees_residual`) asks by `wire.requests.commit`
            whether the step can still be taken back, and if not, writes the average over the residual, so
            that no third tensor like x is needed.
        average: what is delivered.

    Raises:
        ConfigError: they contradict each other.
    """

    rounds: int = 1
    linear: bool = False
    finite: bool = False
    frees_residual: bool = False
    average: Average = Average.MEAN

    def __post_init__(self) -> None:
        if self.rounds < 0:
            raise ConfigError(f"rounds must be at least 0, got {self.rounds}: count the collectives")
        if self.frees_residual and not self.finite:
            raise ConfigError(
                "frees_residual frees the residual without telling whether every x was finite, so a bad step "
                "could not be taken back: set finite, or leave out frees_residual"
            )
        if self.linear and (self.finite or self.average is not Average.MEAN):
            raise ConfigError(
                "linear codes show NaN in their average, which is the mean: leave out finite and average"
            )


@dataclass(frozen=True, kw_only=True)
class Compressor(ABC):
    """Base of everything that can stand between a tensor and the wire.

    A subclass in a module of `stenograd.compressors` is found by itself: its `names` become methods, its
    fields become their keys, and its `examples()` are walked by every suite and benchmark.
    """

    # Method names, each with the field values that the name stands for.
    names: ClassVar[Mapping[str, Mapping[str, Any]]] = {}
    # One line for `stenograd methods`.
    summary: ClassVar[str] = ""
    # What `dense_below` is where a method's text does not say.
    default_dense_below: ClassVar[int] = 0
    # What becomes of each kind of state (its key without "/i") on another number of ranks, for those that
    # differ from rank to rank; all other state is equal on all ranks.
    state_kinds: ClassVar[Mapping[str, StateKind]] = {}

    @property
    def feedback(self) -> Feedback:
        """Whether error feedback suits it; a constant of the class does as well as a property."""
        return Feedback.OFF

    @classmethod
    def examples(cls) -> Iterator[Compressor]:
        """Yield the configurations that the suites shall test."""
        yield cls()

    def init(self, like: Tensor, site: Site) -> State:
        """Create the state for a flat x like `like` (its values do not matter)."""
        require_floating(like)
        return {}

    @abstractmethod
    def facts(self, site: Site) -> Facts:
        """Tell how a bucket travels; asked once per bucket, so that `site.step` does not count."""

    @abstractmethod
    def exchange(self, x: Tensor, residual: Tensor | None, state: State, site: Site) -> Rounds[Exchange]:
        """Average flat `x + residual` over the ranks.

        Args:
            x: flat tensor; handed over, so it may be overwritten.
            residual: added to x; None for none. Not modified before `commit` returns True: it is still needed
                if the step is taken back.
            state: as `init` or the last exchange left it; never modified.
            site: where and when, and what the caller wants.
        """


def average_of(tensors: Iterable[Tensor]) -> Tensor:
    """Return the mean of one or more tensors, summed in order so that every rank gets the same bits.

    Types of 16 bits are summed in float32, where a sum of finite numbers is finite.

    Example:
        >>> import torch
        >>> average_of([torch.tensor([1.0]), torch.tensor([2.0])])
        tensor([1.5000])
    """
    total, dtype, count = None, torch.float32, 0
    for t in tensors:
        if total is None:
            dtype = t.dtype
            total = t.to(torch.promote_types(dtype, torch.float32), copy=True)  # a copy: the first one stays
        else:
            total.add_(t)
        count += 1
    if total is None:
        raise ValueError("the mean of no tensors is not defined: give at least one")
    return total.div_(count).to(dtype)


def require_floating(x: Tensor) -> None:
    """Raise unless x holds real floating-point numbers."""
    if not x.is_floating_point():
        raise TensorTypeError(
            f"compression needs real floating-point tensors, got {x.dtype}: "
            "convert it, or leave it out of the optimizer"
        )
