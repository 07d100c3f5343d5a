"""The text task: a small GPT that learns to continue a text, character by character."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import torch
from torch import Tensor, nn
from torch.nn import functional

from stenograd.errors import DataError
from stenograd.tasks.base import IGNORE, Recipe, Task
from stenograd.tasks.models import CharGPT

__all__ = ["Text"]


class Text(Task):
    """Predict each next character from up to 64 before it.

    The first 90 % of the characters are for training: a sample is any window of 64 and the same window one
    character later. The last 10 % are for evaluation, cut into windows that do not overlap, so that each of
    its characters but the first is predicted exactly once; the last window is padded with targets of -1.

    Args:
        data: a UTF-8 text file; None for Python's own help pages, some 460,000 characters.

    Attributes:
        vocabulary: the different characters of the text, sorted.
        context: length of a window.

    Raises:
        DataError: if the file is missing, unreadable, not UTF-8, or shorter than two windows.

    Example:
        >>> inputs, targets = Text().train_batch(torch.tensor([0, 7]))
        >>> inputs.shape, bool((inputs[:, 1:] == targets[:, :-1]).all())
        (torch.Size([2, 64]), True)
    """

    name = "text"
    context = 64
    recipe = Recipe(
        epochs=10,
        batch_size=12,
        lr=1e-3,
        weight_decay=0.1,
        optimizer="adamw",
        betas=(0.9, 0.99),
        warmup_steps=100,
        min_lr=1e-4,
        steps_per_epoch=200,
    )

    def __init__(self, data: str | Path | None = None) -> None:
        text = _help_pages() if data is None else _read(Path(data))
        least = 2 * (self.context + 1)  # then the training part holds a window, the evaluation part a target
        if len(text) < least:
            raise DataError(f"{data}: expected a text of at least {least} characters, found {len(text)}")
        self.vocabulary, codes = _encode(text)
        cut = len(codes) * 9 // 10
        self._train, evaluation = codes[:cut], codes[cut:]
        self._eval_inputs = _windows(evaluation[:-1], self.context, fill=0)
        # the padding must not count in the loss
        self._eval_targets = _windows(evaluation[1:], self.context, fill=IGNORE)
        self.train_size = len(self._train) - self.context
        self.eval_size = len(self._eval_inputs)

    def build(self) -> nn.Module:
        """Build a GPT of 4 layers, 4 heads and width 128, about 0.8 million parameters."""
        return CharGPT(len(self.vocabulary), self.context)

    def train_batch(self, indices: Tensor) -> tuple[Tensor, Tensor]:
        """Return the windows that start at indices, and those one character later, both (batch, 64)."""
        spans = self._train[indices[:, None] + torch.arange(self.context + 1, device="cpu")].long()
        return spans[:, :-1], spans[:, 1:]

    def eval_batch(self, indices: Tensor) -> tuple[Tensor, Tensor]:
        """Return windows of the evaluation part and their next characters, both of shape (batch, 64)."""
        return self._eval_inputs[indices].long(), self._eval_targets[indices].long()


def _windows(codes: Tensor, length: int, fill: int) -> Tensor:
    """Cut codes into rows; attention is causal, so the padding of the last row affects nothing before it."""
    return functional.pad(codes, (0, -len(codes) % length), value=fill).view(-1, length)


def _encode(text: str) -> tuple[str, Tensor]:
    """Return the sorted characters of a text, and the text as int32 indices of them."""
    # one number a character, whatever the script
    points = np.frombuffer(text.encode("utf-32-le"), dtype="<u4")
    vocabulary, codes = np.unique(points, return_inverse=True)
    return "".join(map(chr, vocabulary)), torch.from_numpy(codes.astype(np.int32))


def _help_pages() -> str:
    from pydoc_data.topics import topics  # half a megabyte, loaded only if it is trained on

    return "".join(topics[key] for key in sorted(topics))


def _read(path: Path) -> str:
    try:
        return path.read_bytes().decode("utf-8")
    except UnicodeDecodeError as error:
        byte = error.object[error.start]
        raise DataError(
            f"{path}: expected UTF-8 text, found byte {byte:#04x} at offset {error.start}"
        ) from error
    except OSError as error:
        raise DataError(f"{path}: expected a readable text file, found: {error.strerror}") from error
