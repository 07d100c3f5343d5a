"""MLBench's aggregation layer: averages of tensors, a model's gradients or its weights over the ranks."""

from __future__ import annotations

import sys
import weakref
from abc import ABC, abstractmethod
from collections.abc import Collection, Iterable, Mapping
from itertools import chain
from typing import Any, Protocol, TypeAlias

import torch
from torch import Tensor, nn

from stenograd import devices
from stenograd.arguments import choice, number
from stenograd.compression.contract import Compressor, Feedback
from stenograd.compression.feedback import ErrorFeedback
from stenograd.compressors.identity import Identity
from stenograd.compressors.powersgd import PowerSGD
from stenograd.errors import ConfigError, TensorTypeError, bad_value
from stenograd.exchange.buckets import Bucket, assign
from stenograd.exchange.tensor_exchange import TensorExchange
from stenograd.launch import process_group
from stenograd.sync.handshake import compare
from stenograd.sync.step_settings import BITS, hashed, refuse, tell, unequal
from stenograd.wire.driver import Driver
from stenograd.wire.traffic import Traffic

__all__ = [
    "AVG_CUSTOM",
    "AVG_WORLD",
    "Aggregate",
    "Aggregation",
    "AllReduceAggregation",
    "Averaging",
    "Denominator",
    "PowerAggregation",
    "RememberingAggregation",
    "gradient",
    "put_gradient",
    "trainable",
    "unused_names",
]

AVG_WORLD = "avg_world"
AVG_CUSTOM = "avg_custom"
Denominator: TypeAlias = Tensor | float | None


class Averaging:
    """Averages named tensors over the ranks; what the compressor remembers is kept by name.

    A copy, pickled or not, keeps that memory, which is this rank's, and finds the ranks again by itself.

    Args:
        world_size: number of ranks; None is the group's.
        compressor: how tensors travel; None sends them as they are.

    Attributes:
        finite: whether the last `average` counts, equal on all ranks. If not, no memory has changed.
        skipped: number of averages that did not count.
        settings: what the next averages' ranks must have alike, such as the loss's scale; none costs nothing.

    Raises:
        ConfigError: world_size is not the group's.
    """

    def __init__(self, world_size: int | None = None, compressor: Compressor | None = None) -> None:
        self.compressor = compressor or Identity()
        self._driver: Driver | None = _join(world_size)
        self.world_size = self._driver.world_size
        self.finite = True
        self.skipped = 0
        self.settings: Mapping[str, Any] = {}
        self._count = 0
        self._met: weakref.ref[nn.Module] | None = None
        self._exchange: TensorExchange | None = None
        self._saved: tuple[list[Bucket], dict[str, Any]] | None = None  # of a copy that has not run yet

    @property
    def driver(self) -> Driver:
        """The way to the other ranks."""
        if self._driver is None:
            self._driver = _join(self.world_size)
        return self._driver

    @property
    def traffic(self) -> Traffic:
        """This rank's bytes; a copy has sent none before it finds the ranks again."""
        return self._driver.traffic if self._driver is not None else Traffic()

    def meet(
        self, tensors: Mapping[str, Tensor], options: Mapping[str, object], model: nn.Module | None = None
    ) -> None:
        """Check that all ranks hold the same parameters and options, and run the same versions and kernels.

        With a model its other parameters and its buffers are compared, too, and it counts as `met`.

        Raises:
            MismatchError: naming the first difference.
        """
        if self.world_size > 1 and tensors:
            compare(self.driver, {k: repr(v) for k, v in options.items()}, tensors, model=model)
        self._met = self._met if model is None else weakref.ref(model)

    def met(self, model: nn.Module) -> None:
        """Compare a model's parameters over the ranks, by name and in order, unless it was the last compared.

        Raises:
            MismatchError: as in `meet`.
        """
        self.driver.check_groupless()
        if self._met is None or self._met() is not model:
            self.meet(dict(model.named_parameters()), {}, model)

    def arrange(self, values: Mapping[str, Tensor], *, by_layer: bool = False) -> TensorExchange:
        """Make the memory of these tensors now, which `average` would make at its first call.

        Args:
            values: as in `average`; only their shapes, dtypes and devices matter.
            by_layer: whether each tensor has collectives of its own, instead of one for all of a dtype.
        """
        exchange = self._running()
        # a tensor alone, or all of a type; nothing is computed meanwhile
        exchange.arrange(assign(values, 1 if by_layer else sys.maxsize, tail=False))
        return exchange

    @torch.no_grad()
    def average(
        self,
        values: Mapping[str, Tensor],
        unused: Collection[str] = (),
        *,
        bad: bool | None = None,
        by_layer: bool = False,
    ) -> dict[str, Tensor]:
        """Return the averages of the tensors that some rank used, valid until the next call.

        Args:
            values: by name, alike on all ranks; they are read only.
            unused: names of which this rank has nothing to say, with zeros in values. What no rank used
                keeps its memory.
            bad: whether this rank found something not finite besides values; None asks nobody. Not for
                compressors with memory.
            by_layer: as in `arrange`.
        """
        self.driver.check_groupless()
        exchange = self.arrange(values, by_layer=by_layer)
        for index, bucket in enumerate(exchange.buckets):
            flat, scale = exchange.flat(index), exchange.scale(index)
            torch.cat([values[name].reshape(-1) for name in bucket.names], out=flat)
            if scale != 1:
                flat.mul_(scale)
            exchange.submit(index)
        names = [name for bucket in exchange.buckets for name in bucket.names]
        flags = [] if bad is None else [bad]
        received = tell(hashed(self.settings, self._count), BITS) if self.settings else []
        # Unlike the exchange's step it moves at a skip, too: each average tells other bits of the hash.
        self._count += 1
        outcome = exchange.finish([name not in unused for name in names], [*flags, *received]).result()
        exchange.join_streams()
        if any(unequal(outcome.any_flags[len(flags) :])):
            refuse(self.driver, self.settings)
        self.finite = outcome.applied and not any(outcome.any_flags[: len(flags)])
        self.skipped += not self.finite
        averages = zip(exchange.buckets, outcome.averages, strict=True)
        views = chain.from_iterable(bucket.views(flat) for bucket, flat in averages)
        return {n: v for n, v, used in zip(names, views, outcome.any_used, strict=True) if used}

    def state_dict(self) -> dict[str, Any]:
        """Return copies of all that decides this rank's next average; empty if nothing does."""
        if self.compressor.feedback is Feedback.EXACT:
            return {}
        return {**self._running().state_dict(), "skipped": self.skipped}

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Take a saved state.

        Raises:
            CheckpointError: it is of another rank, world size, method or model; nothing is changed.
        """
        if self.compressor.feedback is not Feedback.EXACT:
            self._running().load_state_dict(state)
            self.skipped = int(state["skipped"])

    def _running(self) -> TensorExchange:
        if self._exchange is None:
            self._exchange = TensorExchange(self.compressor, self.driver, waits=True)
            if self._saved is not None:
                buckets, state = self._saved
                self._exchange.arrange(buckets)
                self._exchange.load_state_dict(state)
                self._saved = None
        return self._exchange

    def __getstate__(self) -> dict[str, Any]:
        saved = self._saved
        exact = self.compressor.feedback is Feedback.EXACT  # then there is no memory
        if self._exchange is not None and not exact:
            saved = (list(self._exchange.buckets), self._exchange.state_dict())
        # A driver holds a process group and `_met` is a weak reference: neither can be pickled.
        return {**self.__dict__, "_driver": None, "_exchange": None, "_saved": saved, "_met": None}


class Aggregate(Protocol):
    """What `agg_grad` and `agg_model` return."""

    def __call__(self, model: nn.Module, op: str, denom: Denominator = None) -> bool:
        """Average in place; return False where nothing was changed, because it was not finite."""


class Aggregation(Averaging, ABC):
    """Averages a model's gradients or weights over the ranks.

    Args:
        use_cuda: taken for compatibility: tensors travel on the device where they are.
        world_size: number of ranks; None is the group's.
        compressor: how gradients travel; None sends them as they are.

    Raises:
        ConfigError: world_size is not the group's, or use_cuda is given where there is no CUDA device.
    """

    def __init__(
        self, use_cuda: bool = False, world_size: int | None = None, *, compressor: Compressor | None = None
    ) -> None:
        if use_cuda and not devices.count():
            raise bad_value("use_cuda", "needs a CUDA device", use_cuda, "leave it out to train on the CPU")
        self.use_cuda = use_cuda
        super().__init__(world_size, compressor)

    def agg_grad(self, by_layer: bool = False) -> Aggregate:
        """Return a function that averages a model's gradients in place; ranks with other models are refused.

        Args:
            by_layer: one collective per parameter, instead of one for all parameters of a dtype.
        """

        def average(model: nn.Module, op: str, denom: Denominator = None) -> bool:
            self.met(model)
            return self._average_gradients(model, op, denom, by_layer)

        return average

    def agg_model(self, by_layer: bool = False) -> Aggregate:
        """Return a function that averages a model's parameters in place; by_layer as in `agg_grad`."""

        def average(model: nn.Module, op: str, denom: Denominator = None) -> bool:
            self.met(model)
            self.average_weights(model.parameters(), op, denom, by_layer)
            return True

        return average

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
        self.driver.check_groupless()
        exact = divisor == self.world_size  # Stenograd's drivers always divide by N before they add
        if self.divide_before and not exact:
            values = {name: x / divisor for name, x in values.items()}
        if self.world_size > 1:
            means = self.average(values, unused, by_layer=by_layer)
        else:
            # they are multiplied in place below
            means = {name: x.clone() for name, x in values.items() if name not in unused}
        for mean in means.values():
            if not self.divide_before and mean.element_size() < 4:
                # The sum exists, and overflows where it does not fit.
                mean.mul_(self.world_size).div_(divisor)
            elif not exact:
                mean.mul_(self.world_size if self.divide_before else self.world_size / divisor)
        return means

    def _divisor(self, op: str, denom: Denominator) -> float:
        if choice("op", op, (AVG_WORLD, AVG_CUSTOM)) == AVG_WORLD:
            return float(self.world_size)
        if denom is None:
            raise ConfigError("denom must be given with avg_custom, got None: pass step(denom=...)")
        if isinstance(denom, Tensor) and denom.numel() != 1:
            raise bad_value("denom", "must have one element", tuple(denom.shape), "sum it over the batch")
        return number("denom", float(denom), "count the samples of all ranks", above=0)


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
        # Now, so that `memory` and `load_state_dict` know the parameters before the first step.
        self.arrange({name: p for name, p in model.named_parameters() if p.requires_grad})

    @property
    def memory(self) -> dict[str, dict[str, Tensor]]:
        """Copies of what each parameter still has to send (`residual`), and of what else is remembered."""
        parameters: dict[str, dict[str, Tensor]] = self.state_dict()["parameters"]
        return parameters

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
        averages = self.average(gradients, unused_names(named), by_layer=by_layer)
        if self.finite:
            for name, average in averages.items():
                put_gradient(named[name], average)
        return self.finite


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


def trainable(model: nn.Module) -> dict[str, nn.Parameter]:
    """Return the parameters that require a gradient, at least one, by name; tied ones once."""
    named = {name: p for name, p in model.named_parameters() if p.requires_grad}
    if not named:
        raise ConfigError("model must have trainable parameters, got none: call requires_grad_() on some")
    for name, p in named.items():
        if not p.is_floating_point():
            advice = "keep real and imaginary parts"
            raise TensorTypeError(f"parameter {name} must be real, got {p.dtype}: {advice}")
    return named


def gradient(parameter: Tensor, dtype: torch.dtype | None = None) -> Tensor:
    """Return a dense gradient to read, of its own or another dtype; zeros where it is None."""
    grad = parameter.grad
    if grad is None:
        return torch.zeros_like(parameter, dtype=dtype, requires_grad=False)
    if grad.layout is not torch.strided:
        advice = "use sparse=False in the embedding"
        raise TensorTypeError(f"gradients must be dense, got {grad.layout}: {advice}")
    return grad.detach().to(dtype or grad.dtype)


def put_gradient(parameter: Tensor, average: Tensor) -> None:
    """Copy an average into the parameter's gradient, which is made where it is None."""
    if parameter.grad is None:
        parameter.grad = torch.empty_like(parameter)
    parameter.grad.copy_(average)


def unused_names(named: Mapping[str, Tensor]) -> set[str]:
    """Return the names of parameters without a gradient."""
    return {name for name, p in named.items() if p.grad is None}


def _join(world_size: int | None) -> Driver:
    """Join the process group if this process is in none yet, and check its size."""
    process_group.join()
    driver = Driver.own()
    if world_size is not None and (isinstance(world_size, bool) or world_size != driver.world_size):
        rule = f"must be {driver.world_size}, the number of ranks that were launched"
        raise bad_value("world_size", rule, world_size, "pass that, or start as many ranks")
    return driver
