"""What all schedules have in common in which ranks train by themselves, and meet in rounds."""

from __future__ import annotations

import math
from collections.abc import Iterator
from dataclasses import KW_ONLY, dataclass

from stenograd.errors import MethodError, bad_value, check_count
from stenograd.schedules.schedule import Codec, Schedule, refused

__all__ = ["Rounds", "check_word"]

_STATES = ("keep", "average", "reset")
_BUFFERS = ("average", "keep")
_LOST = ("raise", "drop")
_INSIDE = ("dense", "bf16", "fp16")


def check_word(key: str, value: str, known: tuple[str, ...], usual: str) -> None:
    """Refuse a word that a key does not know.

    Raises:
        MethodError: names the key, the words and what was given.
    """
    if value not in known:
        raise bad_value(key, f"must be one of {', '.join(known)}", value, f"use {usual}", MethodError)


def check_natural(key: str, value: int, advice: str) -> None:
    """Refuse a negative count, or one above 2^31 - 1.

    Raises:
        MethodError: names the key and what was given.
    """
    if value != 0:
        check_count(key, value, advice, MethodError)


@dataclass(frozen=True)
class Rounds(Schedule):
    """Local steps, and an exchange every H of them.

    Args:
        every: H, counted in backward passes outside `no_sync()`; 1 to 2^31 - 1.
        seconds: time from the end of a round to the next, in place of `every`; written `every=30s` in text. A
            rank comes to the round with its first step after that, so each makes as many steps as its speed
            allows, and counts for as many (or for its tokens, see `Sync.weight`). 0 for rounds of `every`
            steps. Needs one level, one fragment and no delay.
        after: number of passes at the start in which gradients are averaged as usual, densely.
        states: what a round does with the optimizers' own states (momenta, second moments): "keep" each
            rank's own, "average" them, or "reset" them, so that every round starts without any.
        states_every: with states=average, first moments are averaged in every so many rounds, and second
            moments in every twice as many; the longer a moment remembers, the rarer it need be averaged.
        inside: how gradients are averaged in every step inside each node ("dense", "bf16" or "fp16"); then
            only nodes exchange in rounds, and all ranks of a node stay equal. Empty for no such level.
        node_size: ranks per node, in the order of the ranks; 0 for what the launcher says.
        lost: what a lost rank means: "raise" a PeerLost, or "drop" it: the others hold the round without it,
            and lose no local step. Needs rounds without delay, and dense ones with `local`.
        quorum: opens the run, for workers that come, leave, return and lag: a round is held without waiting
            for more when this share of those that are there has come, in (0, 1], and `grace` has gone by. Who
            is late trains on and counts in a later round for all it has done, by steps or weights; who is new
            gets what the others have. Needs a store that outlives workers (`stenograd rendezvous`, or
            `train --keep`), one level, no delay and no `after`. 0 for a fixed set of ranks.
        grace: seconds that the first who comes to an open round waits for more than the quorum, >= 0. Needs
            quorum.
        buffers: "average" for the mean of floating buffers (running statistics of batch norm), "keep" for
            each rank's own.

    Raises:
        MethodError: a value is outside its range, or has no effect beside the others.
    """

    every: int = 8
    _: KW_ONLY
    seconds: float = 0.0
    after: int = 0
    states: str = "keep"
    states_every: int = 3
    buffers: str = "average"
    inside: str = ""
    node_size: int = 0
    lost: str = "raise"
    quorum: float = 0.0
    grace: float = 2.0

    def __post_init__(self) -> None:
        check_count("every", self.every, "use 8", MethodError)
        if not (self.seconds >= 0 and math.isfinite(self.seconds)):
            raise bad_value("seconds", "must be 0 or positive", self.seconds, "use 30", MethodError)
        # By time ranks make unequally many passes, in which fragments and delays are counted.
        if self.seconds and (self.inside or self.delay or self.fragments > 1):
            wanted = "must be 0 with inside, delay or fragments"
            raise bad_value("seconds", wanted, self.seconds, "count steps: every=30", MethodError)
        check_natural("after", self.after, "leave it out for none")
        check_word("states", self.states, _STATES, "keep")
        check_count("states_every", self.states_every, "use 3", MethodError)
        if self.states != "average":
            self._check_unused("states_every", "without states=average", "states=average")
        check_word("buffers", self.buffers, _BUFFERS, "average")
        if self.inside:
            check_word("inside", self.inside, _INSIDE, "dense")
        check_word("lost", self.lost, _LOST, "raise")
        # These send in groups of their own, which nobody makes anew after a loss.
        if self.lost == "drop" and (self.inside or self.delay or self.after):
            wanted = "must be raise with inside, delay or after"
            raise bad_value("lost", wanted, self.lost, "leave those out", MethodError)
        self._check_open()
        check_natural("node_size", self.node_size, "leave it out for what the launcher says")
        if not self.inside:
            self._check_unused("node_size", "without inside", "inside=dense")

    def _check_unused(self, key: str, where: str, needs: str) -> None:
        """Refuse a key that has no effect beside the others, unless it has its default."""
        if (value := getattr(self, key)) != getattr(type(self), key):
            advice = f"give {needs}, or leave it out"
            raise bad_value(key, f"has no effect {where}", value, advice, MethodError)

    def _check_open(self) -> None:
        """Refuse what needs the same ranks in every round, where they come and leave."""
        if not 0 <= self.quorum <= 1:
            wanted = "must be a share of the ranks, 0 to 1"
            raise bad_value("quorum", wanted, self.quorum, "use 0.75", MethodError)
        if not (self.grace >= 0 and math.isfinite(self.grace)):
            raise bad_value("grace", "must be seconds, 0 or more", self.grace, "use 2", MethodError)
        if not self.quorum:
            self._check_unused("grace", "without quorum", "quorum=0.75")
        wanting = {"inside": self.inside, "delay": self.delay, "after": self.after}
        wanting |= {"states": self.states == "average"}
        if self.quorum and (got := [key for key, value in wanting.items() if value]):
            rule = f"must be 0 with {', '.join(got)}"
            raise bad_value("quorum", rule, self.quorum, f"leave out {', '.join(got)}", MethodError)

    @classmethod
    def examples(cls) -> Iterator[Rounds]:
        """Yield rounds of two steps, in every way that all rounds know."""
        yield cls(every=2)
        yield cls(every=2, after=3)
        yield cls(every=2, states="average", states_every=1)
        yield cls(every=2, states="reset")
        yield cls(every=2, buffers="keep")
        yield cls(every=2, inside="dense", node_size=2)
        yield cls(every=2, lost="drop")

    @property
    def survives(self) -> bool:
        """Whether a round that a rank is lost in is held again without it."""
        return self.lost == "drop" or self.quorum > 0

    @property
    def fragments(self) -> int:
        """Number of parts of the model that are exchanged one after another."""
        return 1

    @property
    def layout(self) -> str:
        """Which parameters form a fragment; see `sync.outer`."""
        return "strided"

    @property
    def delay(self) -> int:
        """Passes from sending to using what came."""
        return 0

    @property
    def qsr(self) -> float:
        """What makes rounds rarer as the learning rate falls; 0 where nothing does."""
        return 0.0

    def period(self, lr: float) -> int:
        """Return the number of steps of a round at a learning rate."""
        return self.every

    def doubts(self, codec: Codec) -> list[str]:
        """Say what is allowed with a method after the slash, and hardly meant."""
        return []

    def starts(self, t: int) -> list[int]:
        """Return the fragments whose exchange starts after pass t, counted from the first local one as 1.

        Fragment f of P starts when `t = f H / P (mod H)`, so exchanges are spread evenly over H passes.

        Example:
            >>> from stenograd.schedules.diloco import DiLoCo
            >>> {t: DiLoCo(every=4, fragments=2).starts(t) for t in range(1, 7)}
            {1: [], 2: [1], 3: [], 4: [0], 5: [], 6: [1]}
        """
        apart = self.every // self.fragments
        return [f for f in range(self.fragments) if (t - f * apart) % self.every == 0]

    def check(self, codec: Codec) -> None:
        """Refuse what changes what is averaged, or counts rounds where steps are meant."""
        if codec.accumulates:
            why = "it accumulates gradients by itself"
            raise refused(self, codec, why, "use topk, or leave out what stands before the slash")
        if codec.votes and not codec.divides_by_senders:  # means over senders suit DiLoCo; Local refuses them
            raise refused(self, codec, "a vote is no mean", "use sign without majority")
        if codec.clips:
            why = "clip_value and clip_norm would clip what rounds exchange, not gradients"
            raise refused(self, codec, why, "clip gradients in your loop, before optimizer.step()")
        if codec.warmup_steps:
            why = "warmup_steps would count rounds"
            raise refused(self, codec, why, f"write after={codec.warmup_steps} before the slash")
