"""Stenograd's methods as a communication hook of DistributedDataParallel, and what registers it."""

from __future__ import annotations

import weakref
from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager
from itertools import chain
from typing import Any

import torch
from torch import Tensor, nn

from stenograd.catalog.method import Method, MethodLike, method
from stenograd.devices import future_on, refuse_capture
from stenograd.errors import CheckpointError, StenogradError, TensorTypeError, first_line
from stenograd.exchange.buckets import Bucket
from stenograd.exchange.kernel_loading import load_kernels
from stenograd.exchange.sparse_rows import sparse_parameters
from stenograd.exchange.tensor_exchange import Outcome, TensorExchange
from stenograd.launch.process_group import refuse_open
from stenograd.stopping import watches
from stenograd.sync.attached import Sync, as_in_training, at_end, next_order
from stenograd.sync.handshake import Members, compare, named, refuse_second_momentum, unwrapped
from stenograd.sync.replica_guard import ReplicaGuard, check_interval
from stenograd.sync.steps import Leftovers, Passes, warn_unexchanged, watch_others
from stenograd.tracing import MAX_EVENTS, Tracing
from stenograd.wire.driver import Driver
from stenograd.wire.finite import is_finite

__all__ = ["DDPHook", "register"]


class DDPHook(Sync):
    """State of the hook on one model; made by `stenograd.ddp.register`.

    DDP calls it with its buckets in index order, and once, after the first step, makes other buckets of the
    same parameters. Since state is kept by parameter name, it carries over. The exchange has a process group
    of its own, because DDP sends its map of used parameters on its group at the same time.
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
        self.method, self._optimizers = how, ()  # DDP does not know which optimizers hold its parameters
        self._group = ddp.process_group
        self._ddp = weakref.ref(ddp)  # which holds this hook where Python's garbage collector cannot look
        module: nn.Module = ddp.module
        self._driver = Driver.own(ddp.process_group, timeout_s=timeout_s)
        self._handles: list[Any] = []
        self._left = Leftovers()
        with self._wholly():
            learning = [p for p in module.parameters() if p.requires_grad]  # others may be of any type
            load_kernels(how, self._driver.world_size, learning, checks=check_every > 0)
            settings: dict[str, Any] = {"method": how.text, "skip_bad_steps": skip_bad_steps}
            settings["checks"] = str((check_every, repair, check_buffers))
            if ddp.broadcast_buffers:  # which DDP does by position, as it does with parameters
                shapes = ((name, tuple(b.shape)) for name, b in ddp.named_module_buffers.items())
                settings |= {f"buffer {name}": str(shape) for name, shape in shapes}
            # Nothing travels beside what "dense" sends, whose sums are then DDP's own, bit for bit.
            self._tells = bool(check_every) or not how.lossless or watches()
            if watches() and how.lossless and not check_every:
                settings["a call of stop_on() before register()"] = True
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
            self._saved: list[Bucket] = []  # those of a state that was loaded
            self._passes_as_saved = 0  # that these are still for
            self._rebuilt: list[list[str]] = []  # names in the buckets of the next pass, where they are new
            self._came: list[tuple[dict[Tensor, Tensor], Tensor]] = []  # pieces of buffers
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
            self._passes = Passes(skip_bad_steps=skip_bad_steps)
            # Of the optimizers seen to step, the exchanges before.
            self._seen: weakref.WeakKeyDictionary[torch.optim.Optimizer, int] = weakref.WeakKeyDictionary()
            trained = {name: p for name, p in parameters.items() if p.requires_grad}
            self._frozen = {id(p) for p in module.parameters() if not p.requires_grad}
            again = "wrap the model in DistributedDataParallel anew, and register the hook"
            members = Members(module, trained, remedy=again, rehooks=False)
            self._handles += [watch_others(self, averages_losses=True)]
            self._handles += [ddp.register_forward_pre_hook(members)]
            self._warned = self._at_once = self._shadows = False

    @torch.no_grad()  # gradients with a graph (create_graph=True) are averaged without it, as DDP does
    def on_bucket(self, bucket: Any) -> torch.futures.Future[Tensor]:
        """Take one bucket from DDP; the future holds its average once the whole step is agreed on.

        With `skip_all_reduce_unused_params`, the buckets that no rank uses do not come, be it the first or
        the last.

        Raises:
            StenogradError: an earlier backward pass broke off while other ranks may have gone on, or the hook
                is closed.
        """
        if self._closed:
            raise StenogradError(
                "this model's hook was closed, and DDP keeps hooks for good: wrap the module in "
                "DistributedDataParallel anew"
            )
        buffer, task = bucket.buffer(), torch._C._current_graph_task_id()
        # At a first bucket no future waits. One of another pass means that this other pass broke off.
        if not self._waiting or task != self._task:
            self._begin(task)
        parameters = bucket.parameters()
        pieces = dict(zip(parameters, buffer.split([p.numel() for p in parameters]), strict=True))
        if self._saved:
            self._came.append((pieces, buffer))
        else:
            self._take(pieces, buffer)
        future = future_on(buffer.device)
        self._waiting.append((buffer, future))
        if bucket.is_last() and self._at_once:
            self._end()
        return future

    @property
    def needs_poll(self) -> bool:
        """Whether only `poll()` tells of requests to stop: no flags travel with the gradients."""
        return not self._tells

    def trace(self, path: str, *, max_events: int = MAX_EVENTS) -> Tracing:
        """Trace what a `with` block does, on all ranks, to a file for Perfetto; see `stenograd.tracing`.

        Steps are noted of the optimizers that have stepped before, since DDP does not know its optimizer.
        """
        return Tracing(path, lambda: [self._driver], self._model, list(self._seen), max_events=max_events)

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

    def state_dict(self) -> dict[str, Any]:
        """Return all that decides this rank's next exchanges, by parameter name; save it on every rank."""
        buckets = self._rebuilt or [list(b.names) for b in self._exchange.buckets]
        return {**super().state_dict(), "buckets": buckets}

    @as_in_training
    def before_save(self) -> None:
        """Let DDP make its own buckets now, not in its next forward pass, so that a state tells them.

        All ranks call it, first of all: it makes them after rank 0's first pass.
        """
        ddp = self._ddp()
        # Later there is nothing to make, and DDP raises where a pass did not use all parameters.
        if ddp is None or self._closed or not 0 < self.step + self.skipped <= 2:
            return
        if not ddp.reducer._rebuild_buckets():
            return
        parts = [bucket.parameters() for bucket in ddp.reducer._get_zeros_like_grad_buckets()]
        small: dict[tuple[torch.dtype, torch.device], list[Tensor]] = {}
        for p in chain.from_iterable(parts):
            if p.numel() < self.method.dense_below:
                small.setdefault((p.dtype, p.device), []).append(p)
        parts = [[p for p in part if p.numel() >= self.method.dense_below] for part in parts]
        self._rebuilt = [[self._names[id(p)] for p in part] for part in (*parts, *small.values()) if part]

    @as_in_training
    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Continue from a saved `state_dict()`; the next steps equal an uninterrupted run's bit for bit.

        DDP makes other buckets after its first pass, and codes depend on buckets. So a new model's first pass
        takes those of the state: its messages leave at its end. A state that was taken after one pass knows
        DDP's later buckets only if it was saved by `save_checkpoint`, `save_state` or an adapter, with
        `static_graph` after two passes; otherwise the step after it, if it is taken on by a new model, may be
        coded otherwise.

        Raises:
            CheckpointError: it is of another format, method, rank, world size or model; nothing is changed.
        """
        saved, anew = self._saved_buckets(state), not self._exchange.buckets
        if anew:
            self._exchange.arrange(saved)
        try:
            super().load_state_dict(state)
        except BaseException:
            if anew:
                self._exchange.arrange([])
            raise
        self._rebuilt, self._saved = [], [] if self._members else saved
        self._passes_as_saved = 2 if self._model.static_graph else 1  # after these DDP makes its own

    def _saved_buckets(self, state: Mapping[str, Any]) -> list[Bucket]:
        """Return the buckets that a state was saved with; none where it does not tell those of all it has.

        Earlier versions did not tell, and with `skip_all_reduce_unused_params` a step may have had only some.
        """
        layout, parameters = state.get("buckets", []), named(self._model.module)
        for name in state.get("parameters", []):
            if name not in parameters:
                raise CheckpointError(
                    f"checkpoint and model differ in parameter {name!r}: load it into the same model"
                )
        if sorted(chain.from_iterable(layout)) != sorted(state.get("parameters", [])):
            return []
        buckets: list[Bucket] = []
        for names in layout:
            here = [parameters[name] for name in names]
            kinds = {(p.dtype, p.device, p.numel() < self.method.dense_below) for p in here}
            if len(kinds) > 1:  # the model was in other types
                return []
            buckets += [Bucket(tuple(names), tuple(p.shape for p in here), *kind) for kind in kinds]
        return buckets

    def _detach(self) -> None:
        """Stop the exchange; the model cannot be trained with this hook afterwards."""
        for handle in self._handles:
            handle.remove()
        self._left.forget()
        if hasattr(self, "_exchange"):
            self._exchange.close()

    @property
    # A property in place of the attribute: only the hook's weak reference may hold the DDP model.
    def _model(self) -> Any:  # type: ignore[override]
        ddp = self._ddp()
        if ddp is None:
            raise StenogradError("the model of this hook is gone: keep the DistributedDataParallel model")
        return ddp

    def _take(self, pieces: Mapping[Tensor, Tensor], buffer: Tensor) -> None:
        """Send one of DDP's buckets, without what travels densely, which waits for the others."""
        small = {p: piece for p, piece in pieces.items() if p.numel() < self.method.dense_below}
        self._small |= small
        large = {p: piece for p, piece in pieces.items() if p not in small} if small else pieces
        if large:
            self._send(list(large), list(large.values()) if small else [buffer])

    def _send_as_saved(self) -> None:
        """Send what has come in the buckets of the state that was loaded, if that is what they hold."""
        came, saved = self._came, self._saved
        self._passes_as_saved -= 1
        self._came, self._saved = [], saved if self._passes_as_saved > 0 else []
        found = {self._names[id(p)]: (p, piece) for pieces, _ in came for p, piece in pieces.items()}
        if found.keys() != {name for bucket in saved for name in bucket.names}:
            for pieces, buffer in came:
                self._take(pieces, buffer)
            return
        for bucket in saved:
            parameters, sources = zip(*(found[name] for name in bucket.names), strict=True)
            self._send(parameters, list(sources), dense=bucket.dense)

    def _send(self, parameters: Sequence[Tensor], sources: list[Tensor], *, dense: bool = False) -> None:
        """Copy gradients of one type from DDP's memory, whole buckets or pieces of some, and submit them."""
        index, first = len(self._sources), sources[0]
        names, shapes = tuple(self._names[id(p)] for p in parameters), tuple(p.shape for p in parameters)
        self._exchange.place(index, Bucket(names, shapes, first.dtype, first.device, dense))
        flat, scale = self._exchange.flat(index), self._exchange.scale(index)
        for source, target in zip(sources, flat.split([s.numel() for s in sources]), strict=True):
            # Divided by the world size in the same pass over memory, and before the sum, as DDP does.
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
            self._abandon()
            self._waiting = []
        refuse_capture()
        self._members, self._sources, self._small, self._task = [], [], {}, task
        self._came, self._rebuilt = [], []
        # Outside of a backward pass DDP's join() shadows the exchange of others. In the first one of a static
        # graph DDP calls its hooks when all nodes are done, and waits before any other callback runs.
        self._shadows = task == -1
        self._at_once = self._shadows or torch._C._current_autograd_node() is None
        self._weigh(idle=self._shadows)
        if not self._at_once:
            at_end(task, self._order, self._end)

    @torch.no_grad()
    def _end(self) -> None:
        """Wait for the averages, and give them to DDP in its own memory."""
        self._send_as_saved()
        self._send_small()
        self._exchange.end_at(len(self._sources))
        used = [i in self._made for members in self._members for i in members] if self._tracks else []
        # Set, not counted: DDP calls no hook in no_sync(), so exchanges are what all ranks count alike.
        self._passes.count = self.step + self.skipped
        flags = self._passes.flags(shadow=self._shadows) if self._tells else []
        outcome = self._exchange.finish(used, flags, stop=self._asks() and self._tells).result()
        self._exchange.join_streams()  # before the averages are read below
        if self._tells:
            self._passes.exchanged(outcome.any_flags, self._driver)
        self._hear(outcome.stop)
        self._made.clear()
        self._finite = outcome.applied
        if not self._finite and self._passes.skips:
            self._left.take(self._bad(outcome))
        for sources, average in zip(self._sources, outcome.averages, strict=True):
            torch._foreach_copy_(sources, list(average.split([s.numel() for s in sources])))
        # Futures last: DDP goes on with its buffers as soon as these are done.
        waiting, self._waiting = self._waiting, []
        for buffer, future in waiting:
            future.set_result(buffer)
        self._check_replicas()

    def _bad(self, outcome: Outcome) -> Iterator[Tensor]:
        """Yield the parameters whose averages, which DDP has not taken yet, are not finite."""
        known = {id(p): p for p in self._model.module.parameters()}
        used = iter(outcome.any_used)
        for members, bucket, average in zip(
            self._members, self._exchange.buckets, outcome.averages, strict=True
        ):
            for member, piece in zip(members, bucket.views(average), strict=True):
                # Without tracking nothing was sent about use, so all count as used.
                if next(used, True) and not is_finite(piece):
                    yield known[member]

    def _refuse_unfrozen(self, optimizer: torch.optim.Optimizer) -> None:
        """Refuse to apply gradients that DDP leaves alone, because it has found their parameters frozen."""
        for p in (p for group in optimizer.param_groups for p in group["params"] if id(p) in self._frozen):
            # DDP may have been made before they were frozen: then they are in its buckets.
            if p.requires_grad and p.grad is not None and not any(id(p) in ids for ids in self._members):
                raise StenogradError(
                    f"a parameter of shape {tuple(p.shape)} has a gradient that was not averaged: it was "
                    "frozen when DistributedDataParallel wrapped the model; after unfreezing wrap it again, "
                    "and register"
                )

    def _begins(self, state: Mapping[str, Any]) -> bool:
        # DDP tells of buckets in the first pass: until then a state has no parameters.
        return not (state.get("parameters") or state.get("step") or state.get("skipped"))

    def _averaged(self) -> set[int]:
        return set(self._names)

    def _learning(self) -> Iterable[Tensor]:
        return (p for p in self._model.module.parameters() if p.requires_grad)

    def _held(self) -> set[int]:
        return set(self._names)

    def _skip_bad(self, optimizer: torch.optim.Optimizer, zeros: bool) -> None:
        self._passes.skip_bad(optimizer, self._names, self.finite, zeros, self._model.module.parameters())

    def _other_step(self, optimizer: torch.optim.Optimizer, zeros: bool) -> None:
        """Let the step after a bad exchange find no gradients; warn of gradients without an exchange."""
        if self._frozen and self.world_size > 1:
            self._refuse_unfrozen(optimizer)
        self._passes.settings.look(self.method, optimizer)
        refuse_second_momentum(self.method, [optimizer])
        before, now = self._seen.get(optimizer), self._exchanges_here()
        self._seen[optimizer] = now
        if before not in (None, now) and (self.finite or not self._passes.skips):
            return  # the usual step, without a look at every parameter
        params = (p for g in optimizer.param_groups for p in g["params"])
        held = [p for p in params if id(p) in self._names and p.grad is not None]
        if held and (before or 0) == now and not self._warned and self.world_size > 1:
            cause = "gradients that no exchange has averaged, as inside ddp_model.no_sync()"
            advice = f"end accumulation outside of it, or nothing travels by {self.method}"
            self._warned = warn_unexchanged(cause, advice)
        if held:
            self._skip_bad(optimizer, zeros)


def register(
    ddp_model: Any,
    how: MethodLike,
    *,
    timeout_s: float = 300.0,
    check_every: int = 0,
    repair: bool = False,
    check_buffers: bool = False,
    skip_bad_steps: bool = True,
) -> DDPHook:
    """Make a DistributedDataParallel model exchange gradients by a Stenograd method.

    Call it once, right after wrapping the model. Averages are final when `backward()` returns; with "dense"
    they equal plain DDP's bit for bit. DDP's options, `no_sync()` and `join()` work as without the hook.

    Args:
        ddp_model: the `DistributedDataParallel` model; it may be compiled, or wrapped by Lightning Fabric.
        how: the method, as text such as "powersgd:rank=4".
        timeout_s: seconds after which a silent peer is an error.
        check_every: after every so many exchanges, compare the ranks' parameters bit for bit; 0 for never.
        repair: overwrite parameters that differ by the majority's and warn, instead of raising.
        check_buffers: compare and repair buffers too. DDP makes them equal before each forward pass, unless
            told not to, so they differ after one that updates them.
        skip_bad_steps: after an exchange that was not finite on some rank, steps of the optimizers that hold
            the model's parameters change nothing on any rank.

    Returns:
        The hook's state, with the face of what `stenograd.distribute` returns, so `traffic`, `step`,
        `finite`, `skipped`, `trace(...)`, `no_sync()`, `join()`, `state_dict()`, `load_state_dict(...)` and
        `close()`.

    Raises:
        MethodError: unknown method or key, or a value outside its range.
        TypeError: the model is not wrapped in DistributedDataParallel.
        TensorTypeError: it has sparse gradients, which DDP does not give to hooks.
        StenogradError: it has a communication hook already, or DDP's Python reducer, which calls none.
        ConfigError: check_every is out of range, repair lacks checks, or this is a worker of an open run.
        MismatchError: the ranks' methods, settings, versions or kernels differ.

    On all ranks `backward()` raises ReplicaDivergence where a check finds a difference (see `ReplicaGuard`),
    and MismatchError where the loss's scale (GradScaler) differs; not with "dense" and `check_every=0`, which
    send nothing beside the gradients. So `stopping` is told there by `poll()` only, unless all ranks called
    `stenograd.stop_on` before this: then flags travel with the gradients, as they do with other methods.

    Example:
        hook = stenograd.ddp.register(ddp_model, "topk:ratio=0.01")
    """
    chosen = method(how)
    chosen.require_every_step("DistributedDataParallel, which averages gradients in every pass,")
    ddp: Any = unwrapped(ddp_model)
    if not hasattr(ddp, "register_comm_hook"):
        raise TypeError(
            f"ddp_model must be a DistributedDataParallel model, got {type(ddp_model).__name__}: wrap it"
        )
    refuse_open()
    if getattr(ddp, "_use_python_reducer", False):
        raise StenogradError(
            'DDP runs with torch._dynamo.config.optimize_ddp = "python_reducer", which calls no hook: set it '
            'to "ddp_optimizer" before wrapping the model'
        )
    if sparse_parameters(ddp.module) & {id(p) for p in ddp.module.parameters() if p.requires_grad}:
        raise TensorTypeError(
            "ddp_model must have dense gradients, got an embedding with sparse=True: use "
            "stenograd.distribute, which averages them exactly, or sparse=False"
        )
    check_interval(check_every, repair)
    checks: dict[str, Any] = {"check_every": check_every, "repair": repair, "check_buffers": check_buffers}
    hook = DDPHook(ddp, chosen, timeout_s=timeout_s, skip_bad_steps=skip_bad_steps, **checks)
    try:  # this comes last, because DDP keeps a hook for good
        # DDP compares annotations with its own classes; a lambda has none.
        ddp.register_comm_hook(hook, lambda state, bucket: state.on_bucket(bucket))
    except BaseException as reason:
        hook.close()
        if not isinstance(reason, RuntimeError):
            raise
        raise StenogradError(
            f"the model has a communication hook already, or cannot take one ({first_line(reason)}): "
            "register one only, right after wrapping the model"
        ) from reason
    return hook
