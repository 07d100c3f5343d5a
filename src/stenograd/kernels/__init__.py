"""Hot primitives, in plain torch for any device; `cpu` and `triton` hold faster versions of the same names.

All tensors are flat. float32 in the memory of the CPU goes to numba, everything else to plain torch. Nothing
here touches a global random generator, and nothing depends on the number of threads.
"""
