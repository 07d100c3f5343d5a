"""What everything that `stenograd.distribute` and `stenograd.ddp.register` return has in common."""

from __future__ import annotations

from abc import abstractmethod
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, contextmanager, nullcontext
from functools import partial
from typing import Any, Protocol, TypeVar

import torch
from torch import nn

from stenograd.catalog.method import Method
from stenograd.comm.drivers import AnyDriver
from stenograd.comm.traffic import Traffic
from stenograd.data.requests import gather
from stenograd.sync.handshake import Wrapping, compare, describe_optimizers
from stenograd.sync.members import Members, entries
from stenograd.sync.tracing import MAX_EVENTS, Tracing

__all__ = ["Attached", "Sync", "as_in_training"]

T = TypeVar("T", bound="Sync")
A = TypeVar("A", bound="Attached")
F = TypeVar("F", bound=Callable[..., Any])


def as_in_training(function: F) -> F:
    """Let a function, or the steps of a generator, work inside of `torch.inference_mode()` as outside.

    What is made in that mode cannot be changed outside of it, and training changes what the function keeps.
    """
    plain: F = torch.inference_mode(False)(torch.no_grad()(function))
    return plain


class Sync(Protocol):
    """What `stenograd.distribute` and `stenograd.ddp.register` return, whatever the method.

    Every method has every name here, so another method's text needs no other change in a program.

    Attributes:
        method: the `Method` in use.

    Example:
        >>> import stenograd
        >>> model = nn.Linear(4, 2)
        >>> optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
        >>> with stenograd.distribute(model, optimizer, "local:every=4") as sync:
        ...     sync.step, sync.round, sync.pending, sync.events
        (0, 0, False, [])
    """

    method: Method

    @property
    def traffic(self) -> Traffic:
        """This rank's totals since attaching: `payload_bytes`, `moved_bytes`, `collectives`, `wait_s`."""

    @property
    def group(self) -> Any:
        """The process group that was given when attaching; None for all ranks."""

    @property
    def rank(self) -> int:
        """This process's rank in the group."""

    @property
    def world_size(self) -> int:
        """Number of ranks in the group."""

    @property
    @abstractmethod
    def step(self) -> int:
        """Number of steps; equal on every rank."""

    @property
    @abstractmethod
    def skipped(self) -> int:
        """Number of steps whose gradients were not finite, which changed nothing."""

    @property
    @abstractmethod
    def finite(self) -> bool:
        """Whether the last backward pass left finite gradients; step only then."""

    @property
    @abstractmethod
    def repaired(self) -> int:
        """Number of checks that found the ranks' parameters unequal, and repaired them."""

    @property
    def enabled(self) -> bool:
        """Whether backward passes count; set it alike on all ranks, between passes."""

    @enabled.setter
    def enabled(self, value: bool) -> None: ...

    def no_sync(self) -> AbstractContextManager[None]:
        """Accumulate gradients locally: backward passes inside exchange nothing, the next one outside all.

        Every rank must use it for the same passes.
        """

    def join(
        self, *, enable: bool = True, throw_on_early_termination: bool = False
    ) -> AbstractContextManager[Any]:
        """Let ranks have different numbers of batches; where ranks meet in rounds, this is refused."""

    def trace(self, path: str, *, max_events: int = MAX_EVENTS) -> Tracing:
        """Trace what a `with` block does, on all ranks, to a file for Perfetto; see `Tracing`."""

    @abstractmethod
    def state_dict(self) -> dict[str, Any]:
        """Return all that decides this rank's next exchanges, by parameter name; save it on every rank."""

    @abstractmethod
    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Continue from a saved `state_dict()`.

        Raises:
            CheckpointError: it is of another format, method, rank, world size or model; nothing is changed.
        """

    @property
    def round(self) -> int:
        """Number of times that the ranks have met; where gradients are averaged, every step is a round."""
        return self.step

    @property
    def left_out(self) -> int:
        """Number of rounds that left this rank or a neighbour out; only mixing with neighbours does so."""
        return 0

    @property
    def share(self) -> float:
        """This rank's push-sum weight; 1 where there are none."""
        return 1.0

    @property
    def events(self) -> list[dict[str, Any]]:
        """For each loss of ranks that was survived (lost=drop), what happened."""
        return []

    @property
    def pending(self) -> bool:
        """Whether something is under way, or due, that `flush()` would finish."""
        return False

    def consensus(self) -> AbstractContextManager[None]:
        """Put the parameters to evaluate or export in place for a `with` block, on all ranks.

        Where every step averages gradients, they are in place already.
        """
        return nullcontext()

    @abstractmethod
    def flush(self) -> None:
        """Finish what is under way or due. Gradient methods leave nothing under way between steps."""

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


class Attached(Sync):
    """A model and its optimizers, synchronised over the ranks: what every `Sync` of this library shares.

    Its collectives run on a process group of its own, so whatever else the program sends at the same time, in
    hooks, in its own backward functions or in threads, is not mixed up with them.
    """

    _driver: AnyDriver
    _model: nn.Module
    _optimizers: Sequence[torch.optim.Optimizer]
    _parameters: dict[str, nn.Parameter]
    _watches: list[Any]
    _wrapping: Wrapping
    _closed: bool
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

    def trace(self, path: str, *, max_events: int = MAX_EVENTS) -> Tracing:
        """Trace what a `with` block does, on all ranks; see `Sync`."""
        return Tracing(path, self._drivers(), self._model, self._optimizers, max_events=max_events)

    def __deepcopy__(self: A, memo: dict[int, Any]) -> A:
        """Return this object itself: a copy of a model that holds its `sync` is attached to nothing."""
        return self

    def flush(self) -> None:
        """Finish nothing: without rounds nothing is under way between steps."""
        return

    @as_in_training
    def before_save(self) -> None:
        """Do what is due before anything is saved; all ranks call it, first of all.

        Where a step was skipped on one rank, it may still have a round to hold that others are waiting in.
        """
        self._hold_if_due()

    def _hold_if_due(self) -> None:
        """Hold the round that is due; gradient methods have none."""

    def after_load(self) -> None:
        """Do what loading a state left over, once model and optimizer are loaded, too."""

    def _passes_made(self) -> int:
        return 0

    def _exchanges(self) -> int:
        """Return how many exchanges were made, whatever came of them; where ranks meet in rounds, passes."""
        return self.step + self.skipped

    def _accumulated(self, before: int) -> None:
        """Note that passes since `before` were not exchanged."""

    def _compare(self, parameters: Mapping[str, nn.Parameter], settings: Mapping[str, Any]) -> None:
        """Check that all ranks have the same model, optimizers, method and settings."""
        own = {"method": self.method.text, **settings}
        own |= describe_optimizers(self._trained, self._optimizers, alike=self.method.averages_gradients)
        compare(self._driver, own, parameters, model=self._model)

    @property
    def _trained(self) -> nn.Module:
        """The model whose parameters the optimizers hold."""
        return self._model

    def _averaged(self) -> set[int]:
        """Return the ids of the parameters that are averaged."""
        return {id(p) for p in self._parameters.values()}

    def _members_of(self, parameters: Mapping[str, nn.Parameter]) -> Members:
        """Return what finds out that these parameters were replaced."""
        return Members(self._model, parameters)

    def _watch(self, modules: Iterable[nn.Module]) -> None:
        """Follow added parameter groups, and forward passes of the model and of what it came wrapped in."""
        for optimizer in self._optimizers:
            optimizer.__dict__["add_param_group"] = partial(self._add_param_group, optimizer)
        called = {id(m): m for module in modules for m in entries(module)}
        self._watches = [module.register_forward_pre_hook(self._wrapping) for module in called.values()]

    @contextmanager
    def _wholly(self) -> Iterator[None]:
        """Attach in a `with` block; where that fails, detach what is attached by then."""
        self._closed = False
        try:
            yield
        except BaseException:
            self.close()
            raise

    def _mean(self, loss: float) -> float:
        """Return the ranks' mean of a loss, the same bits everywhere; in `no_sync()` this rank's."""
        if not self.enabled or self.world_size == 1:
            return loss
        mine = torch.tensor([loss], dtype=torch.float64, device="cpu")
        told = [float(theirs) for (theirs,) in self._driver.run(gather(mine))]
        return sum(told) / len(told)

    def _unwatch(self) -> None:
        for handle in self._watches:
            handle.remove()
        self._wrapping.watch(())
        for optimizer in self._optimizers:
            optimizer.__dict__.pop("add_param_group", None)

    def _add_param_group(self, optimizer: torch.optim.Optimizer, group: dict[str, Any]) -> None:
        type(optimizer).add_param_group(optimizer, group)
        self.refresh()
