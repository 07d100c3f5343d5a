"""Sparse gradients, as of `nn.Embedding(sparse=True)`: ranks gather their rows and add them exactly."""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

import torch
from torch import Tensor, nn
from torch.nn.functional import pad

from stenograd.errors import WireError
from stenograd.exchange.buckets import gradient_type
from stenograd.kernels.scatter import inside
from stenograd.wire.requests import Rounds, gather

__all__ = ["Rows", "average_rows", "rows_of", "sparse_parameters", "write_rows"]


class Rows(NamedTuple):
    """Some rows of a matrix or of a larger tensor: indices, ascending, and values."""

    indices: Tensor  # (n,)
    values: Tensor  # (n, ...)
    length: int  # of the whole, >= n


def sparse_parameters(model: nn.Module) -> set[int]:
    """Return the ids of the parameters whose modules make sparse gradients."""
    kinds = (nn.Embedding, nn.EmbeddingBag)
    return {id(m.weight) for m in model.modules() if isinstance(m, kinds) and m.sparse}


@torch.no_grad()
def rows_of(parameter: Tensor, used: bool = True) -> Rows:
    """Return the rows of a parameter's gradient; none where there is no gradient."""
    grad = parameter.grad
    if grad is None or not used:
        index = torch.empty(0, dtype=torch.int64, device=parameter.device)
        none = parameter.new_empty((0, *parameter.shape[1:]), dtype=gradient_type(parameter))
        return Rows(index, none, len(parameter))
    if grad.layout is torch.strided:  # a tied layer added a dense gradient to it
        # NaN is unequal to 0, so its row is among them, where `SparseFiller.rounds` finds it.
        (index,) = grad.flatten(1).ne(0).any(1).nonzero(as_tuple=True)
        return Rows(index, grad[index], len(grad))
    grad = grad.coalesce()  # ascending, and each row once: `_added` relies on it
    return Rows(grad.indices()[0], grad.values(), len(grad))


def average_rows(rows: Sequence[Rows], world_size: int) -> Rounds[list[Rows]]:
    """Average sparse tensors over the ranks: `mean_r(x_r)`, where a row that a rank lacks counts as zeros.

    The ranks first tell how many rows they have, and then send them, padded to the most of any rank. Rows are
    divided by the world size and added in rank order, so every rank gets the same bits.

    Args:
        rows: this rank's part of each tensor; the same number of tensors on all ranks.
        world_size: number of ranks.

    Returns:
        The averages, in rows that at least one rank had.

    Raises:
        WireError: a rank has more rows than there are, or others.

    Example:
        >>> from stenograd.simulate import run
        >>> one = Rows(torch.tensor([0, 2]), torch.tensor([[2.0], [4.0]]), 3)
        >>> other = Rows(torch.tensor([2]), torch.tensor([[6.0]]), 3)
        >>> told = run([average_rows([one], 2), average_rows([other], 2)])
        >>> told[1][0].indices.tolist(), told[1][0].values.tolist()
        ([0, 2], [[1.0], [5.0]])
    """
    counts = torch.tensor([len(r.indices) for r in rows], device=rows[0].indices.device)
    everyone = [other.tolist() for (other,) in (yield from gather(counts))]
    lengths = [r.length for r in rows]
    if not all(0 <= n <= most for other in everyone for n, most in zip(other, lengths, strict=True)):
        # before memory for as many is asked for
        raise WireError(f"a rank has 0 to {lengths} rows, got {everyone}: the message is damaged")
    own: list[Tensor] = []
    counts_of = list(zip(*everyone, strict=True))
    for (indices, values, _), n in zip(rows, map(max, counts_of), strict=True):
        lacking = n - len(indices)
        own += [
            pad(indices, (0, lacking)),
            torch.cat([values, values.new_zeros(lacking, *values.shape[1:])]),
        ]
    received = yield from gather(*own)
    return [_added(received, i, n, world_size, lengths[i]) for i, n in enumerate(counts_of)]


def write_rows(parameter: Tensor, average: Rows) -> None:
    """Make a parameter's gradient an average; written into the gradient where that is dense, else sparse."""
    grad = parameter.grad
    if grad is not None and grad.layout is torch.strided:
        grad.zero_().index_copy_(0, average.indices, average.values)
        return
    parameter.grad = torch.sparse_coo_tensor(
        average.indices[None],
        average.values,
        parameter.shape,
        device=average.values.device,
        is_coalesced=True,  # `torch.unique` made the indices
        check_invariants=False,
    )


def _added(
    received: Sequence[tuple[Tensor, ...]], i: int, counts: Sequence[int], world_size: int, length: int
) -> Rows:
    """Add the rows of tensor i of all ranks, in rank order."""
    given = torch.cat([other[2 * i][:n] for other, n in zip(received, counts, strict=True)])
    indices = inside(given, length)
    values = torch.cat([other[2 * i + 1][:n] for other, n in zip(received, counts, strict=True)])
    kept, at = torch.unique(indices, return_inverse=True)
    total = values.new_zeros(len(kept), *values.shape[1:])
    start = 0
    for n in counts:  # one rank at a time: within one, every row is another, so no order is left to chance
        total[at[start : start + n]] += values[start : start + n] / world_size
        start += n
    return Rows(kept, total, length)
