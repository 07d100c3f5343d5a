"""Several tensors as one message of bytes, and back."""

from __future__ import annotations

from collections.abc import Callable

import torch
from torch import Tensor

from laconic.errors import WireError

__all__ = ["pack", "pack_rows"]


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


def pack_rows(
    tensors: tuple[Tensor, ...],
) -> tuple[Tensor, Callable[[Tensor], tuple[Tensor, ...]]]:
    """Put tensors into rows of bytes: row i holds row i of each, as `pack` would put it.

    Args:
        tensors: at least one, of any dtypes, on one device, with equal first dimensions above 0.

    Returns:
        A uint8 tensor of one row a rank, and a function that makes one row of each tensor of such a row.

    Example:
        >>> packed, unpack = pack_rows((torch.tensor([[1, 2], [3, 4]]), torch.tensor([5.0, 6.0])))
        >>> packed.shape, unpack(packed[1])
        (torch.Size([2, 24]), (tensor([3, 4]), tensor(6.)))
    """
    rows = len(tensors[0])
    packed, unpack = pack(tuple(t[0] for t in tensors))
    order = sorted(range(len(tensors)), key=lambda i: -tensors[i].element_size())
    raw = [_bytes(tensors[i]).view(rows, -1) for i in order if tensors[i].numel()]
    width = sum(part.shape[1] for part in raw)
    if width < packed.numel():
        raw.append(packed.new_zeros(rows, packed.numel() - width))
    if not raw:
        return packed.new_empty(rows, 0), unpack
    return (raw[0] if len(raw) == 1 else torch.cat(raw, 1)), unpack


def _bytes(t: Tensor) -> Tensor:
    flat = t.contiguous().reshape(-1)
    if flat.stride(0) != 1:  # one element can have any stride
        flat = flat.new_empty(flat.shape).copy_(flat)
    return flat.view(torch.uint8)
