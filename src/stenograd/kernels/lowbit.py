"""Kernels of rounding to the nearest of a few levels: codes of 2 or 4 bits, and a scale for each block."""

from __future__ import annotations

from collections.abc import Sequence

from torch import Tensor

from stenograd.kernels.backend import pick

__all__ = ["lowbit_decode", "lowbit_encode"]


def lowbit_encode(x: Tensor, name: str, block: int, numels: Sequence[int]) -> tuple[Tensor, Tensor]:
    """Send the code of the level nearest to `x / m`, `m = max|x|` of a block.

    Args:
        x: flat tensor (n,), floating; left alone.
        name: "e3m0", "int4" or "int2".
        block: elements per scale; blocks never span tensors.
        numels: lengths of the tensors that lie one after another in x.

    Returns:
        Codes, uint8 (ceil(n bits / 8),), lowest bit first; scales m, float32, one per block, NaN where the
        block has a NaN.

    Raises:
        ConfigError: block below 1, or lengths that do not add up to n.

    Example:
        >>> import torch
        >>> lowbit_encode(torch.tensor([4.0, -1.4, 0.0]), "e3m0", 8, [3])
        (tensor([215,   0], dtype=torch.uint8), tensor([4.]))
    """
    codes, scales = pick("lowbit", "lowbit_encode", x)(x, name, block, numels)
    return codes, scales


def lowbit_decode(payload: tuple[Tensor, Tensor], name: str, block: int, numels: Sequence[int]) -> Tensor:
    """Return what a message says, float32 (n,).

    Args:
        payload: codes and scales.
        name: as in encoding.
        block: as in encoding.
        numels: as in encoding.

    Raises:
        ConfigError: block below 1.
        WireError: codes or scales have another length.

    Example:
        >>> import torch
        >>> payload = lowbit_encode(torch.tensor([4.0, -1.4, 0.0]), "e3m0", 8, [3])
        >>> lowbit_decode(payload, "e3m0", 8, [3])
        tensor([ 4., -1.,  0.])
    """
    decode = pick("lowbit", "lowbit_decode", payload[1], numel=sum(numels))
    values: Tensor = decode(payload, name, block, numels)
    return values
