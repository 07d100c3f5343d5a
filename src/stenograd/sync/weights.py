"""How much each rank's backward passes count: by tokens, samples, or whatever a loss is a mean of."""

from __future__ import annotations

import math
import weakref
from collections.abc import Iterable
from functools import partial
from typing import Any

import torch
from torch import Tensor

from stenograd.errors import ConfigError, StenogradError, bad_value
from stenograd.exchange.filling import is_returned
from stenograd.wire.drivers import AnyDriver
from stenograd.wire.finite import values_of

__all__ = ["Weights"]

_WHAT = "weights"  # by which ranks tell in the group's store that they give them


class Weights:
    """Makes gradients that accumulate weighted means, and tells what they count for beside other ranks'.

    With g_a the gradient of pass a, whose loss is a mean over n_a tokens, `.grad` grows by weighted means:

        G_a = (N_{a-1} G_{a-1} + n_a g_a) / N_a,    N_a = N_{a-1} + n_a

    Args:
        driver: the way to all ranks that give weights.

    Attributes:
        ended: whether the last pass was a step's last; if nobody makes that step, gradients may become zeros.
    """

    def __init__(self, driver: AnyDriver) -> None:
        self._driver, self._agreed = driver, False
        self._counted = self._total = 0.0  # before the last number: of all, and since an exchange or step
        self._last = self._unit = 0.0  # the last number; what a gradient of its pass counts for
        self._factor = self._shrunk = 1.0  # of this pass's gradients, and of those from before it
        self._given, self._made = False, True  # whether since the last exchange; whether its pass has begun
        self._handles: dict[int, Any] = {}
        self._held: list[Tensor] = []  # whose gradients count
        self.ended = False
        # By the store, not by a collective: a rank that never gives weights would not take part in one.
        driver.announce(_WHAT)

    @staticmethod
    def given_elsewhere(driver: AnyDriver) -> bool:
        """Return whether another rank has given weights, so that this one must count for nothing."""
        return driver.announced(_WHAT)

    @property
    def trained(self) -> float:
        """What all passes so far count for; a number counts once its pass has begun."""
        return self._counted + (self._last if self._made else 0.0)

    @torch.no_grad()
    def tell(self, n: float, reduce: str, divided: float, parameters: Iterable[Tensor]) -> None:
        """Take what the next backward pass counts for; see `Sync.weight`."""
        n, held = _checked(n, reduce, divided), list(parameters)
        self._held = held
        self._hook(held)
        grads = [p.grad for p in held if p.grad is not None]
        self._close_last(grads)
        if not grads:  # zero_grad(): what was accumulated is gone
            self._total = 0.0
        self._last, self._unit = n, (n if reduce == "mean" else 1.0) * divided
        self._given, self._made = True, False
        self._expect(grads)

    def _close_last(self, grads: list[Tensor]) -> None:
        """Count the last number if its pass has begun, else undo what was done for that pass."""
        if self._made:
            self._counted += self._last
            self._total += self._last
            self._last = 0.0
        else:
            _scale(grads, 1.0 / self._shrunk)

    def _expect(self, grads: list[Tensor]) -> None:
        """Make gradients their share of the mean that the coming pass, of the last number, adds to."""
        total = self._total + self._last
        self._shrunk = self._total / total if self._total else 1.0
        _scale(grads, self._shrunk)
        self._factor = self._unit / total if self._last else 0.0

    def begin(self) -> None:
        """Note that the last number's pass begins; gradients may have been cleared since it was given."""
        self._made = True
        looks, self.ended = self.ended, False  # only then for zeros: the host waits for a device
        grads = (p.grad for p in self._held if p.grad is not None)
        if self._total and not any(not looks or bool(values_of(grad).any()) for grad in grads):
            self._total, self._factor = 0.0, self._unit / self._last if self._last else 0.0

    def take(self) -> float:
        """Return what the gradients count for that are exchanged now, and begin anew.

        Raises:
            StenogradError: nobody told, or some ranks do not give weights.
        """
        if not self._given:
            raise StenogradError(
                "this training is weighted, but a backward pass came without a weight: call sync.weight(n) "
                "before each backward pass, on every rank"
            )
        self.agree()
        self._made = True  # its pass exchanges now
        total = self._total + self._last
        self.end(())
        return total

    @torch.no_grad()
    def end(self, parameters: Iterable[Tensor]) -> None:
        """Begin anew: gradients were exchanged, or are about to be applied.

        Args:
            parameters: as `tell` got them. If the last number's pass has not begun, their gradients become
                what they were before, and the number is for a pass that is still to come.
        """
        grads = [p.grad for p in parameters if p.grad is not None]
        waits = not self._made
        self._close_last(grads)
        self._total, self._given, self.ended = 0.0, waits, False
        if waits:
            self._expect(grads)

    def agree(self) -> None:
        """Wait, once, until all ranks give weights: messages are not the same without.

        Raises:
            StenogradError: some do not in time.
        """
        if self._agreed:
            return
        silent = self._driver.unannounced(_WHAT, self._driver.timeout_s)
        if silent:
            raise StenogradError(
                f"rank(s) {', '.join(map(str, silent))} gave no weight within "
                f"{self._driver.timeout_s:.0f} s, while this one did: call sync.weight(n) before each "
                "backward pass, on every rank"
            )
        self._agreed = True

    def close(self) -> None:
        """Leave the parameters as they were."""
        for handle in self._handles.values():
            handle.remove()
        self._handles = {}

    def _hook(self, parameters: list[Tensor]) -> None:
        """Scale what autograd adds to these parameters' gradients."""
        # One that is frozen takes no hook now; it gets its own once it learns again.
        held = {id(p): p for p in parameters if p.requires_grad or id(p) in self._handles}
        if held.keys() == self._handles.keys():
            return
        self.close()
        scaled = partial(_scaled, weakref.ref(self))
        torch._dynamo.decorators.skip(_scaled)
        # Before gradients accumulate: only what this pass adds is to be scaled.
        self._handles = {i: p.register_hook(scaled) for i, p in held.items() if p.requires_grad}


def _scaled(weights: weakref.ref[Weights], grad: Tensor) -> Tensor | None:
    """Return a pass's gradient by its share of what has accumulated; None where that is all."""
    running = weights()
    if running is None or is_returned():
        return None
    if not running._made:
        running.begin()
    if running._factor == 1.0:
        return None
    # The mean over nothing may be NaN.
    return grad * running._factor if running._factor else torch.zeros_like(grad)


def _scale(grads: list[Tensor], factor: float) -> None:
    if factor != 1.0 and grads:
        torch._foreach_mul_(grads, factor)


def _checked(n: float, reduce: str, divided: float) -> float:
    number = float(n)
    if not (math.isfinite(number) and number >= 0):
        raise bad_value(
            "n", "must be a finite number >= 0", n, "give the number of tokens or samples", ConfigError
        )
    if reduce not in ("mean", "sum"):
        raise bad_value(
            "reduce", "must be mean or sum", reduce, "say what the loss is over its n", ConfigError
        )
    if not (math.isfinite(divided) and divided > 0):
        raise bad_value("divided", "must be a finite number > 0", divided, "leave it out", ConfigError)
    return number
