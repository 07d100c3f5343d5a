"""`laconic.distribute`: hooks on a model's gradients, so that they are averaged when `backward()` returns."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from concurrent.futures import Future
from contextlib import contextmanager
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn

from laconic.attach import broadcast_model, compare, synced_parameters
from laconic.bucket import assign
from laconic.compressor import Compressor
from laconic.drive import Driver
from laconic.errors import LaconicError, TensorTypeError
from laconic.exchanger import Exchanger, Outcome
from laconic.groups import init
from laconic.parsing import Method, method
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

    Returns:
        The running synchronisation: `no_sync()`, `traffic`, `state_dict()`, `close()`, ...

    Raises:
        MethodError: unknown method or key, or a value outside its range.
        ConfigError: nothing to train, or the optimizer holds other parameters than the model's.
        MismatchError: the ranks' models, methods or versions differ (raised on every rank).
        PeerLost: a rank did not answer within timeout_s.

    Example:
        >>> import torch, laconic
        >>> model = torch.nn.Linear(4, 2)
        >>> optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
        >>> sync = laconic.distribute(model, optimizer, "topk:ratio=0.5")
        >>> model(torch.ones(8, 4)).sum().backward()  # gradients are averaged now
        >>> optimizer.step()
        >>> sync.close()
    """
    return GradientSync(model, optimizer, method, group=group, bucket_bytes=bucket_bytes, timeout_s=timeout_s)


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
    ) -> None:
        self.method = method(how)
        self._flats: list[Tensor] = []
        self._views: dict[int, Tensor] = {}
        self._model = model
        self._optimizers = [optimizer] if isinstance(optimizer, torch.optim.Optimizer) else list(optimizer)
        synced_parameters(model, self._optimizers)  # complain before any connection is made
        assign({}, bucket_bytes)
        init(timeout_s=timeout_s)
        self._driver = self._connect(group, timeout_s)
        self._bucket_bytes = bucket_bytes
        self._enabled = True
        self._closed = False
        self._handles: list[Any] = []
        self._exchanger = Exchanger(self.method, self._driver, waits=self._shares_memory)
        self.refresh()
        broadcast_model(self._driver, model)
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
        try:
            yield
        finally:
            self.enabled = before

    def refresh(self) -> None:
        """Find the parameters anew, on every rank alike; needed after unfreezing some.

        `optimizer.add_param_group` does this by itself. State of parameters that stay is kept.
        """
        parameters = synced_parameters(self._model, self._optimizers)
        ready_order = dict(reversed(parameters.items()))
        buckets = assign(ready_order, self._bucket_bytes)
        compare(self._driver, self._description(parameters), buckets[0].device)
        self._exchanger.arrange(buckets)
        self._parameters = parameters
        self._by_bucket = [[parameters[name] for name in b.names] for b in buckets]
        self._place = {id(p): i for i, ps in enumerate(self._by_bucket) for p in ps}
        self._flats, self._views = [], {}
        self._pass_id = -1
        for handle in self._handles:
            handle.remove()
        self._handles = [p.register_post_accumulate_grad_hook(self._on_gradient) for p in parameters.values()]

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
        """Make the way to the other ranks."""
        return Driver(group, timeout_s=timeout_s)

    def _description(self, parameters: Mapping[str, nn.Parameter]) -> dict[str, Any]:
        shapes = {f"parameter {n}": f"{tuple(p.shape)} {p.dtype}" for n, p in parameters.items()}
        buffers = {f"buffer {n}": f"{tuple(b.shape)} {b.dtype}" for n, b in self._model.named_buffers()}
        versions = {"laconic version": __version__, "torch version": torch.__version__.split("+")[0]}
        return {
            **versions,
            "method": self.method.text,
            "bucket_bytes": self._bucket_bytes,
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
        for group in optimizer.param_groups:
            for p in group["params"]:
                if p.grad is not None and p.requires_grad and id(p) not in self._place:
                    raise LaconicError(
                        f"a parameter of shape {tuple(p.shape)} has a gradient that was not averaged: after "
                        "unfreezing parameters call sync.refresh() on every rank"
                    )

    def _add_param_group(self, optimizer: torch.optim.Optimizer, group: dict[str, Any]) -> None:
        type(optimizer).add_param_group(optimizer, group)
        self.refresh()

    def _on_gradient(self, parameter: Tensor) -> None:
        if not self._enabled:
            return
        if parameter.grad is not None and parameter.grad.layout is not torch.strided:
            raise TensorTypeError(
                f"gradients must be dense, got {parameter.grad.layout}: use Embedding(sparse=False)"
            )
        current = torch._C._current_graph_task_id()
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
        self._cut_flats()
        torch.autograd.Variable._execution_engine.queue_callback(self._end_pass)

    def _cut_flats(self) -> None:
        """Find each parameter's place in this step's flat tensors."""
        for index, (bucket, ps) in enumerate(zip(self._exchanger.buckets, self._by_bucket, strict=True)):
            flat = self._exchanger.flat(index)
            if index == len(self._flats) or self._flats[index] is not flat:
                del self._flats[index:]
                self._flats.append(flat)
                self._views |= dict(zip(map(id, ps), bucket.views(flat), strict=True))

    @torch.no_grad()
    def _fill(self, parameter: Tensor) -> None:
        """Copy a gradient to its place; if it may, it lives there from now on."""
        view, grad, scale = self._views[id(parameter)], parameter.grad, self._exchanger.scale
        if grad is None:
            view.zero_()  # a parameter without a gradient counts as zeros
            return
        if scale != 1.0:
            torch.mul(grad, scale, out=view)
        elif grad.data_ptr() != view.data_ptr():
            view.copy_(grad)
        if self._shares_memory and parameter.is_contiguous():
            parameter.grad = view

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
        self._sent(self._exchanger.finish(flags))
        self._pass_id = -1

    def _sent(self, outcome: Future[Outcome]) -> None:
        """Go on once all buckets are on their way: wait for the averages, which `.grad` then holds."""
        self._write_back(outcome.result())

    def _write_back(self, outcome: Outcome) -> None:
        self._exchanger.join_streams()
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
