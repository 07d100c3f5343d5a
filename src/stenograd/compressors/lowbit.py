"""Low-bit formats: each element rounded to the nearest of a few levels of its block."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import KW_ONLY, dataclass
from typing import Any, ClassVar

from torch import Tensor

from stenograd.compression.blocks import BlockCodec
from stenograd.compression.contract import Feedback, Payload, Site
from stenograd.errors import MethodError, bad_value, check_count
from stenograd.kernels.lowbit import BITS, lowbit_decode, lowbit_encode

__all__ = ["LowBit"]


@dataclass(frozen=True)
class LowBit(BlockCodec):
    """Send the nearest level: `sent = m * argmin_l |x / m - l|`, `m = max|x|` of the block.

    The levels l are `0, +-2^-6, +-2^-5, ..., +-1` for e3m0 (sign, three exponent bits, no mantissa),
    `k / 7` for int4 and `-1, 0, 1` for int2. Zero is a level and the largest element is exact, so no error
    exceeds its element, and what is sent twice is sent unchanged: `C(C(x)) = C(x)`. An element of e3m0 that
    is not lost (`|x| >= 0.75 * 2^-6 m`) is at most a third off; one of the integer formats is at most half
    a level off, `m / 14` and `m / 2`. So with d elements per block and half the lowest level h, the errors
    have at most the share `c / (1 + c)` of the energy of x, `c = (d - 1) h^2`, or for e3m0 1/9 if that is
    more.

    Rounding to the nearest is biased, so gradients need error feedback, which is on by default. Averages of
    pseudo-gradients (the change of the parameters over many local steps) lost nothing without it in 4 bits:
    there it is off by default, except for int2.

    Wire: 4 bits (int2: 2) per element and 32 bits per block, `n b / 8 + 4 n / 512` bytes: one all-gather up
    to three ranks, from four ranks on an all-to-all and an all-gather (`BlockCodec`).

    Args:
        format: "e3m0", "int4" or "int2".
        block: elements per scale, 1 to 2^31 - 1; blocks do not span tensors, so a tensor's last may be
            shorter.

    Raises:
        MethodError: an unknown format, or block outside its range.

    Example:
        >>> import torch
        >>> from stenograd.simulate import exchange
        >>> exchange(LowBit(format="e3m0"), [torch.tensor([4.0, -1.4, 0.6, 0.01])])[0].average
        tensor([ 4.0000, -1.0000,  0.5000,  0.0000])

    Reference: Douillard et al., "Streaming DiLoCo with overlapping communication", 2025 (E3M0 without
    feedback); Thérien et al., "MuLoCo", 2025 (2 bits with feedback).
    """

    names: ClassVar[Mapping[str, Mapping[str, Any]]] = {"lowbit": {}}
    summary: ClassVar[str] = "2 or 4 bits per element, rounded to the nearest"

    format: str = "e3m0"
    _: KW_ONLY
    block: int = 512

    def __post_init__(self) -> None:
        if self.format not in BITS:
            wanted = f"must be one of {', '.join(BITS)}"
            raise bad_value("format", wanted, self.format, "use e3m0", MethodError)
        check_count("block", self.block, "use 512", MethodError)

    @classmethod
    def examples(cls) -> Iterator[LowBit]:
        """Yield every format, and short blocks."""
        for name in BITS:
            yield cls(format=name)
        yield cls(format="int4", block=7)

    @property
    def feedback(self) -> Feedback:
        """What is nearer to zero than to the lowest level is dropped at every step.

        4 bits lose nothing that matters of pseudo-gradients (Streaming DiLoCo's measurements), 2 bits do.
        """
        return Feedback.ON if self.format == "int2" else Feedback.GRADIENTS

    def form(self) -> tuple[int, int]:
        """Two or four bits."""
        return BITS[self.format], self.block

    def encode(self, x: Tensor, site: Site) -> Payload:
        """Pack the codes, lowest bit first, and the largest magnitude of each block."""
        return lowbit_encode(x.contiguous(), self.format, self.block, site.numels)

    def read(self, payload: Payload, site: Site) -> Tensor:
        """Return what one message says, in float32."""
        codes, scales = payload
        return lowbit_decode((codes, scales), self.format, self.block, site.numels)
