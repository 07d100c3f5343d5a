"""A queue of optimizer calls that wait for a gradient exchange, and then run in order."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any

import torch
from torch import Tensor

from stenograd.errors import StenogradError
from stenograd.heat.delayed import DelayedSync

__all__ = ["Updates", "step_with_present_settings"]


class Updates:
    """A queue of calls that run when the gradient exchange in flight has ended.

    Args:
        sync: the engine whose exchange to wait for, or None.
        device_type: of the parameters.

    Example:
        >>> updates = Updates()
        >>> updates.add(lambda: print("updated"))
        >>> updates.waiting
        True
        >>> updates.flush()
        updated
    """

    def __init__(self, sync: DelayedSync | None = None, device_type: str = "cpu") -> None:
        self._sync, self._device_type = sync, device_type
        self._calls: list[Callable[[], None]] = []

    @property
    def waiting(self) -> bool:
        """Whether an exchange is in flight or a call is queued."""
        return bool(self._calls) or (self._sync is not None and self._sync.in_flight)

    def add(self, call: Callable[[], None]) -> None:
        """Queue a call until `flush()`."""
        self._queue_zeroing()
        self._calls.append(call)

    def run(self, call: Callable[[], None]) -> None:
        """Run a call now if nothing waits; otherwise queue it."""
        if self.waiting:
            self.add(call)
        else:
            call()

    def flush(self) -> None:
        """Wait for the exchange, write its averages into `.grad`, then run the calls.

        Raises:
            PeerLost: a rank did not answer; the calls stay in the queue.
            StenogradError: gradients were changed while they were being averaged.
        """
        if not self.waiting:
            return
        # The caller may be inside inference_mode, or in a forward pass under autocast.
        with torch.inference_mode(False), torch.autocast(self._device_type, enabled=False):
            self._queue_zeroing()
            if self._sync is not None:
                self._sync.wait()
            calls, self._calls = self._calls, []
            for call in calls:
                call()

    def _queue_zeroing(self) -> None:
        """Queue the zeroing of gradients that the program zeroed itself; the averages will overwrite them."""
        changed = self._sync.changed() if self._sync is not None else []
        if any(p.grad is not None and bool(p.grad.any()) for p in changed):
            raise StenogradError(
                "gradients were changed while they were being averaged, and the change would be lost: call "
                "flush() of DataParallel before clipping or unscaling them"
            )
        if changed:
            removed = [p.grad is None for p in changed]

            def zero() -> None:
                for p, remove in zip(changed, removed, strict=True):
                    p.grad = None if remove or p.grad is None else p.grad.zero_()

            self._calls.append(zero)


def step_with_present_settings(optimizer: torch.optim.Optimizer) -> Callable[[], None]:
    """Return a step that uses the present settings (learning rate, ...), whatever is set until it runs.

    Example:
        >>> w = torch.nn.Parameter(torch.ones(1))
        >>> w.grad = torch.ones(1)
        >>> optimizer = torch.optim.SGD([w], lr=0.5)
        >>> step = step_with_present_settings(optimizer)
        >>> optimizer.param_groups[0]["lr"] = 0.125
        >>> step()
        >>> w.item(), optimizer.param_groups[0]["lr"]
        (0.5, 0.125)
    """
    # Tensors are copied, because schedulers change a learning rate that is a tensor in place.
    asked = [
        {k: v.clone() if isinstance(v, Tensor) else v for k, v in group.items() if k != "params"}
        for group in optimizer.param_groups
    ]

    def step() -> None:
        later = [dict(group) for group in optimizer.param_groups]
        _set(optimizer, asked)
        try:
            optimizer.step()
        finally:  # settings that the step itself changed stay changed
            pairs = zip(optimizer.param_groups, asked, later, strict=False)
            _set(optimizer, [{k: new[k] for k in old if now[k] is old[k]} for now, old, new in pairs])

    return step


def _set(optimizer: torch.optim.Optimizer, settings: Sequence[Mapping[str, Any]]) -> None:
    for group, values in zip(optimizer.param_groups, settings, strict=False):
        group.update(values)
