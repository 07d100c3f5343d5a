"""Sign compression: one bit an element and one scale a block."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any, ClassVar

from torch import Tensor

from stenograd.compression.blocks import BlockCodec, Chunks
from stenograd.compression.contract import Average, Facts, Feedback, Payload, Site, average_of
from stenograd.errors import MethodError, check_count
from stenograd.kernels.bits import scale_blocks, unpack_bits
from stenograd.kernels.sign import sign_decode_mean, sign_encode_feedback

__all__ = ["Sign"]


@dataclass(frozen=True, kw_only=True)
class Sign(BlockCodec):
    """Send signs and the mean magnitude of each block: `sent = ||x||_1 / d * sign(x)`, with `sign(0) = +1`.

    d is the block's length; blocks are short because layers differ by orders of magnitude. Biased, and a
    contraction: `||error||^2 = ||x||_2^2 - ||x||_1^2 / d`, and `||x||_1 >= ||x||_2` makes `delta = 1 / d`
    (about 2/pi for Gaussian x), so use error feedback. Wire: 1 bit an element and 32 bits a block, 1.03 bits
    an element for blocks of 1024: one all-gather up to three ranks and for the vote, which moves N-1 times
    that; from four ranks on an all-to-all and an all-gather (`BlockCodec`), which move
    at most 2.1 times that (for n of at least 1000 N). Then the average is encoded once more, in blocks as
    short as that allows, and the owner of a chunk keeps what that loses.

    Args:
        block: elements a block, 1 to 2^31 - 1; blocks do not span tensors, so a tensor's last may be shorter.
        majority: whether the average is `mean_r(scale_r) * sign(sum_r sign(x_r))`, the ranks' vote (a tie
            is 0), instead of the mean of what the ranks sent. Residuals stay those of the rank's own message.

    Raises:
        MethodError: block outside its range.

    Example:
        >>> import torch
        >>> from stenograd.simulate import exchange
        >>> exchange(Sign(block=2), [torch.tensor([3.0, -1.0, 0.5])])[0].average
        tensor([ 2.0000, -2.0000,  0.5000])

    Reference: Bernstein et al., "signSGD: Compressed Optimisation for Non-Convex Problems", ICML 2018 (the
    vote, without a scale); Karimireddy et al., "Error Feedback Fixes SignSGD", ICML 2019 (the scale).
    """

    names: ClassVar[Mapping[str, Mapping[str, Any]]] = {"sign": {}}
    summary: ClassVar[str] = "one bit an element, one scale a block"

    # With feedback, momentum and usual learning rates, biases sent as signs made training diverge.
    default_dense_below: ClassVar[int] = 1024

    block: int = 1024
    majority: bool = False

    def __post_init__(self) -> None:
        check_count("block", self.block, "use 1024", MethodError)

    @classmethod
    def examples(cls) -> Iterator[Sign]:
        """Yield several block lengths and the vote."""
        for block in (1024, 16, 1):
            yield cls(block=block)
        yield cls(block=64, majority=True)

    feedback = Feedback.ON  # every element of a block gets the same magnitude

    def form(self) -> tuple[int, int]:
        """One bit."""
        return 1, self.block

    def chunks(self, site: Site) -> Chunks | None:
        """Gather all votes."""
        return None if self.majority else super().chunks(site)

    def again(self, chunks: Chunks) -> tuple[Sign, Chunks]:
        """Encode the average in blocks as short as `Chunks.finer` allows."""
        block = chunks.finer(self.block)
        return replace(self, block=block), chunks.blocked(block)

    def facts(self, site: Site) -> Facts:
        """A vote is no mean."""
        facts = super().facts(site)
        return replace(facts, average=Average.VOTE) if self.majority else facts

    def encode(self, x: Tensor, site: Site) -> Payload:
        """Pack the signs, lowest bit first, and take each block's mean magnitude."""
        return sign_encode_feedback(x, None, self.block, site.numels)

    def encode_error(self, x: Tensor, residual: Tensor | None, site: Site) -> tuple[Payload, Tensor]:
        """Add, encode and leave the rest in x, in one pass over each block."""
        # the sum is the same either way round, and x's memory takes what is left
        return sign_encode_feedback(residual, x, self.block, site.numels), x

    def decode(self, payload: Payload, like: Tensor, site: Site) -> Tensor:
        """Give every element its block's magnitude."""
        return self._mean([payload], like, site)

    def combine(self, payloads: Sequence[Payload], like: Tensor, site: Site) -> Tensor:
        """Average the messages, or vote."""
        if not self.majority:
            return self._mean(payloads, like, site)
        votes = site.out(like).zero_()  # at most the world size, exact in every dtype up to 256 ranks
        for signs, _ in payloads:
            votes += unpack_bits(signs, 1, like.numel()).to(like.dtype).mul_(2).sub_(1)
        scales = average_of(scales for _, scales in payloads)
        return scale_blocks(votes.sign_(), scales.to(votes.dtype), self.block, site.numels)

    def _mean(self, payloads: Sequence[Payload], like: Tensor, site: Site) -> Tensor:
        messages = [(bits, scales) for bits, scales in payloads]
        return sign_decode_mean(messages, self.block, site.numels, out=site.out(like))
