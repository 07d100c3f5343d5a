"""Heat's DASO and data-parallel modules on any device, under the same names: change the import.

`from stenograd.heat import nn, optim` gives Heat's two namespaces, which also hold all of torch's names.
"""

from __future__ import annotations

from stenograd.heat import nn, optim
from stenograd.heat.daso import DASO
from stenograd.heat.data_parallel import DataParallel, DataParallelMultiGPU, DataParallelOptimizer
from stenograd.heat.plateau import DetectMetricPlateau

__all__ = [
    "DASO",
    "MPI_WORLD",
    "DataParallel",
    "DataParallelMultiGPU",
    "DataParallelOptimizer",
    "DetectMetricPlateau",
    "nn",
    "optim",
]

#: As `comm`: all ranks.
MPI_WORLD = None
