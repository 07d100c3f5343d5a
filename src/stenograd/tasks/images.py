"""Labelled grey images, kept as bytes and scaled batch by batch."""

from __future__ import annotations

import torch
from torch import Tensor

from stenograd.tasks.base import Task

__all__ = ["ImageTask", "Images"]

Images = tuple[Tensor, Tensor]  # uint8 pixels (samples, height, width), uint8 labels (samples,)


class ImageTask(Task):
    """A task that classifies images.

    Args:
        train: training images and labels.
        evaluation: evaluation images and labels.
        brightest: the pixel value that becomes 1.0.
    """

    def __init__(self, train: Images, evaluation: Images, brightest: float) -> None:
        self._train = train
        self._evaluation = evaluation
        self._brightest = brightest
        self.train_size = len(train[1])
        self.eval_size = len(evaluation[1])

    def train_batch(
        self, indices: Tensor, *, generator: torch.Generator | None = None
    ) -> tuple[Tensor, Tensor]:
        """Return pixels in [0, 1] of shape (batch, 1, height, width), and labels of shape (batch,)."""
        return self._batch(self._train, indices)

    def eval_batch(self, indices: Tensor) -> tuple[Tensor, Tensor]:
        """Return pixels in [0, 1] of shape (batch, 1, height, width), and labels of shape (batch,)."""
        return self._batch(self._evaluation, indices)

    def _batch(self, images: Images, indices: Tensor) -> tuple[Tensor, Tensor]:
        pixels, labels = images
        return pixels[indices].unsqueeze(1).float() / self._brightest, labels[indices].long()
