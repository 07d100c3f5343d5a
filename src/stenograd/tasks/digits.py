"""The digits task: scikit-learn's 1,797 handwritten digits of 8x8 pixels; needs no file."""

from __future__ import annotations

import importlib.util
from pathlib import Path

import numpy as np
import torch
from torch import Tensor, nn

from stenograd.errors import StenogradError
from stenograd.tasks.images import ImageTask
from stenograd.tasks.models import digits_cnn
from stenograd.tasks.recipe import Recipe

__all__ = ["Digits"]


class Digits(ImageTask):
    """1,437 digits for training and 360 for evaluation, with about a tenth of either in each class.

    Raises:
        StenogradError: if scikit-learn is not installed.

    Example:
        >>> inputs, targets = Digits().eval_batch(torch.arange(4))
        >>> inputs.shape, targets.shape
        (torch.Size([4, 1, 8, 8]), torch.Size([4]))
    """

    name = "digits"
    recipe = Recipe(epochs=20, batch_size=32, lr=0.05, momentum=0.9, weight_decay=1e-4)

    def __init__(self) -> None:
        pixels, labels = _load()
        held_out = torch.zeros(len(labels), dtype=torch.bool, device="cpu")
        # Every fifth of the digits sorted by class: 360 of 1,797, a fifth of each class to within one digit.
        held_out[labels.argsort(stable=True)[::5]] = True
        train = pixels[~held_out], labels[~held_out]
        evaluation = pixels[held_out], labels[held_out]
        super().__init__(train, evaluation, brightest=16)

    def build(self) -> nn.Module:
        """Build the small convolutional network."""
        return digits_cnn()


def _load() -> tuple[Tensor, Tensor]:
    """Read scikit-learn's file, in 15 ms; to import it takes each worker 1.3 s."""
    package = importlib.util.find_spec("sklearn")
    if package is None or package.origin is None:
        advice = "install it with `pip install stenograd[examples]`"
        raise StenogradError(f"the digits task needs scikit-learn: {advice}")
    file = Path(package.origin).parent / "datasets" / "data" / "digits.csv.gz"
    if file.exists():
        rows = np.loadtxt(file, delimiter=",", dtype=np.uint8)
    else:  # a version that keeps it elsewhere
        from sklearn.datasets import load_digits

        rows = np.column_stack(load_digits(return_X_y=True)).astype(np.uint8)
    return torch.from_numpy(rows[:, :-1].reshape(-1, 8, 8).copy()), torch.from_numpy(rows[:, -1].copy())
