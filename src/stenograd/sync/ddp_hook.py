"""Stenograd's methods as a communication hook of DistributedDataParallel."""

from __future__ import annotations

import weakref
from collections.abc import Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, contextmanager
from typing import Any

import torch
from torch import Tensor, nn

from stenograd.catalog.method import Method
from stenograd.comm.driver import Driver
from stenograd.comm.kernel_loading import load_kernels
from stenograd.comm.step_end import Outcome
from stenograd.comm.tensor_exchange import TensorExchange
from stenograd.data.buckets import Bucket
from stenograd.data.finite import is_finite
from stenograd.devices import future_on, refuse_capture
from stenograd.errors import StenogradError
from stenograd.sync.attached import Attached, as_in_training
from stenograd.sync.backward_passes import (
    Leftovers,
    Passes,
    at_end,
    drop_bad,
    next_order,
    warn_of_skip,
    warn_unexchanged,
)
from stenograd.sync.closures import Changed, after_closure
from stenograd.sync.every_step import watch_every_step
from stenograd.sync.handshake import compare, named, refuse_second_momentum
from stenograd.sync.members import Members
from stenograd.sync.replica_guard import ReplicaGuard
from stenograd.sync.tracing import MAX_EVENTS, Tracing

__all__ = ["DDPHook"]


class DDPHook(Attached):
    """State of the hook on one model; made by `stenograd.ddp.register`.

    DDP calls it with its buckets in index order, and once, after the first step, makes other buckets of the
    same parameters. Since state is kept by parameter name, it carries over. The exchange has a process group
    of its own, because DDP sends its map of used parameters on its group at the same time.

    Attributes:
        method: the `Method` in use.
    """

    def __init__(
        self,
        ddp: Any,
        how: Method,
        *,
        timeout_s: float,
        skip_bad_steps: bool,
        check_every: int = 0,
        repair: bool = False,
        check_buffers: bool = False,
    ) -> None:
        self.method = how
        self._finite = True
        self._group = ddp.process_group
        self._ddp = weakref.ref(ddp)  # which holds this hook where Python's garbage collector cannot look
        module: nn.Module = ddp.module
        self._driver = Driver.own(ddp.process_group, timeout_s=timeout_s)
        self._handles: list[Any] = []
        self._left = Leftovers()
        with self._wholly():
            learning = [p for p in module.parameters() if p.requires_grad]  # others may be of any type
            load_kernels(how, self._driver.world_size, learning, checks=check_every > 0)
            checks = str((check_every, repair, check_buffers))
            settings: dict[str, Any] = {
                "method": how.text,
                "skip_bad_steps": skip_bad_steps,
                "checks": checks,
            }
            if ddp.broadcast_buffers:  # which DDP does by position, as it does with parameters
                shapes = ((name, tuple(b.shape)) for name, b in ddp.named_module_buffers.items())
                settings |= {f"buffer {name}": str(shape) for name, shape in shapes}
            parameters = named(module)
            compare(self._driver, settings, parameters)
            self._names = {id(p): name for name, p in parameters.items()}
            self._check_every = check_every
            kept: Any = weakref.proxy(module)  # for the reason given above
            self._guard = ReplicaGuard(kept, self._driver, repair=repair, check_buffers=check_buffers)
            self._exchange = TensorExchange(how, self._driver, waits=True)
            self._order = next_order()
            self._task = -1  # autograd's number of the backward pass
            self._waiting: list[tuple[Tensor, torch.futures.Future[Tensor]]] = []
            self._members: list[list[int]] = []  # ids of the parameters in each bucket of the exchange
            self._sources: list[list[Tensor]] = []  # where they lie in DDP's buckets
            self._small: dict[Tensor, Tensor] = {}  # what travels densely, of the buckets so far
            self._made: set[int] = set()  # ids of those that got a gradient since the last exchange
            # Without these, DDP itself refuses parameters that are not used.
            self._tracks = bool(ddp.find_unused_parameters or ddp.static_graph)
            if self._tracks:
                made = self._made  # not this hook, which a parameter would keep from being collected
                self._handles = [
                    p.register_post_accumulate_grad_hook(lambda p: made.add(id(p)))
                    for p in module.parameters()
                    if p.requires_grad
                ]
            self._skips, self._passes = skip_bad_steps, Passes()
            # Of the optimizers seen to step, the exchanges before; -1 where they hold nothing of this model.
            self._seen: weakref.WeakKeyDictionary[torch.optim.Optimizer, int] = weakref.WeakKeyDictionary()
            trained = {name: p for name, p in parameters.items() if p.requires_grad}
            again = "wrap the model in DistributedDataParallel anew, and register the hook"
            members = Members(module, trained, remedy=again, rehooks=False)
            self._handles += [_watch_steps(self)]
            self._handles += [ddp.register_forward_pre_hook(members)]
            self._warned = self._warned_local = self._at_once = self._shadows = False

    @property
    def repaired(self) -> int:
        """Number of checks that found the ranks' parameters unequal, and repaired them."""
        return self._guard.repaired

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
        """Whether the last exchange was, alike on all ranks."""
        return self._finite

    @torch.no_grad()  # gradients with a graph (create_graph=True) are averaged without it, as DDP does
    def on_bucket(self, bucket: Any) -> torch.futures.Future[Tensor]:
        """Take one bucket from DDP; the future holds its average once the whole step is agreed on.

        With `skip_all_reduce_unused_params`, the buckets that no rank uses do not come, be it the first or
        the last.

        Raises:
            StenogradError: an earlier backward pass broke off while other ranks may have gone on.
        """
        buffer, task = bucket.buffer(), torch._C._current_graph_task_id()
        if not self._waiting or task != self._task:
            self._begin(task)
        parameters = bucket.parameters()
        pieces = dict(zip(parameters, buffer.split([p.numel() for p in parameters]), strict=True))
        small = {p: piece for p, piece in pieces.items() if p.numel() < self.method.dense_below}
        if small:
            self._small |= small
            large = {p: piece for p, piece in pieces.items() if p not in small}
            if large:
                self._send(list(large), list(large.values()))
        else:
            self._send(parameters, [buffer])
        future = future_on(buffer.device)
        self._waiting.append((buffer, future))
        if bucket.is_last() and self._at_once:
            self._end()
        return future

    def state_dict(self) -> dict[str, Any]:
        """Return all that decides this rank's next exchange, by parameter name; save it on every rank."""
        return self._exchange.state_dict()

    @as_in_training
    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Continue from a saved `state_dict()`.

        Raises:
            CheckpointError: it is of another format, method, rank, world size or model; nothing is changed.
        """
        self._exchange.load_state_dict(state)

    @contextmanager
    def no_sync(self) -> Iterator[None]:
        """Accumulate gradients locally: `ddp_model.no_sync()`."""
        with self._model.no_sync():
            yield

    def trace(self, path: str, *, max_events: int = MAX_EVENTS) -> Tracing:
        """Trace what a `with` block does, on all ranks, to a file for Perfetto; see `stenograd.sync.tracing`.

        Steps are noted of the optimizers that have stepped before, since DDP does not know its optimizer.
        """
        mine = [optimizer for optimizer, before in self._seen.items() if before >= 0]
        return Tracing(path, [self._driver], self._model, mine, max_events=max_events)

    def join(self, **options: Any) -> AbstractContextManager[Any]:
        """Let ranks have different numbers of batches: `ddp_model.join(**options)`.

        Averages are divided by the number of all ranks, those that have run out included.
        """
        context: AbstractContextManager[Any] = self._model.join(**options)
        return context

    def join_hook(self, **options: Any) -> Any:
        """Return DDP's own, so that `Join([hook])` is `Join([ddp_model])`."""
        return self._model.join_hook(**options)

    @property
    def join_device(self) -> torch.device:
        """DDP's."""
        device: torch.device = self._model.join_device
        return device

    @property
    def join_process_group(self) -> Any:
        """DDP's."""
        return self._model.join_process_group

    @property
    def _join_config(self) -> Any:
        return self._model._join_config

    @_join_config.setter
    def _join_config(self, config: Any) -> None:
        self._model._join_config = config

    @property
    def enabled(self) -> bool:
        """Whether backward passes exchange gradients: DDP's `require_backward_grad_sync`."""
        return bool(self._model.require_backward_grad_sync)

    @enabled.setter
    def enabled(self, value: bool) -> None:
        self._model.require_backward_grad_sync = value

    def refresh(self) -> None:
        """Refuse to look for other parameters: DDP keeps those that it was made with.

        Raises:
            StenogradError: always.
        """
        raise StenogradError(
            "DistributedDataParallel keeps the parameters that it was made with: after unfreezing some, wrap "
            "the model again, and register"
        )

    def close(self) -> None:
        """Stop the exchange; the model cannot be trained with this hook afterwards. Safe to call twice."""
        if self._closed:
            return
        self._closed = True
        for handle in self._handles:
            handle.remove()
        self._left.forget()
        if hasattr(self, "_exchange"):  # else registering failed before it
            self._exchange.close()
        self._driver.close()

    @property
    def _model(self) -> Any:  # type: ignore[override]
        ddp = self._ddp()
        if ddp is None:
            raise StenogradError("the model of this hook is gone: keep the DistributedDataParallel model")
        return ddp

    def _send(self, parameters: Sequence[Tensor], sources: list[Tensor], *, dense: bool = False) -> None:
        """Copy gradients of one type from DDP's memory, whole buckets or pieces of some, and submit them."""
        index, first = len(self._sources), sources[0]
        names, shapes = tuple(self._names[id(p)] for p in parameters), tuple(p.shape for p in parameters)
        self._exchange.place(index, Bucket(names, shapes, first.dtype, first.device, dense))
        flat, scale = self._exchange.flat(index), self._exchange.scale(index)
        for source, target in zip(sources, flat.split([s.numel() for s in sources]), strict=True):
            torch.mul(source, scale, out=target)
        self._exchange.submit(index)
        self._members.append([id(p) for p in parameters])
        self._sources.append(sources)

    def _send_small(self) -> None:
        """Send the tensors that travel densely, of all of DDP's buckets together."""
        kinds: dict[tuple[torch.dtype, torch.device], dict[Tensor, Tensor]] = {}
        for p, piece in self._small.items():
            kinds.setdefault((piece.dtype, piece.device), {})[p] = piece
        self._small = {}
        for kind in kinds.values():
            self._send(list(kind), list(kind.values()), dense=True)

    def _begin(self, task: int) -> None:
        """Begin an exchange; it ends with the backward pass, before DDP itself waits for its buckets.

        A future that fails there reaches DDP, in whose C++ code its error loses its class. Ending here, the
        caller of `backward()` gets the error itself.
        """
        if self._waiting:
            if self._driver.world_size > 1:
                raise StenogradError(
                    "the last backward pass did not finish (an error in it), so the ranks may be out of "
                    "step: restart from a checkpoint"
                )
            self._waiting = []
            self._exchange.abandon()
        refuse_capture()
        self._members, self._sources, self._small, self._task = [], [], {}, task
        # Outside of a backward pass DDP's join() shadows the exchange of others. In the first one of a static
        # graph DDP calls its hooks when all nodes are done, and waits before any other callback runs.
        self._shadows = task == -1
        self._at_once = self._shadows or torch._C._current_autograd_node() is None
        if not self._at_once:
            at_end(task, self._order, self._end)

    @torch.no_grad()
    def _end(self) -> None:
        """Wait for the averages, and give them to DDP in its own memory."""
        self._send_small()
        self._exchange.end_at(len(self._sources))
        used = [i in self._made for members in self._members for i in members] if self._tracks else []
        # Nothing travels beside what "dense" sends, whose sums are then DDP's own, bit for bit.
        tells = bool(self._check_every) or not self.method.lossless
        self._passes.count = self.step + self.skipped
        flags = self._passes.flags(shadow=self._shadows) if tells else []
        outcome = self._exchange.finish(used, flags).result()
        self._exchange.join_streams()
        if tells:
            self._passes.exchanged(outcome.any_flags, self._driver)
        self._made.clear()
        self._finite = outcome.applied
        if not self._finite and self._skips:
            self._left.take(self._bad(outcome))
        for sources, average in zip(self._sources, outcome.averages, strict=True):
            torch._foreach_copy_(sources, list(average.split([s.numel() for s in sources])))
        waiting, self._waiting = self._waiting, []
        for buffer, future in waiting:
            future.set_result(buffer)
        # A rank that ran out of inputs keeps its parameters until DDP's join ends: no comparing then.
        due = self._check_every and (self.step + self.skipped) % self._check_every == 0
        if due and not self._passes.shadowed:
            self._guard.check(self.step)

    def _bad(self, outcome: Outcome) -> Iterator[Tensor]:
        """Yield the parameters whose averages, which DDP has not taken yet, are not finite."""
        known = {id(p): p for p in self._model.module.parameters()}
        used = iter(outcome.any_used)
        for members, bucket, average in zip(
            self._members, self._exchange.buckets, outcome.averages, strict=True
        ):
            for member, piece in zip(members, bucket.views(average), strict=True):
                if next(used, True) and not is_finite(piece):
                    yield known[member]

    def _moves(self, optimizer: torch.optim.Optimizer) -> bool:
        """Return whether an optimizer holds parameters of this model; looked up again after a bad exchange.

        It may have got a group of them since, and then its step must not apply what is not finite.
        """
        known = self._seen.get(optimizer)
        if known is None or (known == -1 and not self.finite):
            held = (p for g in optimizer.param_groups for p in g["params"])
            if any(id(p) in self._names for p in held):
                self._seen.pop(optimizer, None)
                return True
            known = self._seen[optimizer] = -1
        return known != -1

    def _check_step(
        self, optimizer: torch.optim.Optimizer, *, zeros: bool = False, again: bool = False
    ) -> None:
        """Let the step after a bad exchange find no gradients; warn of gradients without an exchange."""
        self._passes.settings.look()
        before, now = self._seen.get(optimizer), self.step + self.skipped
        self._seen[optimizer] = now
        if before not in (None, now) and (self.finite or not self._skips):
            return  # the usual step, without a look at every parameter
        held = [p for g in optimizer.param_groups for p in g["params"] if id(p) in self._names]
        if held and before is None:
            refuse_second_momentum(self.method, [optimizer])
        self._seen[optimizer] = now if held else -1
        held = [p for p in held if p.grad is not None]
        if held and (before or 0) == now and not self._warned_local and self.world_size > 1:
            cause = "gradients that no exchange has averaged, as inside ddp_model.no_sync()"
            advice = f"end accumulation outside of it, or nothing travels by {self.method}"
            self._warned_local = warn_unexchanged(cause, advice)
        if held and self._skips and not self.finite:
            drop_bad(optimizer, self._names, zeros, self._model.module.parameters())
            self._warned = self._warned or warn_of_skip()


def _watch_steps(hook: DDPHook) -> Any:
    """Look at the steps of all optimizers, since DDP does not know which of them hold its parameters."""
    weak = weakref.ref(hook)

    def act(optimizer: torch.optim.Optimizer, *, zeros: bool = False, again: bool = False) -> None:
        known = weak()
        if known is not None:
            known._check_step(optimizer, zeros=zeros, again=again)

    def exchanges() -> int:
        known = weak()
        return 0 if known is None else known.step + known.skipped

    def mean(loss: float) -> float:
        known = weak()
        return loss if known is None else known._mean(loss)

    watch = after_closure(act, exchanges, mean)

    def before(optimizer: torch.optim.Optimizer, args: Any, given: Any) -> Changed:
        known = weak()
        return watch(optimizer, args, given) if known is not None and known._moves(optimizer) else None

    handle = watch_every_step(before)
    weakref.finalize(hook, handle.remove).atexit = False
    return handle
