"""A torch optimizer for `DataParallel`, whose steps may wait for gradients in flight."""

from __future__ import annotations

from collections.abc import Mapping
from functools import partial
from typing import Any

import torch

from stenograd.heat.updates import Updates, step_with_present_settings

__all__ = ["DataParallelOptimizer"]


class DataParallelOptimizer:
    """Steps a torch optimizer at once, or before the next forward pass of its `DataParallel`.

    Pass `torch_optimizer` to learning-rate schedulers; an update uses the settings at the time of `step()`.

    Args:
        torch_optimizer: any optimizer of torch whose step needs no closure.
        blocking: whether `step()` updates at once; `DataParallel` overwrites it.

    Attributes:
        torch_optimizer: the optimizer.
        blocking_parameter_updates: whether `step()` updates at once.
        update_next: whether a step waits to be applied.
        params_ref: the parameters of the first group.

    Raises:
        TypeError: torch_optimizer is not an optimizer of torch, or blocking is not a bool.

    Example:
        >>> w = torch.nn.Parameter(torch.ones(1))
        >>> optimizer = DataParallelOptimizer(torch.optim.SGD([w], lr=0.5))
        >>> w.grad = torch.ones(1)
        >>> optimizer.step()
        >>> w.item(), optimizer.update_next
        (1.0, True)
        >>> optimizer.flush()  # DataParallel does so before its next forward pass
        >>> w.item(), optimizer.update_next
        (0.5, False)
    """

    def __init__(self, torch_optimizer: torch.optim.Optimizer, blocking: bool = False) -> None:
        if not isinstance(torch_optimizer, torch.optim.Optimizer):
            raise TypeError(
                f"torch_optimizer must be a torch.optim.Optimizer, got {type(torch_optimizer).__name__}: "
                "pass torch.optim.SGD(model.parameters(), lr=0.1), or the like"
            )
        if not isinstance(blocking, bool):
            raise TypeError(f"blocking must be True or False, got {blocking!r} ({type(blocking).__name__})")
        self.torch_optimizer = torch_optimizer
        self.blocking_parameter_updates = blocking
        self.update_next = False
        self.params_ref: list[torch.Tensor] = torch_optimizer.param_groups[0]["params"]
        self._updates = Updates()
        torch_optimizer.register_state_dict_pre_hook(lambda *_: self.flush())
        torch_optimizer.register_load_state_dict_pre_hook(lambda *_: self.flush())

    @property
    def param_groups(self) -> list[dict[str, Any]]:
        """The torch optimizer's groups."""
        return self.torch_optimizer.param_groups

    def attach(self, updates: Updates, *, blocking: bool) -> None:
        """Queue steps with a model's updates from now on; `DataParallel` calls this after a flush."""
        self._updates = updates
        self.blocking_parameter_updates = blocking

    def step(self) -> None:
        """Update the parameters: at once if blocking, otherwise before the next forward pass."""
        if self.blocking_parameter_updates:
            self.torch_optimizer.step()
            return
        self._updates.add(partial(self._apply, step_with_present_settings(self.torch_optimizer)))
        self.update_next = True
        # Torch warns of schedulers that run before a step. Here the order is right: this step keeps its rate.
        self.torch_optimizer._opt_called = True  # type: ignore[attr-defined]

    def zero_grad(self, set_to_none: bool = True) -> None:
        """Reset the gradients, after any queued step that needs them.

        Args:
            set_to_none: True removes them, as torch does by default; False fills them with zeros.
        """
        self._updates.run(partial(self.torch_optimizer.zero_grad, set_to_none))

    def flush(self) -> None:
        """Apply all queued updates.

        Raises:
            PeerLost: a rank did not answer.
        """
        self._updates.flush()

    def state_dict(self) -> dict[str, Any]:
        """Apply queued updates, and return the torch optimizer's state."""
        return self.torch_optimizer.state_dict()

    def load_state_dict(self, state_dict: Mapping[str, Any]) -> None:
        """Apply queued updates, and load a saved state into the torch optimizer."""
        self.torch_optimizer.load_state_dict(dict(state_dict))

    def _apply(self, step: Any) -> None:
        self.update_next = False
        step()
