"""The phases of training steps: when forward passes, backward passes, waits and optimizer steps last."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn

__all__ = ["Phases"]


class Phases:
    """Tells by hooks on a model and its optimizers how long each phase of a step lasted.

    A `wait` is the end of a `backward`: what is left of the exchange when all gradients are there. Rounds
    that are held when an optimizer has stepped are a part of `step`.

    Args:
        model: whose passes are followed.
        optimizers: whose steps are followed.
        note: called with "forward", "backward", "wait" or "step", start and end by `time.perf_counter`.

    Example:
        >>> model, seen = nn.Linear(2, 1), []
        >>> phases = Phases(model, [], lambda kind, start, end: seen.append(kind))
        >>> phases.watch()
        >>> model(torch.ones(1, 2)).sum().backward()
        >>> phases.close()
        >>> seen
        ['forward', 'wait', 'backward']
    """

    def __init__(
        self,
        model: nn.Module,
        optimizers: Sequence[torch.optim.Optimizer],
        note: Callable[[str, float, float], None],
    ) -> None:
        self._model, self._optimizers, self._note = model, list(optimizers), note
        self._handles: list[Any] = []
        self._began: dict[str, float] = {}

    def watch(self) -> None:
        """Begin."""
        self._watch_model(self._model)
        for optimizer in self._optimizers:
            self._watch(optimizer)

    def close(self) -> None:
        """Take all hooks away."""
        for handle in self._handles:
            handle.remove()
        self._handles = []

    def begin(self, kind: str, *_: object) -> None:
        """Note when something begins; a second beginning without an end counts as none."""
        self._began.setdefault(kind, time.perf_counter())

    def end(self, kind: str, *_: object) -> None:
        """Note when it ends."""
        start = self._began.pop(kind, None)
        if start is not None:
            self._note(kind, start, time.perf_counter())

    def _watch_model(self, model: nn.Module) -> None:
        self._handles.append(model.register_forward_pre_hook(partial(self.begin, "forward")))
        self._handles.append(model.register_forward_hook(self._after_forward))

    def _watch(self, optimizer: torch.optim.Optimizer) -> None:
        self._handles.append(optimizer.register_step_pre_hook(partial(self.begin, "step")))
        self._handles.append(optimizer.register_step_post_hook(partial(self.end, "step")))

    def _after_forward(self, model: nn.Module, inputs: Any, output: Any) -> None:
        self.end("forward")
        self._began.pop("backward", None)  # of a backward pass that failed
        for leaf in _tensors(output):
            if leaf.requires_grad:
                leaf.register_hook(self._on_output_gradient)

    def _on_output_gradient(self, grad: Tensor) -> None:
        """Note that a backward pass begins, and have its end noted.

        This comes before any parameter's gradient, so the first callback runs before the engine's, which
        waits for the exchange, and what that callback queues runs after it.
        """
        if "backward" in self._began or not self._handles:
            return
        self.begin("backward")
        queue = torch.autograd.Variable._execution_engine.queue_callback

        def computed() -> None:
            self.begin("wait")
            queue(averaged)

        def averaged() -> None:
            self.end("wait")
            self.end("backward")

        queue(computed)


def _tensors(value: Any) -> Iterator[Tensor]:
    if isinstance(value, Tensor):
        yield value
    elif isinstance(value, Mapping):
        yield from _tensors(list(value.values()))
    elif isinstance(value, (list, tuple)):
        for item in value:
            yield from _tensors(item)
