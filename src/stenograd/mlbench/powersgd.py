"""MLBench's PowerSGD: low-rank gradients with error feedback, momentum after decompression."""

from __future__ import annotations

import torch
from torch import nn

from stenograd.errors import bad_value
from stenograd.mlbench.arguments import check_lr, checked_model
from stenograd.mlbench.compressed import PowerAggregation
from stenograd.mlbench.generic import GenericCentralizedOptimizer

__all__ = ["PowerSGD"]


class PowerSGD(GenericCentralizedOptimizer):
    """SGD on `P Q^T`, where `P = orthonormal(mean(M Q0))`, `Q = mean(M^T P)`, `M_r = g_r + e_r`.

    Then `e_r <- M_r - P (M_r^T P)^T`. Tensors that two factors would not make smaller (1-D ones, small
    matrices) are averaged exactly, with `e = 0`. In a world of one this is `torch.optim.SGD`. A step whose
    gradients are not finite on some rank changes nothing on any; `aggregation.skipped` counts these.

    Args:
        model: the model to train; any mixture of shapes and dtypes.
        lr: learning rate, at least 0; must be given.
        momentum: at least 0; applied to what was decompressed.
        weight_decay: L2 penalty, at least 0; added to what was decompressed.
        dampening: of the momentum; 0 with nesterov.
        nesterov: Nesterov's momentum; needs momentum above 0.
        average_world: must be True.
        use_cuda: taken for compatibility.
        by_layer: collectives of its own for each parameter, instead of shared ones.
        reuse_query: start from the last step's Q (warm start), instead of a random one; better at no cost.
        world_size: number of ranks; must be the group's.
        rank: largest rank of an approximation, at least 1.

    Raises:
        ConfigError: an argument is out of range, or world_size is not the group's.
        CheckpointError: a loaded state is of another rank, world size, method or model.

    Example:
        >>> optimizer = PowerSGD(nn.Linear(4, 4), lr=0.1, rank=2, reuse_query=True)
        >>> optimizer.param_groups[0]["lr"]
        0.1

    Departures: `e` is this rank's own projection error, whose sum over the ranks is the documents' (there
    `e_r = M_r - P Q^T`, which also gathers the differences between the ranks). Random Q come from a
    generator of their own, by_layer works, and memories are in `state_dict()` (D-M5).

    Reference: Vogels et al., "PowerSGD", NeurIPS 2019.
    """

    def __init__(
        self,
        model: nn.Module | None = None,
        lr: float | None = None,
        momentum: float = 0,
        weight_decay: float = 0,
        dampening: float = 0,
        nesterov: bool = False,
        average_world: bool = True,
        use_cuda: bool = False,
        by_layer: bool = False,
        reuse_query: bool = False,
        world_size: int | None = 1,
        rank: int = 1,
    ) -> None:
        if not average_world:
            raise bad_value("average_world", "must be True", average_world, "sums are not implemented")
        rate = check_lr(lr)
        aggregation = PowerAggregation(checked_model(model), use_cuda, reuse_query, world_size, rank)
        self._set_up(model, aggregation, bool(by_layer), agg_grad=True)
        self.optimizer = torch.optim.SGD(
            self.model.parameters(), rate, momentum, dampening, weight_decay, nesterov
        )
