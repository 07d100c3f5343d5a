"""Heat's `ht.optim.dp_optimizer`, by which its documents call the module of its optimizers."""

from stenograd.heat.daso import DASO
from stenograd.heat.data_parallel import DataParallelOptimizer

__all__ = ["DASO", "DataParallelOptimizer"]
