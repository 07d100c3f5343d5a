"""Named tensors in, their averages over the ranks out: the one place in this folder that exchanges."""

from __future__ import annotations

import sys
from collections.abc import Collection, Mapping
from itertools import chain
from typing import Any

import torch
from torch import Tensor

from stenograd.comm.driver import Driver
from stenograd.comm.tensor_exchange import TensorExchange
from stenograd.comm.traffic import Traffic
from stenograd.compression.contract import Compressor
from stenograd.compressors.identity import Identity
from stenograd.data.buckets import Bucket, assign
from stenograd.errors import bad_value
from stenograd.launch import process_group
from stenograd.sync.handshake import compare

__all__ = ["Averaging"]


class Averaging:
    """Averages named tensors over the ranks; what the compressor remembers is kept by name.

    A copy, pickled or not, keeps that memory, which is this rank's, and finds the ranks again by itself.

    Args:
        world_size: number of ranks; None is the group's.
        compressor: how tensors travel; None sends them as they are.

    Attributes:
        finite: whether the last `average` counts, equal on all ranks. If not, no memory has changed.
        skipped: number of averages that did not count.

    Raises:
        ConfigError: world_size is not the group's.
    """

    def __init__(self, world_size: int | None = None, compressor: Compressor | None = None) -> None:
        self.compressor = compressor or Identity()
        self._driver: Driver | None = _join(world_size)
        self.world_size = self._driver.world_size
        self.finite = True
        self.skipped = 0
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

    def meet(self, tensors: Mapping[str, Tensor], options: Mapping[str, object]) -> None:
        """Check that all ranks hold the same parameters and options, and run the same versions and kernels.

        Raises:
            MismatchError: naming the first difference.
        """
        if self.world_size > 1 and tensors:
            compare(self.driver, {k: repr(v) for k, v in options.items()}, tensors)

    def arrange(self, values: Mapping[str, Tensor], *, by_layer: bool = False) -> TensorExchange:
        """Make the memory of these tensors now, which `average` would make at its first call.

        Args:
            values: as in `average`; only their shapes, dtypes and devices matter.
            by_layer: whether each tensor has collectives of its own, instead of one for all of a dtype.
        """
        exchange = self._running()
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
        exchange = self.arrange(values, by_layer=by_layer)
        for index, bucket in enumerate(exchange.buckets):
            flat, scale = exchange.flat(index), exchange.scale(index)
            torch.cat([values[name].reshape(-1) for name in bucket.names], out=flat)
            if scale != 1:
                flat.mul_(scale)
            exchange.submit(index)
        names = [name for bucket in exchange.buckets for name in bucket.names]
        flags = [] if bad is None else [bad]
        outcome = exchange.finish([name not in unused for name in names], flags).result()
        exchange.join_streams()
        self.finite = outcome.applied and not any(outcome.any_flags)
        self.skipped += not self.finite
        averages = zip(exchange.buckets, outcome.averages, strict=True)
        views = chain.from_iterable(bucket.views(flat) for bucket, flat in averages)
        return {n: v for n, v, used in zip(names, views, outcome.any_used, strict=True) if used}

    def state_dict(self) -> dict[str, Any]:
        """Return copies of all that decides this rank's next average."""
        return {**self._running().state_dict(), "skipped": self.skipped}

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Take a saved state.

        Raises:
            CheckpointError: it is of another rank, world size, method or model; nothing is changed.
        """
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
        if self._exchange is not None and not self.compressor.lossless:  # else there is no memory
            saved = (list(self._exchange.buckets), self._exchange.state_dict())
        return {**self.__dict__, "_driver": None, "_exchange": None, "_saved": saved}


def _join(world_size: int | None) -> Driver:
    """Join the process group if this process is in none yet, and check its size."""
    process_group.join()
    driver = Driver.own()
    if world_size is not None and (isinstance(world_size, bool) or world_size != driver.world_size):
        rule = f"must be {driver.world_size}, the number of ranks that were launched"
        raise bad_value("world_size", rule, world_size, "pass that, or start as many ranks")
    return driver
