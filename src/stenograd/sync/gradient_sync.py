"""Hooks on gradients, so that they are averaged when `backward()` returns."""

from __future__ import annotations

import warnings
from collections.abc import Mapping, Sequence
from concurrent.futures import Future
from typing import Any

import torch
from torch import Tensor, nn

from stenograd.catalog.method import MethodLike, method
from stenograd.comm.driver import Driver
from stenograd.comm.kernel_loading import load_kernels
from stenograd.comm.sparse_rows import sparse_parameters
from stenograd.comm.step_end import Outcome
from stenograd.comm.tensor_exchange import DEFAULT_BUCKET_BYTES, TensorExchange
from stenograd.data.buckets import assign
from stenograd.errors import StenogradError
from stenograd.launch.process_group import join
from stenograd.sync.attached import Attached, as_in_training
from stenograd.sync.backward_passes import Leftovers, Passes, bad_of, next_order
from stenograd.sync.closures import after_closure
from stenograd.sync.filling import Filler, Slot, SparseFiller, is_own
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
from stenograd.sync.hooks import Hooked
from stenograd.sync.other_optimizers import watch_others
from stenograd.sync.own_copies import Copies
from stenograd.sync.replica_guard import ReplicaGuard, check_interval
from stenograd.sync.step_settings import StepSettings

__all__ = ["DEFAULT_BUCKET_BYTES", "GradientSync"]


_NAMED = 3  # parameters that a warning lists
_SETTINGS = "check_every, repair, check_buffers, skip_bad_steps"
# Shares of the bytes from which the first, and the last, gradients get a bucket of their own. It is one more
# collective, about 1 ms, which a slow link saves manyfold: it is busy earlier, and the last bucket, which is
# on it when nothing is left to compute, is smaller.
_HEAD_SHARE, _TAIL_SHARE = 1 / 16, 1 / 32


class GradientSync(Hooked, Attached):
    """The running synchronisation of one model; made by `stenograd.distribute`, whose arguments it takes.

    Its collectives run on a process group of its own, so whatever else the program sends at the same time, in
    hooks, in its own backward functions or in threads, is not mixed up with them.

    Attributes:
        method: the `Method` in use.
        traffic: this rank's totals (`payload_bytes`, `moved_bytes`, `collectives`, `wait_s`).

    After `backward()`, gradients live in the buckets' memory, which the next pass fills again: copy one that
    is to outlive its step. A tensor that the program itself has made the gradient, such as a view of its own
    flat buffer, stays the gradient; the average is written into it.
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
        super().__init__()
        self.method = method(how)
        self.method.require_every_step("GradientSync")
        self._model, self._optimizers = unwrapped(model), as_optimizers(optimizer)
        refuse_taken(self._model, self._optimizers)
        check_interval(check_every, repair)
        refuse_second_momentum(self.method, self._optimizers)
        parameters = self._found()  # complain before connecting
        assign({}, bucket_bytes)
        join(timeout_s=timeout_s)
        self._group = group
        self._driver = Driver.own(group, timeout_s=timeout_s)
        self._slots: dict[int, Slot] = {}
        self._met: list[Tensor] = []  # parameters that are equal on all ranks; kept, so that ids stay theirs
        self._watches, self._wrapping = [], Wrapping(self)
        self._left = Leftovers()
        with self._wholly():
            load_kernels(
                self.method,
                self._driver.world_size,
                parameters.values(),
                checks=check_every > 0,
            )
            self._bucket_bytes = bucket_bytes
            self._enabled, self._finite = True, True
            self._check_every = check_every
            self._checks = str((check_every, repair, check_buffers, skip_bad_steps))
            self._order = next_order()
            self._exchange = TensorExchange(self.method, self._driver, waits=self._shares_memory)
            self.refresh()
            with Copies(optimizer).follow(self._model.parameters()):
                broadcast_model(self._driver, self._model)
            self._guard = ReplicaGuard(self._model, self._driver, repair=repair, check_buffers=check_buffers)
            local = any(p.grad is not None for p in self._parameters.values())
            self._passes = Passes(local, skip_bad_steps, StepSettings(self._optimizers))
            self._leave_uncompiled()
            self._watch({id(model): model, id(self._model): self._model}.values())
            watch = after_closure(self._check_step, lambda: self.step + self.skipped, self._mean)
            check = torch.compiler.disable(watch)
            self._watches += [o.register_step_pre_hook(check) for o in self._optimizers]
            self._watches += [watch_others(self)]

    @property
    def step(self) -> int:
        """Number of exchanges applied; equal on every rank."""
        return self._exchange.step

    @property
    def skipped(self) -> int:
        """Number of exchanges that left the compressor's state alone because a gradient was not finite."""
        return self._exchange.skipped

    @property
    def finite(self) -> bool:
        """Whether the last backward pass left finite averages, alike on all ranks; step only then."""
        return self._finite

    @property
    def repaired(self) -> int:
        """Number of checks that found the ranks' parameters unequal, and repaired them."""
        return self._guard.repaired

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
        new = [name for name, p in parameters.items() if self._met and id(p) not in met]
        self._compare(parameters, {**settings, "new parameters": new})
        thin = sparse_parameters(self._model)
        ready_order = {name: p for name, p in reversed(parameters.items()) if id(p) not in thin}
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
        broadcast_tensors(self._driver, [parameters[name].detach() for name in new])
        self._met = list(self._model.parameters())
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
            slot.handle.remove()
        self._parameters = parameters
        by_bucket = [[parameters[name] for name in bucket.names] for bucket in buckets]
        self._slots = {id(p): Slot(i) for i, ps in enumerate(by_bucket) for p in ps}
        sparse = {p: Slot(-1) for p in parameters.values() if id(p) in thin}
        self._slots |= {id(p): slot for p, slot in sparse.items()}
        self._sparse = SparseFiller(sparse, self.world_size)
        for i in old.keys() & self._slots.keys():
            self._slots[i].follow(old[i])
        slots = [[self._slots[id(p)] for p in ps] for ps in by_bucket]
        self._filler = Filler(self._exchange, by_bucket, slots, self._shares_memory)
        self._hook(parameters.values())
        self._wrapping.watch(parameters.values(), self._members_of(parameters))

    def state_dict(self) -> dict[str, Any]:
        """Return all that decides this rank's next exchange, by parameter name; save it on every rank."""
        return self._exchange.state_dict()

    @as_in_training
    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Continue from a saved `state_dict()`; the next steps equal an uninterrupted run's bit for bit.

        Raises:
            CheckpointError: it is of another format, method, rank, world size or model; nothing is changed.
        """
        self._exchange.load_state_dict(state)

    def close(self) -> None:
        """Detach from model and optimizer; safe to call twice."""
        if self._closed:
            return
        self._closed = True
        for slot in self._slots.values():
            if slot.handle is not None:
                slot.handle.remove()
        self._left.forget()
        self._unwatch()
        if hasattr(self, "_exchange"):  # else attaching failed before it
            self._exchange.close()
        self._driver.close()

    def shadow(self) -> None:
        """Take part in one exchange of the others with zeros; see `join`."""
        if self._pass_id != -1:
            raise StenogradError("this rank's last backward pass did not finish: restart from a checkpoint")
        for index in range(len(self._filler.holds)):
            self._filler.zero(index)
            self._exchange.submit(index)
        flags = self._passes.flags(shadow=True)
        used = [False] * len(self._slots)
        outcome = self._exchange.finish(used, flags, extra=self._sparse.rounds(used)).result()
        self._passes.follow(outcome.any_flags, self._driver)
        self._finite = outcome.applied
        for p in self._parameters.values():
            if not is_own(p):
                p.grad = None  # it may lie in the memory that was just used

    @torch.no_grad()
    def take_part(self) -> None:
        """Average zeros with the others' gradients: this rank has no backward pass where they have one."""
        self._check_pass()
        self._passes.begun()
        self._finite, self._next, self._late = True, 0, []
        self._filler.begin()
        self._end_pass()

    def _check_step(
        self, optimizer: torch.optim.Optimizer, *, zeros: bool = False, again: bool = False
    ) -> None:
        """Refuse to apply a gradient that was never averaged: the ranks would drift apart silently."""
        self._wrapping.look_before_step()
        self._passes.settings.look()
        told = self._slots, self._pass_id != -1, self._finite
        self._passes.check_step(optimizer, *told, parameters=self._parameters.values(), zeros=zeros)

    def _skip_bad(self, optimizer: torch.optim.Optimizer, zeros: bool) -> None:
        parameters = self._parameters.values()
        self._passes.skip_bad(optimizer, self._slots, self._finite, zeros, parameters)

    @torch.no_grad()
    def _end_pass(self) -> None:
        while self._late:
            self._take(*self._late.pop())
        while self._next < len(self._filler.holds):
            self._submit_next()
        self._await_join()
        thin = self._sparse.used()
        extra = self._sparse.rounds(thin)
        used = [*self._filler.used(), *thin]
        outcome = self._exchange.finish(used, self._passes.flags(), extra=extra, bad=self._sparse.bad)
        self._sent(outcome)
        self._pass_id = -1
        due = self._check_every and (self.step + self.skipped) % self._check_every == 0
        if due and not self._passes.shadowed:  # a rank that ran out of inputs stays behind until the end
            self._guard.check(self.step)

    def _sent(self, outcome: Future[Outcome]) -> None:
        """Go on once all buckets are on their way: wait for the averages, which `.grad` then holds."""
        self._write_back(outcome.result())

    @torch.no_grad()
    def _write_back(self, outcome: Outcome) -> None:
        self._exchange.join_streams()
        self._passes.exchanged(outcome.any_flags, self._driver)
        self._finite = outcome.applied
        self._filler.write_back(outcome)
        self._sparse.write_back(outcome)
        if not self._finite and self._passes.skips:
            self._leave_bad()

    def _leave_bad(self) -> None:
        """Note what the exchange has left that is not finite, in case that it accumulates further."""
        self._left.take(bad_of(self._parameters.values()))
