"""Average gradients with any method in any step; residuals stay with their parameters."""

from __future__ import annotations

from collections.abc import Collection, Mapping

import torch
from torch import Tensor

from stenograd.catalog.method import Method
from stenograd.comm.driver import Driver
from stenograd.comm.tensor_exchange import TensorExchange
from stenograd.compression.error_feedback import ErrorFeedback
from stenograd.data.buckets import Bucket
from stenograd.errors import StenogradError
from stenograd.singa.fusion import Group

__all__ = ["Exchanges"]

_States = dict[str, dict[str, Tensor]]


class Exchanges:
    """Runs one `TensorExchange` at a time, and makes a new one when a step asks for another method.

    Residuals of parameters that a step does not use, and all residuals while a method has no error feedback,
    are kept by parameter name until a step uses them again.

    Args:
        driver: the way to the other ranks.
    """

    def __init__(self, driver: Driver) -> None:
        self._driver = driver
        self._exchange: TensorExchange | None = None
        self._resting: _States = {}
        self._groups: list[Group] = []
        self._under_way = False
        self._laid_out_anew = False

    @property
    def resting(self) -> bool:
        """Whether residuals are kept that the running exchange does not have."""
        return bool(self._resting)

    def begin(self, how: Method, known: Collection[str]) -> None:
        """Start a step.

        Args:
            how: the method by which this step's gradients travel.
            known: names of the parameters that this step will use, as far as they have names.

        Raises:
            StenogradError: an error interrupted the last step while other ranks may have gone on.
        """
        running = self._exchange
        if self._under_way and running is not None:
            if self._driver.world_size > 1:
                raise StenogradError(
                    "the last step did not finish (an error in its backward pass), so the ranks may be out "
                    "of step: restart from a checkpoint"
                )
            running.abandon()
        returning = not self._resting.keys().isdisjoint(known)
        feeds_back = isinstance(how.compressor, ErrorFeedback)
        if running is None or running.method != how or (feeds_back and returning):
            self._replace(how, self.residuals())
        self._groups = []
        self._under_way = False
        self._laid_out_anew = False

    def submit(self, group: Group, tensors: list[Tensor]) -> None:
        """Start averaging the next group; returns at once."""
        running = self._running()
        self._under_way = True
        first = tensors[0]
        shapes = tuple(t.shape for t in tensors)
        bucket = Bucket(tuple(group), shapes, first.dtype, first.device)
        index = len(self._groups)
        self._laid_out_anew |= running.buckets[index : index + 1] != [bucket]
        running.place(index, bucket)
        torch.cat([t.reshape(-1) for t in tensors], out=running.flat(index))
        running.submit(index)
        self._groups.append(group)

    def finish(self) -> tuple[dict[str, Tensor], bool]:
        """Wait until all groups of the step are averaged.

        Returns:
            The averages by parameter name, in memory that the next step reuses, and whether they are finite.
        """
        running = self._running()
        if self._laid_out_anew:  # when the step ends, the exchange forgets parameters that are in no bucket
            placed = {name for bucket in running.buckets for name in bucket.names}
            states = running.state_dict()["parameters"]
            self._resting |= {name: state for name, state in states.items() if state and name not in placed}
        outcome = running.finish().result()
        running.join_streams()
        self._under_way = False
        averages: dict[str, Tensor] = {}
        for bucket, flat in zip(running.buckets, outcome.averages, strict=False):
            averages.update(zip(bucket.names, bucket.views(flat), strict=True))
        return averages, outcome.applied and all(bool(flat.isfinite().all()) for flat in outcome.averages)

    def residuals(self) -> _States:
        """Return copies of all residuals by parameter name."""
        running = self._exchange
        states = dict(running.state_dict()["parameters"]) if running is not None else {}
        kept = {name: {k: t.clone() for k, t in state.items()} for name, state in self._resting.items()}
        return kept | {name: state for name, state in states.items() if state}

    def load(self, residuals: Mapping[str, Mapping[str, Tensor]]) -> None:
        """Replace all residuals by these."""
        self._stop()
        self._resting = {name: {k: t.clone() for k, t in s.items()} for name, s in residuals.items()}

    def close(self) -> None:
        """Stop the running exchange; its residuals are kept."""
        self._resting = self.residuals()
        self._stop()

    def _stop(self) -> None:
        if self._exchange is not None:
            self._exchange.close()
        self._exchange = None
        self._under_way = False

    def _replace(self, how: Method, residuals: _States) -> None:
        self._stop()
        fresh = TensorExchange(how, self._driver)
        self._resting = residuals
        if isinstance(how.compressor, ErrorFeedback):
            fresh.load_state_dict({**fresh.state_dict(), "parameters": residuals})
            self._resting = {}
        self._exchange = fresh

    def _running(self) -> TensorExchange:
        if self._exchange is None:
            raise StenogradError("no step is under way: call begin first")
        return self._exchange
