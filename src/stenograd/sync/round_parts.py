"""What one exchange of a round carries: the contract, and parameters that become their mean."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Mapping
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn

from stenograd.catalog.method import Method
from stenograd.comm.drivers import AnyDriver
from stenograd.data.finite import is_finite
from stenograd.sync.handshake import broadcast_tensors
from stenograd.sync.parameter_averaging import ParameterAverager

__all__ = ["LocalPart", "Part", "floating_buffers"]


class Part(ABC):
    """Some parameters that are exchanged together, again and again.

    Attributes:
        lost_own: whether this rank's parameters were not finite in a round that the others could hold.
    """

    def __init__(self, parameters: Mapping[str, Tensor], driver: AnyDriver) -> None:
        self.parameters, self.driver = dict(parameters), driver
        self.lost_own = False

    @property
    def names(self) -> list[str]:
        """Names of the parameters."""
        return list(self.parameters)

    @property
    def side(self) -> AnyDriver | None:
        """A driver besides `driver` that it exchanges through, if there is one."""
        return None

    @property
    def under_way(self) -> bool:
        """Whether something was sent that is to be merged later."""
        return False

    def is_finite(self) -> bool:
        """Return whether this rank's parameters are."""
        return all(is_finite(p) for p in self.parameters.values())

    @abstractmethod
    def anchor(self) -> None:
        """Start from the present parameters, which are equal on all ranks."""

    @abstractmethod
    def send(self) -> None:
        """Send what this rank has; returns at once."""

    @abstractmethod
    def merge(self) -> bool:
        """Wait for what was sent and apply it; False if some rank's was not finite, and nothing changed."""

    @property
    @abstractmethod
    def arrived(self) -> bool:
        """Whether `arrive` has got what was sent, which `merge` then takes without a message."""

    @abstractmethod
    def arrive(self) -> None:
        """Wait for what was sent, and keep it for `merge`."""

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
    def restart(self, bad: set[int]) -> None:
        """Give the bad ranks finite parameters; called on all ranks."""

    @abstractmethod
    def settle(self, own: Mapping[str, Tensor] | None) -> bool:
        """End a round by the mean of the parameters of the ranks that saved, after their number has changed.

        Args:
            own: the mean, by name; None if all had the same when they saved.

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
            self._averager.send()

    @property
    def arrived(self) -> bool:
        """Whether the mean is here."""
        return self._arrived

    def arrive(self) -> None:
        """Wait for the exact mean."""
        self._values, self._arrived = self._averager.exact(in_order=True), True

    def move(self, driver: AnyDriver, *, undo: bool) -> None:
        """Exact means leave no state behind."""
        self._averager.close()
        self.driver, self._averager = driver, self._make(driver=driver)
        self._arrived = self._arrived and not undo

    def merge(self) -> bool:
        """Take the mean."""
        if not self._exact:
            return self._averager.merge(1.0)
        if not self._arrived:
            self.arrive()
        values, self._values, self._arrived = self._values, None, False
        return self._averager.take(values)

    def take_common(self) -> bool:
        """There is nothing in common between rounds."""
        return False

    def restart(self, bad: set[int]) -> None:
        """Take the parameters of the first rank whose are finite."""
        good = min(set(range(self.driver.world_size)) - bad)
        tensors = [p.detach().clone() for p in self.parameters.values()]
        broadcast_tensors(self.driver, tensors, good)
        if self.driver.rank in bad:
            with torch.no_grad():
                for p, value in zip(self.parameters.values(), tensors, strict=True):
                    p.copy_(value)

    def settle(self, own: Mapping[str, Tensor] | None) -> bool:
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
    return [] if buffers == "keep" else [b for b in model.buffers() if b.is_floating_point()]
