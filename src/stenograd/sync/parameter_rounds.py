"""Parameters averaged in rounds: every rank trains by itself for some steps, then all meet (local SGD)."""

from __future__ import annotations

import threading
import warnings
import weakref
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn

from stenograd.catalog.method import Method, method
from stenograd.comm.driver import Driver
from stenograd.compression.contract import Compressor
from stenograd.data.finite import is_finite
from stenograd.errors import CheckpointError, ConfigError, NonFiniteError, StenogradError
from stenograd.launch.process_group import join
from stenograd.schedules.local import Local
from stenograd.sync.attached import Attached
from stenograd.sync.backward_passes import at_end, next_order, refuse_nested
from stenograd.sync.handshake import (
    Wrapping,
    as_optimizers,
    broadcast_model,
    refuse_taken,
    synced_parameters,
    unwrapped,
)
from stenograd.sync.parameter_averaging import ParameterAverager, average
from stenograd.sync.replica_guard import ReplicaGuard, check_interval

__all__ = ["ParameterSync"]

_FORMAT = 1  # of state_dict(); a reader refuses others
_graph_task = torch._C._current_graph_task_id


def _on_gradient(sync: weakref.ref[ParameterSync], _: Tensor) -> None:
    running = sync()
    if running is not None:
        running._on_gradient(_graph_task())


def _entries(module: nn.Module) -> Iterator[nn.Module]:
    """Yield what a program calls: the module, or what it contains where it has no forward pass of its own."""
    if type(module).forward is not nn.Module.forward:
        yield module
    else:
        for child in module.children():
            yield from _entries(child)


class ParameterSync(Attached):
    """The running synchronisation of a model whose parameters are averaged every H steps; see `Local`.

    Made by `stenograd.distribute`, whose arguments it takes. The clock counts finished backward passes
    outside `no_sync()`, because all ranks make equally many of those, while one rank may skip an optimizer
    step. A round is held when all given optimizers have stepped after the pass that made it due; if a step
    was skipped or optimizers step in turn, before the next training forward pass of the model (or, in a
    container without one, of what it contains), when the others have stepped too, or by `flush()`.

    Attributes:
        round: number of rounds held; equal on every rank.
        skipped: number of this rank's passes whose steps changed nothing, because a gradient was not finite.
    """

    def __init__(
        self,
        model: nn.Module,
        optimizer: torch.optim.Optimizer | Sequence[torch.optim.Optimizer],
        how: str | Method | Compressor,
        *,
        group: Any = None,
        bucket_bytes: int,
        timeout_s: float = 300.0,
        check_every: int = 0,
        repair: bool = False,
        check_buffers: bool = False,
        skip_bad_steps: bool = True,
    ) -> None:
        self.method = method(how)
        schedule = self.method.schedule
        if not isinstance(schedule, Local):
            raise ConfigError(
                f"parameters are averaged by a schedule such as local:every=8, got {self.method}"
            )
        self._schedule, self._each_round = schedule, self.method.each_round()
        self._exact = self._each_round.compressor.lossless
        self._model, self._optimizers = unwrapped(model), as_optimizers(optimizer)
        refuse_taken(self._model, self._optimizers)
        check_interval(check_every, repair)
        if check_every and not self._exact:
            raise ConfigError(
                f"check_every must be 0 with {self.method}, got {check_every}: what a rank has not sent yet "
                "stays in its parameters, so replicas differ; leave it out, or send all by a schedule alone"
            )
        synced_parameters(self._model, self._optimizers)  # complain before connecting
        join(timeout_s=timeout_s)
        self._driver = Driver.own(group, timeout_s=timeout_s)
        self._bucket_bytes, self._check_every = bucket_bytes, check_every
        self._skips = skip_bad_steps
        self._settings = str((check_every, repair, check_buffers, skip_bad_steps))
        self.round = self.skipped = self._passes = 0
        self._order, self._seen = next_order(), -1
        self._due = self._closed = self._warned = self._counted = False
        self._finite: bool | None = True  # None: not looked at yet
        self._stepped: set[int] = set()
        self._lock = threading.Lock()
        self._handles: list[Any] = []
        self._averager: ParameterAverager | None = None
        self._wrapping = Wrapping(self)
        self.refresh()
        self._guard = ReplicaGuard(self._model, self._driver, repair=repair, check_buffers=check_buffers)
        self._watch({id(model): model, id(self._model): self._model}.values())
        after, before = torch.compiler.disable(self._after_step), torch.compiler.disable(self._before_step)
        self._watches += [o.register_step_pre_hook(before) for o in self._optimizers]
        self._watches += [o.register_step_post_hook(after) for o in self._optimizers]
        forward = torch.compiler.disable(self._before_forward)
        self._watches += [module.register_forward_pre_hook(forward) for module in _entries(self._model)]

    @property
    def step(self) -> int:
        """Number of this rank's finished backward passes outside `no_sync()`; equal on every rank."""
        return self._passes

    @property
    def finite(self) -> bool:
        """Whether the last backward pass of this rank left finite gradients; step only then."""
        if self._finite is None:
            grads = (p.grad for p in self._parameters.values())
            self._finite = all(is_finite(g) for g in grads if g is not None)
        return self._finite

    @property
    def pending(self) -> bool:
        """Whether a round is due."""
        return self._due

    @property
    def repaired(self) -> int:
        """Number of checks that found the ranks' parameters unequal, and repaired them."""
        return self._guard.repaired

    def refresh(self) -> None:
        """Find the parameters anew, on every rank alike; needed after unfreezing some, or `model.to(...)`.

        All ranks then start from rank 0's, as at the beginning, and from nothing owed.
        """
        self._hold_if_due()
        parameters = synced_parameters(self._model, self._optimizers)
        settings = {"bucket_bytes": self._bucket_bytes, "settings": self._settings}
        self._compare(parameters, settings)
        broadcast_model(self._driver, self._model)
        if self._averager is not None:
            self._averager.close()
        itemsize = max(p.element_size() for p in parameters.values())
        chunk = max(self._bucket_bytes // max(itemsize, 4), 1)
        self._averager = ParameterAverager(parameters, self._driver, self._each_round, chunk=chunk)
        self._averager.anchor()
        for handle in self._handles:
            handle.remove()
        hook = partial(_on_gradient, weakref.ref(self))
        torch._dynamo.decorators.skip(_on_gradient)
        self._handles = [p.register_post_accumulate_grad_hook(hook) for p in parameters.values()]
        self._parameters = parameters
        self._wrapping.watch(parameters.values())

    def flush(self) -> None:
        """Hold the round that is due because a step was skipped; needed once, before the last export."""
        self._hold_if_due()

    @contextmanager
    def consensus(self) -> Iterator[None]:
        """Put the exact mean of the ranks' parameters in place for a `with` block, on all ranks.

        Right after an exact round they are in place already, and nothing is sent.
        """
        self._hold_if_due()
        if self._exact and self._passes % self._schedule.every == 0:
            yield
            return
        tensors = [*self._parameters.values(), *self._buffers()]
        own = [t.detach().clone() for t in tensors]
        average([t.data for t in tensors], self._driver, in_order=True)
        try:
            yield
        finally:
            with torch.no_grad():
                for t, mine in zip(tensors, own, strict=True):
                    t.copy_(mine)

    def state_dict(self) -> dict[str, Any]:
        """Return what decides the next round on this rank, besides the model and its optimizer.

        A round that is due is held first, so call it on all ranks.
        """
        self._hold_if_due()
        assert self._averager is not None
        counters = {"passes": self._passes, "round": self.round, "skipped": self.skipped}
        return {**self._identity(), **counters, "averager": self._averager.state_dict()}

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Continue from a saved `state_dict()`, also in mid-round; load the model and its optimizer, too.

        Raises:
            CheckpointError: it is of another format, method, rank, world size or model; nothing is changed.
        """
        for key, want in self._identity().items():
            if (got := state.get(key, "nothing")) != want:
                advice = "save it between rounds to load it elsewhere" if key == "world_size" else ""
                raise CheckpointError(
                    f"the checkpoint's {key} must be {want!r}, got {got!r}: load it where it was saved"
                    + (f"; {advice}" if advice else "")
                )
        assert self._averager is not None
        self._averager.load_state_dict(state["averager"])
        self._passes, self.round = int(state["passes"]), int(state["round"])
        self.skipped = int(state["skipped"])
        self._due, self._finite = False, True
        self._stepped.clear()

    def join(self, **_: Any) -> Any:
        """Refuse ranks with different numbers of batches.

        Raises:
            StenogradError: always: a rank without batches would have nothing to average.
        """
        raise StenogradError(
            f"{self.method} needs as many batches on every rank: drop the rest of longer inputs, or average "
            "gradients in every step (leave out what stands before the slash), where join() works"
        )

    def close(self) -> None:
        """Detach from model and optimizer; safe to call twice."""
        if self._closed:
            return
        self._closed = True
        for handle in self._handles:
            handle.remove()
        self._unwatch()
        if self._averager is not None:
            self._averager.close()
        self._driver.close()

    def _identity(self) -> dict[str, Any]:
        return {
            "format": _FORMAT,
            "method": self.method.text,
            "rank": self.rank,
            "world_size": self.world_size,
        }

    def _buffers(self) -> list[Tensor]:
        """Return the floating buffers that rounds average."""
        if self._schedule.buffers == "keep":
            return []
        return [b for b in self._model.buffers() if b.is_floating_point()]

    def _on_gradient(self, task: int) -> None:
        """Note a backward pass when it makes its first gradient."""
        with self._lock:
            if task == self._seen:
                return
            self._seen = task
        refuse_nested()
        self._driver.check_groupless()
        self._finite, self._counted = None, False
        if self._enabled:
            at_end(task, self._order, self._end_pass)

    def _end_pass(self) -> None:
        self._passes += 1
        if not self._due:  # else the steps after an earlier pass count: optimizers may step in turn
            self._stepped.clear()
            self._due = self._passes % self._schedule.every == 0

    def _before_step(self, optimizer: torch.optim.Optimizer, *_: Any) -> None:
        """Let a step whose gradients are not finite change nothing; only this rank skips it."""
        if not self._skips or self.finite:
            return
        if not self._counted:  # several optimizers step after one pass
            self._counted = True
            self.skipped += 1
        for group in optimizer.param_groups:
            for p in group["params"]:
                p.grad = None
        if not self._warned:
            self._warned = True
            warnings.warn(
                f"a gradient of rank {self.rank} was not finite: this optimizer.step() changes nothing on "
                "this rank; later ones are only counted, in `skipped` (skip_bad_steps=False turns this off)",
                RuntimeWarning,
                stacklevel=4,
            )

    def _after_step(self, optimizer: torch.optim.Optimizer, *_: Any) -> None:
        self._stepped.add(id(optimizer))
        if self._due and len(self._stepped) == len(self._optimizers):
            self._hold_if_due()

    def _before_forward(self, module: nn.Module, _: Any) -> None:
        """Hold a round that a skipped step left due, before the parameters are used again."""
        if module.training and torch.is_grad_enabled():
            self._hold_if_due()

    @torch.no_grad()
    def _hold_if_due(self) -> None:
        """Average the parameters, and the floating buffers.

        Raises:
            NonFiniteError: on every rank, if some rank's parameters are not finite; all keep their own.
        """
        if not self._due or self._averager is None:
            return
        self._due = False
        if self._exact:
            sound = self._averager.replace(in_order=True)
        else:
            self._averager.pack()
            self._averager.send()
            sound = self._averager.merge(1.0)
        if not sound:
            raise NonFiniteError(
                f"round {self.round} of {self.method} found parameters that are not finite on a rank: lower "
                "the learning rate or clip gradients, and go back to a checkpoint"
            )
        if buffers := self._buffers():
            average(buffers, self._driver, in_order=True)
        self.round += 1
        if self._check_every and self.round % self._check_every == 0:
            self._guard.check(self.round)
