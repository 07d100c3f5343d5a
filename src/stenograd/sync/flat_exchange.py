"""Parameters, or what is made of them, averaged chunk by chunk as flat tensors."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from concurrent.futures import Future
from dataclasses import dataclass
from itertools import accumulate
from typing import Any

import torch
from torch import Tensor

from stenograd.catalog.method import Method
from stenograd.comm.drivers import AnyDriver
from stenograd.comm.kernel_loading import load_kernels
from stenograd.comm.step_end import Outcome
from stenograd.comm.tensor_exchange import TensorExchange
from stenograd.compression.contract import Facts, Payload, Site
from stenograd.compression.means import mean_in_order
from stenograd.compressors.identity import Identity
from stenograd.data.flat_parameters import Stream, by_kind
from stenograd.data.requests import Rounds
from stenograd.errors import StenogradError
from stenograd.sync.backward_passes import pass_flags, refuse_other_passes

__all__ = ["IN_ORDER", "FlatExchange"]


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
