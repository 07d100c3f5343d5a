"""The kernels in plain torch, for every device and type."""
