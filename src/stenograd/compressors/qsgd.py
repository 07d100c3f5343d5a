"""QSGD: each element rounded at random to one of a few levels, right on average."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import KW_ONLY, dataclass
from typing import Any, ClassVar

from torch import Tensor

from stenograd.compression.blocks import BlockCodec
from stenograd.compression.contract import Payload, Site
from stenograd.errors import MethodError, bad_value, check_count
from stenograd.kernels.quantize import qsgd_decode_mean, qsgd_encode_feedback

__all__ = ["QSGD", "Rounding"]


class Rounding(BlockCodec):
    """Rounds at random to the levels of a block; `form` says how many, the field `seed` by which draws."""

    seed: int

    def encode(self, x: Tensor, site: Site) -> Payload:
        """Round at random and pack `level + s`, lowest bit first."""
        return qsgd_encode_feedback(x, None, *self.form(), site.numels, self._key(site))

    def encode_error(self, x: Tensor, residual: Tensor | None, site: Site) -> tuple[Payload, Tensor]:
        """Add, encode and leave the rest in x, in one pass over each block."""
        # the sum is the same either way round, and x's memory takes what is left
        return qsgd_encode_feedback(residual, x, *self.form(), site.numels, self._key(site)), x

    def combine(self, payloads: Sequence[Payload], like: Tensor, site: Site) -> Tensor:
        """Average the messages in rank order."""
        messages = [(codes, scales) for codes, scales in payloads]
        return qsgd_decode_mean(messages, *self.form(), site.numels, out=site.out(like))

    def _key(self, site: Site) -> int:
        # Made for its seed alone, a hash of seed, step, key and rank, which kernels hash on for each index.
        return site.generator(self.seed, shared=False).initial_seed()


@dataclass(frozen=True)
class QSGD(Rounding):
    """Send integers: `sent = m / s * floor(s x / m + u)`, `m = max|x|` of the block, u uniform in [0, 1).

    There are `s = 2^(bits-1) - 1` levels on each side of zero. u has 16 bits, so the rounding is unbiased but
    for `2^-17 m / s`, and every rank rounds for itself, so that the errors average out; the error of an
    element is below `m / s`. The paper scales by the block's L2 norm, which is about `sqrt(d / (2 ln d))`
    times its largest magnitude (7 times for 512 Gaussian elements), so nearly all elements would fall between
    0 and the first level; with the largest magnitude every level is used and an element's variance is at
    most `(m / s)^2 / 4`.
    Wire: `bits` an element and 32 bits a block, 4.06 bits an element by default: one all-gather up to three
    ranks, which moves N-1 times that; from four ranks on an all-to-all and an all-gather
    (`BlockCodec`), which move `2 (N-1)/N` times that and a few bytes more a rank. Then
    the average is rounded once more, by the owner of each chunk and at random again, so it stays unbiased.

    Args:
        bits: bits an element, sign included, 2 to 8; 2 bits are the three levels of TernGrad.
        block: elements a block, 1 to 2^31 - 1; the last block may be shorter.
        seed: of the rounding; any integer.

    Raises:
        MethodError: bits or block outside its range.

    Example:
        >>> import torch
        >>> from stenograd.simulate import exchange
        >>> exchange(QSGD(bits=2), [torch.tensor([1.0, -1.0, 0.0])])[0].average
        tensor([ 1., -1.,  0.])

    Reference: Alistarh et al., "QSGD: Communication-Efficient SGD via Gradient Quantization and Encoding",
    NeurIPS 2017; Wen et al., "TernGrad", NeurIPS 2017 (largest magnitude as the scale).
    """

    names: ClassVar[Mapping[str, Mapping[str, Any]]] = {"qsgd": {}}
    summary: ClassVar[str] = "2 to 8 bits an element, rounded at random, unbiased"

    bits: int = 4
    _: KW_ONLY
    block: int = 512
    seed: int = 0

    def __post_init__(self) -> None:
        if not 2 <= self.bits <= 8:
            raise bad_value("bits", "must be 2 to 8", self.bits, "use 4; 'sign' sends 1 bit", MethodError)
        check_count("block", self.block, "use 512", MethodError)

    @classmethod
    def examples(cls) -> Iterator[QSGD]:
        """Yield the fewest, the most and an odd number of bits."""
        for bits, block in ((2, 512), (3, 7), (4, 512), (8, 64)):
            yield cls(bits=bits, block=block)

    def form(self) -> tuple[int, int]:
        """The fields say it."""
        return self.bits, self.block
