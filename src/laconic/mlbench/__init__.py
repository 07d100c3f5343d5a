"""MLBench's optimizers on today's PyTorch: change the import, and every class of its documents is here.

`optimizer = CentralizedSGD(world_size=4, model=model, lr=0.1)`, then `optimizer.step()` in the loop.
"""

from __future__ import annotations

from laconic.mlbench.aggregation import Aggregation, AllReduceAggregation
from laconic.mlbench.backends import FCGraph, global_average, initialize_backends
from laconic.mlbench.centralized import CentralizedAdam, CentralizedSGD
from laconic.mlbench.compressed import PowerAggregation, SparsifiedAggregation
from laconic.mlbench.custom import CustomCentralizedOptimizer
from laconic.mlbench.decentralized import DecentralizedAggregation, DecentralizedSGD
from laconic.mlbench.fp16 import FP16Optimizer
from laconic.mlbench.generic import GenericCentralizedOptimizer
from laconic.mlbench.goals import (
    task1_time_to_accuracy_goal,
    task1_time_to_accuracy_light_goal,
    task2_time_to_accuracy_goal,
    task2_time_to_accuracy_light_goal,
    task3_time_to_perplexity_goal,
    task4_time_to_bleu_goal,
    time_to_accuracy_goal,
)
from laconic.mlbench.partition import DataPartitioner, Partition, partition_dataset_by_rank
from laconic.mlbench.powersgd import PowerSGD
from laconic.mlbench.registry import get_optimizer
from laconic.mlbench.scaler import DynamicLossScaler
from laconic.mlbench.schedulers import (
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
from laconic.mlbench.signsgd import SignSGD
from laconic.mlbench.sparsified import SparsifiedSGD
from laconic.mlbench.sparsified_centralized import CentralizedSparsifiedSGD
from laconic.mlbench.tracker import AverageMeter, Tracker

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
