"""What ranks of tests import, once for all of them: in the process that they are forked from."""

import gc
import pkgutil
from importlib import import_module

from numba.core.registry import cpu_target

# The first optimizer imports `torch._dynamo`; attaching imports `sync`; kernels and compressors import what
# they need on first use, which would be in every rank anew.
for name in ("torch._dynamo", "stenograd.sync.distribute", "stenograd.testing.methods"):
    import_module(name)
for folder in ("stenograd.kernels", "stenograd.compressors"):
    for module in pkgutil.walk_packages(import_module(folder).__path__, f"{folder}."):
        import_module(module.name)
# numba fills its tables of functions when the first kernel is loaded, which takes half a second.
cpu_target.typing_context.refresh()
cpu_target.target_context.refresh()
# The collector writes into every object that it looks at: into memory that forks share until it is written.
gc.collect()
gc.freeze()
