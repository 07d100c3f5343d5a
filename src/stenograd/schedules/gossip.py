"""Gossip: every rank trains a model of its own, and mixes it with those of a few neighbours."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Mapping
from dataclasses import KW_ONLY, dataclass
from typing import Any, ClassVar

from stenograd.errors import MethodError, bad_value, check_count
from stenograd.schedules.rounds import check_word
from stenograd.schedules.schedule import Codec, Schedule, What, refused
from stenograd.topology.directed import Directed, DirectedOnePeer
from stenograd.topology.graph import Graph
from stenograd.topology.mixing import Complete, Ring, Topology

__all__ = ["Gossip"]

_ORDERS = ("combine-then-adapt", "adapt-then-combine")
_PUSH_SUM = ("auto", "on", "off")


def _torus(size: int) -> Topology:
    rows = max(r for r in range(1, math.isqrt(size) + 1) if size % r == 0)
    return Graph.torus(rows, size // rows)


# Every matrix is doubly stochastic, so that the mean over the ranks is kept: equal degrees, or Metropolis.
_GRAPHS: dict[str, Callable[[int], Topology]] = {
    "onepeer": lambda size: DirectedOnePeer(),
    "exponential": Graph.exponential,
    "ring": lambda size: Ring(),
    "torus": _torus,
    "star": lambda size: Graph.star(size, "metropolis"),
    "complete": lambda size: Complete(),
}


@dataclass(frozen=True)
class Gossip(Schedule):
    """Mix parameters with neighbours: `x_i <- sum_j W_ij x_j`, before each optimizer step or after it.

    Nobody waits for all ranks, and what a rank sends does not depend on their number. The ranks' models stay
    different; `sync.consensus()` gives their mean. Optimizer states stay each rank's own.

    With a codec after the slash ranks send differences (CHOCO): `q_i = C(x_i - h_i)`, `h_i <- h_i + q_i` at
    all who know h_i, then `x_i <- x_i + consensus * sum_j W_ij (h_j - h_i)`. What a message loses goes with a
    later one, so error feedback is left out.

    Args:
        graph: who the neighbours are.
            "onepeer": one rank to send to and another to receive from per step, at distances 1, 2, 4, ...
            around all ranks, with weights 1/2; moves the model once per step whatever the number of ranks.
            "exponential": all ranks at distances 1, 2, 4, ... in both directions, at every step.
            "ring": the rank before and the rank after.
            "torus": four neighbours on a grid as nearly square as the number of ranks allows; where that is a
            prime number, a ring.
            "star": rank 0 with all others, by Metropolis weights.
            "complete": all ranks, which gives the exact mean.
        every: number of backward passes outside `no_sync()` from one mixing to the next; 1 to 2^31 - 1.
        consensus: CHOCO's step size towards the neighbours, in (0, 1], which must be given with a codec. The
            less a message tells, the smaller it must be: about 0.4 for sign, 0.04 for topk of 1 %. 0 stands
            for not given.
        order: "combine-then-adapt" mixes parameters between the backward pass and the optimizer's step, which
            then uses the gradient taken before; "adapt-then-combine" mixes what the step has made.
        lost: what a lost rank means: "raise" PeerLost, or "drop" it and go on without.
        pushsum: whether ranks carry push-sum weights, 8 bytes per message, which keep the mean where a lost
            rank would tilt it. "auto": where lost=drop meets a directed graph. "off": then the mean may move.
        buffers: "keep" for each rank's own floating buffers (running statistics of batch norm), "average" to
            mix them like parameters, as they are.

    Raises:
        MethodError: a value is outside its range.

    Example:
        >>> Gossip().topology(6).weights(0, 6, step=1)
        {0: 0.5, 4: 0.5}
        >>> Gossip(lost="drop").push_sum, Gossip(graph="ring", lost="drop").push_sum
        (True, False)

    References: Lian et al., "Can decentralized algorithms outperform centralized algorithms?", NeurIPS 2017;
    Assran et al., "Stochastic Gradient Push for Distributed Deep Learning", ICML 2019 (onepeer, pushsum;
    there steps move w x, here x, which is the same at w = 1, and leaves the learning rate as it is where a
    loss has left another sum of weights); Koloskova et al., "Decentralized Stochastic Optimization and Gossip
    Algorithms with Compressed Communication", ICML 2019 (CHOCO).
    """

    names: ClassVar[Mapping[str, Mapping[str, Any]]] = {"gossip": {}}
    summary: ClassVar[str] = "parameters, mixed with a few neighbours' in every step (gossip, SGP, CHOCO)"
    what: ClassVar[What] = What.NEIGHBOURS

    graph: str = "onepeer"
    _: KW_ONLY
    every: int = 1
    consensus: float = 0.0
    order: str = "combine-then-adapt"
    lost: str = "raise"
    pushsum: str = "auto"
    buffers: str = "keep"

    @classmethod
    def examples(cls) -> Iterator[Gossip]:
        """Yield every graph, and every other way; a consensus other than 1 is for codecs."""
        for graph in _GRAPHS:
            yield cls(graph=graph)
        yield cls(every=2)
        yield cls(order="adapt-then-combine")
        yield cls(lost="drop")
        yield cls(pushsum="on")
        yield cls(buffers="average")
        yield cls(graph="ring", consensus=0.3)
        yield cls(graph="ring", consensus=0.3, order="adapt-then-combine", buffers="average")

    def __post_init__(self) -> None:
        check_word("graph", self.graph, tuple(_GRAPHS), "onepeer")
        check_count("every", self.every, "use 1", MethodError)
        if not 0 <= self.consensus <= 1:
            advice = "1 goes all the way to the estimates"
            raise bad_value("consensus", "must be in (0, 1]", self.consensus, advice, MethodError)
        check_word("order", self.order, _ORDERS, "combine-then-adapt")
        check_word("lost", self.lost, ("raise", "drop"), "raise")
        check_word("pushsum", self.pushsum, _PUSH_SUM, "auto")
        check_word("buffers", self.buffers, ("keep", "average"), "keep")

    @property
    def push_sum(self) -> bool:
        """Whether ranks carry push-sum weights."""
        # After a loss the columns of a directed graph do not sum to 1: without weights the mean would move.
        return self.pushsum == "on" or (self.pushsum == "auto" and self.lost == "drop" and self._turns)

    @property
    def gamma(self) -> float:
        """CHOCO's step size."""
        return self.consensus or 1.0

    def topology(self, size: int) -> Topology:
        """Return the graph of so many ranks."""
        return _GRAPHS[self.graph](size)

    def check(self, codec: Codec) -> None:
        """Refuse what cannot travel to neighbours, and what makes CHOCO diverge or do nothing."""
        if codec.accumulates:
            why = "it accumulates gradients by itself"
            raise refused(self, codec, why, "use topk, sign or qsgd")
        if codec.votes:
            raise refused(self, codec, "a vote is no message of one rank", "use sign without majority")
        if codec.clips:
            why = "clip_value and clip_norm would clip parameters, not gradients"
            raise refused(self, codec, why, "clip gradients in your loop, before optimizer.step()")
        if codec.warmup_steps:
            advice = "leave warmup_steps out; ranks start from equal parameters, so all estimates are exact"
            raise refused(self, codec, "there is no dense mixing to start with", advice)
        if codec.amplifies:
            why = "what unbiased scaling leaves out of a difference grows without bound"
            raise refused(self, codec, why, "leave out unbiased=true, or use topk")
        if codec.lossless:
            if 0 < self.consensus < 1:
                why = f"consensus={self.consensus:g} would only slow down mixing that loses nothing"
                raise refused(self, codec, why, "leave consensus out")
            return
        if not codec.one_message:
            why = "a neighbour must be able to read one rank's message by itself, of a length known before"
            raise refused(self, codec, why, "use topk, sign, qsgd, bf16 or fp16")
        self._check_estimates(codec)

    def _check_estimates(self, codec: Codec) -> None:
        """Refuse a codec where ranks could not keep estimates of their neighbours."""
        if self._turns:
            why = f"ranks keep estimates of fixed neighbours, and those of graph={self.graph} change"
            raise refused(self, codec, why, "use graph=ring, torus or exponential, or leave the codec out")
        if not self.consensus:
            advice = "write consensus=0.4 for sign, 0.04 for topk of 1 %, 1 for bf16, and try others"
            raise refused(self, codec, "the step size must suit what the codec loses", advice)
        if self.lost == "drop":
            advice = "use lost=raise, or leave the codec out"
            raise refused(self, codec, "estimates of a lost rank cannot be taken back", advice)
        if self.pushsum == "on":
            advice = "leave pushsum out; these graphs keep the mean without it"
            raise refused(self, codec, "messages of differences carry no push-sum weights", advice)

    @property
    def _turns(self) -> bool:
        """Whether the graph is directed and changes from step to step."""
        return isinstance(self.topology(2), Directed)  # a graph is of the same kind for any number of ranks
