"""Parameters, and what is made or kept of them, averaged over ranks: at once, or while training goes on."""

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
from stenograd.compression.contract import Facts, Payload, Site
from stenograd.compression.feedback import ErrorFeedback
from stenograd.compression.means import mean_in_order
from stenograd.compressors.identity import Identity
from stenograd.errors import MethodError, NonFiniteError, StenogradError
from stenograd.exchange.flat_parameters import Stream, by_kind
from stenograd.exchange.kernel_loading import load_kernels
from stenograd.exchange.tensor_exchange import Outcome, TensorExchange
from stenograd.sync.copies import Copies
from stenograd.sync.handshake import broadcast_tensors
from stenograd.sync.step_settings import BITS, tell
from stenograd.sync.steps import refuse_other_passes
from stenograd.wire.carried import averaged_buffers
from stenograd.wire.drivers import AnyDriver
from stenograd.wire.finite import are_finite
from stenograd.wire.requests import Rounds, mean

__all__ = [
    "IN_ORDER",
    "FlatExchange",
    "average",
    "average_buffers",
    "average_carried",
    "average_states",
    "difference_method",
    "not_finite",
    "take_states",
]


@dataclass(frozen=True, kw_only=True)
class _InOrder(Identity):
    """Dense averaging whose sums go in rank order, so that a loop in one process gets the same bits."""

    def facts(self, site: Site) -> Facts:
        return Facts(rounds=2, linear=True)

    def reduce(self, payload: Payload, site: Site) -> Rounds[Payload]:
        (x,) = payload
        return ((yield from mean_in_order(x, site.world_size)),)


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
        stop: whether this rank asks all to stop by what it sends; it needs `passes` to travel with.
        stopped: whether a rank has asked by what was received.
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
        # Now, so that ranks do not wait in their first round for one that compiles.
        load_kernels(how, driver.world_size, parameters.values())
        self.streams = [Stream(part) for part in by_kind(parameters, how.dense_below)]
        whole = not how.sends_all(driver.world_size)
        cuts = [
            (i, *cut)
            for i, stream in enumerate(self.streams)
            for cut in stream.cuts(chunk, whole, how.dense_below)
        ]
        self.cuts: list[tuple[int, slice]] = [(at, part) for at, part, _ in cuts]
        # Without `waits`: a round may be under way while training goes on, and averages are kept until they
        # are applied.
        self.exchange = TensorExchange(how, driver, want_errors=want_errors)
        self.exchange.arrange([bucket for *_, bucket in cuts])
        self._future: Future[Outcome] | None = None
        self._passes: int | None = None  # when that was sent
        self.stop = self.stopped = False

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
                # Never refused: without `waits` the exchange holds no average in memory that is lent to it.
                self.exchange.lend(index, values[at][part])
                yield values[at][part]

        self._submit(lent(), weight, passes)

    def _submit(self, flats: Iterator[Tensor], weight: float, passes: int | None) -> None:
        """Hand over all chunks, times `weight`."""
        for index, flat in enumerate(flats):
            # Divided before the sum, as in DDP, so that sums cannot overflow.
            if (factor := weight * self.exchange.scale(index)) != 1:
                flat.mul_(factor)
            try:
                self.exchange.submit(index)
            except StenogradError:
                break  # an earlier chunk failed meanwhile; `receive` raises what happened to it
        flags = () if passes is None else tell(passes, BITS)
        self._future = self.exchange.finish(flags=flags, stop=self.stop)
        self._passes = passes

    def receive(self) -> Outcome | None:
        """Wait for what was sent; None where nothing was, or where a rank's values were not finite.

        Raises:
            StenogradError: on all ranks: they sent it at different backward passes.
        """
        if self._future is None:
            return None
        # Taken off first: after an error nothing is under way any more.
        future, self._future = self._future, None
        outcome = future.result()
        # On a GPU averages are written on side streams; whoever reads them must be behind those.
        self.exchange.join_streams(t for t in (*outcome.averages, *outcome.errors) if t is not None)
        if self._passes is not None:
            refuse_other_passes(outcome.any_flags, self._passes)
        self.stopped |= outcome.stop
        return outcome if outcome.applied else None

    def put(self, outcome: Outcome, values: Sequence[Tensor]) -> None:
        """Copy the averages to flat tensors, one per stream, unless they lie there."""
        for (at, part), average_ in zip(self.cuts, outcome.averages, strict=True):
            if average_.data_ptr() != values[at][part].data_ptr():  # what was lent comes back where it lay
                values[at][part].copy_(average_)

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
        # Parts are saved without the identity, which their whole state holds once.
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


def average(
    tensors: Sequence[Tensor], driver: AnyDriver, weight: float = 1.0, *, in_order: bool = False
) -> None:
    """Replace tensors by their exact mean over the ranks, one message per dtype.

    Args:
        tensors: floating, alike on all ranks.
        driver: the way to the other ranks.
        weight: this rank's weight; the ranks' weights have mean 1.
        in_order: whether to add up in rank order; so that the result is that of a loop in one process.

    Raises:
        NonFiniteError: on every rank, if a mean is not finite; all tensors are kept then.

    Example:
        >>> from stenograd.wire.driver import Driver
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
        own = [stream.read(stream.empty()).mul_(weight) for stream in streams]
        rounds = [mean_in_order(x, driver.world_size) if in_order else mean(x) for x in own]
        means = [driver.run(one) for one in rounds]
        # All means before any is written: one that is bad must leave every tensor as it was.
        if not are_finite(means):
            raise not_finite("tensors")
        for stream, values in zip(streams, means, strict=True):
            stream.write(values)


@torch.no_grad()
def average_carried(
    tensors: Sequence[Tensor], driver: AnyDriver, weights: Sequence[float] | None = None
) -> list[Tensor]:
    """Return the means over the ranks of what is not trained, such as buffers; one message per dtype.

    What is not finite on some ranks is left out; see `wire.carried.mean_of_finite`. So it ends no training.

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


def not_finite(what: str) -> NonFiniteError:
    """Return the error of an average whose ranks, or whose result, have something that is not finite."""
    return NonFiniteError(
        f"{what} to average must be finite, got NaN or infinity on a rank: lower the learning rate, clip "
        "gradients or use a GradScaler, and go back to a checkpoint"
    )


# torch.optim's names: Adam's, AMSGrad's, those of RMSprop and Adadelta, Adagrad's, Adamax's and Adadelta's.
_SECOND = ("exp_avg_sq", "max_exp_avg_sq", "square_avg", "sum", "exp_inf", "acc_delta")


@torch.no_grad()
def average_states(
    optimizers: Sequence[torch.optim.Optimizer],
    parameters: Mapping[str, Tensor],
    driver: AnyDriver,
    copies: Copies,
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
        copies: of the parameters in these states, which follow the parameters and are no moments.
        second: whether second moments (those of squares) are averaged, too.

    Raises:
        NonFiniteError: on every rank, if a moment has an element that is finite nowhere; all are kept then.
    """
    own = _moments(optimizers, parameters, copies)
    said = driver.gather_bytes(json.dumps([*own]).encode())
    received = [{(name, key) for name, key in json.loads(text)} for text in said]
    having = [{name for name, _ in other} for other in received]
    lacking = {of: [of in other for other in having] for of in set().union(*having)}
    lacking = {of: has for of, has in lacking.items() if not all(has)}
    every = sorted(set().union(*received), key=lambda moment: ("|".join(moment), moment))
    names = [(name, key) for name, key in every if second or key not in _SECOND or name in lacking]
    # NaN, which a mean of what is finite leaves out: a rank without the state has no say in it.
    none = {n: torch.full_like(parameters[n[0]], math.nan) for n in names if n not in own}
    means = average_carried([own[n] if n in own else none[n] for n in names], driver)
    if not are_finite(means):
        raise NonFiniteError(
            "optimizer states to average must be finite on some rank, got NaN or infinity on all: lower the "
            "learning rate, clip gradients or use a GradScaler, and go back to a checkpoint"
        )
    new: list[tuple[MutableMapping[Any, Any], Tensor, Any]] = []
    # Sorted, as the names are: all ranks take part in the same broadcasts in the same order.
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
        # Whole states first: the means are then written over the moments in them.
        for state, p, entries in new:
            state[p] = entries
        now = _moments(optimizers, parameters, copies)
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
    own = driver.rank == source
    form: Any = [_form(state.get(p, {})) for p, state in zip(parameters, states, strict=True)] if own else []
    # A string in place of the list is the source's failure, which so becomes an error on every rank.
    try:
        said = json.dumps(form)
    except TypeError as cause:
        said = json.dumps(str(cause))
    form = json.loads(driver.gather_bytes(said.encode())[source], object_hook=_unpacked)
    if isinstance(form, str):
        raise StenogradError(
            f"an optimizer's state must be tensors and plain values to be shared with ranks that lack it "
            f"({form}): keep other things elsewhere"
        )
    tensors: list[Tensor] = []
    for p, entries, kept in zip(parameters, form, states, strict=True):
        state = kept.setdefault(p, {}) if entries else {}
        for key, kind, value, where in entries:
            if kind == "value":
                if not own:
                    state[key] = value
                continue
            if not own:
                dtype, place = getattr(torch, kind), p.device if where == "parameter" else torch.device("cpu")
                state[key] = torch.empty(value, dtype=dtype, device=place)
            tensors.append(state[key])
    broadcast_tensors(driver, tensors, source)


def _owners(
    parameters: Iterable[Tensor], optimizers: Sequence[torch.optim.Optimizer]
) -> list[torch.optim.Optimizer]:
    """Return the optimizers that hold parameters."""
    # reversed: the first that holds it counts
    owners = {id(p): o for o in reversed(optimizers) for group in o.param_groups for p in group["params"]}
    return [owners[id(p)] for p in parameters]


def _moments(
    optimizers: Sequence[torch.optim.Optimizer], parameters: Mapping[str, Tensor], copies: Copies
) -> dict[tuple[str, str], Tensor]:
    """Return moments by the names of their parameters and their keys, in the order of the parameters."""
    found, others = dict[tuple[str, str], Tensor](), copies.of(parameters.values())
    for name, p in parameters.items():
        for optimizer in optimizers:
            for key, value in sorted(optimizer.state.get(p, {}).items()):
                moment = isinstance(value, Tensor) and value.shape == p.shape and value.is_floating_point()
                # A scalar parameter has the shape of its count of steps.
                if moment and key != "step" and id(value) not in others:
                    found[name, str(key)] = value
    return found


def _form(state: Mapping[Any, Any]) -> list[list[Any]]:
    """Describe one parameter's state: for each entry the key, and of tensors the type, shape and place."""
    form: list[list[Any]] = []
    for key, value in state.items():
        if isinstance(value, Tensor):
            place = "cpu" if value.device.type == "cpu" else "parameter"
            form.append([_packed(key), str(value.dtype).removeprefix("torch."), list(value.shape), place])
        else:
            form.append([_packed(key), "value", _packed(value), ""])
    return form


def _packed(value: Any) -> Any:
    """Return a plain value as JSON can write it, which knows neither tuples nor keys that are no strings."""
    if isinstance(value, dict):
        return {"dict": [[_packed(key), _packed(entry)] for key, entry in value.items()]}
    if isinstance(value, (tuple, list)):
        entries = [_packed(entry) for entry in value]
        return {"tuple": entries} if isinstance(value, tuple) else entries
    return value


def _unpacked(found: dict[str, Any]) -> Any:
    """Return what `_packed` has made an object of."""
    return tuple(found["tuple"]) if "tuple" in found else dict(found["dict"])
