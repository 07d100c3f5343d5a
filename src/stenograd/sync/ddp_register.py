"""`stenograd.ddp.register`: give a DistributedDataParallel model our communication hook."""

from __future__ import annotations

from typing import Any

from stenograd.catalog.method import MethodLike, method
from stenograd.comm.sparse_rows import sparse_parameters
from stenograd.errors import StenogradError, TensorTypeError, first_line
from stenograd.sync.ddp_hook import DDPHook
from stenograd.sync.handshake import unwrapped
from stenograd.sync.replica_guard import check_interval

__all__ = ["register"]


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

    Call it once, right after wrapping the model. Averages are final when `backward()` returns, as with DDP
    alone; with "dense" they equal plain DDP's bit for bit. `find_unused_parameters`, `static_graph`,
    `gradient_as_bucket_view`, `no_sync()` and `join()` work as without the hook.

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
        ConfigError: check_every is out of range, or repair is asked for without checks.
        MismatchError: the ranks' methods, settings, versions or kernels differ.

    `backward()` raises ReplicaDivergence, on all ranks, where a check finds a difference; see `ReplicaGuard`.
    It raises MismatchError, on all ranks, where the loss's scale (GradScaler) differs; not with "dense" and
    `check_every=0`, which send nothing beside the gradients.

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
