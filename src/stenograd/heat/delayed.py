"""Gradient averaging that goes on after `backward()`, while the caller does something else."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from concurrent.futures import Future
from typing import Any

import torch
from torch import Tensor

from stenograd.comm.step_end import Outcome
from stenograd.errors import StenogradError
from stenograd.sync.filling import Slot
from stenograd.sync.gradient_sync import GradientSync

__all__ = ["DelayedSync"]


class DelayedSync(GradientSync):
    """A `GradientSync` whose backward passes end at once; `wait()` then writes the averages into `.grad`.

    From the end of a backward pass to `wait()`, `.grad` holds this rank's own gradients. Until then an
    optimizer step, another backward pass and new parameters are errors. The exchange has a process group of
    its own, so collectives of the caller may run at the same time, in any order.

    Example:
        >>> model = torch.nn.Linear(1, 1)
        >>> sync = DelayedSync(model, torch.optim.SGD(model.parameters(), lr=0.1))
        >>> model(torch.ones(1, 1)).backward()
        >>> sync.in_flight, sync.wait(), sync.in_flight
        (True, True, False)
        >>> sync.close()
    """

    _shares_memory = False  # .grad is the caller's until wait()
    _flight: Future[Outcome] | None = None
    _versions: Sequence[int] = ()
    _unused: Sequence[Tensor] = ()

    @property
    def in_flight(self) -> bool:
        """Whether `.grad` still waits for the averages of the last backward pass."""
        return self._flight is not None

    @torch.no_grad()
    def wait(self) -> bool:
        """Wait for the exchange in flight, and write its averages into `.grad`.

        It issues no collective of its own, so ranks may call it at different points of the program.

        Returns:
            Whether an exchange was in flight.

        Raises:
            PeerLost: a rank did not answer; every later call raises it too.
        """
        if self._flight is None:
            return False
        outcome = self._flight.result()
        self._flight = None
        for p in self._unused:
            p.grad = None
        self._write_back(outcome)
        return True

    def changed(self) -> list[Tensor]:
        """Return the parameters whose `.grad` was removed or written to while its exchange was in flight."""
        if self._flight is None:
            return []
        now = (-1 if p.grad is None else p.grad._version for p in self._parameters.values())
        pairs = zip(self._parameters.values(), now, self._versions, strict=True)
        return [p for p, version, sent in pairs if version != sent]

    def flush(self) -> None:
        """Finish the exchange in flight, as `wait()` does."""
        self.wait()

    def refresh(self) -> None:
        """Look for parameters again, while no exchange is in flight; needed after unfreezing some."""
        self._refuse_in_flight("refresh() was called")
        super().refresh()

    def state_dict(self) -> dict[str, Any]:
        """Wait for the exchange in flight, and return all that decides the next one.

        The averages in flight are not part of the state: `wait()` still has to write them.
        """
        self._await_flight()
        return super().state_dict()

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Wait for the exchange in flight, and continue from a saved `state_dict()`.

        Raises:
            CheckpointError: it is of another format, method, rank, world size or model; nothing is changed.
        """
        self._await_flight()
        super().load_state_dict(state)

    def _await_flight(self) -> None:
        if self._flight is not None:
            self._flight.result()

    def _check_step(
        self, optimizer: torch.optim.Optimizer, *, zeros: bool = False, again: bool = False
    ) -> None:
        self._refuse_in_flight("an optimizer stepped")
        super()._check_step(optimizer, zeros=zeros, again=again)

    def _add_param_group(self, optimizer: torch.optim.Optimizer, group: dict[str, Any]) -> None:
        self._refuse_in_flight("a parameter group was added")
        super()._add_param_group(optimizer, group)

    def _on_gradient(self, slot: Slot, parameter: Tensor) -> None:
        self._refuse_in_flight("a backward pass began")
        super()._on_gradient(slot, parameter)

    def _sent(self, outcome: Future[Outcome]) -> None:
        """Keep the future, and note the gradients' versions.

        Unused parameters get zeros, so that zeroing them leaves a trace in the version on every rank alike.
        """
        parameters = self._parameters.values()
        self._unused = [p for p in parameters if p.grad is None]
        for p in self._unused:
            p.grad = torch.zeros_like(p)
        self._versions = [p.grad._version for p in parameters if p.grad is not None]
        self._flight = outcome

    def _refuse_in_flight(self, what: str) -> None:
        if self._flight is not None:
            raise StenogradError(
                f"{what} while gradients are still being averaged: call wait(), or flush() of DataParallel, "
                "before it, or use a DataParallelOptimizer's step()"
            )
