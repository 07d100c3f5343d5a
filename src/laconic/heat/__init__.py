"""Heat's data parallelism on any device: change the import, and DASO and the data-parallel modules are here.

`from laconic.heat import nn, optim` gives its two namespaces, which know all of torch's names too.
"""

from __future__ import annotations

from laconic.heat import nn, optim
from laconic.heat.daso import DASO
from laconic.heat.data_parallel import DataParallel
from laconic.heat.multi_gpu import DataParallelMultiGPU
from laconic.heat.optimizer import DataParallelOptimizer
from laconic.heat.plateau import DetectMetricPlateau

__all__ = [
    "DASO",
    "DataParallel",
    "DataParallelMultiGPU",
    "DataParallelOptimizer",
    "DetectMetricPlateau",
    "nn",
    "optim",
]
