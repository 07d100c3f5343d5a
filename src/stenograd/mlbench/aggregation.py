"""MLBench's aggregation layer: functions that average a model's gradients or weights over the ranks."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Mapping
from functools import partial
from typing import Any, Protocol

import torch
from torch import Tensor, nn

from stenograd.comm.driver import Driver
from stenograd.comm.traffic import Traffic
from stenograd.compression.contract import Site
from stenograd.compressors.identity import Identity
from stenograd.errors import ConfigError, bad_value
from stenograd.mlbench.exchange import Part, exchange, flat_gradient, join, put_gradient, trainable

__all__ = ["AVG_CUSTOM", "AVG_WORLD", "Aggregate", "Aggregation", "AllReduceAggregation", "Denominator"]

AVG_WORLD = "avg_world"
AVG_CUSTOM = "avg_custom"
Denominator = Tensor | float | None


class Aggregate(Protocol):
    """What `agg_grad` and `agg_model` return."""

    def __call__(self, model: nn.Module, op: str, denom: Denominator = None) -> bool:
        """Average in place; return False where nothing was changed, because it was not finite."""


class Aggregation(ABC):
    """Averages over the ranks; a copy, pickled or not, finds the ranks again by itself.

    Args:
        use_cuda: taken for compatibility: tensors travel on the device where they are.
        world_size: number of ranks; None is the group's.

    Raises:
        ConfigError: world_size is not the group's, or use_cuda is given where there is no CUDA device.
    """

    def __init__(self, use_cuda: bool = False, world_size: int | None = None) -> None:
        if use_cuda and not torch.cuda.is_available():
            raise bad_value("use_cuda", "needs a CUDA device", use_cuda, "leave it out to train on the CPU")
        self.use_cuda = use_cuda
        self._driver: Driver | None = join(world_size)
        self.world_size = self._driver.world_size

    @property
    def driver(self) -> Driver:
        """The way to the other ranks."""
        if self._driver is None:
            self._driver = join(self.world_size)
        return self._driver

    @property
    def traffic(self) -> Traffic:
        """This rank's bytes; a copy has sent none before it finds the ranks again."""
        return self._driver.traffic if self._driver is not None else Traffic()

    def agg_grad(self, by_layer: bool = False) -> Aggregate:
        """Return a function that averages a model's gradients in place.

        Args:
            by_layer: one collective a parameter, instead of one for all parameters of a dtype.
        """
        return partial(self._agg_gradients, by_layer=by_layer)

    def agg_model(self, by_layer: bool = False) -> Aggregate:
        """Return a function that averages a model's parameters in place; by_layer as in `agg_grad`."""
        return partial(self._agg_weights, by_layer=by_layer)

    def state_dict(self) -> dict[str, Any]:
        """Return what decides this rank's next exchange; empty if nothing does."""
        return {}

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Take a saved state; nothing, if nothing decides the next exchange."""
        return

    @abstractmethod
    def _agg_gradients(
        self, model: nn.Module, op: str, denom: Denominator = None, *, by_layer: bool = False
    ) -> bool: ...

    @abstractmethod
    def _agg_weights(
        self, model: nn.Module, op: str, denom: Denominator = None, *, by_layer: bool = False
    ) -> bool: ...

    def __getstate__(self) -> dict[str, Any]:
        return {**self.__dict__, "_driver": None}


class AllReduceAggregation(Aggregation):
    """Dense averages: `avg_world` is `sum_r x_r / N`, `avg_custom` is `sum_r x_r / denom`.

    With divide_before each rank divides and then the quotients are added, so that 16-bit sums cannot
    overflow; without, the sum itself must fit the tensors' dtype. A world of one divides by denom, too.
    A gradient that is None on some ranks counts as zeros there; one that is None on all stays None.

    Args:
        world_size: number of ranks; None is the group's.
        divide_before: see above.
        use_cuda: as in `Aggregation`.

    Raises:
        ConfigError: as in `Aggregation`; in use, op is neither of the two, or denom is missing or not
            above 0.

    Example:
        >>> layer = nn.Linear(2, 1, bias=False)
        >>> layer.weight.grad = torch.tensor([[4.0, 8.0]])
        >>> AllReduceAggregation(world_size=1).agg_grad()(layer, "avg_custom", denom=4)
        True
        >>> layer.weight.grad
        tensor([[1., 2.]])
    """

    def __init__(
        self, world_size: int | None = None, divide_before: bool = False, use_cuda: bool = False
    ) -> None:
        super().__init__(use_cuda, world_size)
        self.divide_before = divide_before

    def average_weights(
        self, parameters: list[nn.Parameter], op: str, denom: Denominator = None, *, by_layer: bool = False
    ) -> None:
        """Average parameters in place, whatever model they are of; integer ones are left alone."""
        parameters = [p for p in parameters if p.is_floating_point()]
        flats = [p.detach().reshape(-1).clone() for p in parameters]
        averages, _ = self._averages(flats, [True] * len(flats), op, denom, by_layer)
        with torch.no_grad():
            for p, average in zip(parameters, averages, strict=True):
                p.copy_(average.view(p.shape))

    def _agg_weights(
        self, model: nn.Module, op: str, denom: Denominator = None, *, by_layer: bool = False
    ) -> bool:
        self.average_weights(list(model.parameters()), op, denom, by_layer=by_layer)
        return True

    def _agg_gradients(
        self, model: nn.Module, op: str, denom: Denominator = None, *, by_layer: bool = False
    ) -> bool:
        parameters = list(trainable(model).values())
        has = [p.grad is not None for p in parameters]
        averages, used = self._averages([flat_gradient(p) for p in parameters], has, op, denom, by_layer)
        with torch.no_grad():
            for p, average, kept in zip(parameters, averages, used, strict=True):
                if kept:
                    put_gradient(p, average)
        return True

    def _averages(
        self, flats: list[Tensor], has: list[bool], op: str, denom: Denominator, by_layer: bool
    ) -> tuple[list[Tensor], list[bool]]:
        """Return averages, and which of them any rank had something to say about."""
        divisor = self._divisor(op, denom)
        if self.divide_before and op == AVG_CUSTOM:
            flats = [x.div_(divisor) for x in flats]
        used = has
        if self.world_size > 1:
            rank, size = self.driver.rank, self.world_size
            sites = [Site(shapes=(x.shape,), rank=rank, world_size=size, key=i) for i, x in enumerate(flats)]
            parts = [Part(Identity(), x, {}, s, h) for x, s, h in zip(flats, sites, has, strict=True)]
            settled = exchange(parts, self.driver, by_layer=by_layer)
            flats, used = [e.average for e in settled.exchanges], settled.used
        for x in flats:
            self._finish(x, op, divisor)
        return flats, used

    def _finish(self, mean: Tensor, op: str, divisor: float) -> None:
        """Turn the mean into what was asked: Stenograd's drivers always divide by N before they add."""
        if self.divide_before:
            if op == AVG_CUSTOM:
                mean.mul_(self.world_size)
        elif mean.element_size() < 4:
            mean.mul_(self.world_size).div_(divisor)  # the sum exists, and overflows where it does not fit
        elif op == AVG_CUSTOM:
            mean.mul_(self.world_size / divisor)

    def _divisor(self, op: str, denom: Denominator) -> float:
        if op == AVG_WORLD:
            return float(self.world_size)
        if op != AVG_CUSTOM:
            raise bad_value("op", f"must be {AVG_WORLD!r} or {AVG_CUSTOM!r}", op, "choose one")
        if denom is None:
            raise ConfigError("denom must be given with avg_custom, got None: pass step(denom=...)")
        if isinstance(denom, Tensor) and denom.numel() != 1:
            raise bad_value("denom", "must have one element", tuple(denom.shape), "sum it over the batch")
        value = float(denom)
        if not 0 < value < float("inf"):
            raise bad_value("denom", "must be finite and above 0", value, "count the samples of all ranks")
        return value
