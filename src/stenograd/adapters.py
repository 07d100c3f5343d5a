"""What adapters to frameworks do with a model: attach a method, show the consensus, save and load states."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

from stenograd.catalog.method import Method
from stenograd.checkpoint.api import load_state, save_state
from stenograd.errors import MethodError, StenogradError
from stenograd.sync.ddp import register
from stenograd.sync.distribute import distribute
from stenograd.sync.handshake import unwrapped
from stenograd.sync.step_settings import directed
from stenograd.wire.carried import in_memory

__all__ = ["Attached", "refuse_clipping", "stops"]

_POLL_STEPS = 8  # between two questions whether to stop, where no exchange tells


def stops(sync: Any, step: int) -> bool:
    """Return whether a rank was asked to stop; all ranks call it after a step of this number.

    Where no exchange tells, they ask each other now and then, if `stop_on` was called before attaching.
    """
    # By the step's number, which is equal on all ranks, because a poll is a collective. It may go by twos.
    before, sync._polled = sync._polled, step // _POLL_STEPS
    polls = sync.needs_poll and sync.listens and sync._polled != before
    return bool(sync.poll() if polls else sync.stopping)


def refuse_clipping(method: Method, parameters: Iterable[Tensor], advice: str) -> None:
    """Refuse to clip what a framework takes for gradients after their exchange, where it is a direction.

    Raises:
        MethodError: the method delivers a direction for one of the parameters.
    """
    if method.averages_gradients and directed(method, parameters):
        raise MethodError(
            f"{method} delivers a direction, whose norm is that of its shape, so clipping it would shorten "
            f"every step alike: {advice}, and choose the learning rate instead"
        )


# Compared by identity, as `one in others` needs: its fields hold tensors, whose == has many answers.
@dataclass(eq=False)
class Attached:
    """A model and what runs its exchanges.

    Args:
        module: the plain model.
        sync: from `stenograd.ddp.register` or `stenograd.distribute`.
        optimizers: those that hold its parameters; empty where the sync does not need them.
        timeout_s: seconds after which a silent peer is an error.
    """

    module: nn.Module
    sync: Any
    optimizers: Sequence[torch.optim.Optimizer] = ()
    timeout_s: float = 300.0
    _own: dict[str, Tensor] | None = field(default=None, init=False)
    _closed: bool = field(default=False, init=False)

    @classmethod
    def by_hook(cls, ddp: Any, method: Method, options: Mapping[str, Any]) -> Attached:
        """Register a method as the hook of a DDP model, with the options of `stenograd.ddp.register`."""
        module: Any = unwrapped(ddp).module
        return cls(module, register(ddp, method, **options), timeout_s=options["timeout_s"])

    @classmethod
    def by_optimizers(
        cls,
        module: nn.Module,
        optimizers: Sequence[torch.optim.Optimizer],
        method: Method,
        options: Mapping[str, Any],
    ) -> Attached:
        """Let a plain model train in rounds, with the options of `stenograd.distribute`."""
        sync = distribute(module, optimizers, method, **options)
        return cls(module, sync, list(optimizers), options["timeout_s"])

    @property
    def in_rounds(self) -> bool:
        """Whether the ranks' parameters differ between exchanges."""
        return not self.sync.method.averages_gradients

    def show(self) -> None:
        """Put the consensus of all ranks in place, until `hide()`; all ranks call it."""
        if not self.in_rounds or self._own is not None:
            return
        try:
            # Copied out of the block, since `hide()` comes in a later call.
            shown = self._common()
        except StenogradError as cause:
            if not self._closed:
                raise
            raise StenogradError(
                f"training by {self.sync.method} ended with an error, and ranks cannot find any more what "
                "they have in common: save in a callback's on_exception, or go back to a checkpoint"
            ) from cause
        self._own = self._values()
        self._put(shown)

    def adopt(self) -> None:
        """Leave the model with the consensus of all ranks; all of them call it."""
        self._put(self._common())

    def hide(self) -> None:
        """Put this rank's own parameters back, if the consensus is in place."""
        own, self._own = self._own, None
        if own is not None:
            self._put(own)

    @contextmanager
    def shown(self) -> Iterator[None]:
        """Put the consensus in place for a `with` block, unless it is already."""
        before = self._own
        self.show()
        try:
            yield
        finally:
            if before is None:
                self.hide()

    @contextmanager
    def kept(self) -> Iterator[None]:
        """Keep this rank's own model over a `with` block that attaches it anew, which gives it rank 0's."""
        own = self._values()
        yield
        with self.sync._copies.follow(self.module.parameters()):
            self._put(own)

    def save(self, folder: Path, name: str) -> None:
        """Save what this rank keeps for itself; all ranks call it."""
        consensus = None if self._own is None else self._values()
        # A rank saves its own parameters, which evaluation has replaced by the consensus for a while.
        if self._own is not None:
            self._put(self._own)
        try:
            save_state(folder, self.sync, name=name, **self._parts())
        finally:
            if consensus is not None:
                self._put(consensus)

    def load(self, folder: Path, name: str) -> None:
        """Continue from what `save` wrote; all ranks call it, after the framework has loaded its own part.

        Raises:
            MissingState: there is none; on every rank.
            CheckpointError: it is not whole or does not fit; on every rank.
        """
        load_state(folder, self.sync, name=name, **self._parts())
        self._own = None  # if the consensus was in place, what was loaded is there now

    def begin_anew(self) -> None:
        """Go on from the model as it was just loaded, without a state of ours; all ranks call it."""
        self.sync._begin_anew()
        self._own = None

    def close(self) -> None:
        """Detach from the model, in which the consensus stays if it is in place."""
        self._closed = True
        self.sync.close()

    def _parts(self) -> dict[str, Any]:
        # In rounds each rank has a model of its own; else the framework's checkpoint holds that of all.
        held = {"model": self.module, "optimizer": self.optimizers} if self.in_rounds else {}
        return {**held, "timeout_s": self.timeout_s}

    def _common(self) -> dict[str, Tensor]:
        with self.sync.consensus():
            return self._values()

    def _tensors(self) -> dict[str, Tensor]:
        averaged = self.sync._averaged()
        held: dict[str, Tensor] = {n: p for n, p in self.module.named_parameters() if id(p) in averaged}
        held |= self.module.named_buffers()
        return {name: in_memory(t.detach()) for name, t in held.items()}

    def _values(self) -> dict[str, Tensor]:
        return {name: t.clone() for name, t in self._tensors().items()}

    def _put(self, values: Mapping[str, Tensor]) -> None:
        for name, target in self._tensors().items():
            # A buffer may have been made, or have grown, since: a cache of what was last computed.
            if name in values and values[name].shape == target.shape:
                target.copy_(values[name])
