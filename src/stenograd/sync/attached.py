"""What everything that `stenograd.distribute` returns has in common."""

from __future__ import annotations

from abc import abstractmethod
from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, contextmanager, nullcontext
from functools import partial
from typing import Any, TypeVar

import torch
from torch import nn

from stenograd.catalog.method import Method
from stenograd.comm.drivers import AnyDriver
from stenograd.comm.traffic import Traffic
from stenograd.sync.handshake import Wrapping, compare
from stenograd.sync.tracing import MAX_EVENTS, Tracing

__all__ = ["Attached"]

T = TypeVar("T", bound="Attached")


class Attached:
    """A model and its optimizers, synchronised over the ranks.

    Its collectives run on a process group of its own, so whatever else the program sends at the same time, in
    hooks, in its own backward functions or in threads, is not mixed up with them.

    Attributes:
        method: the `Method` in use.
        traffic: this rank's totals (`payload_bytes`, `moved_bytes`, `collectives`, `wait_s`).
    """

    method: Method
    _driver: AnyDriver
    _model: nn.Module
    _optimizers: Sequence[torch.optim.Optimizer]
    _parameters: dict[str, nn.Parameter]
    _watches: list[Any]
    _wrapping: Wrapping
    _enabled: bool = True
    _group: Any = None

    def _drivers(self) -> list[AnyDriver]:
        """Return all ways to other ranks, the one to all of them first."""
        return [self._driver]

    @property
    def traffic(self) -> Traffic:
        """Bytes, collectives and seconds waited of this rank since attaching."""
        return self._driver.traffic

    @property
    def group(self) -> Any:
        """The process group that was given when attaching; None for all ranks."""
        return self._group

    @property
    def rank(self) -> int:
        """This process's rank in the group."""
        return self._driver.rank

    @property
    def world_size(self) -> int:
        """Number of ranks in the group."""
        return self._driver.world_size

    @property
    def pending(self) -> bool:
        """Whether something is under way, or due, that `flush()` would finish."""
        return False

    @property
    def enabled(self) -> bool:
        """Whether backward passes count; set it alike on all ranks, between passes."""
        return self._enabled

    @enabled.setter
    def enabled(self, value: bool) -> None:
        self._enabled = value

    @contextmanager
    def no_sync(self) -> Iterator[None]:
        """Accumulate gradients locally: backward passes inside exchange nothing, the next one outside all.

        Every rank must use it for the same passes.
        """
        before, self.enabled = self.enabled, False
        passes = self._passes_made()
        try:
            yield
        finally:
            self.enabled = before
            self._accumulated(passes)

    def consensus(self) -> AbstractContextManager[None]:
        """Put the parameters to evaluate or export in place for a `with` block, on all ranks.

        Where every step averages gradients, they are in place already.
        """
        return nullcontext()

    def trace(self, path: str, *, max_events: int = MAX_EVENTS) -> Tracing:
        """Trace what a `with` block does, on all ranks, to a file for Perfetto; see `Tracing`."""
        return Tracing(path, self._drivers(), self._model, self._optimizers, max_events=max_events)

    def __deepcopy__(self: T, memo: dict[int, Any]) -> T:
        """Return this object itself: a copy of a model that holds its `sync` is attached to nothing."""
        return self

    def flush(self) -> None:
        """Finish what is under way or due. Gradient methods leave nothing under way between steps."""

    def before_save(self) -> None:
        """Do what is due before anything is saved; all ranks call it, first of all.

        Where a step was skipped on one rank, it may still have a round to hold that others are waiting in.
        """
        self._hold_if_due()

    def _hold_if_due(self) -> None:
        """Hold the round that is due; gradient methods have none."""

    def after_load(self) -> None:
        """Do what loading a state left over, once model and optimizer are loaded, too."""

    @abstractmethod
    def refresh(self) -> None:
        """Find the parameters anew, on every rank alike; needed after unfreezing some, or `model.to(...)`."""

    @abstractmethod
    def close(self) -> None:
        """Detach from model and optimizer; safe to call twice."""

    def __enter__(self: T) -> T:
        return self

    def __exit__(self, *exc: object) -> None:
        self.close()

    def _passes_made(self) -> int:
        return 0

    def _accumulated(self, before: int) -> None:
        """Note that passes since `before` were not exchanged."""

    def _compare(self, parameters: Mapping[str, nn.Parameter], settings: Mapping[str, Any]) -> None:
        """Check that all ranks have the same model, method and settings."""
        own = {"method": self.method.text, **settings}
        synced = {id(p) for p in parameters.values()}
        others = {n: p for n, p in self._model.named_parameters() if id(p) not in synced}
        compare(self._driver, own, parameters, others=others, buffers=dict(self._model.named_buffers()))

    def _averaged(self) -> set[int]:
        """Return the ids of the parameters that are averaged."""
        return {id(p) for p in self._parameters.values()}

    def _watch(self, modules: Iterable[nn.Module]) -> None:
        """Follow added parameter groups, and forward passes of the model and of what it came wrapped in."""
        for optimizer in self._optimizers:
            optimizer.__dict__["add_param_group"] = partial(self._add_param_group, optimizer)
        self._watches = [module.register_forward_pre_hook(self._wrapping) for module in modules]

    def _unwatch(self) -> None:
        for handle in self._watches:
            handle.remove()
        self._wrapping.watch(())
        for optimizer in self._optimizers:
            optimizer.__dict__.pop("add_param_group", None)

    def _add_param_group(self, optimizer: torch.optim.Optimizer, group: dict[str, Any]) -> None:
        type(optimizer).add_param_group(optimizer, group)
        self.refresh()
