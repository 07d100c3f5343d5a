"""Several tensors as one message of bytes, and back."""

from __future__ import annotations

from collections.abc import Callable

import torch
from torch import Tensor

from laconic.errors import WireError

__all__ = ["pack"]


def pack(tensors: tuple[Tensor, ...]) -> tuple[Tensor, Callable[[Tensor], tuple[Tensor, ...]]]:
    """Put tensors into one byte buffer, widest type first for alignment; also return the way back.

    Args:
        tensors: of any shapes and dtypes, on one device.

    Returns:
        The flat uint8 buffer, and a function that makes such tensors of a buffer of the same length; it
        raises WireError for another length.

    Example:
        >>> packed, unpack = pack((torch.tensor([1, 2], dtype=torch.uint8), torch.tensor([1.0])))
        >>> packed.numel(), unpack(packed)  # 2 + 4, padded to whole floats
        (8, (tensor([1, 2], dtype=torch.uint8), tensor([1.])))
    """
    order = sorted(range(len(tensors)), key=lambda i: -tensors[i].element_size())
    sizes = [tensors[i].numel() * tensors[i].element_size() for i in order]
    widest = max((t.element_size() for t in tensors), default=1)
    padding = -sum(sizes) % widest
    raw = [_bytes(tensors[i]) for i in order]
    if padding:
        raw.append(raw[0].new_zeros(padding))
    packed = raw[0] if len(raw) == 1 else torch.cat(raw)
    if not packed.numel():  # nothing travels, and slices of nothing may be misaligned
        return packed, lambda row: tensors

    def unpack(row: Tensor) -> tuple[Tensor, ...]:
        if row.numel() != packed.numel():
            raise WireError(
                f"expected {packed.numel()} bytes, got {row.numel()}: the ranks disagree on the payload"
            )
        pieces = row[: sum(sizes)].split(sizes)
        back = {
            i: piece.view(tensors[i].dtype).view(tensors[i].shape)
            for i, piece in zip(order, pieces, strict=True)
        }
        return tuple(back[i] for i in range(len(tensors)))

    return packed, unpack


def _bytes(t: Tensor) -> Tensor:
    flat = t.contiguous().reshape(-1)
    if flat.stride(0) != 1:  # one element can have any stride
        flat = flat.new_empty(flat.shape).copy_(flat)
    return flat.view(torch.uint8)
