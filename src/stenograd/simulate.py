"""N ranks in one process, without a network: trainings (`ranks`), one exchange, or coroutines (`run`)."""

from stenograd.exchange.simulate import exchange, run
from stenograd.exchange.simulated_ranks import ranks

__all__ = ["exchange", "ranks", "run"]
