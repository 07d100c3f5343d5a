"""Numbers of a few bits in bytes, and a flat tensor as blocks: what codecs in plain torch share."""

from __future__ import annotations

from collections.abc import Sequence
from functools import lru_cache

import numpy as np
import torch
from torch import Tensor
from torch.nn.functional import pad

from stenograd.errors import WireError

__all__ = ["block_starts", "block_views", "pack_bits", "packed_bytes", "scale_blocks", "unpack_bits"]

# A packed word of `bits` bytes is also an integer of this type, so it needs no byte-wise copy.
_WORDS = {1: torch.uint8, 2: torch.int16, 4: torch.int32}


def packed_bytes(count: int, bits: int) -> int:
    """Bytes that `count` values of `bits` bits each take: `ceil(count * bits / 8)`.

    Example:
        >>> packed_bytes(3, bits=3)
        2
    """
    return -(-count * bits // 8)


def pack_bits(values: Tensor, bits: int) -> Tensor:
    """Write values of `bits` bits one after another, lowest bit first.

    Eight values, one a byte, are one int64 word; neighbours are joined in it three times (8 -> 4 -> 2 -> 1
    lanes), which leaves the word's low `bits` bytes as the result.

    Args:
        values: 1-D uint8 tensor, every value below `2 ** bits`.
        bits: bits per value, 1 to 8.

    Example:
        >>> pack_bits(torch.tensor([1, 0, 1, 1], dtype=torch.uint8), bits=1)
        tensor([13], dtype=torch.uint8)
    """
    count = values.numel()
    if bits == 8 or count == 0:
        return values.clone()
    words = _aligned(pad(values, (0, -count % 8))).view(torch.int64)
    for lane in (8, 16, 32):
        held = bits * lane // 8  # bits in use at the bottom of a lane
        odd = words & _mask(2 * lane, lane, held)
        words = words.bitwise_xor(odd)
        words |= odd >> (lane - held)
    if bits in _WORDS:
        low = words.to(_WORDS[bits]).view(torch.uint8)
    else:
        low = words.view(torch.uint8).view(-1, 8)[:, :bits].reshape(-1)
    return low[: packed_bytes(count, bits)]


def unpack_bits(packed: Tensor, bits: int, count: int) -> Tensor:
    """Read back what `pack_bits` wrote.

    Args:
        packed: 1-D uint8 tensor of `ceil(count * bits / 8)` bytes.
        bits: bits per value, 1 to 8.
        count: number of values.

    Raises:
        WireError: `packed` has another length.

    Example:
        >>> unpack_bits(torch.tensor([13], dtype=torch.uint8), bits=1, count=4)
        tensor([1, 0, 1, 1], dtype=torch.uint8)
    """
    if packed.numel() != packed_bytes(count, bits):
        needed = packed_bytes(count, bits)
        raise WireError(f"{count} values of {bits} bits take {needed} bytes, got {packed.numel()}")
    if bits == 8 or count == 0:
        return packed.clone()
    groups = -(-count // 8)
    low = pad(packed, (0, groups * bits - packed.numel()))
    if bits in _WORDS:
        words = _aligned(low).view(_WORDS[bits]).to(torch.int64)
        words &= (1 << 8 * bits) - 1  # widening repeats the sign
    else:
        words = pad(low.view(groups, bits), (0, 8 - bits)).view(-1).view(torch.int64)
    for lane in (32, 16, 8):
        held = bits * lane // 8
        odd = words & _mask(2 * lane, held, held)
        words ^= odd
        words |= odd << (lane - held)
    return words.view(torch.uint8)[:count]


def block_views(flat: Tensor, block: int, numels: Sequence[int]) -> list[Tensor]:
    """View a flat tensor as rows of `block` elements that never span two of the tensors in it.

    A tensor's shorter last block is a view of one row. Layers differ by orders of magnitude, so a scale that
    a bias shared with the next layer's weights would suit neither.

    Args:
        flat: 1-D tensor.
        block: elements a row, at least 1.
        numels: lengths of the tensors that lie one after another in flat.

    Example:
        >>> [tuple(v.shape) for v in block_views(torch.zeros(22), block=4, numels=[8, 10, 4])]
        [(4, 4), (1, 2), (1, 4)]
    """
    views: list[Tensor] = []
    begin = end = 0  # of whole blocks that are not yet a view
    for numel in numels:
        rest = numel % block
        end += numel - rest
        if rest:
            views += [flat[begin:end].view(-1, block), flat[end : end + rest].view(1, -1)]
            begin = end = end + rest
    return [v for v in [*views, flat[begin:end].view(-1, block)] if v.numel()]


def block_starts(block: int, numels: Sequence[int]) -> Tensor:
    """Return where each block of `block_views` starts in the flat tensor, and where the last one ends.

    Example:
        >>> block_starts(4, [8, 0, 10])
        tensor([ 0,  4,  8, 12, 16, 18])
    """
    return _block_starts(block, tuple(numels))


@lru_cache(maxsize=256)  # a bucket has the same tensors in every step; nobody may write into the result
def _block_starts(block: int, numels: tuple[int, ...]) -> Tensor:
    sizes = np.array(numels, np.int64)
    blocks, total = (sizes + block - 1) // block, sizes.sum()
    # How far each tensor lies from where whole blocks of all tensors before it would put it.
    shifts = sizes.cumsum() - sizes - block * (blocks.cumsum() - blocks)
    starts = np.append(block * np.arange(blocks.sum()) + shifts.repeat(blocks), total)
    return torch.from_numpy(starts)


def scale_blocks(flat: Tensor, scales: Tensor, block: int, numels: Sequence[int]) -> Tensor:
    """Multiply each block by its scale, in place.

    Args:
        flat: as for `block_views`, and so are block and numels.
        scales: one for each block.
        block: see there.
        numels: see there.

    Example:
        >>> scale_blocks(torch.ones(3), torch.tensor([2.0, 5.0]), block=2, numels=[3])
        tensor([2., 2., 5.])
    """
    start = 0
    for rows in block_views(flat, block, numels):
        rows.mul_(scales[start : start + len(rows), None])
        start += len(rows)
    return flat


def _mask(period: int, start: int, width: int) -> int:
    """Return the int64 whose bits `start` to `start + width` of every `period` bits are set."""
    word = sum(((1 << width) - 1) << (start + at) for at in range(0, 64, period))
    return word - (1 << 64) if word >> 63 else word


def _aligned(buffer: Tensor) -> Tensor:
    """Return bytes that can be viewed as words; a slice of a larger buffer may start anywhere."""
    odd = buffer.storage_offset() % 8 or buffer.data_ptr() % 8
    return buffer.clone() if odd or not buffer.is_contiguous() else buffer
