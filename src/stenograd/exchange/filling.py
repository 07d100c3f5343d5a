"""Gradients into buckets before an exchange, and averages back into gradients after it."""

from __future__ import annotations

import itertools
import sys
from collections.abc import Callable, Iterator, Mapping, Sequence
from functools import cache
from typing import Any

import torch
from torch import Tensor, nn

from stenograd.errors import StenogradError, TensorTypeError
from stenograd.exchange.buckets import Bucket, gradient_type
from stenograd.exchange.sparse_rows import Rows, average_rows, rows_of, write_rows
from stenograd.exchange.tensor_exchange import Outcome, TensorExchange
from stenograd.wire.finite import are_finite
from stenograd.wire.requests import Rounds

__all__ = ["Filler", "Slot", "SparseFiller", "arrives", "check_gradient", "is_own", "is_returned"]

# A bucket of tensors smaller than this on average is filled by one call when it is complete: a call for each
# gradient comes between two of autograd's own, out of the caches, and then takes 60 us and not 10.
_SMALL_ELEMENTS = 1 << 17
# Smaller than this, gradients also keep their own memory: with 10,000 tensors of 4 elements, giving each
# another took twice the time of the whole backward pass.
_FEW_ELEMENTS = 2048
_KEPT_VIEWS = 3  # memories that a bucket changes between: its own, an old residual's, an average's
_marks = itertools.count(1)  # 0 is for a gradient without a mark


class Slot:
    """What is known of one parameter's gradient.

    Attributes:
        bucket: the number of its bucket; -1 for one whose gradients are sparse.
        handles: of its hooks; the first is called when a gradient is complete.
        used: whether a backward pass made a gradient since the last exchange.
        at: number of the pass in which its gradient was ready.
        stays: whether the program holds the gradient of this pass, so that the average must go into it.
        whole: whether nobody else reads the memory of the gradient that autograd has brought; see `arrives`.
    """

    __slots__ = ("_mark", "at", "bucket", "handles", "stays", "used", "whole")

    def __init__(self, bucket: int) -> None:
        self.bucket = bucket
        self.handles: list[Any] = []
        self.used = self.stays = self.whole = False
        self.at = 0
        self._mark = 0

    def leave(self, grad: Tensor | None, *, inside: bool = False) -> None:
        """Remember the gradient that an exchange leaves; `inside` tells that it is a part of a bucket.

        By a number on the tensor: holding it would keep its memory from the next backward pass after
        `zero_grad()`, and torch cannot swap tensors (`model.to`) that have a weak reference. The number is
        negative where the tensor has memory of its own.
        """
        if grad is not None:
            mark = next(_marks)
            self._mark = grad._left_by_stenograd = mark if inside else -mark  # type: ignore[attr-defined]

    def left(self, grad: Tensor | None) -> bool:
        """Return whether this is the gradient that the last exchange left."""
        return grad is not None and _mark_of(grad) == self._mark != 0

    def release(self) -> None:
        """Take the hooks away."""
        for handle in self.handles:
            handle.remove()

    def hand_over(self, grad: Tensor) -> None:
        """Let a gradient that was left have memory of its own from now on."""
        mark = -_mark_of(grad)
        self._mark = mark if self.left(grad) else self._mark
        grad._left_by_stenograd = mark  # type: ignore[attr-defined]

    def follow(self, other: Slot) -> None:
        """Know of the parameter what another slot knew."""
        self._mark, self.used = other._mark, other.used

    def counts(self, grad: Tensor | None) -> bool:
        """Return whether there is something to average: a new gradient, or one that was assigned by hand."""
        return self.used or (grad is not None and not self.left(grad))


class _Hold:
    """One bucket's parameters, and the views of their gradients in the memories that it uses.

    Attributes:
        together: whether it is filled by one call when it is complete.
        many: whether gradients keep memory of their own; then it is filled together, too.
        missing: number of gradients to come in this pass.
    """

    def __init__(self, bucket: Bucket, params: list[nn.Parameter], slots: list[Slot]) -> None:
        self.bucket, self.params, self.slots = bucket, params, slots
        self.together = len(params) > 1 and sum(bucket.numels) < _SMALL_ELEMENTS * len(params)
        self.many = len(params) > 1 and sum(bucket.numels) < _FEW_ELEMENTS * len(params)
        self.missing = 0
        self._views: dict[int, list[Tensor]] = {}
        self._cached: set[int] = set()  # ids of these views

    def views(self, flat: Tensor) -> list[Tensor]:
        """Cut a flat tensor; the views are kept, and keep its memory, so an address means one memory."""
        address = flat.data_ptr()
        known = self._views.get(address)
        if known is None:
            # Detached, or the program could not `detach_()` the gradients that they become.
            known = [view.detach() for view in self.bucket.views(flat)]
            if len(self.params) == 1:  # its memory may be another gradient's in each step
                return known
            # The oldest goes first: its views would keep memory alive that nobody else uses any more.
            while len(self._views) >= _KEPT_VIEWS:
                self._views.pop(next(iter(self._views)))
            self._views[address] = known
            self._note_cached()
        return known

    def knows(self, flat: Tensor) -> bool:
        """Return whether there are views of this memory."""
        return flat.data_ptr() in self._views

    def place(self, parameter: Tensor) -> int:
        """Return a parameter's place in the bucket."""
        # By identity: `list.index` would compare tensors element by element.
        return next(i for i, p in enumerate(self.params) if p is parameter)

    def caches(self, grad: Tensor) -> bool:
        """Return whether a gradient is one of the views that are kept here."""
        return id(grad) in self._cached

    def part_with(self, grad: Tensor) -> None:
        """Move a gradient out of this bucket's memory; it stays the same tensor."""
        # This bucket needs another view in its place: the program's tensor gets memory of its own.
        for views in self._views.values():
            views[:] = [view.detach() if view is grad else view for view in views]
        self._note_cached()
        grad.data = grad.clone()

    def _note_cached(self) -> None:
        self._cached = {id(view) for views in self._views.values() for view in views}


class Filler:
    """Fills an exchange's buckets with the gradients of parameters.

    Args:
        exchange: whose buckets to fill, arranged.
        params: each bucket's parameters.
        slots: theirs.
        shares: whether gradients may live where they are averaged, which saves two copies.

    Attributes:
        holds: one per bucket; `missing` counts gradients to come in this pass.
    """

    def __init__(
        self,
        exchange: TensorExchange,
        params: Sequence[list[nn.Parameter]],
        slots: Sequence[list[Slot]],
        shares: bool,
    ) -> None:
        self._exchange, self._shares = exchange, shares
        for view in (False, True) if shares else ():
            _usual_holders(view)  # measures by a backward pass, which must not be inside of another one
        self.holds = [_Hold(*parts) for parts in zip(exchange.buckets, params, slots, strict=True)]

    def lends(self, index: int) -> bool:
        """Return whether the gradient in a bucket may be exchanged where autograd has left it."""
        return self._shares and index >= 0 and len(self.holds[index].params) == 1

    def begin(self) -> None:
        """Expect all gradients anew."""
        for hold in self.holds:
            hold.missing = len(hold.params)

    def fill(self, index: int, parameter: Tensor) -> None:
        """Put a gradient where it is exchanged, unless that is done for all of its bucket together."""
        if not self.holds[index].together:
            self._fill_one(index, parameter)

    @torch.no_grad()
    def _fill_one(self, index: int, parameter: Tensor) -> None:
        hold = self.holds[index]
        at = hold.place(parameter)
        slot = hold.slots[at]
        self._look(hold, parameter, slot)
        grad, scale = parameter.grad, self._exchange.scale(index)
        check_gradient(grad, parameter, hold.bucket)
        if grad is None:
            self._view(hold, index, at).zero_()  # counts as zeros
        elif self._alone(hold, slot, parameter, grad) and self._exchange.lend(index, grad.view(-1)):
            if scale != 1.0:
                grad.mul_(scale)
        else:
            view = self._view(hold, index, at)
            if scale != 1.0:
                torch.mul(grad, scale, out=view)
            elif grad is not view:
                view.copy_(grad)
            # Other layouts, such as channels_last, keep a gradient in their own, which a flat bucket has not.
            if self._shares and not slot.stays and parameter.is_contiguous():
                parameter.grad = view

    @torch.no_grad()
    def complete(self, index: int, number: int) -> None:
        """Fill what pass `number` has not made a gradient of, and all of a bucket that is filled together."""
        hold = self.holds[index]
        if hold.many:
            self._fill_many(hold, index)
            return
        if hold.together:
            self._fill_together(hold, index, number)
        if hold.missing:
            for p, slot in zip(hold.params, hold.slots, strict=True):
                if slot.at == number:  # its hook has filled it, or `_fill_together` just now
                    continue
                if p.grad is None or slot.counts(p.grad):
                    self._fill_one(index, p)
                else:
                    self._fill_left(hold, index, p, slot)

    def zero(self, index: int) -> None:
        """Fill a bucket with zeros: this rank has nothing to say."""
        self._exchange.flat(index).zero_()

    def used(self) -> Iterator[bool]:
        """Yield for each parameter, bucket by bucket, whether there is something to average."""
        for hold in self.holds:
            for p, slot in zip(hold.params, hold.slots, strict=True):
                yield slot.used or slot.counts(p.grad)

    @torch.no_grad()
    def write_back(self, outcome: Outcome) -> None:
        """Make gradients the averages; one that no rank made in this pass stays as it is."""
        start = 0
        for index, (hold, average) in enumerate(zip(self.holds, outcome.averages, strict=True)):
            stop = start + len(hold.params)
            used = outcome.any_used[start:stop]
            start = stop
            if hold.many and not hold.knows(average):
                # Cutting fresh memory into thousands of views takes longer than copying it.
                average = self._exchange.flat(index).copy_(average)
            views = hold.views(average)
            if hold.many or not self._shares:
                self._copy_back(hold, views, used)
                continue
            for p, slot, view, any_used in zip(hold.params, hold.slots, views, used, strict=True):
                slot.used = False
                if not any_used:
                    continue
                if p.is_contiguous() and not slot.stays:
                    if p.grad is not view:
                        p.grad = view
                    slot.leave(view, inside=True)
                else:
                    slot.leave(_written(p, view))

    def _copy_back(self, hold: _Hold, views: list[Tensor], used: Sequence[bool]) -> None:
        grads: list[Tensor] = []
        sources: list[Tensor] = []
        for p, slot, view, any_used in zip(hold.params, hold.slots, views, used, strict=True):
            slot.used = False
            if any_used:
                grad = p.grad
                if grad is None:
                    slot.leave(_written(p, view))
                else:
                    slot.leave(grad)
                    grads.append(grad)
                    sources.append(view)
        if grads:
            torch._foreach_copy_(grads, sources)

    def _fill_many(self, hold: _Hold, index: int) -> None:
        flat = self._exchange.flat(index)
        targets, grads = hold.views(flat), [p.grad for p in hold.params]
        for grad, p in zip(grads, hold.params, strict=True):
            check_gradient(grad, p, hold.bucket)
        made = [grad for grad in grads if grad is not None]
        if len(made) < len(grads):
            flat.zero_()
            targets = [view for view, grad in zip(targets, grads, strict=True) if grad is not None]
        if made:
            torch._foreach_copy_(targets, made)
        scale = self._exchange.scale(index)
        if scale != 1.0:
            flat.mul_(scale)

    def _fill_together(self, hold: _Hold, index: int, number: int) -> None:
        """Fill in the gradients that pass `number` has made."""
        for p, slot in zip(hold.params, hold.slots, strict=True):
            if slot.at == number:
                check_gradient(p.grad, p, hold.bucket)
                self._look(hold, p, slot)
        views = hold.views(self._exchange.flat(index))
        targets: list[Tensor] = []
        grads: list[Tensor] = []
        for p, slot, view in zip(hold.params, hold.slots, views, strict=True):
            if slot.at != number:
                continue
            if p.grad is None:
                view.zero_()  # somebody took it away: it counts as zeros
            else:
                targets.append(view)
                grads.append(p.grad)
                # The list keeps the old gradient until it is copied below.
                if self._shares and not slot.stays and p.is_contiguous():
                    p.grad = view
        if targets:
            torch._foreach_copy_(targets, grads)
            scale = self._exchange.scale(index)
            if scale == 1.0:
                return
            if len(targets) == len(views):
                self._exchange.flat(index).mul_(scale)
            else:
                torch._foreach_mul_(targets, scale)

    def _fill_left(self, hold: _Hold, index: int, parameter: Tensor, slot: Slot) -> None:
        """Fill in the gradient that an earlier exchange left, in case that other ranks add to theirs.

        If none does, it must stay as it is; so it moves out of the memory that this exchange writes to.
        """
        self._look(hold, parameter, slot)
        grad = parameter.grad
        assert grad is not None  # it was left
        if _mark_of(grad) > 0:
            grad = parameter.grad = grad.clone()
            slot.leave(grad)
        torch.mul(grad, self._exchange.scale(index), out=self._view(hold, index, hold.place(parameter)))

    def _alone(self, hold: _Hold, slot: Slot, parameter: Tensor, grad: Tensor) -> bool:
        """Return whether a gradient is a whole bucket in memory of its own, so that it need not be copied."""
        whole, slot.whole = slot.whole, False
        return (
            whole
            and self._shares
            and len(hold.params) == 1
            and not slot.stays
            and parameter.is_contiguous()
            and grad.is_contiguous()
            and grad.device == parameter.device
            and grad.dtype is hold.bucket.dtype
            # The exchange may keep this memory as its state, so nothing else may lie in it.
            and grad.untyped_storage().nbytes() == grad.numel() * grad.element_size() > 0
        )

    def _look(self, hold: _Hold, parameter: Tensor, slot: Slot) -> None:
        """Find out whether a gradient must stay the tensor that it is; then it leaves the bucket's memory."""
        slot.stays = self._shares and is_held(parameter, hold.caches)
        # It was a part of a bucket, and the program has taken hold of it since.
        if slot.stays and _mark_of(parameter.grad) > 0:
            hold.part_with(parameter.grad)  # type: ignore[arg-type]
            slot.hand_over(parameter.grad)  # type: ignore[arg-type]

    def _view(self, hold: _Hold, index: int, at: int) -> Tensor:
        """Return a parameter's place in this step's flat tensor."""
        return hold.views(self._exchange.flat(index))[at]


class SparseFiller:
    """Exchanges the sparse gradients of some parameters.

    Args:
        slots: the parameters, and what is known of them.
        exchange: whose method clips them, and which tells what this rank's count for.

    Attributes:
        bad: whether this rank's gradients were not finite, when they were last read.
    """

    def __init__(self, slots: Mapping[nn.Parameter, Slot], exchange: TensorExchange) -> None:
        self._slots, self._exchange = dict(slots), exchange
        self.bad = False

    def used(self) -> list[bool]:
        """Return for each parameter whether there is something to average."""
        return [slot.counts(p.grad) for p, slot in self._slots.items()]

    def rounds(self, used: Sequence[bool]) -> Rounds[list[Rows]] | None:
        """Return what exchanges the gradients of the used parameters; None if there are no parameters."""
        rows = [rows_of(p, use) for p, use in zip(self._slots, used, strict=False)]
        # Also those that an earlier pass has left and nobody sends now: the next step would apply them.
        self.bad = not are_finite(p.grad for p in self._slots if p.grad is not None)
        return self._averages(rows) if rows else None

    def _averages(self, rows: Sequence[Rows]) -> Rounds[list[Rows]]:
        share, how = self._exchange.weighed(), self._exchange.method
        if share != 1.0 or how.clips:
            rows = [r._replace(values=(r.values * share).contiguous()) for r in rows]
            for r in rows:
                how.clip(r.values.view(-1), [r.values.numel()])
        return (yield from average_rows(rows, self._exchange.driver.world_size))

    def write_back(self, outcome: Outcome) -> None:
        """Make gradients the averages, which are the last in the outcome."""
        # Whoever calls `finish` appends these parameters to those of the buckets.
        start = len(outcome.any_used) - len(self._slots)
        for (p, slot), used, rows in zip(
            self._slots.items(), outcome.any_used[start:], outcome.extra or [], strict=True
        ):
            slot.used = False
            if used:
                write_rows(p, rows)
                slot.leave(p.grad)


def _mark_of(grad: Tensor | None) -> int:
    """Return the number that an exchange has left on a gradient; 0 where none has."""
    return getattr(grad, "_left_by_stenograd", 0)


def is_own(parameter: Tensor) -> bool:
    """Return whether a gradient is the program's own tensor, as far as can be seen; see `is_held`."""
    # Without a name for the gradient, which would be one more reference to it.
    return parameter.grad is not None and (parameter.grad._is_view() or is_held(parameter, _in_bucket))


def _in_bucket(grad: Tensor) -> bool:
    """Return whether a gradient is a part of a bucket, whose list of views holds it."""
    return _mark_of(grad) > 0 and grad.untyped_storage().nbytes() != grad.nbytes


def is_held(parameter: Tensor, cached: Callable[[Tensor], bool] = lambda _: False) -> bool:
    """Return whether the program may hold a parameter's gradient, or the memory it is in, beyond this step.

    Such as a flat buffer, of which all gradients are views, that the program itself sets to zero. What
    autograd has just made is written to for the first time, is no view, fills its memory, and is known to
    nobody. What an exchange left is a part of a bucket.

    Args:
        parameter: whose gradient it is.
        cached: whether the caller holds a gradient itself.

    Example:
        >>> weight = nn.Parameter(torch.zeros(2))
        >>> weight.sum().backward()
        >>> is_held(weight)
        False
        >>> weight.grad = torch.zeros(4)[:2]
        >>> weight.sum().backward()
        >>> is_held(weight)
        True
    """
    grad = parameter.grad
    if grad is None:
        return False
    # References besides the parameter's own; one of them may be the list of views that a bucket keeps.
    known = sys.getrefcount(grad) - _known_references
    if grad._version == 0 and not known:  # autograd has just made it
        return False
    if grad._is_view() or known > 1 or (known == 1 and not cached(grad)):
        return True
    if _mark_of(grad) > 0 or grad.layout is not torch.strided:
        return False
    return grad.untyped_storage().nbytes() != grad.nbytes


def _references() -> int:
    """Return how many references there are to a gradient that nobody holds, as `is_held` counts them."""
    parameter = nn.Parameter(torch.zeros(1, dtype=torch.float32, device="cpu"))
    parameter.grad = torch.zeros(1, dtype=torch.float32, device="cpu")
    grad = parameter.grad
    return sys.getrefcount(grad)


_known_references = _references()  # measured: how many a call itself holds is up to Python


def is_returned() -> bool:
    """Return whether what a leaf's hook gets is for `torch.autograd.grad`, which adds nothing to `.grad`."""
    try:
        torch._C._will_engine_execute_node(torch._C._current_autograd_node())
    except RuntimeError:  # of leaves it answers only where their gradients accumulate
        return True
    return False


def arrives(slot: Slot, grad: Tensor) -> None:
    """Note whether nobody else uses the memory of a gradient; a hook of its parameter.

    What autograd brings may be a view of a gradient that it goes on with, as in the sum of a parameter and of
    what a layer has made, or lie where the next pass writes, as in a CUDA graph. Once it has accumulated,
    that can be seen no more.
    """
    if not is_returned():
        slot.whole = grad.layout is torch.strided and _holders(grad) <= _usual_holders(grad._is_view())


_count = getattr(torch._C, "_storage_Use_Count", None)  # before torch 2.9 only where it is built for CUDA


def _holders(grad: Tensor) -> int:
    """Return how many hold a gradient's memory, and what it is a view of, as far as torch tells."""
    memory: int = _count(grad.untyped_storage()._cdata) if _count else 0
    base: Any = grad._base
    return memory if base is None else memory + base._use_count()


@cache
def _usual_holders(view: bool) -> int:
    """Return how many that are where nobody else uses it, as of a matrix that may have been transposed."""
    found: list[int] = []  # measured: how many a view, or the call of a hook, holds is up to torch
    with torch.inference_mode(False), torch.enable_grad():
        matrix = nn.Parameter(torch.zeros(2, 1, dtype=torch.float32, device="cpu"))
        matrix.register_hook(lambda grad: found.append(_holders(grad)))
        (2 * (matrix.t() if view else matrix)).sum().backward()
    return found[0]


def check_gradient(grad: Tensor | None, parameter: Tensor, bucket: Bucket) -> None:
    """Refuse a gradient that cannot be averaged where it is.

    Raises:
        TensorTypeError: it is sparse, or belongs to a graph.
        StenogradError: the parameter has another type or device than when it was attached.
    """
    if grad is None or (
        grad.layout is torch.strided
        and not grad.requires_grad
        and gradient_type(parameter) is bucket.dtype
        and parameter.device == bucket.device
    ):
        return
    if grad.layout is not torch.strided:
        raise TensorTypeError(
            f"this gradient must be dense, got {grad.layout} for a parameter of shape "
            f"{tuple(parameter.shape)}: use nn.Embedding(..., sparse=True), whose gradients are known to be "
            "sparse when the model is attached, or sparse=False"
        )
    if grad.requires_grad:
        raise TensorTypeError(
            "gradients must not have a graph of their own, got one from backward(create_graph=True), "
            "which averaging would cut: use torch.autograd.grad for the inner derivative"
        )
    raise StenogradError(
        f"a parameter of shape {tuple(parameter.shape)} was {bucket.dtype} on {bucket.device} when it was "
        f"attached and is {gradient_type(parameter)} on {parameter.device} now: call model.to(...) before "
        "distribute, or sync.refresh() on every rank after it"
    )


def _written(parameter: Tensor, average: Tensor) -> Tensor:
    """Copy an average into a gradient in the parameter's own memory layout, and return the gradient."""
    if parameter.grad is None:
        parameter.grad = torch.empty_like(parameter, dtype=average.dtype).copy_(average)
    else:
        parameter.grad.copy_(average)
    return parameter.grad
