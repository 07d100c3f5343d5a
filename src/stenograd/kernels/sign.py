"""One bit an element and one scale a block: plain torch, and whatever is faster."""

from __future__ import annotations

import functools
from collections.abc import Sequence

import torch
from torch import Tensor
from torch.nn import functional

from stenograd.errors import ConfigError, WireError
from stenograd.kernels.backend import check_out, corrected, landed, length_of, matching, pick, present
from stenograd.kernels.bits import block_views, pack_bits, scale_blocks, unpack_bits

__all__ = ["block_count", "check_scales", "lane_means", "sign_decode_mean", "sign_encode_feedback"]

_LANES = 32  # as many as the CPU's kernels add at once


def sign_encode_feedback(
    x: Tensor | None, residual: Tensor | None, block: int, numels: Sequence[int]
) -> tuple[Tensor, Tensor]:
    """Send signs and mean magnitudes: `v = x + r`, `scale = mean|v|` of a block, `r' = v - scale sign(v)`.

    `sign(0) = +1` and `sign(NaN) = -1`. The mean is added in float64 in a fixed order, so it is the same on
    every machine.

    Args:
        x: flat tensor (n,); left alone. None where all that is to send is in residual.
        residual: flat tensor (n,), overwritten; None for none.
        block: elements a scale; blocks never span tensors, so a tensor's last may be shorter.
        numels: lengths of the tensors that lie one after another in x.

    Returns:
        Bits, uint8 (ceil(n / 8),), lowest first, set for `v >= 0`; scales, float32, one a block.

    Raises:
        ConfigError: block below 1, lengths that do not fit, or neither x nor residual.
        TensorTypeError: a tensor is not flat and floating.

    Example:
        >>> sign_encode_feedback(torch.tensor([3.0, -1.0, 0.5]), None, block=2, numels=[3])
        (tensor([5], dtype=torch.uint8), tensor([2.0000, 0.5000]))
    """
    x = matching(x, residual) if x is not None else None
    fast = pick(sign_encode_feedback, *present(x, residual))
    if fast is not None and (sent := fast(x, residual, block, numels)) is not None:
        return sent
    block_count(block, numels, length_of(x, residual))  # refuses lengths that do not fit
    v = corrected(x, residual)
    scales = [v.new_zeros(0, dtype=torch.float32)]
    bits = pack_bits((v >= 0).view(torch.uint8), 1)  # before v becomes what is left
    for rows in block_views(v, block, numels):
        scales.append(lane_means(rows))
        if residual is not None:
            scale = scales[-1][:, None].to(rows.dtype)
            rows.sub_(torch.where(rows >= 0, scale, -scale))
    return bits, torch.cat(scales)


def lane_means(rows: Tensor) -> Tensor:
    """Return each row's mean magnitude: sums of eight, then 32 sums of those in float64, then in pairs.

    With the order fixed, the kernels get the same bits. An eighth of each is added, so that nothing
    overflows.

    Example:
        >>> lane_means(torch.tensor([[1.0, -3.0]]))
        tensor([2.])
    """
    wide = torch.promote_types(rows.dtype, torch.float32)  # float16 holds no eighth of its least numbers
    lanes = torch.zeros(len(rows), _LANES, dtype=torch.float64, device=rows.device)
    for piece in rows.split(8 * _LANES, dim=1):
        shares = functional.pad(piece.abs().to(wide) * 0.125, (0, 8 * _LANES - piece.shape[1]))
        lanes += functools.reduce(torch.add, shares.chunk(8, dim=1))
    while lanes.shape[1] > 1:
        left, right = lanes.chunk(2, dim=1)
        lanes = left + right
    return (lanes[:, 0] * 8 / rows.shape[1]).to(torch.float32)


def sign_decode_mean(
    payloads: Sequence[tuple[Tensor, Tensor]], block: int, numels: Sequence[int], out: Tensor | None = None
) -> Tensor:
    """Return the mean over ranks of what `sign_encode_feedback` sent, added in rank order.

    Args:
        payloads: per rank `(bits, scales)`.
        block: as in encoding.
        numels: as in encoding; they add up to n.
        out: where to write it, (n,); new float32 memory otherwise.

    Raises:
        ConfigError: there are no payloads, block below 1, or out has another length.
        WireError: a payload has another length.

    Example:
        >>> payload = sign_encode_feedback(torch.tensor([3.0, -1.0, 0.5]), None, block=2, numels=[3])
        >>> sign_decode_mean([payload], block=2, numels=[3])
        tensor([ 2.0000, -2.0000,  0.5000])
    """
    n = sum(numels)
    kind, wide = check_out(payloads, n, out)
    fast = pick(sign_decode_mean, kind, numel=n)
    if fast is not None and (mean := fast(payloads, block, numels, wide)) is not None:
        return landed(mean, out)
    check_scales(payloads, block_count(block, numels, n))
    total = torch.zeros(n, dtype=torch.float32, device=kind.device) if wide is None else wide.zero_()
    for bits, scales in payloads:
        signs = unpack_bits(bits, 1, n).to(total.dtype).mul_(2).sub_(1)
        total += scale_blocks(signs, scales.to(total.dtype), block, numels)
    return landed(total.div_(len(payloads)), out)


def block_count(block: int, numels: Sequence[int], n: int) -> int:
    """Return how many blocks there are.

    Raises:
        ConfigError: block below 1, or the lengths do not add up to n.

    Example:
        >>> block_count(4, [8, 9], 17)
        5
    """
    if block < 1:
        raise ConfigError(f"block must be at least 1, got {block}: use 1024")
    if sum(numels) != n or min(numels, default=0) < 0:
        raise ConfigError(f"numels must add up to the {n} elements, got {sum(numels)}: give every tensor's")
    return sum(-(-numel // block) for numel in numels)


def check_scales(payloads: Sequence[tuple[Tensor, Tensor]], blocks: int) -> None:
    """Refuse payloads with another number of scales than there are blocks.

    Raises:
        WireError: one has.

    Example:
        >>> check_scales([(torch.zeros(1), torch.zeros(5))], 5)
    """
    for _, scales in payloads:
        if scales.numel() != blocks:
            raise WireError(f"{blocks} blocks have as many scales, got {scales.numel()}")
