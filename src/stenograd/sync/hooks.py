"""From the gradients that autograd makes to full buckets on their way."""

from __future__ import annotations

import threading
import weakref
from abc import abstractmethod
from collections.abc import Callable, Iterable
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn

from stenograd.comm.tensor_exchange import TensorExchange
from stenograd.errors import StenogradError
from stenograd.sync.filling import Filler, Slot
from stenograd.sync.handshake import refuse_taken
from stenograd.sync.steps import Passes, at_end, refuse_nested
from stenograd.sync.uneven import Uneven

__all__ = ["Hooked"]

_graph_task = torch._C._current_graph_task_id


def _hook(sync: Callable[[], Hooked | None], slot: Slot, parameter: Tensor) -> None:
    """Tell an engine of a gradient.

    Python's garbage collector does not see what tensors' hooks hold. So the model holds its engine (see
    `Wrapping`), and its parameters only know of it: when the model goes, the engine and its process group go.
    """
    running = sync()
    if running is None:
        raise StenogradError("the attached model is gone: keep it as long as its parameters are trained")
    running._on_gradient(slot, parameter)


class Hooked(Uneven):
    """What hooks on a model's parameters do; `GradientSync` says what for.

    A pass begins with the first gradient, and ends when autograd has made the last; buckets leave in between,
    as they fill, in their order. autograd runs one thread for each device, so a lock guards all of it.
    """

    _enabled: bool
    _exchange: TensorExchange
    _filler: Filler
    _finite: bool
    _order: int
    _passes: Passes
    _slots: dict[int, Slot]

    def __init__(self) -> None:
        super().__init__()
        self._lock = threading.RLock()
        self._exchanging = False

    @abstractmethod
    def _end_pass(self) -> None:
        """Do what is left when autograd has made all gradients of a pass with an exchange."""

    def _leave_uncompiled(self) -> None:
        """Keep Dynamo, which traces what runs while a compiled training step does, out of the hooks."""
        for hook in (_hook, type(self)._on_gradient, Hooked._on_gradient, Hooked._take):
            torch._dynamo.decorators.skip(hook)  # a wrapper would cost a microsecond for each gradient
        self._begin_pass = torch.compiler.disable(self._begin_pass)  # type: ignore[method-assign]
        self._ready = torch.compiler.disable(self._ready)  # type: ignore[method-assign]

    def _hook(self, parameters: Iterable[nn.Parameter]) -> None:
        """Hook parameters that have a slot."""
        mine = weakref.ref(self)
        for p in parameters:
            slot = self._slots[id(p)]
            slot.handle = self._owner(p).register_post_accumulate_grad_hook(partial(_hook, mine, slot))
        self._pass_id = self._seen = -1
        self._fresh = True  # nobody looked yet if the model was wrapped after this

    def _owner(self, parameter: nn.Parameter) -> Tensor:
        """Return what autograd makes the gradient of."""
        return parameter

    def _on_gradient(self, slot: Slot, parameter: Tensor) -> None:
        with self._lock:
            task = _graph_task()
            if self._seen != task:
                self._begin_pass(task)
            slot.used = True
            if not self._exchanging:
                return
            hooks: Any = parameter._post_accumulate_grad_hooks
            if len(hooks) > 1 and next(reversed(hooks)) != slot.handle.id:
                # The user's hooks, registered later, may still change the gradient. They run before the next
                # gradient's; from the next pass on ours is the last.
                hooks[slot.handle.id] = hooks.pop(slot.handle.id)  # C++ does not see what move_to_end does
                self._late.append((slot, parameter))
                return
            while self._late:
                self._take(*self._late.pop())
            self._take(slot, parameter)

    def _take(self, slot: Slot, parameter: Tensor) -> None:
        """Note that a gradient is complete."""
        number = self._passes.count
        if slot.at == number:
            return
        slot.at = number
        if self._driver.tracer is not None:
            self._driver.tracer.ready(slot.bucket, parameter)
        if slot.bucket >= 0:
            hold = self._filler.holds[slot.bucket]
            hold.missing -= 1
            if not hold.together or not hold.missing:
                self._ready(slot.bucket, parameter)

    def _ready(self, index: int, parameter: Tensor) -> None:
        """Fill in a gradient, and send the buckets that are full."""
        self._filler.fill(index, parameter)
        holds = self._filler.holds
        while self._next < len(holds) and not holds[self._next].missing:
            self._submit_next()

    def _begin_pass(self, task: int) -> None:
        refuse_nested()
        self._finite = True  # what the last exchange was says nothing of gradients that this pass makes
        if self._enabled:
            self._check_pass()
            self._notify_join()
            at_end(task, self._order, self._end_pass)
            self._pass_id = task
            self._next = 0
            self._late: list[tuple[Slot, Tensor]] = []
            self._filler.begin()
        self._exchanging, self._seen = self._enabled, task
        self._passes.begun()

    def _check_pass(self) -> None:
        """Refuse to begin an exchange that cannot end well."""
        if self._fresh:
            refuse_taken(self._model, [])
            self._fresh = False
        self._driver.check_groupless()
        if self._pass_id == -1:
            return
        if self._driver.world_size > 1:
            raise StenogradError(
                "the last backward pass did not finish (an error in it), so the ranks may be out of step: "
                "restart from a checkpoint"
            )
        self._exchange.abandon()  # an interrupted pass of one rank harms nobody else

    def _submit_next(self) -> None:
        self._filler.complete(self._next, self._passes.count)
        if self._driver.tracer is not None:
            self._driver.tracer.full(self._next)
        self._exchange.submit(self._next)
        self._next += 1
