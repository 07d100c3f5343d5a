"""Data parallelism with Heat's interface: updates at once, or only before the next forward pass."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import Future
from contextlib import AbstractContextManager
from functools import partial
from threading import Lock
from typing import Any

import torch
from torch import Tensor, nn

from stenograd.arguments import typed
from stenograd.catalog.method import MethodLike
from stenograd.errors import ConfigError, StenogradError
from stenograd.exchange.buckets import usual_bytes
from stenograd.exchange.filling import Slot
from stenograd.exchange.tensor_exchange import Outcome
from stenograd.heat.daso import DASO, check_comm
from stenograd.sync.gradients import GradientSync
from stenograd.wire.groups import ranks_of
from stenograd.wire.traffic import Traffic

__all__ = ["DataParallel", "DataParallelMultiGPU", "DataParallelOptimizer", "DelayedSync", "Updates"]


class DelayedSync(GradientSync):
    """A `GradientSync` whose backward passes end at once; `wait()` then writes the averages into `.grad`.

    From the end of a backward pass to `wait()`, `.grad` holds this rank's own gradients. Until then an
    optimizer step, another backward pass and new parameters are errors. The exchange has a process group of
    its own, so collectives of the caller may run at the same time, in any order.

    Example:
        >>> model = torch.nn.Linear(1, 1)
        >>> sync = DelayedSync(model, torch.optim.SGD(model.parameters(), lr=0.1))
        >>> model(torch.ones(1, 1)).backward()
        >>> sync.in_flight, sync.wait(), sync.in_flight
        (True, True, False)
        >>> sync.close()
    """

    _shares_memory = False  # .grad is the caller's until wait()
    _flight: Future[Outcome] | None = None
    _versions: Sequence[int] = ()
    _unused: Sequence[Tensor] = ()

    @property
    def in_flight(self) -> bool:
        """Whether `.grad` still waits for the averages of the last backward pass."""
        return self._flight is not None

    @torch.no_grad()
    def wait(self) -> bool:
        """Wait for the exchange in flight, and write its averages into `.grad`.

        It issues no collective of its own, so ranks may call it at different points of the program.

        Returns:
            Whether an exchange was in flight.

        Raises:
            PeerLost: a rank did not answer; every later call raises it too.
        """
        if self._flight is None:
            return False
        # An error leaves `_flight` set, so that every later call raises it, too.
        outcome = self._flight.result()
        self._flight = None
        # Their zeros are from `_sent`. Where another rank has a gradient, `_write_back` makes one here.
        for p in self._unused:
            p.grad = None
        self._write_back(outcome)
        return True

    def changed(self) -> list[Tensor]:
        """Return the parameters whose `.grad` was removed or written to while its exchange was in flight."""
        if self._flight is None:
            return []
        now = (-1 if p.grad is None else p.grad._version for p in self._parameters.values())
        pairs = zip(self._parameters.values(), now, self._versions, strict=True)
        return [p for p, version, sent in pairs if version != sent]

    def flush(self) -> None:
        """Finish the exchange in flight, as `wait()` does."""
        self.wait()

    def refresh(self) -> None:
        """Look for parameters again, while no exchange is in flight; needed after unfreezing some."""
        self._refuse_in_flight("refresh() was called")
        super().refresh()

    def state_dict(self) -> dict[str, Any]:
        """Wait for the exchange in flight, and return all that decides the next one.

        The averages in flight are not part of the state: `wait()` still has to write them.
        """
        self._await_flight()
        return super().state_dict()

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Wait for the exchange in flight, and continue from a saved `state_dict()`.

        Raises:
            CheckpointError: it is of another format, method, rank, world size or model; nothing is changed.
        """
        self._await_flight()
        super().load_state_dict(state)

    def _await_flight(self) -> None:
        if self._flight is not None:
            self._flight.result()

    def _check_step(
        self, optimizer: torch.optim.Optimizer, *, zeros: bool = False, again: bool = False
    ) -> None:
        self._refuse_in_flight("an optimizer stepped")
        super()._check_step(optimizer, zeros=zeros, again=again)

    def _add_param_group(self, optimizer: torch.optim.Optimizer, group: dict[str, Any]) -> None:
        self._refuse_in_flight("a parameter group was added")
        super()._add_param_group(optimizer, group)

    def _on_gradient(self, slot: Slot, parameter: Tensor) -> None:
        self._refuse_in_flight("a backward pass began")
        super()._on_gradient(slot, parameter)

    def _sent(self, outcome: Future[Outcome]) -> None:
        """Keep the future, and note the gradients' versions.

        Unused parameters get zeros, so that zeroing them leaves a trace in the version on every rank alike.
        """
        parameters = self._parameters.values()
        self._unused = [p for p in parameters if p.grad is None]
        for p in self._unused:
            p.grad = torch.zeros_like(p)
        self._versions = [p.grad._version for p in parameters if p.grad is not None]
        self._flight = outcome

    def _refuse_in_flight(self, what: str) -> None:
        if self._flight is not None:
            raise StenogradError(
                f"{what} while gradients are still being averaged: call wait(), or flush() of DataParallel, "
                "before it, or use a DataParallelOptimizer's step()"
            )


class Updates:
    """A queue of calls that run when the gradient exchange in flight has ended.

    Args:
        sync: the engine whose exchange to wait for, or None.
        device_type: of the parameters.

    Example:
        >>> updates = Updates()
        >>> updates.add(lambda: print("updated"))
        >>> updates.waiting
        True
        >>> updates.flush()
        updated
    """

    def __init__(self, sync: DelayedSync | None = None, device_type: str = "cpu") -> None:
        self._sync, self._device_type = sync, device_type
        self._calls: list[Callable[[], None]] = []

    @property
    def waiting(self) -> bool:
        """Whether an exchange is in flight or a call is queued."""
        return bool(self._calls) or (self._sync is not None and self._sync.in_flight)

    def add(self, call: Callable[[], None]) -> None:
        """Queue a call until `flush()`."""
        # What the program has zeroed so far comes before this call, as in the program.
        self._queue_zeroing()
        self._calls.append(call)

    def run(self, call: Callable[[], None]) -> None:
        """Run a call now if nothing waits; otherwise queue it."""
        if self.waiting:
            self.add(call)
        else:
            call()

    def flush(self) -> None:
        """Wait for the exchange, write its averages into `.grad`, then run the calls.

        Raises:
            PeerLost: a rank did not answer; the calls stay in the queue.
            StenogradError: gradients were changed while they were being averaged.
        """
        if not self.waiting:
            return
        # The caller may be inside inference_mode, or in a forward pass under autocast.
        with torch.inference_mode(False), torch.autocast(self._device_type, enabled=False):
            self._queue_zeroing()
            if self._sync is not None:
                self._sync.wait()
            calls, self._calls = self._calls, []  # one that fails is not run again
            for call in calls:
                call()

    def _queue_zeroing(self) -> None:
        """Queue the zeroing of gradients that the program zeroed itself; the averages will overwrite them."""
        changed = self._sync.changed() if self._sync is not None else []
        if any(p.grad is not None and bool(p.grad.any()) for p in changed):
            raise StenogradError(
                "gradients were changed while they were being averaged, and the change would be lost: call "
                "flush() of DataParallel before clipping or unscaling them"
            )
        if changed:
            removed = [p.grad is None for p in changed]

            def zero() -> None:
                for p, remove in zip(changed, removed, strict=True):
                    p.grad = None if remove or p.grad is None else p.grad.zero_()

            self._calls.append(zero)


class DataParallelOptimizer:
    """Steps a torch optimizer at once, or before the next forward pass of its `DataParallel`.

    Pass `torch_optimizer` to learning-rate schedulers; an update uses the settings at the time of `step()`.

    Args:
        torch_optimizer: any optimizer of torch whose step needs no closure.
        blocking: whether `step()` updates at once; `DataParallel` overwrites it.

    Attributes:
        torch_optimizer: the optimizer.
        blocking_parameter_updates: whether `step()` updates at once.
        update_next: whether a step waits to be applied.
        params_ref: the parameters of the first group.

    Raises:
        TypeError: torch_optimizer is not an optimizer of torch, or blocking is not a bool.

    Example:
        >>> w = torch.nn.Parameter(torch.ones(1))
        >>> optimizer = DataParallelOptimizer(torch.optim.SGD([w], lr=0.5))
        >>> w.grad = torch.ones(1)
        >>> optimizer.step()
        >>> w.item(), optimizer.update_next
        (1.0, True)
        >>> optimizer.flush()  # DataParallel does so before its next forward pass
        >>> w.item(), optimizer.update_next
        (0.5, False)
    """

    def __init__(self, torch_optimizer: torch.optim.Optimizer, blocking: bool = False) -> None:
        advice = "pass torch.optim.SGD(model.parameters(), lr=0.1), or the like"
        typed("torch_optimizer", torch_optimizer, torch.optim.Optimizer, "a torch.optim.Optimizer", advice)
        typed("blocking", blocking, bool, "True or False", "choose one")
        self.torch_optimizer = torch_optimizer
        self.blocking_parameter_updates = blocking
        self.update_next = False
        self.params_ref: list[torch.Tensor] = torch_optimizer.param_groups[0]["params"]
        self._updates = Updates()
        # a step that waits belongs to what is saved
        torch_optimizer.register_state_dict_pre_hook(lambda *_: self.flush())
        # and not to what is loaded
        torch_optimizer.register_load_state_dict_pre_hook(lambda *_: self.flush())

    @property
    def param_groups(self) -> list[dict[str, Any]]:
        """The torch optimizer's groups, after queued updates: a GradScaler takes gradients from them."""
        self.flush()  # what it divides while the exchange is in flight would be lost, and leaves no trace
        return self.torch_optimizer.param_groups

    def attach(self, updates: Updates, *, blocking: bool) -> None:
        """Queue steps with a model's updates from now on; `DataParallel` calls this after a flush."""
        self._updates = updates
        self.blocking_parameter_updates = blocking

    def step(self) -> None:
        """Update the parameters: at once if blocking, otherwise before the next forward pass."""
        if self.blocking_parameter_updates:
            self.torch_optimizer.step()
            return
        self._updates.add(partial(self._apply, _step_with_present_settings(self.torch_optimizer)))
        self.update_next = True
        # Torch warns of schedulers that run before a step. Here the order is right: this step keeps its rate.
        self.torch_optimizer._opt_called = True  # type: ignore[attr-defined]

    def zero_grad(self, set_to_none: bool = True) -> None:
        """Reset the gradients, after any queued step that needs them.

        Args:
            set_to_none: True removes them, as torch does by default; False fills them with zeros.
        """
        self._updates.run(partial(self.torch_optimizer.zero_grad, set_to_none))

    def flush(self) -> None:
        """Apply all queued updates.

        Raises:
            PeerLost: a rank did not answer.
        """
        self._updates.flush()

    def state_dict(self) -> dict[str, Any]:
        """Apply queued updates, and return the torch optimizer's state."""
        return self.torch_optimizer.state_dict()

    def load_state_dict(self, state_dict: Mapping[str, Any]) -> None:
        """Apply queued updates, and load a saved state into the torch optimizer."""
        self.torch_optimizer.load_state_dict(dict(state_dict))

    def _apply(self, step: Any) -> None:
        self.update_next = False
        step()


class DataParallel(nn.Module):
    """A module whose gradients are averaged over ranks.

    With `blocking_parameter_updates`, gradients are final when `backward()` returns, and `step()` updates at
    once. Without, the exchange goes on after `backward()`; calls of `step()` and `zero_grad()` are queued,
    and run in order when the parameters are needed: before the next forward or backward pass, and before the
    module is switched to evaluation, saved or loaded. Both give the same parameters. Call `flush()` before
    any other code that reads parameters or gradients, such as clipping.

    Departs from Heat: the whole update is applied before the first layer of the next forward pass, not layer
    by layer. Buckets travel in the order of the backward pass, so when the first layer's gradients are here,
    all are; and layer by layer, a tied weight would be used before its update, and an optimizer that counts
    its steps would count layers. Weights are rank 0's instead of new ones, and torch's random state is left
    alone. Frozen, shared and root-level parameters, several groups and several optimizers work without
    blocking too.

    Args:
        module: the model, alike on every rank.
        comm: process group of torch.distributed; None for all ranks.
        optimizer: a `DataParallelOptimizer`, or several, that hold the module's parameters.
        blocking_parameter_updates: whether `step()` updates at once.
        method: how gradients travel, as text such as "topk:ratio=0.01".
        bucket_bytes: largest size of a bucket of gradients; None as for `stenograd.distribute`.
        timeout_s: seconds after which a silent peer is an error.

    Raises:
        TypeError: module, comm, optimizer or blocking_parameter_updates is of another type.
        ConfigError, MismatchError, PeerLost: as in `stenograd.distribute`.

    Example:
        >>> import torch
        >>> model = nn.Linear(1, 1, bias=False)
        >>> _ = nn.init.ones_(model.weight)
        >>> optimizer = DataParallelOptimizer(torch.optim.SGD(model.parameters(), lr=0.5))
        >>> net = DataParallel(model, optimizer=optimizer)
        >>> for _ in range(2):
        ...     optimizer.zero_grad()
        ...     loss = net(torch.ones(1, 1)).sum()  # applies the update of the last round
        ...     loss.backward()
        ...     optimizer.step()
        >>> model.weight.item(), net.eval().module.weight.item()
        (0.5, 0.0)
        >>> net.close()
    """

    def __init__(
        self,
        module: nn.Module,
        comm: Any = None,
        optimizer: DataParallelOptimizer | Sequence[DataParallelOptimizer] = (),
        blocking_parameter_updates: bool = False,
        *,
        method: MethodLike = "dense",
        bucket_bytes: int | None = None,
        timeout_s: float = 300.0,
    ) -> None:
        optimizers = _checked(module, comm, optimizer, blocking_parameter_updates)
        super().__init__()
        self.module = module
        self.comm = comm
        self.blocking_parameter_updates = blocking_parameter_updates
        self._optimizers = optimizers
        self._handles: list[Any] = []
        bucket_bytes = usual_bytes(module.parameters()) if bucket_bytes is None else bucket_bytes
        kind = GradientSync if blocking_parameter_updates else DelayedSync
        held = [o.torch_optimizer for o in optimizers]
        before = [(o, o._updates, o.blocking_parameter_updates) for o in optimizers]
        self._sync = kind(module, held, method, group=comm, bucket_bytes=bucket_bytes, timeout_s=timeout_s)
        try:
            delayed = self._sync if isinstance(self._sync, DelayedSync) else None
            self._updates = Updates(delayed, next(module.parameters()).device.type)
            for o in optimizers:
                # What is queued waits in the updates that the optimizer is about to leave.
                o.flush()
                o.attach(self._updates, blocking=blocking_parameter_updates)
            self._lock = Lock()
            if delayed is not None:
                self._watch()
        except BaseException:
            self._unwatch()
            for o, updates, blocking in before:
                o.attach(updates, blocking=blocking)
            self._sync.close()
            raise

    @property
    def sync(self) -> GradientSync:
        """The engine that averages gradients; save its `state_dict()`, the method's state, on every rank."""
        return self._sync

    @property
    def traffic(self) -> Traffic:
        """Bytes, collectives and seconds waited of this rank."""
        return self._sync.traffic

    def forward(self, *args: Any, **kwargs: Any) -> Any:
        """Call the module; a hook on it applies queued updates first."""
        return self.module(*args, **kwargs)

    def flush(self) -> None:
        """Wait for the exchange in flight, which leaves averages in `.grad`, and apply queued updates.

        Raises:
            PeerLost: a rank did not answer.
            StenogradError: gradients were changed while they were being averaged.
        """
        self._updates.flush()

    def no_sync(self) -> AbstractContextManager[None]:
        """Accumulate gradients on this rank in the backward passes inside the block."""
        return self._sync.no_sync()

    def refresh(self) -> None:
        """Look for parameters again; every rank calls it, after unfreezing some."""
        self.flush()
        self._sync.refresh()
        if self._handles:
            self._watch()

    def train(self, mode: bool = True) -> DataParallel:
        """Switch to training or evaluation; before evaluation queued updates are applied."""
        if not mode:
            self.flush()
        return super().train(mode)

    def zero_grad(self, set_to_none: bool = True) -> None:
        """Reset all gradients, after any queued step that needs them."""
        self._updates.run(partial(super().zero_grad, set_to_none))

    def close(self) -> None:
        """Apply queued updates and detach from module and optimizers, whose steps then update at once.

        A second call does nothing.

        Raises:
            PeerLost: a rank did not answer; queued updates are dropped.
        """
        try:
            self.flush()
        finally:
            self._updates = Updates()
            for o in self._optimizers:
                o.attach(self._updates, blocking=True)
            self._unwatch()
            self._sync.close()

    def __reduce__(self) -> tuple[Callable[[nn.Module], nn.Module], tuple[nn.Module]]:
        """Apply queued updates; then copies and pickles are those of the module, and attached to nothing."""
        self.flush()
        return _itself, (self.module,)

    def _watch(self) -> None:
        """Register hooks that flush before any use of the module, also without this wrapper."""
        self._unwatch()
        first, module = _FlushHook(self.flush), self.module
        self._handles = [
            module.register_forward_pre_hook(first),
            module.register_state_dict_pre_hook(first),
            module.register_load_state_dict_pre_hook(first),
            # Runs before autograd adds the gradient; a hook after that would come too late.
            *(p.register_hook(self._before_gradient) for p in module.parameters() if p.requires_grad),
        ]

    def _unwatch(self) -> None:
        for handle in self._handles:
            handle.remove()
        self._handles = []

    def _before_gradient(self, _: Tensor) -> None:
        """Flush before a second backward pass adds to gradients whose averages are still in flight."""
        with self._lock:  # autograd runs one thread per device
            self.flush()


class _FlushHook:
    """A hook that calls a function; in a copied or unpickled module it does nothing."""

    def __init__(self, function: Callable[[], None] | None = None) -> None:
        self._function = function

    def __call__(self, *_: Any) -> None:
        if self._function is not None:
            self._function()

    def __reduce__(self) -> tuple[type[_FlushHook], tuple[()]]:
        return _FlushHook, ()


class DataParallelMultiGPU(nn.Module):
    """A module that DASO trains; call it like the module itself.

    Departs from Heat: weights are rank 0's instead of new ones; any device, and any number of ranks per node.

    Args:
        module: the model, alike on every rank.
        optimizer: the DASO that trains it.
        comm: None, or DASO's own process group.

    Raises:
        TypeError: module is not a torch.nn.Module, or optimizer is not a DASO.
        ConfigError: comm is another process group than DASO's.

    Example:
        >>> model = nn.Linear(2, 1)
        >>> daso = DASO(torch.optim.SGD(model.parameters(), lr=0.1), total_epochs=20)
        >>> net = DataParallelMultiGPU(model, daso)
        >>> net(torch.ones(3, 2)).shape
        torch.Size([3, 1])
        >>> daso.close()
    """

    def __init__(self, module: nn.Module, optimizer: DASO, comm: Any = None) -> None:
        typed("module", module, nn.Module, "a torch.nn.Module", "pass the model")
        typed("optimizer", optimizer, DASO, "a DASO", "use DataParallel for others")
        whole = optimizer.comm is None and comm is not None and ranks_of(comm) == ranks_of(None)
        if comm is not None and comm is not optimizer.comm and not whole:
            raise ConfigError("comm must be DASO's own process group, got another: leave it out here")
        super().__init__()
        self.module = module
        self.comm = optimizer.comm
        optimizer.set_model(module)  # never draws new weights: Heat does, and destroys pretrained ones

    def forward(self, *args: Any, **kwargs: Any) -> Any:
        """Call the module."""
        return self.module(*args, **kwargs)


def _itself(module: nn.Module) -> nn.Module:
    return module


def _checked(module: Any, comm: Any, optimizer: Any, blocking: Any) -> list[DataParallelOptimizer]:
    """Check the types of all arguments, and return the optimizers as a list."""
    typed("module", module, nn.Module, "a torch.nn.Module", "pass the model")
    check_comm(comm)
    typed("blocking_parameter_updates", blocking, bool, "True or False", "choose one")
    optimizers = list(optimizer) if isinstance(optimizer, (list, tuple)) else [optimizer]
    for o in optimizers or [None]:
        if not isinstance(o, DataParallelOptimizer):
            name = "none" if o is None else type(o).__name__
            advice = "use DataParallelMultiGPU" if name == "DASO" else "wrap each in DataParallelOptimizer"
            raise TypeError(f"optimizer must be one DataParallelOptimizer or several, got {name}: {advice}")
    return optimizers


def _step_with_present_settings(optimizer: torch.optim.Optimizer) -> Callable[[], None]:
    """Return a step that uses the present settings (learning rate, ...), whatever is set until it runs.

    Example:
        >>> w = torch.nn.Parameter(torch.ones(1))
        >>> w.grad = torch.ones(1)
        >>> optimizer = torch.optim.SGD([w], lr=0.5)
        >>> step = _step_with_present_settings(optimizer)
        >>> optimizer.param_groups[0]["lr"] = 0.125
        >>> step()
        >>> w.item(), optimizer.param_groups[0]["lr"]
        (0.5, 0.125)
    """
    # Tensors are copied, because schedulers change a learning rate that is a tensor in place.
    asked = [
        {k: v.clone() if isinstance(v, Tensor) else v for k, v in group.items() if k != "params"}
        for group in optimizer.param_groups
    ]

    def step() -> None:
        later = [dict(group) for group in optimizer.param_groups]
        _set(optimizer, asked)
        try:
            optimizer.step()
        finally:  # settings that the step itself changed stay changed
            # Not strict: groups may have been added while the step was queued.
            pairs = zip(optimizer.param_groups, asked, later, strict=False)
            _set(optimizer, [{k: new[k] for k in old if now[k] is old[k]} for now, old, new in pairs])

    return step


def _set(optimizer: torch.optim.Optimizer, settings: Sequence[Mapping[str, Any]]) -> None:
    for group, values in zip(optimizer.param_groups, settings, strict=False):
        group.update(values)
