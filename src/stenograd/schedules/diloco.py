"""DiLoCo: local steps, then an outer optimizer's step along the mean of what ranks have moved."""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping
from dataclasses import KW_ONLY, dataclass
from typing import Any, ClassVar

from stenograd.errors import MethodError, bad_value, check_count
from stenograd.schedules.rounds import Rounds, check_natural, check_word
from stenograd.schedules.schedule import Codec, What, refused
from stenograd.topology.pairs import spread_per_round

__all__ = ["DiLoCo"]

_LAYOUTS = ("strided", "sequential")
_TOPOLOGIES = ("all", "pairs")


@dataclass(frozen=True)
class DiLoCo(Rounds):
    """Average pseudo-gradients every H steps, and let an outer SGD apply them.

    All ranks share outer parameters phi. Every rank trains H steps from phi, to theta_i; then

        Delta = mean_i C(phi - theta_i)                what the ranks have moved; C is what follows the slash
        m <- momentum * m + Delta
        phi <- phi - outer_lr * (Delta + momentum * m)    or outer_lr * m with nesterov=false
        theta_i <- phi

    which is `torch.optim.SGD` fed Delta. phi and m are equal on all ranks bit for bit. Optimizer states stay
    each rank's own. With one rank nothing is sent, and the outer step is taken all the same (Lookahead).

    In its streaming form the model is cut into `fragments`, which are exchanged in turn, H / fragments steps
    apart, so that a link carries less at a time; with `delay`, what was sent is used `delay` steps later,
    while training goes on: `theta_i <- mix theta_i + (1 - mix) phi`. The numbers are those of torchft's
    fixtures, but fragment 0 goes last in a round, a delayed fragment is sent where torchft takes it, and
    `mix=1` (its `fragment_update_alpha`) is refused: ranks would ignore the others.

    Args:
        outer_lr: the outer learning rate, positive. The best grows with the number of ranks and with H; try
            0.4, 0.7 and 1.
        momentum: of the outer SGD, in [0, 1). With 0.9 it remembers 10 rounds: train at least 60.
        nesterov: Nesterov's form.
        fragments: P, from 1; `every` must be a multiple.
        layout: which blocks of layers form a fragment: "strided" (block b goes to fragment b modulo P) or
            "sequential" (neighbours together). What belongs to no block, such as embeddings, is a fragment of
            its own where there are blocks enough.
        delay: steps from sending to using, below every / fragments.
        mix: share of a rank's own parameters that it keeps when it takes phi, in [0, 1); needs a delay. At 0,
            the `delay` steps made meanwhile are thrown away.
        eager: use what was sent a whole round later, each rank with its own share replaced by its newest:
            `Delta = mean(old) + (Delta_i(new) - Delta_i(old)) / N`. Nothing ever waits for the network; phi
            and m then differ from rank to rank. Needs fragments=1 and delay=0.
        topology: "all" for one mean over all ranks, or "pairs": ranks meet in random pairs, drawn anew in
            each round, and where their number is odd one of them sits out. Then phi and m are each rank's
            own, and the outer step follows `phi_i - (theta_i + theta_j) / 2`, which also brings the ranks'
            phi together; no round waits for all ranks (NoLoCo). Needs delay=0, eager=false and no inside,
            and nothing after the slash.
        every, seconds, after, states, states_every, buffers, quorum, grace: see `Rounds`.

    Raises:
        MethodError: a value is outside its range, or two do not fit together.

    Example:
        >>> DiLoCo().every, DiLoCo().outer_lr, DiLoCo().momentum
        (30, 0.7, 0.9)

    References: Douillard et al., "DiLoCo", arXiv 2311.08105, and "Streaming DiLoCo with overlapping
    communication", arXiv 2501.18512 (fragments, delay, mix); Kale et al., "Eager Updates", arXiv 2502.12996;
    Kolehmainen et al., "NoLoCo", arXiv 2506.10911 (pairs).
    """

    names: ClassVar[Mapping[str, Mapping[str, Any]]] = {"diloco": {}}
    summary: ClassVar[str] = (
        "pseudo-gradients every few steps, applied by an outer SGD with momentum (DiLoCo)"
    )
    what: ClassVar[What] = What.PSEUDO_GRADIENTS

    every: int = 30
    _: KW_ONLY
    outer_lr: float = 0.7
    momentum: float = 0.9
    nesterov: bool = True
    fragments: int = 1
    layout: str = "strided"
    delay: int = 0
    mix: float = 0.0
    eager: bool = False
    topology: str = "all"

    @classmethod
    def examples(cls) -> Iterator[Rounds]:
        """Yield also fragments, delays, eager rounds, pairs and other outer optimizers."""
        yield from super().examples()
        yield cls(every=2, outer_lr=1.0, momentum=0.5, nesterov=False)
        yield cls(every=4, fragments=2)
        yield cls(every=6, fragments=3, layout="sequential", delay=1, mix=0.5)
        yield cls(every=2, delay=1, mix=0.5)
        yield cls(every=2, eager=True)
        yield cls(every=2, topology="pairs", momentum=0.5)

    def __post_init__(self) -> None:
        super().__post_init__()
        if not (self.outer_lr > 0 and math.isfinite(self.outer_lr)):
            raise bad_value("outer_lr", "must be positive and finite", self.outer_lr, "use 0.7", MethodError)
        if not 0 <= self.momentum < 1:
            raise bad_value("momentum", "must be in [0, 1)", self.momentum, "use 0.9", MethodError)
        check_count("fragments", self.fragments, "use 1 for the whole model", MethodError)
        check_word("layout", self.layout, _LAYOUTS, "strided")
        if self.fragments == 1:
            self._check_unused("layout", "with one fragment", "fragments=4")
        check_natural("delay", self.delay, "leave it out for none")
        check_word("topology", self.topology, _TOPOLOGIES, "all")
        self._check_timing()
        self._check_pairs()

    @property
    def shares_outer(self) -> bool:
        """Whether phi and m are equal on all ranks."""
        return not self.eager and self.topology == "all"

    def doubts(self, codec: Codec) -> list[str]:
        """Say what is allowed with a method after the slash, and hardly meant."""
        found = []
        if codec.forgets:
            found.append("what a round does not send is lost for good; leave out feedback=false")
        if self.delay and not self.mix:
            found.append(
                f"with delay={self.delay} and mix=0 the {self.delay} local steps made while a round is under "
                "way are thrown away; give mix=0.5"
            )
        if (self.every, self.outer_lr, self.momentum) == (1, 1.0, 0.0):
            found.append("this averages parameters in every step; local:every=1 does so with less memory")
        if self.topology == "pairs":
            growth = spread_per_round(self.outer_lr, self.momentum, self.nesterov)
            if growth >= 1:
                found.append(
                    f"with outer_lr={self.outer_lr:g} and momentum={self.momentum:g} in pairs, the variance "
                    f"of outer parameters among many ranks grows {growth:.2f} times per round; give "
                    "momentum=0.5"
                )
        return found

    def check(self, codec: Codec) -> None:
        """Refuse also what pairs have nothing to compress against."""
        super().check(codec)
        if self.topology == "pairs" and not codec.lossless:
            why = "ranks that meet for one round share no parameters from which to send differences"
            raise refused(self, codec, why, "use topology=all, or leave the codec out")

    def _check_timing(self) -> None:
        if self.every % self.fragments:
            near = max(self.every // self.fragments, 1) * self.fragments
            raise bad_value(
                "every",
                f"must be a multiple of fragments={self.fragments}",
                self.every,
                f"use {near}",
                MethodError,
            )
        apart = self.every // self.fragments
        if self.delay >= apart:
            wanted = f"must be below every / fragments = {apart}, so that one fragment at a time is under way"
            raise bad_value("delay", wanted, self.delay, f"use {apart - 1}", MethodError)
        if not 0 <= self.mix < 1:
            advice = "use 0.5; 1 would keep what a rank has and never take what the others sent"
            raise bad_value("mix", "must be in [0, 1)", self.mix, advice, MethodError)
        if not self.delay:
            self._check_unused("mix", "without a delay", "delay=1")
        if self.seconds and (self.eager or self.topology == "pairs"):
            wanted = "must be 0 with eager rounds or pairs"
            raise bad_value("seconds", wanted, self.seconds, "count steps: every=30", MethodError)
        if self.quorum and (self.eager or self.topology == "pairs"):
            wanted = "must be 0 with eager rounds or pairs"
            raise bad_value("quorum", wanted, self.quorum, "leave those out", MethodError)
        if self.eager and self.lost == "drop":
            raise bad_value(
                "lost", "must be raise with eager", self.lost, "leave one of them out", MethodError
            )
        if self.eager and (self.delay or self.fragments > 1):
            got = f"delay={self.delay}, fragments={self.fragments}"
            raise bad_value("eager", "needs delay=0 and fragments=1", got, "leave them out", MethodError)

    def _check_pairs(self) -> None:
        """Refuse what needs all ranks, or an exchange in the background."""
        wanting = {"delay": self.delay, "eager": self.eager, "inside": self.inside}
        wanting["states"] = self.states if self.states == "average" else ""
        got = [key for key, value in wanting.items() if value]
        if self.topology == "pairs" and got:
            rule = f"must be all with {', '.join(got)}"
            raise bad_value("topology", rule, "pairs", f"leave out {', '.join(got)}", MethodError)
