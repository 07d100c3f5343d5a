"""What a training reports: a row for each epoch, scores, and the fingerprint of its parameters."""

from __future__ import annotations

import hashlib
from dataclasses import dataclass

import torch
from torch import nn

__all__ = ["Row", "Score", "fingerprint"]


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


def fingerprint(model: nn.Module) -> str:
    """Return the first 16 hexadecimal digits of the SHA-256 of all parameters' bytes.

    Example:
        >>> layer = nn.Linear(2, 2)
        >>> before = fingerprint(layer)
        >>> _ = layer.weight.data.add_(1)
        >>> before == fingerprint(layer)
        False
    """
    digest = hashlib.sha256()
    for parameter in model.parameters():
        raw = parameter.detach().cpu().contiguous().reshape(-1).view(torch.uint8)
        digest.update(raw.numpy().tobytes())
    return digest.hexdigest()[:16]
