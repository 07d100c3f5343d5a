"""`laconic.distribute`: hooks on a model's gradients, so that they are averaged when `backward()` returns."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from concurrent.futures import Future
from contextlib import contextmanager
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn

from laconic.attach import broadcast_model, compare, refuse_taken, synced_parameters
from laconic.bucket import assign
from laconic.compressor import Compressor
from laconic.drive import Driver
from laconic.errors import LaconicError
from laconic.exchanger import Exchanger, Outcome
from laconic.groups import join
from laconic.guard import ReplicaGuard, check_interval
from laconic.kernels.backend import wanted
from laconic.parsing import Method, method
from laconic.passes import Passes
from laconic.tracing import MAX_EVENTS, Tracing
from laconic.traffic import Traffic
from laconic.version import __version__

__all__ = ["DEFAULT_BUCKET_BYTES", "GradientSync", "distribute"]

DEFAULT_BUCKET_BYTES = 4 << 20


def distribute(
    model: nn.Module,
    optimizer: torch.optim.Optimizer | Sequence[torch.optim.Optimizer],
    method: str | Method | Compressor = "dense",
    *,
    group: Any = None,
    bucket_bytes: int = DEFAULT_BUCKET_BYTES,
    timeout_s: float = 300.0,
    check_every: int = 0,
    repair: bool = False,
    check_buffers: bool = False,
) -> GradientSync:
    """Make every `loss.backward()` leave gradients that are averaged over all ranks.

    Model, optimizer and training loop stay yours: clipping, GradScaler, schedulers and accumulation work as
    before. Rank 0's parameters and buffers are broadcast here, so all ranks start equal.

    Args:
        model: the same on every rank; frozen, tied and unused parameters are fine.
        optimizer: one or several, holding the model's parameters.
        method: how gradients travel, as text such as "topk:ratio=0.01" (see `laconic methods`).
        group: process group; None for all ranks. Without an initialised torch.distributed the ranks are
            found from the launcher's variables (torchrun, mpiexec, srun), or this process is alone.
        bucket_bytes: gradients travel in buckets of at most this size; a larger tensor is its own bucket.
        timeout_s: seconds after which a silent peer is an error.
        check_every: after every so many exchanges, compare the ranks' parameters bit for bit; 0 for never.
        repair: overwrite parameters that differ by the majority's and warn, instead of raising.
        check_buffers: compare and repair buffers too.

    Returns:
        The running synchronisation: `no_sync()`, `traffic`, `state_dict()`, `close()`, ...

    Raises:
        MethodError: unknown method or key, or a value outside its range.
        ConfigError: nothing to train, or the optimizer holds other parameters than the model's.
        MismatchError: the ranks' models, methods or versions differ (raised on every rank).
        PeerLost: a rank did not answer within timeout_s.

    `backward()` raises ReplicaDivergence, on all ranks, where a check finds a difference; see `ReplicaGuard`.

    Example:
        >>> import torch, laconic
        >>> model = torch.nn.Linear(4, 2)
        >>> optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
        >>> sync = laconic.distribute(model, optimizer, "topk:ratio=0.5")
        >>> model(torch.ones(8, 4)).sum().backward()  # gradients are averaged now
        >>> optimizer.step()
        >>> sync.close()
    """
    kept: dict[str, Any] = {"group": group, "bucket_bytes": bucket_bytes, "timeout_s": timeout_s}
    guard: dict[str, Any] = {"check_every": check_every, "repair": repair, "check_buffers": check_buffers}
    return GradientSync(model, optimizer, method, **kept, **guard)


class GradientSync:
    """The running synchronisation of one model; made by `laconic.distribute`, whose arguments it takes.

    Attributes:
        method: the `Method` in use.
        traffic: this rank's totals (`payload_bytes`, `moved_bytes`, `collectives`, `wait_s`).

    After `backward()`, gradients live in the buckets' memory, which the next pass fills again: copy one that
    is to outlive its step.
    """

    # Whether gradients may live where they are averaged, which saves two copies.
    _shares_memory = True

    def __init__(
        self,
        model: nn.Module,
        optimizer: torch.optim.Optimizer | Sequence[torch.optim.Optimizer],
        how: str | Method | Compressor = "dense",
        *,
        group: Any = None,
        bucket_bytes: int = DEFAULT_BUCKET_BYTES,
        timeout_s: float = 300.0,
        check_every: int = 0,
        repair: bool = False,
        check_buffers: bool = False,
    ) -> None:
        self.method = method(how)
        self._flats: dict[int, Tensor] = {}
        self._views: dict[int, Tensor] = {}
        self._model = model
        self._optimizers = [optimizer] if isinstance(optimizer, torch.optim.Optimizer) else list(optimizer)
        refuse_taken(model, self._optimizers)
        check_interval(check_every, repair)
        synced_parameters(model, self._optimizers)  # complain before any connection is made
        assign({}, bucket_bytes)
        join(timeout_s=timeout_s)
        self._driver = self._connect(group, timeout_s)
        self._bucket_bytes = bucket_bytes
        self._enabled = True
        self._closed = False
        self._check_every, self._checks = check_every, str((check_every, repair, check_buffers))
        self._finite = True
        self._handles: list[Any] = []
        self._exchanger = Exchanger(self.method, self._driver, waits=self._shares_memory)
        self.refresh()
        broadcast_model(self._driver, model)
        self._guard = ReplicaGuard(model, self._driver, repair=repair, check_buffers=check_buffers)
        self._passes = Passes(local=any(p.grad is not None for p in self._parameters.values()))
        self._watch_optimizers()

    @property
    def traffic(self) -> Traffic:
        """Bytes, collectives and seconds waited of this rank since attaching."""
        return self._driver.traffic

    @property
    def step(self) -> int:
        """Number of exchanges applied; equal on every rank."""
        return self._exchanger.step

    @property
    def skipped(self) -> int:
        """Number of exchanges that left the compressor's state alone because a gradient was not finite."""
        return self._exchanger.skipped

    @property
    def finite(self) -> bool:
        """Whether the last backward pass left finite averages, alike on all ranks; step only then."""
        return self._finite

    @property
    def repaired(self) -> int:
        """Number of checks that found the ranks' parameters unequal, and repaired them."""
        return self._guard.repaired

    @property
    def rank(self) -> int:
        """This process's rank in the group."""
        return self._driver.rank

    @property
    def world_size(self) -> int:
        """Number of ranks in the group."""
        return self._driver.world_size

    @property
    def enabled(self) -> bool:
        """Whether backward passes exchange gradients; set it alike on all ranks, between passes."""
        return self._enabled

    @enabled.setter
    def enabled(self, value: bool) -> None:
        self._enabled = value

    @contextmanager
    def no_sync(self) -> Iterator[None]:
        """Accumulate gradients locally: backward passes inside exchange nothing, the next one outside all.

        Every rank must use it for the same passes.
        """
        before, self.enabled = self.enabled, False
        passes = self._passes.count
        try:
            yield
        finally:
            self.enabled = before
            self._passes.accumulated(passes)

    def refresh(self) -> None:
        """Find the parameters anew, on every rank alike; needed after unfreezing some.

        `optimizer.add_param_group` does this by itself. State of parameters that stay is kept.
        """
        parameters = synced_parameters(self._model, self._optimizers)
        ready_order = dict(reversed(parameters.items()))
        buckets = assign(ready_order, self._bucket_bytes, tail=self.method.compressor.bulky)
        compare(self._driver, self._description(parameters), buckets[0].device)
        self._exchanger.arrange(buckets)
        self._parameters = parameters
        self._by_bucket = [[parameters[name] for name in b.names] for b in buckets]
        self._place = {id(p): i for i, ps in enumerate(self._by_bucket) for p in ps}
        self._flats, self._views = {}, {}
        self._pass_id = -1
        for handle in self._handles:
            handle.remove()
        self._handles = [p.register_post_accumulate_grad_hook(self._on_gradient) for p in parameters.values()]

    def trace(self, path: str, *, max_events: int = MAX_EVENTS) -> Tracing:
        """Trace what a `with` block does, on all ranks, to a file for Perfetto; see `Tracing`."""
        return Tracing(path, self._driver, self._model, self._optimizers, max_events=max_events)

    def flush(self) -> None:
        """Finish what is under way. Gradient methods leave nothing under way between steps."""

    def state_dict(self) -> dict[str, Any]:
        """Return all that decides this rank's next exchange, by parameter name; save it on every rank."""
        return self._exchanger.state_dict()

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Continue from a saved `state_dict()`; the next steps equal an uninterrupted run's bit for bit.

        Raises:
            CheckpointError: it is of another format, method, rank, world size or model; nothing is changed.
        """
        self._exchanger.load_state_dict(state)

    def close(self) -> None:
        """Detach from model and optimizer; safe to call twice."""
        if self._closed:
            return
        self._closed = True
        for handle in self._handles:
            handle.remove()
        for watch in self._watches:
            watch.remove()
        for optimizer in self._optimizers:
            optimizer.__dict__.pop("add_param_group", None)
        self._exchanger.close()
        self._driver.close()

    def __enter__(self) -> GradientSync:
        return self

    def __exit__(self, *exc: object) -> None:
        self.close()

    def _connect(self, group: Any, timeout_s: float) -> Driver:
        """Make the way to the other ranks, apart from every other collective of the program."""
        return Driver.own(group, timeout_s=timeout_s)

    def _description(self, parameters: Mapping[str, nn.Parameter]) -> dict[str, Any]:
        shapes = {f"parameter {n}": f"{tuple(p.shape)} {p.dtype}" for n, p in parameters.items()}
        buffers = {f"buffer {n}": f"{tuple(b.shape)} {b.dtype}" for n, b in self._model.named_buffers()}
        versions = {"laconic version": __version__, "torch version": torch.__version__.split("+")[0]}
        return {
            **versions,
            "method": self.method.text,
            "kernels": wanted(),
            "bucket_bytes": self._bucket_bytes,
            "check_every, repair, check_buffers": self._checks,
            "parameters": len(shapes),
            **shapes,
            **buffers,
        }

    def _watch_optimizers(self) -> None:
        for optimizer in self._optimizers:
            optimizer.__dict__["add_param_group"] = partial(self._add_param_group, optimizer)
        self._watches = [o.register_step_pre_hook(self._check_step) for o in self._optimizers]

    def _check_step(self, optimizer: torch.optim.Optimizer, *_: Any) -> None:
        """Refuse to apply a gradient that was never averaged: the ranks would drift apart silently."""
        self._passes.check_step(optimizer, self._place, self._pass_id != -1)

    def _add_param_group(self, optimizer: torch.optim.Optimizer, group: dict[str, Any]) -> None:
        type(optimizer).add_param_group(optimizer, group)
        self.refresh()

    def _on_gradient(self, parameter: Tensor) -> None:
        current = torch._C._current_graph_task_id()
        self._passes.saw(current)
        if not self._enabled:
            return
        self._passes.check_gradient(parameter.grad)
        if self._pass_id != current:
            self._begin_pass(current)
        index = self._place[id(parameter)]
        self._missing[index].discard(id(parameter))
        self._fill(parameter)  # now, while the gradient is in the cache
        while self._next < len(self._missing) and not self._missing[self._next]:
            self._submit_next()

    def _begin_pass(self, graph_task: int) -> None:
        if self._pass_id != -1 and self.world_size == 1:
            self._exchanger.abandon()  # an interrupted pass harms nobody else
        elif self._pass_id != -1:
            raise LaconicError(
                "the last backward pass did not finish (an error in it, or a nested backward such as "
                "checkpoint(use_reentrant=True)), so the ranks may be out of step: restart from a checkpoint"
            )
        self._pass_id = graph_task
        self._next = 0
        self._missing = [{id(p) for p in ps} for ps in self._by_bucket]
        torch.autograd.Variable._execution_engine.queue_callback(self._end_pass)

    @torch.no_grad()
    def _fill(self, parameter: Tensor) -> None:
        """Put a gradient where it is exchanged; if it may, it lives there from now on."""
        grad, scale, index = parameter.grad, self._exchanger.scale, self._place[id(parameter)]
        if grad is None:
            self._view(parameter, index).zero_()  # a parameter without a gradient counts as zeros
        elif self._alone(parameter, grad, index) and self._exchanger.lend(index, grad.view(-1)):
            if scale != 1.0:
                grad.mul_(scale)
        else:
            view = self._view(parameter, index)
            if scale != 1.0:
                torch.mul(grad, scale, out=view)
            elif grad.data_ptr() != view.data_ptr():
                view.copy_(grad)
            if self._shares_memory and parameter.is_contiguous():
                parameter.grad = view

    def _alone(self, parameter: Tensor, grad: Tensor, index: int) -> bool:
        """Return whether a gradient is a whole bucket in memory of its own, so that it need not be copied."""
        return (
            self._shares_memory
            and len(self._by_bucket[index]) == 1
            and parameter.is_contiguous()
            and grad.is_contiguous()
            and not grad.requires_grad
            and (grad.dtype, grad.device) == (parameter.dtype, parameter.device)
            and grad.untyped_storage().nbytes() == grad.numel() * grad.element_size() > 0
        )

    def _view(self, parameter: Tensor, index: int) -> Tensor:
        """Return a parameter's place in this step's flat tensor."""
        flat = self._exchanger.flat(index)
        if self._flats.get(index) is not flat:
            self._flats[index] = flat
            places = self._exchanger.buckets[index].views(flat)
            self._views |= dict(zip(map(id, self._by_bucket[index]), places, strict=True))
        return self._views[id(parameter)]

    def _submit_next(self) -> None:
        index = self._next
        if self._missing[index]:
            for p in self._by_bucket[index]:
                if id(p) in self._missing[index]:
                    self._fill(p)
        self._exchanger.submit(index)
        self._next += 1

    @torch.no_grad()
    def _end_pass(self) -> None:
        while self._next < len(self._by_bucket):
            self._submit_next()
        flags = [p.grad is not None for ps in self._by_bucket for p in ps]
        self._sent(self._exchanger.finish(flags + self._passes.flags()))
        self._pass_id = -1
        if self._check_every and (self.step + self.skipped) % self._check_every == 0:
            self._guard.check(self.step)

    def _sent(self, outcome: Future[Outcome]) -> None:
        """Go on once all buckets are on their way: wait for the averages, which `.grad` then holds."""
        self._write_back(outcome.result())

    def _write_back(self, outcome: Outcome) -> None:
        self._exchanger.join_streams()
        self._passes.exchanged(outcome.any_flags)
        self._finite = outcome.applied
        used = iter(outcome.any_flags)
        for bucket, ps, average in zip(
            self._exchanger.buckets, self._by_bucket, outcome.averages, strict=True
        ):
            for p, view in zip(ps, bucket.views(average), strict=True):
                if not next(used):
                    continue  # no rank used it: the optimizer must not see a gradient
                if self._shares_memory and p.is_contiguous():
                    if p.grad is None or p.grad.data_ptr() != view.data_ptr():
                        p.grad = view
                elif p.grad is None:
                    p.grad = view.clone()
                else:
                    p.grad.copy_(view)
