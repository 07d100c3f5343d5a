"""Dense codes: signs, levels and 16-bit floats."""

from __future__ import annotations

from collections.abc import Sequence

from torch import Tensor

from stenograd.kernels.backend import check_out, matching, pick, present

__all__ = [
    "not_finite",
    "qsgd_decode_mean",
    "qsgd_encode_feedback",
    "sign_decode_mean",
    "sign_encode_feedback",
]


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
        >>> import torch
        >>> sign_encode_feedback(torch.tensor([3.0, -1.0, 0.5]), None, block=2, numels=[3])
        (tensor([5], dtype=torch.uint8), tensor([2.0000, 0.5000]))
    """
    x = matching(x, residual) if x is not None else None
    function = pick("sign", "sign_encode_feedback", *present(x, residual))
    bits, scales = function(x, residual, block, numels)
    return bits, scales


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
        >>> import torch
        >>> payload = sign_encode_feedback(torch.tensor([3.0, -1.0, 0.5]), None, block=2, numels=[3])
        >>> sign_decode_mean([payload], block=2, numels=[3])
        tensor([ 2.0000, -2.0000,  0.5000])
    """
    n = sum(numels)
    kind = check_out(payloads, n, out)
    total: Tensor = pick("sign", "sign_decode_mean", kind, numel=n)(payloads, block, numels, out)
    return total


def qsgd_encode_feedback(
    x: Tensor | None, residual: Tensor | None, bits: int, block: int, numels: Sequence[int], seed: int
) -> tuple[Tensor, Tensor]:
    """Send integers: `code = floor(s v / m + u) + s`, `v = x + r`, `m = max|v|` of a block.

    There are `s = 2^(bits-1) - 1` levels on each side of zero. u is a hash of seed and place, uniform in
    [0, 1), so the rounding is unbiased and needs no generator; `r' = v - m / s (code - s)`. A block with an
    infinite or NaN element has such a scale.

    Args:
        x: flat tensor (n,); left alone. None where all that is to send is in residual.
        residual: flat tensor (n,), overwritten; None for none.
        bits: bits an element, 2 to 8.
        block: elements a scale; blocks never span tensors.
        numels: lengths of the tensors that lie one after another in x.
        seed: any integer; another one for each rank and step.

    Returns:
        Codes, uint8 (ceil(n bits / 8),), lowest bit first; scales m, float32, one a block.

    Raises:
        ConfigError: bits or block outside its range, lengths that do not fit, or neither x nor residual.
        TensorTypeError: a tensor is not flat and floating.

    Example:
        >>> import torch
        >>> qsgd_encode_feedback(torch.tensor([1.0, -1.0, 0.0]), None, bits=2, block=4, numels=[3], seed=0)
        (tensor([18], dtype=torch.uint8), tensor([1.]))
    """
    x = matching(x, residual) if x is not None else None
    function = pick("quantize", "qsgd_encode_feedback", *present(x, residual))
    codes, scales = function(x, residual, bits, block, numels, seed)
    return codes, scales


def qsgd_decode_mean(
    payloads: Sequence[tuple[Tensor, Tensor]],
    bits: int,
    block: int,
    numels: Sequence[int],
    out: Tensor | None = None,
) -> Tensor:
    """Return the mean over ranks of what `qsgd_encode_feedback` sent, added in rank order.

    Args:
        payloads: per rank `(codes, scales)`.
        bits: as in encoding.
        block: as in encoding.
        numels: as in encoding; they add up to n.
        out: where to write it, (n,); new float32 memory otherwise.

    Raises:
        ConfigError: there are no payloads, bits or block outside its range, or out has another length.
        WireError: a payload has another length.

    Example:
        >>> import torch
        >>> payload = torch.tensor([18], dtype=torch.uint8), torch.tensor([1.0])
        >>> qsgd_decode_mean([payload], bits=2, block=4, numels=[3])
        tensor([ 1., -1.,  0.])
    """
    n = sum(numels)
    kind = check_out(payloads, n, out)
    total: Tensor = pick("quantize", "qsgd_decode_mean", kind, numel=n)(payloads, bits, block, numels, out)
    return total


def not_finite(x: Tensor) -> bool:
    """Return whether any element is infinite or NaN, reading no further than the first.

    Args:
        x: flat tensor; left alone.

    Raises:
        TensorTypeError: x is not flat and floating.

    Example:
        >>> import torch
        >>> not_finite(torch.ones(3)), not_finite(torch.tensor([1.0, float("inf")]))
        (False, True)
    """
    x = matching(x, None)
    return bool(pick("values", "not_finite", x)(x))
