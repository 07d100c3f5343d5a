"""Heat's data parallelism on any device: change the import, and DASO and the data-parallel modules are here.

`from stenograd.heat import nn, optim` gives its two namespaces, which know all of torch's names too.
"""

from __future__ import annotations

from stenograd.heat import nn, optim
from stenograd.heat.daso import DASO
from stenograd.heat.data_parallel import DataParallel
from stenograd.heat.multi_gpu import DataParallelMultiGPU
from stenograd.heat.optimizer import DataParallelOptimizer
from stenograd.heat.plateau import DetectMetricPlateau

__all__ = [
    "DASO",
    "DataParallel",
    "DataParallelMultiGPU",
    "DataParallelOptimizer",
    "DetectMetricPlateau",
    "nn",
    "optim",
]
