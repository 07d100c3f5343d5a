"""A 64-bit hash of words on the CPU, in one pass."""

from __future__ import annotations

from typing import Any

import numpy as np
import torch
from torch import Tensor

from stenograd.kernels.cpu.jit import kernel, view
from stenograd.kernels.hash import GOLDEN

__all__ = ["hash_words"]


def hash_words(words: Tensor) -> Tensor:
    """Return `sum_i mix(w_i + (i + 1) golden) mod 2**64` as a 0-d int64."""
    total = np.uint64(_sum(view(words.view(torch.uint64))))
    # As a signed number: what is above 2**63 - 1 fits into no int64 tensor.
    return torch.tensor(int(total.view(np.int64)), device="cpu")


@kernel
def _sum(words: Any) -> Any:
    """Add up splitmix64's results; every place has a key of its own, so the loop runs in vectors."""
    total = np.uint64(0)
    for i in range(words.size):
        z = words[i] + np.uint64(i + 1) * np.uint64(GOLDEN)
        z = (z ^ (z >> np.uint64(30))) * np.uint64(0xBF58476D1CE4E5B9)
        z = (z ^ (z >> np.uint64(27))) * np.uint64(0x94D049BB133111EB)
        total += z ^ (z >> np.uint64(31))
    return total
