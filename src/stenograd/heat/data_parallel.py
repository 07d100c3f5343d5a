"""Data parallelism with Heat's interface: updates at once, or only before the next forward pass."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager
from functools import partial
from threading import Lock
from typing import Any

from torch import Tensor, nn

from stenograd.catalog.method import Method
from stenograd.comm.groups import is_group
from stenograd.comm.traffic import Traffic
from stenograd.compression.contract import Compressor
from stenograd.heat.delayed import DelayedSync
from stenograd.heat.optimizer import DataParallelOptimizer
from stenograd.heat.updates import Updates
from stenograd.sync.gradient_sync import DEFAULT_BUCKET_BYTES, GradientSync

__all__ = ["DataParallel"]


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
        bucket_bytes: largest size of a bucket of gradients.
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
        method: str | Method | Compressor = "dense",
        bucket_bytes: int = DEFAULT_BUCKET_BYTES,
        timeout_s: float = 300.0,
    ) -> None:
        optimizers = _checked(module, comm, optimizer, blocking_parameter_updates)
        super().__init__()
        self.module = module
        self.comm = comm
        self.blocking_parameter_updates = blocking_parameter_updates
        self._optimizers = optimizers
        kind = GradientSync if blocking_parameter_updates else DelayedSync
        held = [o.torch_optimizer for o in optimizers]
        self._sync = kind(module, held, method, group=comm, bucket_bytes=bucket_bytes, timeout_s=timeout_s)
        delayed = self._sync if isinstance(self._sync, DelayedSync) else None
        self._updates = Updates(delayed, next(module.parameters()).device.type)
        for o in optimizers:
            o.flush()
            o.attach(self._updates, blocking=blocking_parameter_updates)
        self._lock = Lock()
        self._handles: list[Any] = []
        if delayed is not None:
            self._watch()

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

    def _watch(self) -> None:
        """Register hooks that flush before any use of the module, also without this wrapper."""
        self._unwatch()
        first, module = _FlushHook(self.flush), self.module
        self._handles = [
            module.register_forward_pre_hook(first),
            module.register_state_dict_pre_hook(first),
            module.register_load_state_dict_pre_hook(first),
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


def _checked(module: Any, comm: Any, optimizer: Any, blocking: Any) -> list[DataParallelOptimizer]:
    """Check the types of all arguments, and return the optimizers as a list."""
    if not isinstance(module, nn.Module):
        raise TypeError(f"module must be a torch.nn.Module, got {type(module).__name__}: pass the model")
    if comm is not None and not is_group(comm):
        raise TypeError(
            f"comm must be a process group of torch.distributed, got {type(comm).__name__}: "
            "give torch.distributed.new_group(...), or None for all ranks"
        )
    if not isinstance(blocking, bool):
        raise TypeError(f"blocking_parameter_updates must be True or False, got {blocking!r}")
    optimizers = list(optimizer) if isinstance(optimizer, (list, tuple)) else [optimizer]
    for o in optimizers or [None]:
        if not isinstance(o, DataParallelOptimizer):
            name = "none" if o is None else type(o).__name__
            advice = "use DataParallelMultiGPU" if name == "DASO" else "wrap each in DataParallelOptimizer"
            raise TypeError(f"optimizer must be one DataParallelOptimizer or several, got {name}: {advice}")
    return optimizers
