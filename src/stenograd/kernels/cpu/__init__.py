"""The kernels in numba, for float32 in the memory of the CPU."""
