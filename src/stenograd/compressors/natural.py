"""Natural compression: each element as one of the two powers of two around it."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, ClassVar

import torch
from torch import Tensor

from stenograd.compression.blocks import WHOLE, BlockCodec
from stenograd.compression.contract import Payload, Site
from stenograd.kernels.bits import block_views, scale_blocks, unpack_bits
from stenograd.kernels.quantize import uniforms
from stenograd.kernels.sign import block_count, check_scales

__all__ = ["Natural"]

_BITS = 8  # the sign, and seven for 127 exponents and zero
_PIECE = 1 << 22  # elements at a time, so that what is computed on the way stays small
_SIGN = 128  # the highest bit of a code
_ONE = 126  # the code of the scale itself; 127 is twice the scale


@dataclass(frozen=True, kw_only=True)
class Natural(BlockCodec):
    """Send a power of two: of `2^e <= |x| < 2^(e+1)` the upper with the chance `|x| / 2^e - 1`, or the lower.

    So it is right on average, `E[sent] = x`, with a variance of at most `x^2 / 8` per element, and every rank
    draws for itself. The exponent counts down from the largest of the tensor; 127 of them and zero fit into
    seven bits, and what is below the smallest (`2^-125` of the largest) becomes zero.

    Wire: 8 bits per element and 32 bits per tensor: one all-gather up to three ranks, from four ranks on an
    all-to-all and an all-gather (`BlockCodec`), where the average is drawn once more.

    Args:
        seed: of the draws; any integer.

    Example:
        >>> import torch
        >>> from stenograd.simulate import exchange
        >>> exchange(Natural(), [torch.tensor([4.0, -0.5, 0.0])])[0].average
        tensor([ 4.0000, -0.5000,  0.0000])

    Reference: Horváth et al., "Natural Compression for Distributed Deep Learning", MSML 2022, which sends
    the exponent of float32 in nine bits with the sign.
    """

    names: ClassVar[Mapping[str, Mapping[str, Any]]] = {"natural": {}}
    summary: ClassVar[str] = "a power of two, drawn at random, 8 bits per element"

    seed: int = 0

    def form(self) -> tuple[int, int]:
        """Eight bits, and a scale for each tensor."""
        return _BITS, WHOLE

    def encode(self, x: Tensor, site: Site) -> Payload:
        """Draw a power of two for each element and write its place below the tensor's largest."""
        codes = torch.empty(x.numel(), dtype=torch.uint8, device=x.device)
        # The generator is made for its seed alone, a hash of seed, step, key and rank, which kernels hash on.
        draws = uniforms(site.generator(self.seed, shared=False).initial_seed(), x.numel(), x.device)
        scales = [torch.zeros(0, dtype=torch.float32, device=x.device)]
        rows_of = (block_views(t, WHOLE, site.numels) for t in (x, draws, codes))
        for rows, draw, out in zip(*rows_of, strict=True):
            scale = _power_below(rows.abs().amax(1, keepdim=True).to(torch.float32))
            scales.append(scale.view(-1))
            divisor = torch.where(scale == 0, 1.0, scale)
            parts = (t.split(_PIECE, dim=1) for t in (rows, draw, out))
            for part, uniform, codes_of in zip(*parts, strict=True):
                codes_of.copy_(_codes((part / divisor).to(torch.float32), uniform))
        return codes, torch.cat(scales)

    def read(self, payload: Payload, site: Site) -> Tensor:
        """Return what one message says, in float32."""
        codes, scales = payload
        check_scales([(codes, scales)], block_count(WHOLE, site.numels, sum(site.numels)))
        powers = torch.exp2(torch.arange(_SIGN, device=codes.device, dtype=torch.float32) - _ONE)
        powers[:1].zero_()  # not `powers[0] = 0`, which copies a number from memory: a GPU is waited for
        levels = torch.cat([powers, -powers])
        values = levels.index_select(0, unpack_bits(codes, _BITS, sum(site.numels)).to(torch.int32))
        return scale_blocks(values, scales, WHOLE, site.numels)


def _codes(share: Tensor, draw: Tensor) -> Tensor:
    """Return the codes of shares of the scale, which are below 2."""
    mantissa, exponent = torch.frexp(share.abs())  # in [0.5, 1), and of the power above
    code = exponent + (_ONE - 1)
    code += draw < 2 * mantissa - 1  # with the chance |x| / 2^e - 1
    code = torch.where((share == 0) | (exponent < 2 - _ONE), 0, code)  # below 2^-125 of the largest
    return code.clamp_(0, 127).add_((share < 0).to(code.dtype), alpha=_SIGN)


def _power_below(x: Tensor) -> Tensor:
    """Return the largest power of two that does not exceed x; 0, NaN and infinity as they are."""
    # Not `ldexp`, whose powers are of the program's default dtype. The quotient has no rounding.
    power = x / (2 * torch.frexp(x).mantissa)
    # NaN and infinity stay, because `BlockCodec.finite` looks at the scales only.
    return torch.where((x == 0) | ~x.isfinite(), x, power)
