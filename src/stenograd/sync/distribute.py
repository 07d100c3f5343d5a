"""`stenograd.distribute`: the one entry, which looks at the method's schedule."""

from __future__ import annotations

import os
from collections.abc import Sequence
from typing import Any

import torch
from torch import nn

from stenograd.catalog.method import MethodLike
from stenograd.catalog.method import method as parse
from stenograd.errors import ConfigError
from stenograd.exchange.buckets import usual_bytes
from stenograd.launch.detect import OPEN_VARIABLE
from stenograd.schedules.schedule import What
from stenograd.sync.attached import Sync
from stenograd.sync.gossip import GossipSync
from stenograd.sync.gradients import GradientSync
from stenograd.sync.handshake import several
from stenograd.sync.open_rounds import OpenRounds
from stenograd.sync.rounds import ParameterSync
from stenograd.sync.sharded import ShardedSync, is_sharded

__all__ = ["distribute"]

_KINDS: dict[What, type[GradientSync | ParameterSync | GossipSync]] = {
    What.GRADIENTS: GradientSync,
    What.NEIGHBOURS: GossipSync,
}


def distribute(
    model: nn.Module,
    optimizer: torch.optim.Optimizer | Sequence[torch.optim.Optimizer],
    method: MethodLike = "dense",
    *,
    group: Any = None,
    bucket_bytes: int | None = None,
    timeout_s: float = 300.0,
    check_every: int = 0,
    repair: bool = False,
    check_buffers: bool = False,
    skip_bad_steps: bool = True,
) -> Sync:
    """Make every `loss.backward()` leave gradients that are averaged over all ranks.

    A method with a schedule, such as "local:every=8" or "diloco:every=30/topk", lets ranks train by
    themselves and meet from time to time instead, and with "gossip" each rank meets a few others only; see
    `stenograd.schedules`.

    Model, optimizer and training loop stay yours: clipping, GradScaler and schedulers work as before. With
    accumulation, put all passes of a step but the last inside `sync.no_sync()`: each pass outside exchanges,
    or counts for a schedule. Rank 0's parameters and buffers are broadcast here, so all ranks start equal.

    Args:
        model: the same on every rank; frozen, tied and unused parameters are fine, and so are the sparse
            gradients of `nn.Embedding(sparse=True)`, which are averaged exactly whatever the method.
        optimizer: one or several, holding the model's parameters. What none of them holds is not averaged.
        method: how gradients travel, as text such as "topk:ratio=0.01" (see `stenograd methods`), or as
            objects that mean the same: `TopK(ratio=0.01)`, `DiLoCo(every=30)`,
            `Method(TopK(ratio=0.01), schedule=DiLoCo(every=30))`.
        group: process group, or a `DeviceMesh` of one dimension; None for all ranks. For a model that
            `fully_shard` (FSDP2) has sharded, the ranks that hold the same shards. Without an initialised
            torch.distributed the ranks are found from the launcher's variables (torchrun, mpiexec, srun), or
            this process is alone.
        bucket_bytes: gradients travel in buckets of at most this size; a larger tensor is its own bucket.
            None for 4 MiB, or 25 MiB for models on a GPU, where each bucket costs the same time to start.
        timeout_s: seconds after which a silent peer is an error.
        check_every: after every so many exchanges, compare the ranks' parameters bit for bit; 0 for never.
        repair: overwrite parameters that differ by the majority's and warn, instead of raising.
        check_buffers: compare and repair buffers too.
        skip_bad_steps: after an exchange that was not finite on some rank, `optimizer.step()` changes
            nothing on any: neither weights, nor momenta, nor step counts. False for torch's behaviour.

    Returns:
        The running synchronisation: the same names whatever the method (see `Sync`).

    Raises:
        MethodError: unknown method or key, or a value outside its range.
        ConfigError: nothing to train, or the optimizer holds other parameters than the model's.
        MismatchError: the ranks' models, the order of their tensors, optimizers, methods or versions differ
            (raised on every rank).
        PeerLost: a rank did not answer within timeout_s.

    `backward()` raises, on all ranks, ReplicaDivergence where a check finds a difference (`ReplicaGuard`),
    and MismatchError where gradients are averaged and the loss's scale (GradScaler) or learning rates differ.

    Example:
        >>> import torch, stenograd
        >>> model = torch.nn.Linear(4, 2)
        >>> optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
        >>> sync = stenograd.distribute(model, optimizer, "topk:ratio=0.5")
        >>> model(torch.ones(8, 4)).sum().backward()  # gradients are averaged now
        >>> optimizer.step()
        >>> sync.close()
    """
    bucket_bytes = usual_bytes(model.parameters()) if bucket_bytes is None else bucket_bytes
    kept: dict[str, Any] = {"group": group, "bucket_bytes": bucket_bytes, "timeout_s": timeout_s}
    guard: dict[str, Any] = {"check_every": check_every, "repair": repair, "check_buffers": check_buffers}
    chosen = parse(method)
    quorum = getattr(chosen.schedule, "quorum", 0)
    if OPEN_VARIABLE in os.environ and not quorum:
        raise ConfigError(
            f"{OPEN_VARIABLE} is set, so this process is a worker of an open run, which needs rounds with a "
            f"quorum, got {chosen}: use diloco:every=30,quorum=0.75, or unset it"
        )
    kind = OpenRounds if quorum else _KINDS.get(chosen.schedule.what, ParameterSync)
    # FSDP comes before all schedules: it refuses them by itself, with its own reason.
    kind = ShardedSync if is_sharded(model) else kind
    return kind(model, several(optimizer), chosen, skip_bad_steps=skip_bad_steps, **kept, **guard)
