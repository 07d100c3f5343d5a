"""N ranks in one process and without a network: `stenograd.simulate.exchange` and `run`."""

from stenograd.comm.simulate import exchange, run

__all__ = ["exchange", "run"]
