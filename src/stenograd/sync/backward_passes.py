"""Watches backward passes and optimizer steps: raises or warns before the ranks can drift apart."""

from __future__ import annotations

import itertools
import sys
import threading
import warnings
import weakref
from collections.abc import Callable, Container, Iterable, Iterator, Mapping, Sequence
from functools import cache, partial
from typing import Any
from weakref import WeakKeyDictionary, WeakValueDictionary

import torch
from torch import Tensor
from torch.autograd.function import BackwardCFunction
from torch.autograd.graph import _engine_run_backward

from stenograd.comm.drivers import AnyDriver
from stenograd.data.finite import is_finite, look_at, values_of
from stenograd.devices import refuse_capture
from stenograd.errors import StenogradError
from stenograd.sync.filling import Slot, is_own
from stenograd.sync.step_settings import BITS, StepSettings, refuse, tell, unequal

__all__ = [
    "Leftovers",
    "Passes",
    "at_end",
    "bad_of",
    "drop",
    "drop_bad",
    "next_order",
    "pass_flags",
    "refuse_nested",
    "refuse_other_passes",
    "refuse_step",
    "warn_of_skip",
    "warn_unexchanged",
    "zero_bad",
]

_BITS = 4  # of a pass's number that the ranks compare


class _Ends(list[tuple[int, Callable[[], None]]]):
    """What waits for the end of one backward pass: (place in the order of attaching, what to do)."""


# By the pass's number in autograd. Engines that one pass reaches must end in the same order on all ranks,
# whichever was reached first. autograd holds them with its callbacks, and drops both where a pass breaks off.
_ends: WeakValueDictionary[int, _Ends] = WeakValueDictionary()
_lock = threading.Lock()
_taken: WeakKeyDictionary[torch.optim.Optimizer, list[tuple[Tensor, Tensor | None]]] = WeakKeyDictionary()
_orders = itertools.count()


def next_order() -> int:
    """Return a number for something that is being attached; all ranks attach in the same order."""
    return next(_orders)


def at_end(task: int, order: int, action: Callable[[], None]) -> None:
    """Call something when a backward pass ends, after whatever was attached before it; call it in the pass.

    Args:
        task: the pass's number, `torch._C._current_graph_task_id()`.
        order: of what was attached, equal on all ranks.
        action: what to do.
    """
    with _lock:
        waiting = _ends.setdefault(task, _Ends())
        waiting.append((order, action))
        first = len(waiting) == 1
    if first:
        torch.autograd.Variable._execution_engine.queue_callback(partial(_untraced(), task, waiting))


@cache
def _untraced() -> Callable[[int, _Ends], None]:
    """Return `_run_ends`, which torch.compile would trace where it compiles a whole training step."""
    run: Callable[[int, _Ends], None] = torch.compiler.disable(_run_ends)
    return run


def _run_ends(task: int, waiting: _Ends) -> None:
    with _lock:
        _ends.pop(task, None)
    for _, action in sorted(waiting, key=lambda end: end[0]):
        action()


def refuse_nested() -> None:
    """Refuse a backward pass inside another one: its gradients are a part of what the outer one makes.

    Raises:
        StenogradError: autograd runs inside the backward function of something, or is being compiled, or is
            being captured as a CUDA graph.
    """
    refuse_capture()
    compiled: Any = sys.modules.get("torch._dynamo.compiled_autograd")
    if compiled is not None and (compiled.compiled_autograd_enabled or compiled.in_compiled_autograd_region):
        raise StenogradError(
            "compiled autograd is not supported, because it calls gradient hooks outside of a backward pass: "
            "compile the forward pass only (torch.compile(model)), and leave compiled_autograd off"
        )
    frame, inside = sys._getframe(), False
    while frame is not None:
        if frame.f_code is _engine_run_backward.__code__:
            inside = True
        elif inside and frame.f_code is BackwardCFunction.apply.__code__:
            raise StenogradError(
                "a backward pass inside another one, as checkpoint(use_reentrant=True) runs it, makes only "
                "some of the gradients, so they cannot be averaged yet: use checkpoint(use_reentrant=False)"
            )
        frame = frame.f_back  # type: ignore[assignment]


def refuse_step(
    optimizer: torch.optim.Optimizer, averaged: Container[int], under_way: bool = False
) -> list[Tensor]:
    """Refuse to step within a backward pass, or by a gradient that nobody averages.

    Args:
        optimizer: about to step.
        averaged: the ids of the parameters that are averaged.
        under_way: whether a backward pass broke off.

    Returns:
        The optimizer's parameters that have a gradient.

    Raises:
        StenogradError: it is so.
    """
    if under_way or torch._C._current_graph_task_id() != -1:
        raise StenogradError(
            "an optimizer stepped during a backward pass, before gradients were averaged (or the last "
            "pass failed): step after backward() returns"
        )
    held = [p for g in optimizer.param_groups for p in g["params"] if p.grad is not None]
    for p in held:
        if p.requires_grad and id(p) not in averaged:
            raise StenogradError(
                f"a parameter of shape {tuple(p.shape)} has a gradient that was not averaged: after "
                "unfreezing parameters call sync.refresh() on every rank"
            )
    return held


def drop(optimizer: torch.optim.Optimizer, held: Iterable[Tensor], zeros: bool) -> None:
    """Let a step find no gradients, so that optimizers leave weights, momenta and counts as they are.

    Args:
        optimizer: about to step; after the step, parameters get back gradients that are the program's own
            tensors, such as views of a flat buffer.
        held: the parameters.
        zeros: whether they get zeros, for an optimizer that computes with its gradients already.
    """
    for p in held:
        if zeros and p.grad is not None:
            p.grad.zero_()
            continue
        if is_own(p):
            if optimizer not in _taken:
                _taken[optimizer] = []
                optimizer.register_step_post_hook(_give_back)
            _taken[optimizer].append((p, p.grad))
        p.grad = None


def _give_back(optimizer: torch.optim.Optimizer, *_: Any) -> None:
    """Undo `drop` for gradients that the program holds."""
    for p, grad in _taken[optimizer]:
        p.grad = grad
    _taken[optimizer].clear()


def drop_bad(
    optimizer: torch.optim.Optimizer, averaged: Container[int], zeros: bool, parameters: Iterable[Tensor]
) -> None:
    """Let a step find no gradients, and let what other optimizers gather for a later step be finite.

    Gradients that accumulate over several passes stay bad once one is, and would make each of these passes
    bad for the parameters that step in between.

    Args:
        optimizer: about to step.
        averaged: the ids of the parameters that are averaged.
        zeros: whether its gradients become zeros; see `drop`.
        parameters: those that other optimizers may hold; of theirs only bad gradients become zeros.
    """
    mine = {id(p): p for g in optimizer.param_groups for p in g["params"] if id(p) in averaged}
    drop(optimizer, mine.values(), zeros)
    for p in bad_of(parameters):
        if id(p) not in mine and p.grad is not None:
            p.grad.zero_()  # not None: its optimizer may compute with it before it asks, as SAM does


def bad_of(parameters: Iterable[Tensor]) -> Iterator[Tensor]:
    """Return those parameters whose gradients are not finite, one after another."""
    return (p for p in parameters if p.grad is not None and not is_finite(p.grad))


class Leftovers:
    """Gradients of a bad pass that accumulate further: they become zeros when the next pass begins.

    `drop_bad` sees to them where an optimizer steps. A `GradScaler` leaves out the step of one that is not
    fused, and then nobody would: a gradient that another optimizer gathers for a later step would stay bad,
    and with it each pass until then. Where none of the bad gradients was cleared since, no step lies between,
    and all stay: the passes belong to one step, which is lost.

    Example:
        >>> a, b = (torch.nn.Parameter(torch.ones(1)) for _ in "ab")
        >>> left = Leftovers()
        >>> (a * b * torch.nan).backward()
        >>> left.take([a, b])
        >>> a.grad = None
        >>> (a + 2 * b).backward()
        >>> a.grad, b.grad
        (tensor([1.]), tensor([2.]))
    """

    def __init__(self) -> None:
        self._bad: list[Tensor] = []
        self._handles: list[Any] = []

    def take(self, parameters: Iterable[Tensor], handle: Any = None) -> None:
        """Take those, after a bad pass, whose gradients are not finite.

        Args:
            parameters: leaves, unless there is a handle.
            handle: of a hook by which the caller has `clear()` called when the next pass begins.
        """
        self.forget()
        self._bad = list(parameters)
        if handle is not None:
            self._handles = [handle]
            return
        # Before a gradient is added to: a hook that is called afterwards finds the new one spoilt, too. It
        # only knows of this, because the garbage collector does not see what hooks hold.
        known = weakref.ref(self)

        @torch.compiler.disable  # type: ignore[untyped-decorator]  # Dynamo traces it in a compiled step
        def before(_: Tensor) -> None:
            with _lock:  # autograd runs one thread for each device
                if (found := known()) is not None:
                    found.clear()

        self._handles = [p.register_hook(before) for p in self._bad]

    def forget(self) -> None:
        """Leave them as they are."""
        handles, self._bad, self._handles = self._handles, [], []
        for handle in handles:
            handle.remove()

    @torch.no_grad()
    def clear(self) -> None:
        """Make them zeros, unless all are still there."""
        bad = self._bad
        self.forget()
        # An empty shard of a parameter says nothing of the others of it.
        left = [p for p in bad if p.grad is not None and not (p.grad.numel() and is_finite(p.grad))]
        for p in left if len(left) < len(bad) else ():
            p.grad.zero_()  # type: ignore[union-attr]


@torch.no_grad()
def zero_bad(
    optimizer: torch.optim.Optimizer, averaged: Container[int], sound: Tensor, parameters: Iterable[Tensor]
) -> None:
    """Let a device do what is nearest to `drop_bad`, while the host does not know whether a gradient is bad.

    Gradients become zeros, so momenta and weight decay act in the step. Asking would let the device idle.

    Args:
        optimizer: about to step; all of its gradients become zeros if not `sound`.
        averaged: the ids of the parameters that are averaged.
        sound: 0-d and boolean, on a device: whether all gradients are finite.
        parameters: those that other optimizers may hold; of theirs only bad gradients become zeros.
    """
    mine = {id(p): p for g in optimizer.param_groups for p in g["params"] if id(p) in averaged}
    bad = {sound.device: sound.logical_not()}
    for p in parameters:
        if p.grad is None:
            continue
        values = values_of(p.grad)
        if id(p) in mine:
            if values.device not in bad:
                bad[values.device] = bad[sound.device].to(values.device, non_blocking=not values.is_cpu)
            values.masked_fill_(bad[values.device], 0)
        elif isinstance(fine := look_at([values]), Tensor):
            values.masked_fill_(fine.logical_not(), 0)
        elif not fine:
            values.zero_()


def warn_of_skip() -> bool:
    """Warn, once for each engine, that a step changes nothing; return True."""
    warnings.warn(
        "a gradient was not finite on some rank: this optimizer.step() changes nothing, on all ranks alike; "
        "later ones are only counted, in `skipped` (skip_bad_steps=False turns this off)",
        RuntimeWarning,
        stacklevel=6,
    )
    return True


def warn_unexchanged(cause: str, advice: str) -> bool:
    """Warn, once for each engine, that a step applies gradients of this rank alone; return True."""
    warnings.warn(
        f"optimizer.step() applies {cause}: the ranks drift apart; {advice}", RuntimeWarning, stacklevel=7
    )
    return True


def pass_flags(count: int) -> list[bool]:
    """Return flags that tell a pass's number modulo 16 from others: each bit, then each bit's opposite.

    Example:
        >>> pass_flags(1)
        [True, False, False, False, False, True, True, True]
    """
    return tell(count, _BITS)


def refuse_other_passes(any_flags: Sequence[bool], count: int) -> None:
    """Look at which of all ranks' `pass_flags` were set.

    Raises:
        StenogradError: on all ranks: they are at different backward passes.
    """
    if any(unequal(any_flags)):
        raise StenogradError(
            f"the ranks are at different backward passes, this one at number {count}: use no_sync() and "
            "backward() for the same batches on every rank, and restart from a checkpoint"
        )


class Passes:
    """Counts a rank's backward passes, and knows whether its gradients are averages.

    Args:
        local: whether there are gradients from before, which were never averaged.
        skip_bad_steps: whether a step is to change nothing after an exchange that was not finite.
        settings: what the steps of all ranks must have in common.

    Attributes:
        count: number of passes begun, those without an exchange included.
        shadowed: whether in the last exchange a rank took part that had run out of inputs.
        skips: as given.
    """

    def __init__(
        self, local: bool = False, skip_bad_steps: bool = True, settings: StepSettings | None = None
    ) -> None:
        self.count = 0
        self.settings = settings or StepSettings()
        self.shadowed = False
        self._exchanges = 0
        self._at_step: dict[int, int] = {}  # exchanges when an optimizer stepped last, by its id
        self.skips = skip_bad_steps
        self._local, self._warned, self._warned_of_bad = local, False, False

    def begun(self) -> int:
        """Count a pass that makes its first gradient, and return its number."""
        self.count += 1
        return self.count

    def accumulated(self, before: int) -> None:
        """Note that passes since number `before` exchanged nothing."""
        self._local = self._local or self.count > before

    def flags(self, *, shadow: bool = False) -> list[bool]:
        """Return flags for the exchange that tell this pass's number modulo 16 and its settings from others.

        Each bit is sent as itself and as its opposite. Where both are set, two ranks are at different passes,
        or take steps with different settings. A rank that shadows others' exchanges has no number of its own;
        the first flag tells of it.

        Example:
            >>> Passes().flags()[:5]
            [False, False, False, False, False]
        """
        if shadow:
            return [True, *[False] * (2 * _BITS + 2 * BITS)]
        return [False, *pass_flags(self.count), *self.settings.flags(self.count)]

    def exchanged(self, any_flags: Sequence[bool], driver: AnyDriver) -> None:
        """Take which of all ranks' `flags` were set: gradients are averages now.

        Raises:
            StenogradError: on all ranks: they are at different backward passes.
            MismatchError: on all ranks: their losses' scales or learning rates differ.
        """
        self.shadowed = any_flags[0]
        self._check(any_flags, driver)
        self._exchanges += 1
        self._local = False

    def _check(self, any_flags: Sequence[bool], driver: AnyDriver) -> None:
        refuse_other_passes(any_flags[1 : 1 + 2 * _BITS], self.count)
        if any(unequal(any_flags[1 + 2 * _BITS :])):
            refuse(driver, self.settings.read())

    def follow(self, any_flags: Sequence[bool], driver: AnyDriver) -> None:
        """Take the other ranks' number from their `flags`: this rank shadowed their pass."""
        self._check(any_flags, driver)
        theirs = sum(bool(one) << bit for bit, one in enumerate(any_flags[1 : 1 + _BITS]))
        self.count += (theirs - self.count) % (1 << _BITS)
        self._exchanges += 1

    def check_step(
        self,
        optimizer: torch.optim.Optimizer,
        slots: Mapping[int, Slot],
        under_way: bool,
        finite: bool,
        *,
        parameters: Iterable[Tensor] = (),
        zeros: bool = False,
    ) -> None:
        """Refuse to step on gradients that were not averaged; take those away that are not finite.

        Args:
            optimizer: about to step.
            slots: of the parameters that are exchanged, by id.
            under_way: whether a backward pass is, or broke off.
            finite: whether the last exchange was.
            parameters: as in `drop_bad`.
            zeros: whether those become zeros, because the step computes with them already.

        Raises:
            StenogradError: a pass is under way or failed, or a gradient was not averaged.
        """
        held = refuse_step(optimizer, slots, under_way)
        if not self.skip_bad(optimizer, slots, finite, zeros, parameters) and held:
            self._warn_of_local(optimizer, held, slots)

    def skip_bad(
        self,
        optimizer: torch.optim.Optimizer,
        slots: Container[int],
        finite: bool,
        zeros: bool,
        parameters: Iterable[Tensor] = (),
    ) -> bool:
        """Let a step change nothing if it may not apply what the last exchange left, and tell whether."""
        bad = self.skips and not finite
        if bad:
            drop_bad(optimizer, slots, zeros, parameters)
            self._warned_of_bad = self._warned_of_bad or warn_of_skip()
        return bad

    def _warn_of_local(
        self, optimizer: torch.optim.Optimizer, held: Sequence[Tensor], slots: Mapping[int, Slot]
    ) -> None:
        """Warn once where a step applies what was never averaged."""
        before = self._at_step.get(id(optimizer), 0)
        self._at_step[id(optimizer)] = self._exchanges
        if self._warned:
            return
        if self._local:
            cause = "gradients of this rank alone, from no_sync() or from before distribute()"
            advice = "end accumulation with a backward pass outside no_sync(), or call zero_grad() first"
        elif self._exchanges == before and any(_by_hand(p, slots) for p in held):
            cause = "gradients that no backward() made, such as those of torch.autograd.grad"
            advice = "let loss.backward() make them, or average them yourself"
        else:
            return
        self._warned = warn_unexchanged(cause, advice)


def _by_hand(parameter: Tensor, slots: Mapping[int, Slot]) -> bool:
    """Return whether neither a backward pass nor an exchange left the gradient that a parameter has."""
    slot = slots.get(id(parameter))
    return slot is not None and not slot.used and not slot.left(parameter.grad)
