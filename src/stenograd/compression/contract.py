"""The compressor contract: how a tensor that is averaged over the ranks is written on the wire.

A compressor is a frozen description (a ratio, a rank, ...). All that changes from step to step lives in a
`State`, made by `init` and replaced, never modified. So one object serves every bucket, a step can be taken
back by keeping the old state, and saving the states saves everything. How its codes reach the other ranks is
the business of a `Transport`, which the compressor chooses once per bucket.
"""

from __future__ import annotations

import math
from abc import ABC, abstractmethod
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass, field, replace
from enum import Enum
from typing import Any, ClassVar, NamedTuple, TypeAlias, TypeVar

import torch
from torch import Tensor

from stenograd.data.requests import Rounds
from stenograd.errors import ConfigError, TensorTypeError

__all__ = [
    "Compressor",
    "Exchange",
    "Feedback",
    "Payload",
    "Site",
    "State",
    "Transport",
    "average_of",
    "require_floating",
]

# Tensors that decide the next exchange. A tensor is either flat like x, element for element (a residual),
# or belongs to the i-th tensor of x and is called "NAME/i" (PowerSGD's "q/3"). Keys are equal on all ranks.
State: TypeAlias = Mapping[str, Tensor]
Payload: TypeAlias = tuple[Tensor, ...]
T = TypeVar("T", bound="Transport")
_CPU = torch.device("cpu")


class Feedback(Enum):
    """Whether error feedback suits a compressor."""

    ON = "on"  # it loses the same things again and again: on unless the method says feedback=false
    OFF = "off"  # unbiased, `E[decode(encode(x))] = x`, or rounding to 8 bits or finer: off unless asked for
    OWN = "own"  # it keeps what it has not sent in its state, so there is nothing left to feed back
    NEVER = "never"  # nothing is lost, or what is sent is so much larger than x that residuals would diverge


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
    """

    shapes: tuple[torch.Size, ...]
    rank: int = 0
    world_size: int = 1
    step: int = 0
    key: int = 0
    dtype: torch.dtype = torch.float32
    device: torch.device = _CPU
    buffer: Tensor | None = field(default=None, compare=False, repr=False)

    def out(self, like: Tensor) -> Tensor:
        """Return unset memory like x for the average, kept from step to step where there is some.

        Fresh memory of some megabytes costs more, in page faults, than the arithmetic that fills it.
        """
        buffer = self.buffer
        if buffer is None or (buffer.dtype, buffer.shape) != (like.dtype, like.shape):
            return torch.empty_like(like)
        return buffer

    def wide(self) -> Site:
        """Return the site of x as float32, unless it is wider: what a residual is added to becomes that."""
        wide = torch.promote_types(self.dtype, torch.float32)
        return self if wide == self.dtype else replace(self, dtype=wide)

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

    @property
    def numel(self) -> int:
        """Number of elements of x."""
        return sum(self.numels)


class Exchange(NamedTuple):
    """What an exchange returns.

    Attributes:
        average: flat tensor with x's length and dtype, equal on every rank bit for bit; may live in x's
            memory.
        state: the next state, with the same keys and shapes as the one given.
        error: what of this rank's x is not in the average, or None where it was not asked for. Unless the
            transport votes, `average = mean over ranks of (x - error)`. Mostly `x - error` is x as the
            others decoded it; where a rank compresses what it has averaged, it keeps that loss too, times
            the world size. It may live in x's memory, and so may a state made of it: whoever owns x must not
            fill it again before copying or replacing it.
        finite: what the messages told (`Finite`, a 0-d uint8 tensor equal on every rank), or None if they
            tell nothing. Where it is not BOUNDED the step does not count.
    """

    average: Tensor
    state: State
    error: Tensor | None = None
    finite: Tensor | None = None


@dataclass(frozen=True, kw_only=True)
class Transport(ABC):
    """How the ranks' codes become one average. A compressor chooses one per bucket; the engine asks it.

    Args:
        rounds: collectives that `run` asks for, one after another.
        linear: codes add up: x may come divided by the world size already (`summing`), NaN and infinity show
            in the average, there is no state that they could harm, and x may be cut anywhere.
        reports_finite: `Exchange.finite` tells whether every rank's x was finite, so that nobody need look
            through x before, nor agree with the other ranks on what was found.
        frees_residual: `run` asks by `data.requests.commit` whether the step can still be taken back, and if
            not, writes the average over the residual, so that no third tensor like x is needed.
        votes: the average is something else than the mean of what the ranks sent.

    Raises:
        ConfigError: the properties contradict each other.
    """

    rounds: int = 1
    linear: bool = False
    reports_finite: bool = False
    frees_residual: bool = False
    votes: bool = False

    def __post_init__(self) -> None:
        if self.rounds < 0:
            raise ConfigError(f"rounds must be at least 0, got {self.rounds}: count the collectives of `run`")
        if self.frees_residual and not self.reports_finite:
            raise ConfigError(
                f"{type(self).__name__} frees the residual without telling whether every x was finite, so a "
                "bad step could not be taken back: set reports_finite, or leave out frees_residual"
            )
        if self.linear and (self.reports_finite or self.votes):
            raise ConfigError(
                f"{type(self).__name__} is linear, so NaN shows in its average, which is the mean: leave out "
                "reports_finite and votes"
            )

    @abstractmethod
    def run(
        self, codec: Any, x: Tensor, residual: Tensor | None, state: State, site: Site, want_error: bool
    ) -> Rounds[Exchange]:
        """Average flat `x + residual` over the ranks.

        Args:
            codec: the compressor that chose this transport.
            x: flat tensor; handed over, so it may be overwritten.
            residual: added to x; None for none. Not modified before `commit` returns True: it is still needed
                if the step is taken back.
            state: as `init` or the last exchange left it; never modified.
            site: where and when.
            want_error: whether the exchange must carry `error`; always where there is a residual.
        """

    def keeping(self: T) -> T:
        """Return the same without freeing the residual, for whoever needs the old state after the step."""
        return replace(self, frees_residual=False) if self.frees_residual else self

    def summing(self: T) -> T:
        """Return the same for x that is divided by the world size already; only where it is linear."""
        raise ConfigError(f"{type(self).__name__} does not sum: only linear transports do")


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

    @property
    def divides_by_senders(self) -> bool:
        """Whether an element's average is the mean over those ranks only that sent it."""
        return False

    @property
    def feeds_pseudo_gradients(self) -> bool:
        """Whether error feedback is on by default also for pseudo-gradients, the sums of many local steps."""
        return self.feedback is Feedback.ON

    @property
    def feedback(self) -> Feedback:
        """Whether error feedback suits it."""
        return Feedback.OFF

    @property
    def delta(self) -> float:
        """Contraction: `||error||^2 <= (1 - delta) ||x||^2` for every x; 0 where none is promised."""
        return 0.0

    @property
    def own_momentum(self) -> bool:
        """Whether what is delivered has momentum in it, so that the optimizer must have none."""
        return False

    def moves(self, shape: torch.Size) -> bool:
        """Whether what is delivered of a tensor of this shape has momentum in it; see `own_momentum`."""
        return self.own_momentum

    @property
    def lossless(self) -> bool:
        """Whether the average is exact, so that there is no error to feed back."""
        return self.delta == 1.0 and self.feedback is Feedback.NEVER

    @classmethod
    def examples(cls) -> Iterator[Compressor]:
        """Yield the configurations that the suites shall test."""
        yield cls()

    def init(self, like: Tensor, site: Site) -> State:
        """Create the state for a flat x like `like` (its values do not matter)."""
        require_floating(like)
        return {}

    @abstractmethod
    def transport(self, site: Site) -> Transport:
        """Choose how the codes of a bucket travel; asked once per bucket, so `site.step` does not count."""

    def rounds(self, x: Tensor, state: State, site: Site, *, want_error: bool = False) -> Rounds[Exchange]:
        """Average flat x over the ranks, by the transport that suits it; the state given stays as it is."""
        transport = self.transport(site).keeping()
        return (yield from transport.run(self, x, None, state, site, want_error))


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
