"""Local SGD: every rank trains by itself, and parameters are averaged from time to time."""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from typing import Any, ClassVar

from stenograd.errors import MethodError, bad_value
from stenograd.schedules.rounds import Rounds
from stenograd.schedules.schedule import Codec, What, refused

__all__ = ["Local"]

_ENOUGH = 1 << 16  # its square is beyond the longest round; that of a larger ratio may be beyond floats


@dataclass(frozen=True, kw_only=True)
class Local(Rounds):
    """Average parameters every H steps: `p_r <- p_r - opt(g_r)`, H times, then `p <- mean_r p_r`.

    Moves `2 (N-1)/N` times the model every H steps, or what a compressor after the slash makes of it: then
    ranks send differences from what they sent so far, so that what a message loses goes with a later one (see
    `sync.outer.Part`). With `after`, this is post-local SGD.

    Args:
        qsr: the quadratic synchronisation rule: the next round comes after `max(every, floor((qsr / lr)^2))`
            steps, lr being the largest learning rate of the first parameter group since the last one. So
            rounds become rarer as the rate falls, but not in warm-up. 0 for rounds of `every` steps.
        every, seconds, after, states, states_every, buffers, quorum, grace: see `Rounds`.

    Raises:
        MethodError: a value is outside its range.

    Example:
        >>> Local(every=4, qsr=0.02).period(lr=0.008), Local(every=4, qsr=0.02).period(lr=0.004)
        (6, 25)

    References: Stich, "Local SGD Converges Fast and Communicates Little", ICLR 2019; Lin et al., "Don't Use
    Large Mini-Batches, Use Local SGD", ICLR 2020 (`after`); Gu et al., "A Quadratic Synchronization Rule for
    Distributed Deep Learning", ICLR 2024 (`qsr`); Iacob et al., "DES-LOC", 2025 (`states_every`).
    """

    names: ClassVar[Mapping[str, Mapping[str, Any]]] = {"local": {}}
    summary: ClassVar[str] = "parameters, averaged every few steps (local SGD)"
    what: ClassVar[What] = What.PARAMETERS

    qsr: float = 0.0

    @classmethod
    def examples(cls) -> Iterator[Rounds]:
        """Yield also rounds that become rarer: of 1 step at a learning rate of 0.1, of 4 at 0.05."""
        yield from super().examples()
        yield cls(every=1, qsr=0.1)

    def __post_init__(self) -> None:
        super().__post_init__()
        if not (self.qsr >= 0 and math.isfinite(self.qsr)):
            raise bad_value("qsr", "must be 0 or positive", self.qsr, "leave it out for none", MethodError)
        if self.qsr and (self.seconds or self.quorum):
            raise bad_value(
                "qsr", "must be 0 with seconds or quorum", self.qsr, "leave one of them out", MethodError
            )

    def check(self, codec: Codec) -> None:
        """Refuse also what scales up the differences that it sends."""
        super().check(codec)
        if self.survives and not codec.lossless:
            why = "what a lost rank has sent of its differences cannot be taken back"
            instead = "use diloco, or leave the codec out"
            if self.lost == "drop":
                instead = "use lost=raise, diloco, or leave the codec out"
            raise refused(self, codec, why, instead)
        if codec.divides_by_senders:
            why = "ranks would not know what the others hold of their differences"
            raise refused(self, codec, why, "leave out divide=senders, or use diloco")
        if codec.amplifies:
            why = "what unbiased scaling leaves out of a difference grows without bound"
            raise refused(self, codec, why, "leave out unbiased=true, or use topk")

    def period(self, lr: float) -> int:
        """Return the number of steps of a round at a learning rate."""
        # A scheduler may reach a rate of 0, by which nothing can be divided.
        if not self.qsr or lr <= 0:
            return self.every
        steps = math.floor(min(self.qsr / lr, _ENOUGH) ** 2)
        # the bound of `every` itself
        return min(max(self.every, steps), (1 << 31) - 1)
