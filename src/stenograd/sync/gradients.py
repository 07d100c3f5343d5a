"""Hooks on gradients, so that they are averaged when `backward()` returns."""

from __future__ import annotations

import threading
import warnings
import weakref
from collections.abc import Callable, Iterable, Sequence
from concurrent.futures import Future
from contextlib import AbstractContextManager, nullcontext
from functools import partial
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.algorithms.join import Join, Joinable, JoinHook
from torch.utils.hooks import unserializable_hook

from stenograd.catalog.method import MethodLike, method
from stenograd.errors import StenogradError
from stenograd.exchange.buckets import DEFAULT_BUCKET_BYTES, assign, gradient_like, gradient_type
from stenograd.exchange.filling import Filler, Slot, SparseFiller, arrives, is_own
from stenograd.exchange.kernel_loading import load_kernels
from stenograd.exchange.sparse_rows import sparse_parameters
from stenograd.exchange.tensor_exchange import Outcome, TensorExchange
from stenograd.launch.process_group import join
from stenograd.sync.attached import Sync, at_end, next_order, refuse_nested
from stenograd.sync.averaging import take_states
from stenograd.sync.copies import Copies
from stenograd.sync.handshake import (
    Wrapping,
    as_optimizers,
    broadcast_model,
    broadcast_tensors,
    refuse_second_momentum,
    refuse_taken,
    synced_parameters,
    unwrapped,
)
from stenograd.sync.replica_guard import ReplicaGuard, check_interval
from stenograd.sync.step_settings import StepSettings
from stenograd.sync.steps import (
    Leftovers,
    Passes,
    bad_of,
)
from stenograd.wire.driver import Driver
from stenograd.wire.groups import as_group
from stenograd.wire.requests import gather

__all__ = ["GradientSync"]


_graph_task = torch._C._current_graph_task_id
_NAMED = 3  # parameters that a warning lists
_SETTINGS = "check_every, repair, check_buffers, skip_bad_steps"  # what a MismatchError calls them
# Shares of the bytes from which the first, and the last, gradients get a bucket of their own. It is one more
# collective, about 1 ms, which a slow link saves manyfold: it is busy earlier, and the last bucket, which is
# on it when nothing is left to compute, is smaller.
_HEAD_SHARE, _TAIL_SHARE = 1 / 16, 1 / 32


class GradientSync(Sync, Joinable):
    """The running synchronisation of one model; made by `stenograd.distribute`, whose arguments it takes.

    A pass begins with the first gradient, and ends when autograd has made the last; buckets leave in between,
    as they fill, in their order. autograd runs one thread for each device, so a lock guards all of it.

    After `backward()`, gradients live in the buckets' memory, which the next pass fills again: copy one that
    is to outlive its step. A tensor that the program itself has made the gradient, such as a view of its own
    flat buffer, stays the gradient; the average is written into it.

    Where ranks have different numbers of batches (`join`), one that has no more takes part in the others'
    exchanges with zeros. Averages are still divided by the number of all ranks, as DistributedDataParallel
    does by default. When the last rank has run out, all take its parameters, buffers and optimizer state, its
    learning rates and other settings, and the state of its schedulers and of its GradScaler, so that they go
    on equal.
    """

    # Whether gradients may live where they are averaged, which saves two copies.
    _shares_memory = True

    def __init__(
        self,
        model: nn.Module,
        optimizer: torch.optim.Optimizer | Sequence[torch.optim.Optimizer],
        how: MethodLike = "dense",
        *,
        group: Any = None,
        bucket_bytes: int = DEFAULT_BUCKET_BYTES,
        timeout_s: float = 300.0,
        check_every: int = 0,
        repair: bool = False,
        check_buffers: bool = False,
        skip_bad_steps: bool = True,
    ) -> None:
        super().__init__()  # of Joinable
        self._notice: Any = None
        self._lock = threading.RLock()
        self._exchanging = False
        self.method = method(how)
        self.method.require_every_step("GradientSync")
        self._model, self._optimizers = unwrapped(model), as_optimizers(optimizer)
        refuse_taken(self._model, self._optimizers)
        check_interval(check_every, repair)
        refuse_second_momentum(self.method, self._optimizers)
        parameters = self._found()  # complain before connecting
        assign({}, bucket_bytes)  # refuses a bad size, also before connecting
        join(timeout_s=timeout_s)
        self._group = group
        self._driver = Driver.own(group, timeout_s=timeout_s)
        self._slots: dict[int, Slot] = {}
        self._met: list[Tensor] = []  # parameters that ranks have alike; kept, so that nobody gets their ids
        self._watches, self._wrapping = [], Wrapping(self)
        self._left, self._copies = Leftovers(), Copies(optimizer)
        with self._wholly():
            size, checks = self._driver.world_size, check_every > 0
            load_kernels(self.method, size, map(gradient_like, parameters.values()), checks=checks)
            self._bucket_bytes = bucket_bytes
            self._enabled, self._finite = True, True
            self._check_every = check_every
            self._checks = str((check_every, repair, check_buffers, skip_bad_steps))
            self._order = next_order()
            self._exchange = TensorExchange(self.method, self._driver, waits=self._shares_memory)
            self.refresh()
            # After `refresh` has compared the ranks: tensors are broadcast by position, so another order
            # would swap layers.
            follow = self._copies.follow
            with follow(self._model.parameters()):
                broadcast_model(self._driver, self._model)
            self._guard = ReplicaGuard(
                self._model, self._driver, repair=repair, check_buffers=check_buffers, follow=follow
            )
            local = any(p.grad is not None for p in self._parameters.values())
            self._passes = Passes(local, skip_bad_steps, StepSettings(self._optimizers))
            self._leave_uncompiled()
            called = {id(model): model, id(self._model): self._model}.values()
            self._watch(called, self._mean)

    def _found(self) -> dict[str, nn.Parameter]:
        """Return what to synchronise, by name."""
        return synced_parameters(self._model, self._optimizers)

    def _passes_made(self) -> int:
        return self._passes.count

    def _accumulated(self, before: int) -> None:
        self._passes.accumulated(before)

    def refresh(self) -> None:
        """Find the parameters anew, on every rank alike; needed after unfreezing some, or `model.to(...)`.

        `optimizer.add_param_group` does this by itself. State of parameters that stay is kept, under other
        names, too; that of parameters that were replaced is dropped with a warning, and the new ones take
        rank 0's values.
        """
        parameters = self._found()
        settings = {"bucket_bytes": self._bucket_bytes, _SETTINGS: self._checks}
        met = {id(p) for p in self._met}
        new = [name for name, p in parameters.items() if self._met and id(self._owner(p)) not in met]
        types = {name: gradient_type(p) for name, p in parameters.items()}
        own = {f"gradient of {n}": str(t) for n, t in types.items() if t is not parameters[n].dtype}
        self._compare(parameters, {**settings, **own, "new parameters": new})
        thin = sparse_parameters(self._model)
        # autograd makes gradients about in the reverse of the order of definition.
        ready_order = {n: gradient_like(p) for n, p in reversed(parameters.items()) if id(p) not in thin}
        device = next(iter(parameters.values())).device
        share = self.method.share(self.world_size, device)
        buckets = assign(
            ready_order,
            self._bucket_bytes,
            head=share >= _HEAD_SHARE,
            tail=share >= _TAIL_SHARE,
            dense_below=self.method.dense_below,
        )
        before, now = vars(self).get("_parameters", {}), {id(p): name for name, p in parameters.items()}
        # `new` was compared above, so all ranks send the same tensors in the same order.
        with self._copies.follow(parameters[name] for name in new):
            broadcast_tensors(self._driver, [parameters[name].detach() for name in new])
        self._met = list(self._trained.parameters())
        kept = {name: now.get(id(p), "") for name, p in before.items()}
        if lost := sorted(set(self._exchange.arrange(buckets, device, kept)) & parameters.keys()):
            warnings.warn(
                f"parameters were replaced, {', '.join(lost[:_NAMED])} and {len(lost)} in all: what "
                f"{self.method} still owed to the old ones is dropped",
                RuntimeWarning,
                stacklevel=2,
            )
        old = self._slots
        for slot in old.values():
            slot.release()
        self._parameters = parameters
        by_bucket = [[parameters[name] for name in bucket.names] for bucket in buckets]
        self._slots = {id(p): Slot(i) for i, ps in enumerate(by_bucket) for p in ps}
        sparse = {p: Slot(-1) for p in parameters.values() if id(p) in thin}
        self._slots |= {id(p): slot for p, slot in sparse.items()}
        self._sparse = SparseFiller(sparse, self._exchange)
        for i in old.keys() & self._slots.keys():
            self._slots[i].follow(old[i])
        slots = [[self._slots[id(p)] for p in ps] for ps in by_bucket]
        self._filler = Filler(self._exchange, by_bucket, slots, self._shares_memory)
        self._hook(parameters.values())
        self._wrapping.watch(parameters.values(), self._members_of(parameters))

    def _leave_uncompiled(self) -> None:
        """Keep Dynamo, which traces what runs while a compiled training step does, out of the hooks."""
        for hook in (_hook, arrives, type(self)._on_gradient, GradientSync._on_gradient, GradientSync._take):
            torch._dynamo.decorators.skip(hook)  # a wrapper would cost a microsecond for each gradient
        # These two run once in a pass or in a bucket, where a wrapper costs nothing to speak of.
        self._begin_pass = torch.compiler.disable(self._begin_pass)  # type: ignore[method-assign]
        self._ready = torch.compiler.disable(self._ready)  # type: ignore[method-assign]

    def _hook(self, parameters: Iterable[nn.Parameter]) -> None:
        """Hook parameters that have a slot."""
        own = weakref.ref(self)
        for p in parameters:
            slot = self._slots[id(p)]
            owner = self._owner(p)
            slot.handles = [owner.register_post_accumulate_grad_hook(partial(_hook, own, slot))]
            if self._filler.lends(slot.bucket):
                slot.handles.append(owner.register_hook(unserializable_hook(partial(arrives, slot))))
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
            if len(hooks) > 1 and next(reversed(hooks)) != (ours := slot.handles[0].id):
                # The user's hooks, registered later, may still change the gradient. They run before the next
                # gradient's; from the next pass on ours is the last.
                hooks[ours] = hooks.pop(ours)  # C++ does not see what move_to_end does
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
            # Small tensors wait for one call: each by itself, between autograd's computations, takes 60 us
            # and not 10.
            if not hold.together or not hold.missing:
                self._ready(slot.bucket, parameter)

    def _ready(self, index: int, parameter: Tensor) -> None:
        """Fill in a gradient, and send the buckets that are full."""
        self._filler.fill(index, parameter)
        holds = self._filler.holds
        # By index, whichever is full first: ranks must send the same buckets in the same order.
        while self._next < len(holds) and not holds[self._next].missing:
            self._submit_next()

    def _begin_pass(self, task: int) -> None:
        refuse_nested()
        self._finite = True  # what the last exchange was says nothing of gradients that this pass makes
        if self._enabled:
            self._left.clear()  # also of what this pass does not reach, as a frozen layer
            self._check_pass()
            self._notify_join()  # awaited in `_end_pass`, so that the pass hides it
            at_end(task, self._order, self._end_pass)
            self._pass_id = task
            self._next = 0
            self._late: list[tuple[Slot, Tensor]] = []
            self._filler.begin()
            self._weigh()
        self._exchanging, self._seen = self._enabled, task
        self._passes.begun()

    def _check_pass(self) -> None:
        """Refuse to begin an exchange that cannot end well."""
        if self._fresh:
            refuse_taken(self._model, [])
            self._fresh = False
        self._driver.check_groupless()
        # An exchange that has ended sets it back; else the last pass broke off, or its exchange failed.
        if self._pass_id != -1:
            self._abandon()

    def _submit_next(self) -> None:
        self._filler.complete(self._next, self._passes.count)
        if self._driver.tracer is not None:
            self._driver.tracer.full(self._next)
        self._exchange.submit(self._next)
        self._next += 1

    @torch.no_grad()
    def _end_pass(self) -> None:
        while self._late:
            self._take(*self._late.pop())
        # Buckets with tensors that this pass did not use never got full, and other ranks wait for them.
        while self._next < len(self._filler.holds):
            self._submit_next()
        self._await_join()
        thin = self._sparse.used()
        extra = self._sparse.rounds(thin)
        used = [*self._filler.used(), *thin]
        # After `rounds`, which looks at the gradients: only now is `bad` that of this pass.
        flags, bad = self._passes.flags(), self._sparse.bad
        outcome = self._exchange.finish(used, flags, extra=extra, bad=bad, stop=self._asks())
        self._sent(outcome)
        self._pass_id = -1
        self._check_replicas()

    def _sent(self, outcome: Future[Outcome]) -> None:
        """Go on once all buckets are on their way: wait for the averages, which `.grad` then holds."""
        self._write_back(outcome.result())

    @torch.no_grad()
    def _write_back(self, outcome: Outcome) -> None:
        self._exchange.join_streams()  # before anything reads averages
        # Raises where ranks are at different passes, whose average must not become a gradient.
        self._passes.exchanged(outcome.any_flags, self._driver)
        self._hear(outcome.stop)
        self._finite = outcome.applied
        self._filler.write_back(outcome)
        self._sparse.write_back(outcome)
        if not self._finite and self._passes.skips:
            self._leave_bad()

    def _leave_bad(self) -> None:
        """Note what the exchange has left that is not finite, in case that it accumulates further."""
        self._left.take(bad_of(self._parameters.values()))

    @torch.no_grad()
    def take_part(self) -> None:
        """Average zeros with the others' gradients: this rank has no backward pass where they have one."""
        # DASO calls this outside of a backward pass, so nothing would ever run what `at_end` takes.
        self._check_pass()
        self._passes.begun()
        self._finite, self._next, self._late = True, 0, []
        self._filler.begin()
        self._weigh(idle=True)
        self._end_pass()

    def _check_step(
        self, optimizer: torch.optim.Optimizer, *, zeros: bool = False, again: bool = False
    ) -> None:
        """Refuse to apply a gradient that was never averaged: the ranks would drift apart silently."""
        # Schedulers such as OneCycleLR give an optimizer momentum when it is attached already.
        refuse_second_momentum(self.method, [optimizer])
        self._wrapping.look_before_step()
        self._passes.settings.look(self.method, optimizer)
        received = self._slots, self._pass_id != -1, self.finite
        self._passes.check_step(optimizer, *received, parameters=self._parameters.values(), zeros=zeros)

    def _skip_bad(self, optimizer: torch.optim.Optimizer, zeros: bool) -> None:
        parameters = self._parameters.values()
        self._passes.skip_bad(optimizer, self._slots, self.finite, zeros, parameters)

    def join(
        self, *, enable: bool = True, throw_on_early_termination: bool = False
    ) -> AbstractContextManager[Any]:
        """Let ranks have different numbers of batches: train inside `with sync.join():`.

        Each batch is one backward pass with an exchange. With several engines use
        `Join([first, second])`, in the order in which their backward passes come.

        Args:
            enable: False does nothing, for inputs that are known to be even.
            throw_on_early_termination: raise on all ranks as soon as one has run out.
        """
        if self._driver.world_size == 1:
            return nullcontext()
        return Join([self], enable, throw_on_early_termination)

    @property
    def join_device(self) -> torch.device:
        """Where the parameters live."""
        return next(self._model.parameters()).device

    @property
    def join_process_group(self) -> Any:
        """The group that was given when attaching, on which `Join` counts who is left."""
        return as_group(self._group) if self._group is not None else dist.group.WORLD

    def join_hook(self, **kwargs: Any) -> JoinHook:
        """Return what a rank does that has run out."""
        return _Shadow(self)

    def shadow(self) -> None:
        """Take part in one exchange of the others with zeros; see `join`."""
        if self._pass_id != -1:
            raise StenogradError("this rank's last backward pass did not finish: restart from a checkpoint")
        self._weigh(idle=True)
        for index in range(len(self._filler.holds)):
            self._filler.zero(index)
            self._exchange.submit(index)
        flags = self._passes.flags(shadow=True)
        used = [False] * len(self._slots)
        extra, stop = self._sparse.rounds(used), self._asks()
        outcome = self._exchange.finish(used, flags, extra=extra, stop=stop).result()
        self._exchange.join_streams()  # before the buckets are filled anew
        self._passes.follow(outcome.any_flags, self._driver)
        self._hear(outcome.stop)
        self._finite = outcome.applied
        for p in self._parameters.values():
            if not is_own(p):
                p.grad = None  # it may lie in the memory that was just used

    def take_from_last(self, last: bool) -> None:
        """Make all ranks equal to the lowest of those that ran out last; `last` tells if this is one."""
        Joinable.__init__(self)  # later passes are no part of the `with` block any more
        received = self._driver.run(gather(torch.tensor([int(last)], device="cpu")))
        lasts = [rank for rank, (other,) in enumerate(received) if bool(other)]
        if len(lasts) == len(received) or not lasts:
            return  # even inputs, so nothing differs
        with self._copies.follow(self._model.parameters()):
            broadcast_model(self._driver, self._model, lasts[0])
        for optimizer in self._optimizers:
            held: list[Tensor] = [p for group in optimizer.param_groups for p in group["params"]]
            take_states(self._driver, held, [optimizer.state] * len(held), lasts[0])
        self._passes.settings.share(self._driver, lasts[0])

    def _notify_join(self) -> None:
        """Tell `Join` that this rank takes part in one more exchange."""
        if self._join_config.enable:
            self._notice = Join.notify_join_context(self)

    def _await_join(self) -> None:
        notice, self._notice = self._notice, None
        if notice is not None:
            notice.wait()

    def _detach(self) -> None:
        for slot in self._slots.values():
            slot.release()
        self._left.forget()
        self._unwatch()
        if hasattr(self, "_exchange"):
            self._exchange.close()


def _hook(sync: Callable[[], GradientSync | None], slot: Slot, parameter: Tensor) -> None:
    """Tell an engine of a gradient.

    Python's garbage collector does not see what tensors' hooks hold. So the model holds its engine (see
    `Wrapping`), and its parameters only know of it: when the model goes, the engine and its process group go.
    """
    running = sync()
    if running is None:
        raise StenogradError("the attached model is gone: keep it as long as its parameters are trained")
    running._on_gradient(slot, parameter)


class _Shadow(JoinHook):
    def __init__(self, sync: GradientSync) -> None:
        self._sync = sync

    def main_hook(self) -> None:
        self._sync.shadow()

    def post_hook(self, is_last_joiner: bool) -> None:
        self._sync.take_from_last(is_last_joiner)
