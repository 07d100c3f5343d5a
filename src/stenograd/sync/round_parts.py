"""What one exchange of a round carries: the contract, and parameters that become their mean."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable, Mapping
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn

from stenograd.catalog.method import Method
from stenograd.comm.drivers import AnyDriver
from stenograd.data.carried import averaged_buffers
from stenograd.data.finite import are_finite
from stenograd.sync.averaging import ParameterAverager
from stenograd.sync.handshake import broadcast_tensors

__all__ = ["LocalPart", "Part", "floating_buffers"]


class Part(ABC):
    """Some parameters that are exchanged together, again and again.

    Attributes:
        lost_own: whether this rank's parameters were not finite in a round that the others could hold, or
            would not have been after it.
        passes: number of this rank's backward passes, for the ranks to compare when they exchange.
    """

    def __init__(self, parameters: Mapping[str, Tensor], driver: AnyDriver) -> None:
        self.parameters, self.driver = dict(parameters), driver
        self.lost_own = False
        self.passes = 0

    @property
    def names(self) -> list[str]:
        """Names of the parameters."""
        return list(self.parameters)

    @property
    def under_way(self) -> bool:
        """Whether something was sent that is to be merged later."""
        return False

    def is_finite(self) -> bool:
        """Return whether this rank's parameters are."""
        return are_finite(self.parameters.values())

    @abstractmethod
    def anchor(self) -> None:
        """Start from the present parameters, which are equal on all ranks."""

    @abstractmethod
    def send(self) -> None:
        """Send what this rank has; returns at once."""

    @abstractmethod
    def merge(self) -> bool:
        """Wait for what was sent and apply it; False if some rank's was not finite, and nothing changed."""

    @abstractmethod
    def arrive(self) -> bool:
        """Wait for what was sent and keep it for `merge`, which then needs no message.

        Returns:
            Whether all ranks' parameters were finite.
        """

    @abstractmethod
    def move(self, driver: AnyDriver, *, undo: bool) -> None:
        """Exchange through another driver from now on.

        Args:
            driver: the way to the ranks that are left.
            undo: whether to forget what was sent, which `send` can then send again.
        """

    @abstractmethod
    def take_common(self) -> bool:
        """Put what the ranks have in common in place, if that needs no message; else say False."""

    @abstractmethod
    def restart(self, bad: set[int]) -> Callable[[], object]:
        """Bring finite parameters for the bad ranks, and return what gives them these; called on all ranks.

        Until that is called nothing changes.
        """

    @abstractmethod
    def settle(self, own: Mapping[str, Tensor] | None, ranks: int) -> bool:
        """End a round by the mean of the parameters of the ranks that saved, after their number has changed.

        Args:
            own: the mean, by name; None if all had the same when they saved.
            ranks: their number.

        Returns:
            Whether there was a round to end.
        """

    @abstractmethod
    def exchanged(self) -> list[str]:
        """Return the names under which a compressor's state is kept."""

    @abstractmethod
    def state_dict(self, *, own: bool) -> dict[str, Any]:
        """Return the exchange's state, and tensors by what they are and the parameter's name.

        Args:
            own: whether this rank's parameters are among them, so that others can end the round under way.
        """

    @abstractmethod
    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Continue from a saved `state_dict()`."""

    @abstractmethod
    def close(self) -> None:
        """Stop what sends."""


class LocalPart(Part):
    """Parameters that become their mean: exactly, or by compressed differences."""

    def __init__(self, parameters: Mapping[str, Tensor], driver: AnyDriver, how: Method, chunk: int) -> None:
        super().__init__(parameters, driver)
        self._exact = how.lossless
        self._make = partial(ParameterAverager, parameters, how=how, chunk=chunk)
        self._averager = self._make(driver=driver)
        self._values: list[Tensor] | None = None
        self._arrived = False
        self.anchor()

    def anchor(self) -> None:
        """Count differences from here."""
        self._averager.anchor()

    def send(self) -> None:
        """Send differences; exact means are sent and taken in one go."""
        if not self._exact:
            self._averager.pack()
            self._averager.send(self.passes)

    def arrive(self) -> bool:
        """Wait for the exact mean."""
        self._values, self._arrived = self._averager.exact(in_order=True, passes=self.passes), True
        return self._values is not None

    def move(self, driver: AnyDriver, *, undo: bool) -> None:
        """Exact means leave no state behind."""
        self._averager.close()
        self.driver, self._averager = driver, self._make(driver=driver)
        self._arrived = self._arrived and not undo

    def merge(self) -> bool:
        """Take the mean."""
        if not self._exact:
            sound = self._averager.merge(1.0)
            self.lost_own = sound and self._averager.stayed
            return sound
        if not self._arrived:
            self.arrive()
        values, self._values, self._arrived = self._values, None, False
        return self._averager.take(values)

    def take_common(self) -> bool:
        """There is nothing in common between rounds."""
        return False

    def restart(self, bad: set[int]) -> Callable[[], object]:
        """Bring the parameters of the first rank whose are finite."""
        good = min(set(range(self.driver.world_size)) - bad)
        tensors = [p.detach().clone() for p in self.parameters.values()]
        broadcast_tensors(self.driver, tensors, good)
        return partial(self._take, tensors) if self.driver.rank in bad else bool

    @torch.no_grad()
    def _take(self, tensors: list[Tensor]) -> None:
        for p, value in zip(self.parameters.values(), tensors, strict=True):
            p.copy_(value)

    def settle(self, own: Mapping[str, Tensor] | None, ranks: int) -> bool:
        """Take the mean, and count differences from it."""
        for name, value in (own or {}).items():
            self.parameters[name].copy_(value)
        self.anchor()
        return own is not None

    def exchanged(self) -> list[str]:
        """Return the names of what travels."""
        return self._averager.exchanged()

    def state_dict(self, *, own: bool) -> dict[str, Any]:
        """Return the exchange's state, this rank's parameters, and what was sent so far."""
        return self._averager.by_name(own=own)

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Continue from a saved `state_dict()`."""
        self._averager.load_by_name(state)

    def close(self) -> None:
        """Stop the threads that send."""
        self._averager.close()


def floating_buffers(model: nn.Module, buffers: str) -> list[Tensor]:
    """Return the buffers that rounds average or mix; none with `buffers=keep`."""
    return [] if buffers == "keep" else averaged_buffers(model)
