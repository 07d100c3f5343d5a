"""Compressors around a compressor: clipping, a dense start, and dense small tensors."""

from __future__ import annotations

import math
from collections.abc import Iterator
from dataclasses import dataclass, field

import torch
from torch import Tensor

from stenograd.compression.contract import Compressor, Exchange, Site, State
from stenograd.compression.small_all_reduce import direct_means
from stenograd.compressors.identity import Identity
from stenograd.data.requests import Rounds, settle, together
from stenograd.errors import MethodError, bad_value, check_count

__all__ = ["Clip", "PerSize", "Warmup"]


@dataclass(frozen=True, kw_only=True)
class _Wrapper(Compressor):
    """What all wrappers pass on from the compressor inside."""

    inner: Compressor

    @classmethod
    def examples(cls) -> Iterator[Compressor]:
        """Yield nothing: a wrapper needs something to wrap."""
        return iter(())

    @property
    def biased(self) -> bool:
        """As inside."""
        return self.inner.biased

    @property
    def lossless(self) -> bool:
        """As inside."""
        return self.inner.lossless

    @property
    def bulky(self) -> bool:
        """As inside."""
        return self.inner.bulky

    def one_round(self, world_size: int) -> bool:
        """As inside."""
        return self.inner.one_round(world_size)

    @property
    def amplifies(self) -> bool:
        """As inside."""
        return self.inner.amplifies

    @property
    def votes(self) -> bool:
        """As inside."""
        return self.inner.votes

    @property
    def propagates(self) -> bool:
        """As inside."""
        return self.inner.propagates

    def detects(self, world_size: int) -> bool:
        """As inside."""
        return self.inner.detects(world_size)

    def settles(self, world_size: int) -> bool:
        """As inside: what acts on x before it is compressed leaves the residual's memory alone."""
        return self.inner.settles(world_size)

    def init(self, like: Tensor, site: Site) -> State:
        """Create the state of the compressor inside."""
        return self.inner.init(like, site)


@dataclass(frozen=True, kw_only=True)
class Clip(_Wrapper):
    """Clip this rank's tensor: `x <- clamp(x, -value, value)`, then `x <- x * min(1, norm / ||x||)`.

    The norm is that of each parameter's own gradient (L2), so that the result does not depend on how
    parameters are put into buckets. The error is that of the clipped x: what clipping takes away is gone on
    purpose. Clamping would hide an infinity, so whoever runs the exchange looks for one first (`propagates`).

    Args:
        inner: what receives the clipped tensor.
        value: largest magnitude of an element; None leaves elements alone.
        norm: largest L2 norm of a parameter's gradient; None leaves norms alone.

    Raises:
        MethodError: neither is given, or one is not positive and finite.

    Example:
        >>> import torch
        >>> from stenograd.simulate import exchange
        >>> exchange(Clip(inner=Identity(), value=1.0), [torch.tensor([3.0, -0.5])])[0].average
        tensor([ 1.0000, -0.5000])
    """

    value: float | None = None
    norm: float | None = None

    def __post_init__(self) -> None:
        if self.value is None and self.norm is None:
            raise MethodError("Clip needs a value, a norm or both, got neither: give value=1.0 or norm=1.0")
        for name, bound in (("clip_value", self.value), ("clip_norm", self.norm)):
            if bound is not None and not (bound > 0 and math.isfinite(bound)):
                raise bad_value(
                    name, "must be positive and finite", bound, "leave it out for none", MethodError
                )

    @property
    def propagates(self) -> bool:
        """A clamped infinity is finite."""
        return self.value is None and self.inner.propagates

    def detects(self, world_size: int) -> bool:
        """A clamped infinity is finite."""
        return self.value is None and self.inner.detects(world_size)

    def rounds(self, x: Tensor, state: State, site: Site, *, want_error: bool = False) -> Rounds[Exchange]:
        """Clip, then exchange."""
        if self.value is not None:
            x.clamp_(-self.value, self.value)
        if self.norm is not None:
            for part in x.split(site.numels):
                length = torch.linalg.vector_norm(part)
                part.mul_(torch.where(length > self.norm, self.norm / length, 1.0))
        return (yield from self.inner.rounds(x, state, site, want_error=want_error))


@dataclass(frozen=True, kw_only=True)
class Warmup(_Wrapper):
    """Average densely for the first `steps` exchanges, then compress. State inside waits untouched.

    Args:
        inner: what compresses afterwards.
        steps: number of dense exchanges, 1 to 2^31 - 1; skipped (non-finite) steps do not count.

    Raises:
        MethodError: steps outside its range.

    Example:
        >>> from stenograd.compressors.topk import TopK
        >>> Warmup(inner=TopK(ratio=0.01), steps=100).steps
        100

    Reference: Lin et al., "Deep Gradient Compression", ICLR 2018 (which ramps up the ratio instead).
    """

    steps: int = 0
    dense: Compressor = field(default_factory=Identity, repr=False)

    def __post_init__(self) -> None:
        check_count("warmup_steps", self.steps, "leave it out for none", MethodError)

    def rounds(self, x: Tensor, state: State, site: Site, *, want_error: bool = False) -> Rounds[Exchange]:
        """Choose by the step, which is equal on every rank."""
        if site.step >= self.steps:
            return (yield from self.inner.rounds(x, state, site, want_error=want_error))
        done = yield from self.dense.rounds(x, {}, site, want_error=want_error)
        return done._replace(state=state)


@dataclass(frozen=True, kw_only=True)
class PerSize(_Wrapper):
    """Send tensors with fewer than `below` elements densely and compress the others, in the same rounds.

    Biases and normalisation scales are few and sensitive; compressing them saves nothing.

    Args:
        inner: what compresses the large tensors.
        below: number of elements from which a tensor is compressed, 1 to 2^31 - 1.

    Raises:
        MethodError: below is outside its range.

    Example:
        >>> import torch
        >>> from stenograd.compressors.topk import TopK
        >>> from stenograd.simulate import exchange
        >>> method = PerSize(inner=TopK(ratio=0.25), below=3)
        >>> exchange(method, [torch.arange(6.0)], shapes=[(2,), (4,)])[0].average
        tensor([0., 1., 0., 0., 0., 5.])
    """

    below: int = 0

    def __post_init__(self) -> None:
        check_count("dense_below", self.below, "leave it out for none", MethodError)

    def one_round(self, world_size: int) -> bool:
        """Small and large tensors travel in collectives of their own."""
        return False

    def settles(self, world_size: int) -> bool:
        """As inside; here it also asks for what travels densely."""
        return self.inner.settles(world_size)

    def init(self, like: Tensor, site: Site) -> State:
        """Create the inner state for the large tensors, named by their places in the whole x."""
        large = self._large(site)
        if not large:
            return {}
        return _renumbered(self.inner.init(like[: _total(site, large)], _part(site, large)), large)

    def rounds(self, x: Tensor, state: State, site: Site, *, want_error: bool = False) -> Rounds[Exchange]:
        """Split, exchange both parts together, join."""
        large = self._large(site)
        small = [i for i in range(len(site.shapes)) if i not in large]
        if not small or not large:  # one part is the whole
            done = yield from (
                self.inner.rounds(x, state, site, want_error=want_error)
                if large
                else _densely(x, state, site, want_error)
            )
            if site.settles and not large:
                yield from settle(done.average.isfinite().all())
            return done
        pieces = x.split(site.numels)
        xs = [torch.cat([pieces[i] for i in chosen]) for chosen in (small, large)]
        inside = self.inner.rounds(
            xs[1], _unnumbered(state, large), _part(site, large), want_error=want_error
        )
        exchanges = yield from together([_densely(xs[0], {}, site, want_error), inside])
        average = torch.empty_like(x)
        error = torch.empty_like(x) if want_error else None
        for done, chosen in zip(exchanges, (small, large), strict=True):
            _put_back(done.average, average, site, chosen)
            if error is not None and done.error is not None:
                _put_back(done.error, error, site, chosen)
        new = _renumbered(exchanges[1].state, large)
        told = [done.average.isfinite().all() if done.finite is None else done.finite for done in exchanges]
        overflow = any(done.overflow for done in exchanges)
        finite = torch.stack(told).all()
        if site.settles:  # others of the step must hear of it
            yield from settle(finite & average.isfinite().all())
        return Exchange(average, new, error, finite, overflow)

    def corrected(self, x: Tensor, residual: Tensor, state: State, site: Site) -> Rounds[Exchange]:
        """Leave the sum to the compressor inside where it gets all of x."""
        if len(self._large(site)) < len(site.shapes):
            return (yield from super().corrected(x, residual, state, site))
        return (yield from self.inner.corrected(x, residual, state, site))

    def _large(self, site: Site) -> list[int]:
        return [i for i, n in enumerate(site.numels) if n >= self.below]


def _densely(x: Tensor, state: State, site: Site, want_error: bool) -> Rounds[Exchange]:
    """Average x exactly; there is little of it."""
    (average,) = yield from direct_means((x,), site.world_size)
    return Exchange(average, state, torch.zeros_like(average) if want_error else None)


def _part(site: Site, chosen: list[int]) -> Site:
    return Site(
        shapes=tuple(site.shapes[i] for i in chosen),
        rank=site.rank,
        world_size=site.world_size,
        step=site.step,
        key=site.key,
    )


def _total(site: Site, chosen: list[int]) -> int:
    return sum(site.numels[i] for i in chosen)


def _put_back(flat: Tensor, whole: Tensor, site: Site, chosen: list[int]) -> None:
    targets = whole.split(site.numels)
    for i, piece in zip(chosen, flat.split([site.numels[i] for i in chosen]), strict=True):
        targets[i].copy_(piece)


def _renumbered(state: State, chosen: list[int]) -> State:
    """Rename "q/1" of a part to its place in the whole."""
    return {_at(key, chosen): t for key, t in state.items()}


def _unnumbered(state: State, chosen: list[int]) -> State:
    """Undo `_renumbered`."""
    places = {i: at for at, i in enumerate(chosen)}
    return {_at(key, places): t for key, t in state.items()}


def _at(key: str, places: list[int] | dict[int, int]) -> str:
    base, slash, number = key.partition("/")
    return f"{base}/{places[int(number)]}" if slash else key
