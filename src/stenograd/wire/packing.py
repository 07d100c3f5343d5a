"""Several tensors as one message of bytes, and back."""

from __future__ import annotations

from collections.abc import Callable

import torch
from torch import Tensor

from stenograd.errors import WireError

__all__ = ["as_bytes", "flattened", "pack", "pack_rows"]


def flattened(tensors: tuple[Tensor, ...]) -> tuple[Tensor, Callable[[Tensor], tuple[Tensor, ...]]]:
    """Put tensors of one type in a row; also return the way back.

    Args:
        tensors: at least one, of any shapes.

    Returns:
        A contiguous tensor, the very one that is given if that is one and contiguous, and a function that
        makes tensors of the given shapes of another one like it.

    Example:
        >>> row, split = flattened((torch.ones(2), torch.zeros(1, 1)))
        >>> row, split(row + 1)
        (tensor([1., 1., 0.]), (tensor([2., 2.]), tensor([[1.]])))
    """
    if len(tensors) == 1:
        return tensors[0].contiguous(), lambda row: (row,)

    def split(row: Tensor) -> tuple[Tensor, ...]:
        """Cut one row."""
        pieces = row.split([t.numel() for t in tensors])
        return tuple(piece.view(t.shape) for piece, t in zip(pieces, tensors, strict=True))

    return torch.cat([t.reshape(-1) for t in tensors]), split


def pack(tensors: tuple[Tensor, ...]) -> tuple[Tensor, Callable[[Tensor], tuple[Tensor, ...]]]:
    """Put tensors into one byte buffer, widest type first for alignment; also return the way back.

    Args:
        tensors: at least one, of any shapes and dtypes, on one device.

    Returns:
        The flat uint8 buffer, and a function that makes such tensors of a buffer of the same length; it
        raises WireError for another length.

    Example:
        >>> packed, unpack = pack((torch.tensor([1, 2], dtype=torch.uint8), torch.tensor([1.0])))
        >>> packed.numel(), unpack(packed)  # 2 + 4, padded to whole floats
        (8, (tensor([1, 2], dtype=torch.uint8), tensor([1.])))
    """
    packed, unpack = pack_rows(tuple(t.unsqueeze(0) for t in tensors))
    return packed[0], unpack


def pack_rows(tensors: tuple[Tensor, ...]) -> tuple[Tensor, Callable[[Tensor], tuple[Tensor, ...]]]:
    """Put tensors into rows of bytes: row i holds row i of each, as `pack` would put it.

    Args:
        tensors: at least one, of any dtypes, on one device, with equal first dimensions above 0.

    Returns:
        A uint8 tensor of as many rows, and a function that makes one row of each tensor of such a row.

    Example:
        >>> packed, unpack = pack_rows((torch.tensor([[1, 2], [3, 4]]), torch.tensor([5.0, 6.0])))
        >>> packed.shape, unpack(packed[1])
        (torch.Size([2, 24]), (tensor([3, 4]), tensor(6.)))
    """
    rows = len(tensors[0])
    order = sorted(range(len(tensors)), key=lambda i: -tensors[i].element_size())
    raw = [as_bytes(tensors[i]).view(rows, -1) if tensors[i].numel() else None for i in order]
    sizes = [0 if part is None else part.shape[1] for part in raw]
    parts = [part for part in raw if part is not None]
    padding = -sum(sizes) % max(t.element_size() for t in tensors)  # so that the next row starts aligned, too
    if padding:
        parts.append(parts[0].new_zeros(rows, padding))
    if not parts:  # nothing travels, and slices of nothing may be misaligned
        return torch.empty(rows, 0, dtype=torch.uint8, device=tensors[0].device), lambda row: tuple(
            t[0] for t in tensors
        )

    def unpack(row: Tensor) -> tuple[Tensor, ...]:
        """Read one row."""
        if row.numel() != sum(sizes) + padding:
            raise WireError(
                f"expected {sum(sizes) + padding} bytes, got {row.numel()}: the ranks disagree on the payload"
            )
        pieces = row[: sum(sizes)].split(sizes)
        back = {
            i: piece.view(tensors[i].dtype).view(tensors[i].shape[1:])
            for i, piece in zip(order, pieces, strict=True)
        }
        return tuple(back[i] for i in range(len(tensors)))

    return (parts[0] if len(parts) == 1 else torch.cat(parts, 1)), unpack


def as_bytes(t: Tensor) -> Tensor:
    """Return a tensor's bytes in logical order, in its own memory where that is contiguous.

    Example:
        >>> as_bytes(torch.tensor([[1, -1]], dtype=torch.int16))
        tensor([  1,   0, 255, 255], dtype=torch.uint8)
    """
    # lazy conjugates have other bytes in memory
    flat = t.resolve_conj().resolve_neg().contiguous().reshape(-1)
    if flat.stride(0) != 1:  # one element can have any stride
        flat = flat.new_empty(flat.shape).copy_(flat)
    return flat.view(torch.uint8)
