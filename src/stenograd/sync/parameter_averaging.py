"""Parameters averaged over ranks: exactly and at once, or compressed while training goes on."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import replace
from typing import Any

import torch
from torch import Tensor, nn

from stenograd.catalog.method import Method, MethodLike, method
from stenograd.comm.drivers import AnyDriver
from stenograd.compression.feedback import ErrorFeedback
from stenograd.compression.means import mean_in_order
from stenograd.data.carried import averaged_buffers
from stenograd.data.finite import are_finite
from stenograd.data.flat_parameters import Stream, by_kind
from stenograd.data.requests import mean
from stenograd.errors import CheckpointError, MethodError, NonFiniteError
from stenograd.sync.flat_exchange import IN_ORDER, FlatExchange

__all__ = [
    "ParameterAverager",
    "average",
    "average_buffers",
    "average_carried",
    "difference_method",
    "spread",
]


def difference_method(how: MethodLike) -> Method:
    """Return a method fit for differences: error feedback is taken off, since differences carry it already.

    What a message leaves out stays in the difference from what was sent so far, and so goes out later.

    Raises:
        MethodError: unknown; or it clips, votes or scales up, so what was sent is not near the difference.
    """
    chosen = method(how)
    chosen.require_every_step("an average of parameters")
    if chosen.accumulates:
        raise MethodError(
            f"{chosen.text} accumulates gradients by itself, so it cannot send differences of parameters: "
            "use topk, or leave out the schedule"
        )
    if chosen.amplifies or chosen.clips or chosen.votes:
        raise MethodError(
            f"differences of parameters need a method that sends them as they are, got {chosen.text}: "
            "leave out clipping, majority and unbiased scaling"
        )
    compressor = chosen.compressor
    inner = compressor.inner if isinstance(compressor, ErrorFeedback) else compressor
    return replace(chosen, compressor=inner)


class ParameterAverager:
    """Averages parameters over a group: `replace` exactly, `send` and `merge` while training goes on.

    A message holds the difference from what this rank sent so far, `q = C(p - h)`, `h <- h + q`, and all
    ranks keep the mean of what was sent, `H <- H + mean(q)`. So rounding and sparsity cost no update: what a
    message loses goes with a later one, and updates far below a weight's own precision survive. The merge,
    `p <- p + share (H + (p_sent - h) - p)`, then keeps the ranks' mean whatever the compressor; with a
    lossless one it is `p <- p + share (mean(p_sent) - p)`, and p itself travels. Then h follows p, `h <- h +
    share (H - h)`, which leaves the mean of all h at H: without it, what is sent seldom is merged often.

    Parameters travel in float32, or float64 where they have it, in chunks.

    Args:
        parameters: by name, alike on all ranks.
        driver: the way to the other ranks.
        how: how differences are written; see `difference_method`.
        weight: this rank's weight in the average; the ranks' weights have mean 1.
        chunk: largest number of elements sent at once; a remainder goes first. Methods that are neither dense
            nor a cast cut between parameters only.

    Attributes:
        stayed: whether the last `merge` left parameters of this rank where they were, because what it led to
            is beyond what float16 holds. The difference goes on being sent.

    Reference: Koloskova et al., "Decentralized Stochastic Optimization and Gossip Algorithms with Compressed
    Communication", ICML 2019 (CHOCO, here with everyone as neighbour and with h moved).
    """

    def __init__(
        self,
        parameters: Mapping[str, Tensor],
        driver: AnyDriver,
        how: MethodLike,
        *,
        weight: float = 1.0,
        chunk: int = 10_000_000,
    ) -> None:
        self.driver = driver.private()
        self.method = difference_method(how)
        self.weight = weight
        self._parameters, self._chunk = parameters, chunk
        self._lossless = self.method.lossless
        self._flat = FlatExchange(
            parameters, self.driver, self.method, chunk=chunk, want_errors=not self._lossless
        )
        self._exact: dict[bool, FlatExchange] = {}  # made when first used
        self._packed: list[Tensor] = []
        self._sent: list[Tensor] = []
        self._mine: list[Tensor] = []
        self._mean: list[Tensor] = []
        self._arrived = False
        self.stayed = False

    @property
    def chunks(self) -> list[slice]:
        """What travels at once, in this order, as slices of all parameters in a row."""
        return self._flat.chunks

    @torch.no_grad()
    def anchor(self) -> None:
        """Count differences from the present parameters, which must be equal on all ranks."""
        if not self._lossless:
            self._mine = self._flat.values()
            self._mean = [values.clone() for values in self._mine]

    @torch.no_grad()
    def pack(self) -> None:
        """Read the parameters that the next `send` shall send."""
        if not self._packed:
            self._packed = [stream.empty() for stream in self._flat.streams]
        for stream, packed in zip(self._flat.streams, self._packed, strict=True):
            stream.read(packed)

    @torch.no_grad()
    def send(self, passes: int | None = None) -> None:
        """Send what `pack` read; returns at once. What was sent before must have been merged.

        Args:
            passes: see `FlatExchange.send`.
        """
        self._packed, self._sent = self._sent, self._packed

        def fill(at: int, part: slice, out: Tensor) -> None:
            if self._lossless:
                out.copy_(self._sent[at][part])
            else:
                torch.sub(self._sent[at][part], self._mine[at][part], out=out)

        self._flat.send(fill, self.weight, passes)

    @torch.no_grad()
    def merge(self, share: float) -> bool:
        """Wait for what was sent, and move the parameters by `share` of their way to the average.

        Returns:
            Whether all ranks' parameters were finite; if not, nothing moved.
        """
        self._await_arrival()
        arrived, self._arrived = self._arrived, False
        if arrived:
            self.stayed = False
            for stream, target in zip(self._flat.streams, self._sent, strict=True):
                if stream.holds(target):
                    stream.approach(target, share)
                else:
                    self.stayed = True
            for mine, mean_ in zip(self._mine, self._mean, strict=True):
                mine.lerp_(mean_, share)
        return arrived

    def discard(self) -> None:
        """Wait for what was sent, and forget it."""
        self._await_arrival()
        self._arrived = False

    def replace(self, *, in_order: bool = False) -> bool:
        """Make the parameters the exact average if it is finite, and tell whether it is; see `exact`."""
        return self.take(self.exact(in_order=in_order))

    @torch.no_grad()
    def take(self, values: Sequence[Tensor] | None) -> bool:
        """Overwrite the parameters by what `exact` returned, if that is not None, and tell whether it is."""
        for stream, found in zip(self._flat.streams, values or (), strict=values is not None):
            stream.write(found)
        return values is not None

    @torch.no_grad()
    def exact(self, *, in_order: bool = False, passes: int | None = None) -> list[Tensor] | None:
        """Return the parameters' exact average, as flat tensors; None if it is not finite.

        Args:
            in_order: whether to add up in rank order, so that the result is that of a loop in one process.
            passes: see `FlatExchange.send`.
        """
        exact = self._exact.get(in_order)
        if exact is None:
            how = IN_ORDER if in_order else method("dense")
            exact = FlatExchange(self._parameters, self.driver, how, chunk=self._chunk)
            self._exact[in_order] = exact
        values = exact.values()
        exact.lend(values, self.weight, passes)
        outcome = exact.receive()
        if outcome is None:  # every rank keeps its own, for whoever wants to save what is left
            return None
        for (at, part), average_ in zip(exact.cuts, outcome.averages, strict=True):
            if average_.data_ptr() != values[at][part].data_ptr():
                values[at][part].copy_(average_)
        return values

    def exchanged(self) -> list[str]:
        """Return the names under which a compressor's state is kept."""
        return self._flat.names

    def by_name(self, *, own: bool) -> dict[str, Any]:
        """Return what decides the next exchange, by parameter name, for `load_by_name`; nothing is under way.

        Args:
            own: whether this rank's parameters are a part of it.
        """
        named = {"own": self._flat.values()} if own else {}
        named |= {} if self._lossless else {"own sent": self._mine, "mean of sent": self._mean}
        tensors = {key: self._flat.by_name(values) for key, values in named.items()}
        return {"exchange": self._flat.exchange.state_dict(), "tensors": tensors}

    def load_by_name(self, state: Mapping[str, Any]) -> None:
        """Continue from what `by_name` returned.

        Raises:
            CheckpointError: it is of another model.
        """
        self._flat.load(state["exchange"])
        if not self._lossless:
            found = state["tensors"]
            self._mine = self._flat.flat(found["own sent"])
            self._mean = self._flat.flat(found["mean of sent"])

    def state_dict(self) -> dict[str, Any]:
        """Return what decides the next exchange, an unmerged one included; waits for it."""
        self._await_arrival()
        return {
            "exchange": self._flat.exchange.state_dict(),
            "mine": [t.clone() for t in self._mine],
            "mean": [t.clone() for t in self._mean],
            "arrived": [t.clone() for t in self._sent] if self._arrived else [],
        }

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Continue from a saved `state_dict()`.

        Raises:
            CheckpointError: it is of another method, rank or model.
        """
        sizes = [sum(stream.numels) for stream in self._flat.streams]
        for key in ("mine", "mean", "arrived"):
            if state[key] and [t.numel() for t in state[key]] != sizes:
                raise CheckpointError(f"the state's {key} is of another model: load it into the same model")
        self._await_arrival()
        self._flat.exchange.load_state_dict(state["exchange"])
        self._mine, self._mean = self._taken(state["mine"]), self._taken(state["mean"])
        self._arrived = bool(state["arrived"])
        if self._arrived:
            self._sent = self._taken(state["arrived"])

    def close(self) -> None:
        """Stop the threads that send."""
        for flat in (self._flat, *self._exact.values()):
            flat.close()

    def _taken(self, tensors: Sequence[Tensor]) -> list[Tensor]:
        return [stream.empty().copy_(t) for t, stream in zip(tensors, self._flat.streams, strict=False)]

    @torch.no_grad()
    def _await_arrival(self) -> None:
        """Wait for the exchange in flight and work out where it leads."""
        outcome = self._flat.receive()
        if outcome is None:
            return
        for index, (at, part) in enumerate(self._flat.cuts):
            sent, mean_, lost = self._sent[at][part], outcome.averages[index], outcome.errors[index]
            if self._lossless:
                sent.copy_(mean_)
                continue
            lost = torch.zeros_like(sent) if lost is None else lost / self.weight
            torch.sub(sent, lost, out=self._mine[at][part])
            torch.add(self._mean[at][part].add_(mean_), lost, out=sent)
        self._arrived = True


def average(
    tensors: Sequence[Tensor], driver: AnyDriver, weight: float = 1.0, *, in_order: bool = False
) -> None:
    """Replace tensors by their exact mean over the ranks, one message per dtype.

    Args:
        tensors: floating, alike on all ranks.
        driver: the way to the other ranks.
        weight: this rank's weight; the ranks' weights have mean 1.
        in_order: whether to add up in rank order; see `ParameterAverager.replace`.

    Raises:
        NonFiniteError: on every rank, if a mean is not finite; all tensors are kept then.

    Example:
        >>> from stenograd.comm.driver import Driver
        >>> from stenograd.launch.process_group import init, shutdown
        >>> _ = init()
        >>> x = torch.ones(2)
        >>> average([x], Driver())  # alone, so nothing changes
        >>> x.tolist()
        [1.0, 1.0]
        >>> shutdown()
    """
    with torch.no_grad():
        streams = [Stream(part) for part in by_kind({str(i): t for i, t in enumerate(tensors)})]
        mine = [stream.read(stream.empty()).mul_(weight) for stream in streams]
        rounds = [mean_in_order(x, driver.world_size) if in_order else mean(x) for x in mine]
        means = [driver.run(one) for one in rounds]
        if not are_finite(means):
            raise _not_finite("tensors")
        for stream, values in zip(streams, means, strict=True):
            stream.write(values)


@torch.no_grad()
def average_carried(
    tensors: Sequence[Tensor], driver: AnyDriver, weights: Sequence[float] | None = None
) -> list[Tensor]:
    """Return the means over the ranks of what is not trained, such as buffers; one message per dtype.

    What is not finite on some ranks is left out; see `data.carried.mean_of_finite`. So it ends no training.

    Args:
        tensors: floating, alike on all ranks.
        driver: the way to the other ranks.
        weights: of all ranks, with mean 1; None for equal ones.

    Returns:
        A mean for each tensor, in float32 or float64, equal on all ranks.
    """
    size = driver.world_size
    weights = [1.0] * size if weights is None else weights
    named = {str(i): t for i, t in enumerate(tensors)}
    means: dict[str, Tensor] = {}
    for stream in map(Stream, by_kind(named)):
        mean_ = driver.run(mean_in_order(stream.read(stream.empty()), size, weights=weights))
        pieces = mean_.split(stream.numels)
        means |= {n: x.view(t.shape) for n, x, t in zip(stream.names, pieces, stream.parameters, strict=True)}
    return [means[name] for name in named]


@torch.no_grad()
def average_buffers(model: nn.Module, driver: AnyDriver) -> None:
    """Replace a model's floating buffers by their means over the ranks; see `average_carried`."""
    buffers = averaged_buffers(model)
    for buffer, mean_ in zip(buffers, average_carried(buffers, driver), strict=True):
        buffer.copy_(mean_)


@torch.no_grad()
def spread(parameters: Mapping[str, Tensor], driver: AnyDriver, source: int, finite: bool) -> None:
    """Give every rank of a node the parameters of one of them, if they are fit for it.

    Args:
        parameters: by name, alike on all ranks.
        driver: the way to the ranks of the node.
        source: the rank in the node whose parameters all take.
        finite: there: whether an average was finite; elsewhere without meaning.

    Raises:
        NonFiniteError: on every rank, if it was not.
    """
    verdict = torch.full(
        (1,), float(finite), dtype=torch.float32, device=next(iter(parameters.values())).device
    )
    driver.broadcast(verdict, source, counted=True)
    if not verdict.item():
        raise _not_finite("parameters")
    if driver.world_size == 1:
        return
    for part in by_kind(parameters):
        stream = Stream(part)
        values = stream.empty()
        if driver.rank == source:
            stream.read(values)
        driver.broadcast(values, source, counted=True)
        if driver.rank != source:
            stream.write(values)


def _not_finite(what: str) -> NonFiniteError:
    return NonFiniteError(
        f"{what} to average must be finite, got NaN or infinity on a rank: lower the learning rate, clip "
        "gradients or use a GradScaler, and go back to a checkpoint"
    )
