"""What an Accelerator has prepared, and how it trains."""

from __future__ import annotations

import torch
from accelerate import Accelerator, DistributedType
from torch import nn

from stenograd.errors import ConfigError, bad_value
from stenograd.sync.handshake import as_optimizers

__all__ = ["optimizers_of", "refuse_sharding"]


def optimizers_of(accelerator: Accelerator, model: nn.Module) -> list[torch.optim.Optimizer]:
    """Return the prepared optimizers that hold parameters of a model."""
    mine = {id(p) for p in model.parameters()}
    prepared = as_optimizers(list(accelerator._optimizers))
    return [o for o in prepared if any(id(p) in mine for g in o.param_groups for p in g["params"])]


def refuse_sharding(accelerator: Accelerator) -> None:
    """Refuse what does not keep a whole model on every rank."""
    kind = accelerator.distributed_type
    if kind != DistributedType.NO and not kind.name.startswith("MULTI_"):
        raise bad_value(
            "accelerator.distributed_type",
            "must be that of plain data-parallel training",
            kind.name,
            "leave FSDP, DeepSpeed and the others out, or train without Stenograd",
        )
    if accelerator.parallelism_config is not None:
        raise ConfigError(
            "accelerator must have no parallelism_config: tensor and context parallelism split models"
        )
