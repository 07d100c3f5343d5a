"""A callback that writes the ledger's totals to the Trainer's loggers."""

from __future__ import annotations

from typing import Any

from stenograd.errors import ConfigError
from stenograd.lightning.packages import pytorch

__all__ = ["TrafficLogger"]


class TrafficLogger(pytorch.callbacks.Callback):
    """Logs bytes, collectives and seconds waited, as sums since training began, of rank 0.

    They are written as often as everything else (`Trainer(log_every_n_steps=...)`).

    Args:
        prefix: begins every name, before a slash.

    Example:
        trainer = Trainer(strategy=StenogradStrategy("topk:ratio=0.05"), callbacks=[TrafficLogger()])
    """

    def __init__(self, prefix: str = "traffic") -> None:
        self._prefix = prefix

    def on_train_start(self, trainer: Any, pl_module: Any) -> None:
        """Refuse a strategy that has no ledger.

        Raises:
            ConfigError: the strategy is not one of Stenograd's.
        """
        if getattr(trainer.strategy, "sync", None) is None:
            raise ConfigError(
                "TrafficLogger needs strategy=StenogradStrategy(...), got "
                f"{type(trainer.strategy).__name__}: use that, or leave the callback out"
            )

    def on_train_batch_end(self, trainer: Any, pl_module: Any, *_: Any) -> None:
        """Log the totals so far."""
        pl_module.log_dict(trainer.strategy.sync.traffic.as_metrics(self._prefix))
