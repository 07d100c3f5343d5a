"""Parameters, and what is made of them, averaged over ranks: at once, or while training goes on."""

from __future__ import annotations

import json
import math
from collections.abc import Callable, Iterable, Iterator, Mapping, MutableMapping, Sequence
from concurrent.futures import Future
from dataclasses import dataclass, replace
from itertools import accumulate
from typing import Any

import torch
from torch import Tensor, nn

from stenograd.catalog.method import Method, MethodLike, method
from stenograd.comm.drivers import AnyDriver
from stenograd.comm.kernel_loading import load_kernels
from stenograd.comm.step_end import Outcome
from stenograd.comm.tensor_exchange import TensorExchange
from stenograd.compression.contract import Site, Transport
from stenograd.compression.error_feedback import ErrorFeedback
from stenograd.compression.small_all_reduce import mean_in_order
from stenograd.compression.transports import InOrder
from stenograd.compressors.identity import Identity
from stenograd.data.carried import averaged_buffers
from stenograd.data.finite import are_finite
from stenograd.data.flat_parameters import Stream, by_kind
from stenograd.data.requests import mean
from stenograd.errors import CheckpointError, MethodError, NonFiniteError, StenogradError
from stenograd.sync.handshake import broadcast_tensors
from stenograd.sync.steps import pass_flags, refuse_other_passes

__all__ = [
    "IN_ORDER",
    "FlatExchange",
    "ParameterAverager",
    "average",
    "average_buffers",
    "average_carried",
    "average_states",
    "difference_method",
    "floating_buffers",
    "forget_states",
    "spread",
    "take_states",
]


@dataclass(frozen=True, kw_only=True)
class _InOrder(Identity):
    """Dense averaging whose sums go in rank order, so that a loop in one process gets the same bits."""

    def transport(self, site: Site) -> Transport:
        return InOrder()


IN_ORDER = Method(compressor=_InOrder(), text="dense")


class FlatExchange:
    """One exchange of all given parameters' values at a time, in float32, or float64 where they have it.

    Args:
        parameters: by name, alike on all ranks.
        driver: the way to the other ranks.
        how: the method; of dense ones, `IN_ORDER` adds up in rank order.
        chunk: largest number of elements sent at once; a remainder goes first. Methods that are neither dense
            nor a cast cut between parameters only.
        want_errors: whether outcomes tell what compression lost.

    Attributes:
        streams: the parameters, one stream of each kind.
        cuts: what travels at once: the number of its stream, and the part of it.
        exchange: what carries them.
    """

    def __init__(
        self,
        parameters: Mapping[str, Tensor],
        driver: AnyDriver,
        how: Method,
        *,
        chunk: int,
        want_errors: bool = False,
    ) -> None:
        load_kernels(how, driver.world_size, parameters.values())
        self.streams = [Stream(part) for part in by_kind(parameters, how.dense_below)]
        whole = not how.sends_all(driver.world_size)
        cuts = [
            (i, *cut)
            for i, stream in enumerate(self.streams)
            for cut in stream.cuts(chunk, whole, how.dense_below)
        ]
        self.cuts: list[tuple[int, slice]] = [(at, part) for at, part, _ in cuts]
        self.exchange = TensorExchange(how, driver, want_errors=want_errors)
        self.exchange.arrange([bucket for *_, bucket in cuts])
        self._future: Future[Outcome] | None = None
        self._passes: int | None = None  # when that was sent

    @property
    def chunks(self) -> list[slice]:
        """What travels at once, in this order, as slices of all parameters in a row."""
        starts = list(accumulate((sum(stream.numels) for stream in self.streams), initial=0))
        return [slice(starts[at] + part.start, starts[at] + part.stop) for at, part in self.cuts]

    @property
    def under_way(self) -> bool:
        """Whether something was sent and not received yet."""
        return self._future is not None

    def values(self) -> list[Tensor]:
        """Return copies of the parameters, one flat tensor per stream."""
        return [stream.read(stream.empty()) for stream in self.streams]

    @torch.no_grad()
    def send(
        self, fill: Callable[[int, slice, Tensor], Any], weight: float = 1.0, passes: int | None = None
    ) -> None:
        """Send what `fill(stream, part, out)` writes for each cut, times `weight`; returns at once.

        With the number of this rank's backward `passes`, if given; `receive` compares them.
        """

        def filled() -> Iterator[Tensor]:
            for index, (at, part) in enumerate(self.cuts):
                flat = self.exchange.flat(index)
                fill(at, part, flat)
                yield flat

        self._submit(filled(), weight, passes)

    @torch.no_grad()
    def lend(self, values: Sequence[Tensor], weight: float = 1.0, passes: int | None = None) -> None:
        """Send flat tensors, one per stream, which belong to the exchange from then on; see `send`."""

        def lent() -> Iterator[Tensor]:
            for index, (at, part) in enumerate(self.cuts):
                self.exchange.lend(index, values[at][part])
                yield values[at][part]

        self._submit(lent(), weight, passes)

    def _submit(self, flats: Iterator[Tensor], weight: float, passes: int | None) -> None:
        """Hand over all chunks, times `weight`."""
        for index, flat in enumerate(flats):
            if (factor := weight * self.exchange.scale(index)) != 1:
                flat.mul_(factor)
            try:
                self.exchange.submit(index)
            except StenogradError:
                break  # an earlier chunk failed meanwhile; `receive` raises what happened to it
        self._future = self.exchange.finish(flags=() if passes is None else pass_flags(passes))
        self._passes = passes

    def receive(self) -> Outcome | None:
        """Wait for what was sent; None where nothing was, or where a rank's values were not finite.

        Raises:
            StenogradError: on all ranks: they sent it at different backward passes.
        """
        if self._future is None:
            return None
        future, self._future = self._future, None
        outcome = future.result()
        self.exchange.join_streams(t for t in (*outcome.averages, *outcome.errors) if t is not None)
        if self._passes is not None:
            refuse_other_passes(outcome.any_flags, self._passes)
        return outcome if outcome.applied else None

    def by_name(self, values: Sequence[Tensor]) -> dict[str, Tensor]:
        """Return copies of flat tensors, one per stream, cut into the parameters' shapes."""
        return {
            name: piece.view(p.shape).clone()
            for stream, flat in zip(self.streams, values, strict=True)
            for name, p, piece in zip(stream.names, stream.parameters, flat.split(stream.numels), strict=True)
        }

    def flat(self, named: Mapping[str, Tensor]) -> list[Tensor]:
        """Return what `by_name` was given."""
        return [
            torch.cat([named[name].reshape(-1).to(stream.device, stream.dtype) for name in stream.names])
            for stream in self.streams
        ]

    @property
    def names(self) -> list[str]:
        """Names under which a compressor's state is kept."""
        return [name for bucket in self.exchange.buckets for name in bucket.names]

    def load(self, state: Mapping[str, Any]) -> None:
        """Take the counters and the compressor's state of a saved exchange of the same method.

        Raises:
            CheckpointError: it is of another model.
        """
        self.exchange.load_state_dict({**self.exchange.identity, **state})

    def close(self) -> None:
        """Stop the thread that sends."""
        self.exchange.close()


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
        self._lossless = self.method.compressor.lossless
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


def floating_buffers(model: nn.Module, buffers: str) -> list[Tensor]:
    """Return the buffers that rounds average or mix; none with `buffers=keep`."""
    return [] if buffers == "keep" else averaged_buffers(model)


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


_SECOND = ("exp_avg_sq", "max_exp_avg_sq", "square_avg", "sum", "exp_inf", "acc_delta")


@torch.no_grad()
def average_states(
    optimizers: Sequence[torch.optim.Optimizer],
    parameters: Mapping[str, Tensor],
    driver: AnyDriver,
    *,
    second: bool,
) -> Callable[[], None]:
    """Average the optimizers' moments over the ranks, and return what puts the means in place.

    Moments are those of their tensors that have the parameter's shape. Their mean is that of the ranks that
    have one, and of what is finite there: it divides by the number of those, element by element. A rank
    without the state of a parameter (all its steps so far were skipped) takes that mean, and the rest of the
    state, such as the number of steps, of the lowest rank that has one. If it counted as zero, second moments
    would shrink, and the next step would be too long. All moments of such a parameter are averaged.

    Args:
        optimizers: the same on all ranks.
        parameters: by name, alike on all ranks.
        driver: the way to the other ranks; nothing of this user's may be under way.
        second: whether second moments (those of squares) are averaged, too.

    Raises:
        NonFiniteError: on every rank, if a moment has an element that is finite nowhere; all are kept then.
    """
    mine = _moments(optimizers, parameters)
    told = [set(json.loads(text)) for text in driver.gather_bytes(json.dumps([*mine]).encode())]
    having = [{name.rsplit("|", 1)[0] for name in theirs} for theirs in told]
    lacking = {of: [of in theirs for theirs in having] for of in set().union(*having)}
    lacking = {of: has for of, has in lacking.items() if not all(has)}
    names = [
        name
        for name in sorted(set().union(*told))
        if second or name.rsplit("|", 1)[1] not in _SECOND or name.rsplit("|", 1)[0] in lacking
    ]
    none = {n: torch.full_like(parameters[n.rsplit("|", 1)[0]], math.nan) for n in names if n not in mine}
    means = average_carried([mine[n] if n in mine else none[n] for n in names], driver)
    if not are_finite(means):
        raise NonFiniteError(
            "optimizer states to average must be finite on some rank, got NaN or infinity on all: lower the "
            "learning rate, clip gradients or use a GradScaler, and go back to a checkpoint"
        )
    new: list[tuple[MutableMapping[Any, Any], Tensor, Any]] = []
    for source in sorted({has.index(True) for has in lacking.values()}):
        of = sorted(name for name, has in lacking.items() if has.index(True) == source)
        held = [parameters[name] for name in of]
        owners = _owners(held, optimizers)
        # What comes from there is put aside; ranks that have a state of their own keep theirs.
        states = [o.state if driver.rank == source else {} for o in owners]
        take_states(driver, held, states, source)
        new += [
            (o.state, p, state[p])
            for name, o, p, state in zip(of, owners, held, states, strict=True)
            if not lacking[name][driver.rank] and p in state
        ]

    @torch.no_grad()
    def put() -> None:
        for state, p, entries in new:
            state[p] = entries
        now = _moments(optimizers, parameters)
        for name, mean_ in zip(names, means, strict=True):
            if name in now:
                now[name].copy_(mean_)

    return put


@torch.no_grad()
def take_states(
    driver: AnyDriver,
    parameters: Sequence[Tensor],
    states: Sequence[MutableMapping[Any, Any]],
    source: int,
) -> None:
    """Give every rank one rank's optimizer states of some parameters; they may have entries that others lack.

    Args:
        driver: the way to the other ranks.
        parameters: alike on all ranks.
        states: for each of them the mapping that holds its state, such as `optimizer.state`, by parameter.
        source: whose states all take.

    Raises:
        StenogradError: on every rank: a state there holds something else than tensors and plain values.
    """
    mine = driver.rank == source
    form: Any = [_form(state.get(p, {})) for p, state in zip(parameters, states, strict=True)] if mine else []
    try:
        said = json.dumps(form)
    except TypeError as cause:
        said = json.dumps(str(cause))
    form = json.loads(driver.gather_bytes(said.encode())[source])
    if isinstance(form, str):
        raise StenogradError(
            f"an optimizer's state must be tensors and plain values to be shared with ranks that lack it "
            f"({form}): keep other things elsewhere"
        )
    tensors: list[Tensor] = []
    for p, entries, kept in zip(parameters, form, states, strict=True):
        state = kept.setdefault(p, {}) if entries else {}
        for key, (kind, value, where) in entries.items():
            if kind == "value":
                state[key] = value
                continue
            if not mine:
                dtype, place = getattr(torch, kind), p.device if where == "parameter" else torch.device("cpu")
                state[key] = torch.empty(value, dtype=dtype, device=place)
            tensors.append(state[key])
    broadcast_tensors(driver, tensors, source)


def forget_states(optimizers: Sequence[torch.optim.Optimizer], parameters: Iterable[Tensor]) -> None:
    """Drop what the optimizers remember of parameters, so that their next steps start afresh."""
    wanted = list(parameters)
    for optimizer in optimizers:
        for p in wanted:
            optimizer.state.pop(p, None)


def _owners(
    parameters: Iterable[Tensor], optimizers: Sequence[torch.optim.Optimizer]
) -> list[torch.optim.Optimizer]:
    """Return the optimizers that hold parameters."""
    owners = {id(p): o for o in reversed(optimizers) for group in o.param_groups for p in group["params"]}
    return [owners[id(p)] for p in parameters]


def _moments(
    optimizers: Sequence[torch.optim.Optimizer], parameters: Mapping[str, Tensor]
) -> dict[str, Tensor]:
    """Return moments by "parameter|key", in the order of the parameters."""
    found = {}
    for name, p in parameters.items():
        for optimizer in optimizers:
            for key, value in sorted(optimizer.state.get(p, {}).items()):
                moment = isinstance(value, Tensor) and value.shape == p.shape and value.is_floating_point()
                if moment and key != "step":
                    found[f"{name}|{key}"] = value
    return found


def _form(state: Mapping[str, Any]) -> dict[str, tuple[str, Any, str]]:
    """Describe one parameter's state: of tensors the type, shape and place."""
    form: dict[str, tuple[str, Any, str]] = {}
    for key, value in state.items():
        if isinstance(value, Tensor):
            place = "cpu" if value.device.type == "cpu" else "parameter"
            form[key] = (str(value.dtype).removeprefix("torch."), list(value.shape), place)
        else:
            form[key] = ("value", value, "")
    return form
