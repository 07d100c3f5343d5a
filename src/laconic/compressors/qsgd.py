"""QSGD: each element rounded at random to one of a few levels, right on average."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from typing import Any, ClassVar

import torch
from torch import Tensor

from laconic.compressor import Codec, Payload, Site
from laconic.errors import MethodError, bad_value
from laconic.kernels.reference import block_views, pack_bits, unpack_bits

__all__ = ["QSGD"]


@dataclass(frozen=True, kw_only=True)
class QSGD(Codec):
    """Send integers: `sent = m / s * floor(s x / m + u)`, `m = max|x|` of the block, u uniform in [0, 1).

    There are `s = 2^(bits-1) - 1` levels on each side of zero. The rounding is unbiased and every rank
    rounds for itself, so that the errors average out; the error of an element is below `m / s`. The paper
    scales by the block's L2 norm, which is about `sqrt(d / (2 ln d))` times its largest magnitude (7 times
    for 512 Gaussian elements), so nearly all elements would fall between 0 and the first level; with the
    largest magnitude every level is used and an element's variance is at most `(m / s)^2 / 4`.
    Wire: `bits` an element and 32 bits a block, 4.06 bits an element by default, one all-gather.

    Args:
        bits: bits an element, sign included, 2 to 8; 2 bits are the three levels of TernGrad.
        block: elements a block, at least 1; the last block may be shorter.
        seed: of the rounding; any integer.

    Raises:
        MethodError: bits or block outside its range.

    Example:
        >>> import torch
        >>> from laconic.simulate import exchange
        >>> exchange(QSGD(bits=2), [torch.tensor([1.0, -1.0, 0.0])])[0].average
        tensor([ 1., -1.,  0.])

    Reference: Alistarh et al., "QSGD: Communication-Efficient SGD via Gradient Quantization and Encoding",
    NeurIPS 2017; Wen et al., "TernGrad", NeurIPS 2017 (largest magnitude as the scale).
    """

    names: ClassVar[Mapping[str, Mapping[str, Any]]] = {"qsgd": {}}
    summary: ClassVar[str] = "2 to 8 bits an element, rounded at random, unbiased"

    bits: int = 4
    block: int = 512
    seed: int = 0

    def __post_init__(self) -> None:
        if not 2 <= self.bits <= 8:
            raise bad_value("bits", "must be 2 to 8", self.bits, "use 4; 'sign' sends 1 bit", MethodError)
        if self.block < 1:
            raise bad_value("block", "must be at least 1", self.block, "use 512", MethodError)

    @classmethod
    def examples(cls) -> Iterator[QSGD]:
        """Yield the fewest, the most and an odd number of bits."""
        for bits, block in ((2, 512), (3, 7), (4, 512), (8, 64)):
            yield cls(bits=bits, block=block)

    def encode(self, x: Tensor, site: Site) -> Payload:
        """Round at random and pack `level + s`, lowest bit first."""
        generator = site.generator(self.seed, shared=False, device=x.device)
        dtype = torch.promote_types(x.dtype, torch.float32)
        y = torch.rand(x.numel(), dtype=dtype, device=x.device, generator=generator)
        scales = [torch.zeros(0, dtype=torch.float32, device=x.device)]
        for rows, u in zip(self._blocks(x, site), self._blocks(y, site), strict=True):
            largest = torch.maximum(rows.amax(1), rows.amin(1).neg_()).to(torch.float32)
            scales.append(largest)
            unit = torch.where(largest > 0, largest, 1.0)[:, None]
            u.addcdiv_(rows.to(dtype), unit.to(dtype), value=self._levels)
        codes = y.add_(self._levels).clamp_(0, 2 * self._levels).to(torch.uint8)  # truncation is floor here
        return pack_bits(codes, self.bits), torch.cat(scales)

    def decode(self, payload: Payload, like: Tensor, site: Site) -> Tensor:
        """Multiply the levels by `m / s`."""
        codes, scales = payload
        y = unpack_bits(codes, self.bits, like.numel()).to(torch.promote_types(like.dtype, torch.float32))
        y.sub_(self._levels)
        start = 0
        for rows in self._blocks(y, site):
            rows.mul_(scales[start : start + len(rows), None] / self._levels)
            start += len(rows)
        return y.to(like.dtype)

    def error(self, x: Tensor, payload: Payload, site: Site) -> Tensor:
        """Return `x - decode(encode(x))`; overwrites x."""
        return x.sub_(self.decode(payload, x, site))

    def _blocks(self, flat: Tensor, site: Site) -> list[Tensor]:
        return block_views(flat, self.block, site.numels)

    @property
    def _levels(self) -> int:
        return (1 << (self.bits - 1)) - 1
