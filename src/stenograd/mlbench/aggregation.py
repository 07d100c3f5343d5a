"""MLBench's aggregation layer: functions that average a model's gradients or weights over the ranks."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Collection, Iterable, Mapping
from typing import Any, Protocol

import torch
from torch import Tensor, nn

from stenograd.comm.driver import Driver
from stenograd.comm.traffic import Traffic
from stenograd.compression.contract import Compressor
from stenograd.compression.error_feedback import ErrorFeedback
from stenograd.compressors.powersgd import PowerSGD
from stenograd.errors import ConfigError, bad_value
from stenograd.mlbench.arguments import (
    AVG_CUSTOM,
    AVG_WORLD,
    Denominator,
    gradient,
    put_gradient,
    trainable,
    unused_names,
)
from stenograd.mlbench.averaging import Averaging

__all__ = [
    "Aggregate",
    "Aggregation",
    "AllReduceAggregation",
    "PowerAggregation",
    "RememberingAggregation",
]


class Aggregate(Protocol):
    """What `agg_grad` and `agg_model` return."""

    def __call__(self, model: nn.Module, op: str, denom: Denominator = None) -> bool:
        """Average in place; return False where nothing was changed, because it was not finite."""


class Aggregation(ABC):
    """Averages over the ranks; a copy, pickled or not, finds the ranks again by itself.

    Args:
        use_cuda: taken for compatibility: tensors travel on the device where they are.
        world_size: number of ranks; None is the group's.
        compressor: how gradients travel; None sends them as they are.

    Attributes:
        averaging: what exchanges, with `traffic`, this rank's bytes.

    Raises:
        ConfigError: world_size is not the group's, or use_cuda is given where there is no CUDA device.
    """

    def __init__(
        self,
        use_cuda: bool = False,
        world_size: int | None = None,
        *,
        compressor: Compressor | None = None,
    ) -> None:
        if use_cuda and not torch.cuda.is_available():
            raise bad_value("use_cuda", "needs a CUDA device", use_cuda, "leave it out to train on the CPU")
        self.use_cuda = use_cuda
        self.averaging = Averaging(world_size, compressor)
        self.world_size = self.averaging.world_size

    @property
    def driver(self) -> Driver:
        """The way to the other ranks."""
        return self.averaging.driver

    @property
    def traffic(self) -> Traffic:
        """This rank's bytes."""
        return self.averaging.traffic

    def agg_grad(self, by_layer: bool = False) -> Aggregate:
        """Return a function that averages a model's gradients in place.

        Args:
            by_layer: one collective per parameter, instead of one for all parameters of a dtype.
        """

        def average(model: nn.Module, op: str, denom: Denominator = None) -> bool:
            return self._average_gradients(model, op, denom, by_layer)

        return average

    def agg_model(self, by_layer: bool = False) -> Aggregate:
        """Return a function that averages a model's parameters in place; by_layer as in `agg_grad`."""

        def average(model: nn.Module, op: str, denom: Denominator = None) -> bool:
            self.average_weights(model.parameters(), op, denom, by_layer)
            return True

        return average

    def state_dict(self) -> dict[str, Any]:
        """Return what decides this rank's next exchange; empty if nothing does."""
        return {}

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Take a saved state; nothing, if nothing decides the next exchange."""
        return

    @abstractmethod
    def average_weights(self, weights: Iterable[Tensor], op: str, denom: Denominator, by_layer: bool) -> None:
        """Average parameters in place, whatever model they are of; integer ones are left alone."""

    @abstractmethod
    def _average_gradients(self, model: nn.Module, op: str, denom: Denominator, by_layer: bool) -> bool: ...


class AllReduceAggregation(Aggregation):
    """Dense averages: `avg_world` is `sum_r x_r / N`, `avg_custom` is `sum_r x_r / denom`.

    With divide_before each rank divides and then the quotients are added, so that 16-bit sums cannot
    overflow; without, the sum itself must fit the tensors' dtype. A world of one divides by denom, too.
    A gradient that is None on some ranks counts as zeros there; one that is None on all stays None.

    Args:
        world_size: number of ranks; None is the group's.
        divide_before: see above.
        use_cuda: as in `Aggregation`.

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

    @torch.no_grad()
    def average_weights(self, weights: Iterable[Tensor], op: str, denom: Denominator, by_layer: bool) -> None:
        """See `Aggregation.average_weights`."""
        named = {str(i): p for i, p in enumerate(p for p in weights if p.is_floating_point())}
        for name, average in self._averages(named, (), self._divisor(op, denom), by_layer).items():
            named[name].copy_(average)

    @torch.no_grad()
    def _average_gradients(self, model: nn.Module, op: str, denom: Denominator, by_layer: bool) -> bool:
        named = trainable(model)
        gradients, divisor = {name: gradient(p) for name, p in named.items()}, self._divisor(op, denom)
        for name, average in self._averages(gradients, unused_names(named), divisor, by_layer).items():
            put_gradient(named[name], average)
        return True

    def _averages(
        self, values: Mapping[str, Tensor], unused: Collection[str], divisor: float, by_layer: bool
    ) -> dict[str, Tensor]:
        """Return `sum_r x_r / divisor` of those that some rank used."""
        exact = divisor == self.world_size  # Stenograd's drivers always divide by N before they add
        if self.divide_before and not exact:
            values = {name: x / divisor for name, x in values.items()}
        if self.world_size > 1:
            means = self.averaging.average(values, unused, by_layer=by_layer)
        else:
            means = {name: x.clone() for name, x in values.items() if name not in unused}
        for mean in means.values():
            if not self.divide_before and mean.element_size() < 4:
                # The sum exists, and overflows where it does not fit.
                mean.mul_(self.world_size).div_(divisor)
            elif not exact:
                mean.mul_(self.world_size if self.divide_before else self.world_size / divisor)
        return means

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


class RememberingAggregation(Aggregation):
    """Averages gradients with error feedback; what it remembers is kept by parameter name.

    A step whose gradients are not finite on some rank changes nothing on any: `skipped` counts these.

    Args:
        model: its trainable parameters get memories.
        compressor: how gradients travel, with error feedback.
        use_cuda, world_size: as in `Aggregation`.
    """

    def __init__(
        self, model: nn.Module, compressor: Compressor, use_cuda: bool, world_size: int | None
    ) -> None:
        super().__init__(use_cuda, world_size, compressor=compressor)
        self.averaging.arrange({name: p for name, p in model.named_parameters() if p.requires_grad})

    @property
    def skipped(self) -> int:
        """Number of steps that changed nothing."""
        return self.averaging.skipped

    @property
    def memory(self) -> dict[str, dict[str, Tensor]]:
        """Copies of what each parameter still has to send (`residual`), and of what else is remembered."""
        parameters: dict[str, dict[str, Tensor]] = self.state_dict()["parameters"]
        return parameters

    def state_dict(self) -> dict[str, Any]:
        """Return copies of all that decides this rank's next exchange."""
        return self.averaging.state_dict()

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Take a saved state.

        Raises:
            CheckpointError: it is of another rank, world size, method or model; nothing is changed.
        """
        self.averaging.load_state_dict(state)

    def average_weights(self, weights: Iterable[Tensor], op: str, denom: Denominator, by_layer: bool) -> None:
        """Raise: errors are fed back to gradients only."""
        kind = type(self).__name__
        raise ConfigError(f"{kind} averages gradients, got weights: use AllReduceAggregation for weights")

    @torch.no_grad()
    def _average_gradients(self, model: nn.Module, op: str, denom: Denominator, by_layer: bool) -> bool:
        if op != AVG_WORLD or denom is not None:
            got = op if denom is None else f"denom {float(denom)}"
            raise bad_value("op", f"must be {AVG_WORLD!r}, without denom", got, "use AllReduceAggregation")
        named = trainable(model)
        gradients = {name: gradient(p) for name, p in named.items()}
        averages = self.averaging.average(gradients, unused_names(named), by_layer=by_layer)
        if self.averaging.finite:
            for name, average in averages.items():
                put_gradient(named[name], average)
        return self.averaging.finite


class PowerAggregation(RememberingAggregation):
    """Low-rank factors of each gradient matrix, with error feedback; see `stenograd.mlbench.PowerSGD`.

    Args:
        reuse_query: whether the power iteration starts from the last step's Q.
        world_size: number of ranks; in a world of one nothing is compressed.
        rank: largest rank of an approximation, at least 1.

    Example:
        >>> layer = nn.Linear(2, 1)
        >>> layer.weight.grad = torch.tensor([[4.0, 8.0]])
        >>> PowerAggregation(layer).agg_grad()(layer, "avg_world")
        True
    """

    def __init__(
        self,
        model: nn.Module,
        use_cuda: bool = False,
        reuse_query: bool = False,
        world_size: int | None = 1,
        rank: int = 1,
    ) -> None:
        compressor = ErrorFeedback(inner=PowerSGD(rank=rank, warm_start=reuse_query, values="float32"))
        super().__init__(model, compressor, use_cuda, world_size)

    def _average_gradients(self, model: nn.Module, op: str, denom: Denominator, by_layer: bool) -> bool:
        if self.world_size == 1 and op == AVG_WORLD and denom is None:
            return True  # every gradient is its own average
        return super()._average_gradients(model, op, denom, by_layer)
