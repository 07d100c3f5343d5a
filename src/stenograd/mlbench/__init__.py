"""MLBench's optimizers on today's PyTorch: change the import, and every class of its documents is here.

`optimizer = CentralizedSGD(world_size=4, model=model, lr=0.1)`, then `optimizer.step()` in the loop. Where it
does something else than MLBench, docs/mlbench.md says so under "Departures".
"""

from __future__ import annotations

from typing import Any

import torch

from stenograd.arguments import choice
from stenograd.mlbench.aggregation import Aggregation, AllReduceAggregation, PowerAggregation
from stenograd.mlbench.backends import FCGraph, global_average, initialize_backends
from stenograd.mlbench.centralized import (
    CentralizedAdam,
    CentralizedSGD,
    CustomCentralizedOptimizer,
    GenericCentralizedOptimizer,
    PowerSGD,
)
from stenograd.mlbench.decentralized import DecentralizedAggregation, DecentralizedSGD
from stenograd.mlbench.fp16 import DynamicLossScaler, FP16Optimizer
from stenograd.mlbench.optim import CentralizedSparsifiedSGD, SignSGD, SparsifiedAggregation, SparsifiedSGD
from stenograd.mlbench.partition import DataPartitioner, Partition, partition_dataset_by_rank
from stenograd.mlbench.schedulers import (
    ExponentialWarmupMultiStepLR,
    LRLinearWarmUp,
    MultiStepLRLinearWarmUp,
    PolyDecayLRLinearWarmup,
    ReduceLROnPlateauWithWarmup,
    SparsifiedSGDLR,
    SQRTTimeDecayLR,
    SQRTTimeDecayLRWithWarmup,
    TimeDecayLR,
)
from stenograd.mlbench.tracker import (
    AverageMeter,
    Tracker,
    task1_time_to_accuracy_goal,
    task1_time_to_accuracy_light_goal,
    task2_time_to_accuracy_goal,
    task2_time_to_accuracy_light_goal,
    task3_time_to_perplexity_goal,
    task4_time_to_bleu_goal,
    time_to_accuracy_goal,
)

__all__ = [
    "Aggregation",
    "AllReduceAggregation",
    "AverageMeter",
    "CentralizedAdam",
    "CentralizedSGD",
    "CentralizedSparsifiedSGD",
    "CustomCentralizedOptimizer",
    "DataPartitioner",
    "DecentralizedAggregation",
    "DecentralizedSGD",
    "DynamicLossScaler",
    "ExponentialWarmupMultiStepLR",
    "FCGraph",
    "FP16Optimizer",
    "GenericCentralizedOptimizer",
    "LRLinearWarmUp",
    "MultiStepLRLinearWarmUp",
    "Partition",
    "PolyDecayLRLinearWarmup",
    "PowerAggregation",
    "PowerSGD",
    "ReduceLROnPlateauWithWarmup",
    "SQRTTimeDecayLR",
    "SQRTTimeDecayLRWithWarmup",
    "SignSGD",
    "SparsifiedAggregation",
    "SparsifiedSGD",
    "SparsifiedSGDLR",
    "TimeDecayLR",
    "Tracker",
    "get_optimizer",
    "global_average",
    "initialize_backends",
    "partition_dataset_by_rank",
    "task1_time_to_accuracy_goal",
    "task1_time_to_accuracy_light_goal",
    "task2_time_to_accuracy_goal",
    "task2_time_to_accuracy_light_goal",
    "task3_time_to_perplexity_goal",
    "task4_time_to_bleu_goal",
    "time_to_accuracy_goal",
]

_OPTIMIZERS: dict[str, type[torch.optim.Optimizer]] = {
    "centralized_adam": CentralizedAdam,
    "centralized_sgd": CentralizedSGD,
    "centralized_sparsified_sgd": CentralizedSparsifiedSGD,
    "decentralized_sgd": DecentralizedSGD,
    "power_sgd": PowerSGD,
    "sign_sgd": SignSGD,
    "sparsified_sgd": SparsifiedSGD,
}


def get_optimizer(name: str, **kwargs: Any) -> torch.optim.Optimizer:
    """Make an optimizer by its name.

    Args:
        name: sign_sgd, sparsified_sgd, centralized_sparsified_sgd, centralized_sgd, centralized_adam,
            power_sgd or decentralized_sgd.
        kwargs: its arguments.

    Raises:
        ConfigError: the name is unknown, or as the optimizer.

    Example:
        >>> w = torch.zeros(2, requires_grad=True)
        >>> type(get_optimizer("sign_sgd", params=[w], lr=0.1)).__name__
        'SignSGD'
    """
    return _OPTIMIZERS[choice("name", name, _OPTIMIZERS)](**kwargs)
