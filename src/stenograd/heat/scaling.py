"""One optimizer step under a GradScaler that all ranks take or skip together."""

from __future__ import annotations

from typing import Any

import torch

from stenograd.comm.agreement import sum_over_ranks
from stenograd.comm.driver import Driver

__all__ = ["step_together"]


def step_together(scaler: Any, optimizer: torch.optim.Optimizer, driver: Driver) -> bool:
    """Unscale, agree over the ranks on whether a gradient overflowed, step or skip, update the scale.

    Costs one all-gather of 8 bytes per rank. Skips decided by each rank alone, as in Heat, let ranks diverge.

    Args:
        scaler: a `torch.amp.GradScaler`; it may have unscaled the gradients already.
        optimizer: the optimizer whose gradients it scaled.
        driver: the way to the other ranks.

    Returns:
        Whether the optimizer stepped.
    """
    if not scaler.is_enabled():
        scaler.step(optimizer)
        return True
    # Torch's own sharded scalers agree at the same point, in the record of what unscale_ found.
    record = scaler._per_optimizer_states[id(optimizer)]
    if record["stage"].name == "READY":
        scaler.unscale_(optimizer)
    found = list(record["found_inf_per_device"].values())
    mine = float(any(bool(flag.item()) for flag in found))
    overflowed = sum_over_ranks(driver, [mine])[0] > 0
    for flag in found:
        flag.fill_(float(overflowed))
    scaler.step(optimizer)
    scaler.update()
    return not overflowed
