"""The largest elements of every chunk of a tensor, instead of the largest of all."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from stenograd.kernels.reference.bits import block_views
from stenograd.kernels.reference.indices import place_type

__all__ = ["chunk_count", "kept_of", "select_chunks"]


def kept_of(length: int, ratio: float) -> int:
    """Return how many elements of a chunk are kept: `round(ratio * length)`, at least 1.

    Args:
        length: elements in the chunk, at least 1.
        ratio: share to keep, in (0, 1].

    Example:
        >>> kept_of(4096, 1 / 64), kept_of(10, 0.01)
        (64, 1)
    """
    return max(1, round(ratio * length))


def chunk_count(numels: Sequence[int], chunk: int, ratio: float) -> int:
    """Return how many elements `select_chunks` keeps of tensors of these lengths.

    Example:
        >>> chunk_count([8, 0, 5], chunk=4, ratio=0.5)  # 2 + 2, nothing, 2 + 1
        7
    """
    kept = kept_of(chunk, ratio)
    rests = [kept_of(n % chunk, ratio) for n in numels if n % chunk]
    return kept * sum(n // chunk for n in numels) + sum(rests)


def select_chunks(x: Tensor, numels: Sequence[int], chunk: int, ratio: float) -> tuple[Tensor, Tensor]:
    """Return the largest elements of each chunk, with their places in x, ascending.

    A chunk is `chunk` consecutive elements of one tensor; a tensor's last one may be shorter, and keeps its
    share. So what is kept of a tensor depends neither on the other tensors nor on the bucket it is in.

    Args:
        x: flat tensor (n,), any floating type; left alone. NaN counts as largest.
        numels: lengths of the tensors that lie one after another in x.
        chunk: elements per chunk, at least 1.
        ratio: share to keep of each, in (0, 1].

    Example:
        >>> select_chunks(torch.tensor([5.0, 4.0, 0.1, -0.2]), [4], chunk=2, ratio=0.5)
        (tensor([0, 3], dtype=torch.int32), tensor([ 5.0000, -0.2000]))
    """
    places = [torch.empty(0, dtype=torch.int64, device=x.device)]
    start = 0
    for rows in block_views(x, chunk, numels):  # (chunks, length)
        count, length = rows.shape
        inside = rows.abs().topk(kept_of(length, ratio), dim=1, sorted=False).indices.sort(1).values
        begins = torch.arange(start, start + count * length, length, device=x.device)
        places.append((inside + begins[:, None]).view(-1))
        start += count * length
    found = torch.cat(places)
    return found.to(place_type(x.numel())), x.index_select(0, found)
