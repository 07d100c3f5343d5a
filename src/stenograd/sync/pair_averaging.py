"""Outer optimizers that agree in random pairs of ranks, so that no round waits for all of them (NoLoCo)."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

import torch
from torch import Tensor

from stenograd.comm.drivers import AnyDriver
from stenograd.data.finite import are_finite
from stenograd.schedules.diloco import DiLoCo
from stenograd.sync.flat_exchange import IN_ORDER
from stenograd.sync.gossip import Gossip
from stenograd.sync.outer import OuterPart

__all__ = ["PairPart"]


class PairPart(OuterPart):
    """Some parameters, and an outer optimizer of each rank's own that is fed what its pair has found.

    The pair's mean pseudo-gradient and the distance of phi_i from the pair's mean phi add up to

        mean(phi - theta) + phi_i - mean(phi) = phi_i - mean(theta)

    so theta is all that a pair has to exchange, once in each direction.

    A rank whose parameters are not finite gives its partner nothing, and takes what the partner has; see
    `mixing`. Without a partner it goes back to its outer parameters.

    Args:
        parameters: by name, alike on all ranks; equal on all ranks now.
        driver: the way to the other ranks.
        pairs: what mixes with a partner; fragments share it.
        schedule: the values of the outer step.
        chunk: see `OuterPart`.
        beside: returns tensors that are averaged in the pair together with the parameters (buffers).
    """

    def __init__(
        self,
        parameters: Mapping[str, Tensor],
        driver: AnyDriver,
        pairs: Gossip,
        schedule: DiLoCo,
        chunk: int,
        beside: Callable[[], list[Tensor]],
    ) -> None:
        super().__init__(parameters, driver, IN_ORDER, schedule, chunk)
        self._pairs, self._beside = pairs, beside

    def send(self) -> None:
        """Send nothing yet: a pair exchanges what it has in `merge`."""

    @torch.no_grad()
    def merge(self) -> bool:
        """Exchange parameters with the partner, and make the outer step.

        Returns:
            True: what one rank brings can spoil nobody else's round.

        Raises:
            PeerLost: the partner did not answer in time, and lost=raise or nobody knows which.
        """
        values = self._flat.values()
        self.lost_own = not are_finite(values)
        self._pairs.mix(values, carried=self._beside(), passes=self.passes)
        self.driver = self._pairs.driver  # another one, if ranks were lost
        found = [outer - mean for outer, mean in zip(self._outer, values, strict=True)]
        if not (are_finite(values) and self._step(found)):
            self.lost_own = True
            self.take_outer()
        return True

    def state_dict(self, *, own: bool) -> dict[str, Any]:
        """Return what decides the next rounds; the number of mixings draws the next pairs."""
        state = super().state_dict(own=own)
        return {**state, "exchange": {**state["exchange"], "step": self._pairs.step}}

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Continue from a saved `state_dict()`; see `OuterPart.load_state_dict`."""
        super().load_state_dict(state)
        self._pairs.load_state_dict({"step": int(state["exchange"]["step"])})
