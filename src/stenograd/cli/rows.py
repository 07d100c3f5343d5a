"""What a training reports: a row for each epoch, and scores."""

from __future__ import annotations

from dataclasses import dataclass

__all__ = ["Row", "Score"]


@dataclass(frozen=True, slots=True)
class Score:
    """Mean loss and accuracy over all ranks' samples; NaN where no sample counted."""

    loss: float
    accuracy: float


@dataclass(frozen=True, slots=True, kw_only=True)
class Row:
    """One epoch, as rank 0 tells it. All but `seconds` is equal in a repeated or resumed run.

    Attributes:
        epoch: number of epochs trained, from 1.
        seconds: for training and evaluation.
        payload_bytes: what this rank handed to collectives.
        moved_bytes: what those made it send.
        dense_bytes: what dense training sends in as many steps (hands over, for a world of one).
        steps: number of steps.
        skipped: steps among them that a gradient which is not finite made void.
    """

    epoch: int
    train_loss: float
    train_accuracy: float
    eval_loss: float
    eval_accuracy: float
    seconds: float
    payload_bytes: int
    moved_bytes: int
    dense_bytes: int
    compression: float
    steps: int
    skipped: int
