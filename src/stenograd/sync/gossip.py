"""Averaging with neighbours: a rank's tensors become a weighted mean of its own and its neighbours'."""

from __future__ import annotations

import math
import time
import warnings
from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from typing import Any, TypeVar

import torch
from torch import Tensor

from stenograd.catalog.method import Method, method
from stenograd.comm.driver import Driver, Pipeline
from stenograd.comm.traffic import Label
from stenograd.compression.contract import Site
from stenograd.data.carried import can_average
from stenograd.data.requests import gather
from stenograd.errors import CheckpointError, ConfigError, PeerLost, TensorTypeError, bad_value
from stenograd.sync.compressed_gossip import Estimates, codec_of
from stenograd.sync.handshake import compare
from stenograd.sync.mixing import Number, by_dtype, mixing
from stenograd.sync.survivors import watch_ranks
from stenograd.topology.directed import Directed
from stenograd.topology.mixing import Checked, Topology, describe

__all__ = ["Gossip"]

T = TypeVar("T")

_LOST = ("raise", "drop")


class Gossip:
    """Mixes this rank's tensors with its neighbours', step after step.

    All ranks make it at the same place, where they compare their topologies. The graph is checked again at
    every step at which it may change, on all ranks alike and before anything is sent.

    Args:
        driver: the way to the other ranks; its `traffic` counts what is sent.
        topology: who mixes with whom, the same on all ranks.
        how: how tensors travel to neighbours: "dense", or a codec such as "topk:ratio=0.1"; then ranks keep
            estimates of their neighbours (see `Estimates`), and the graph must be the same at every step.
        consensus: step size towards the neighbours with a codec, in (0, 1].
        lost: what a lost rank means: "raise" a PeerLost, or "drop" it and go on; the same on all ranks.
        push_sum: whether ranks carry weights by which the mean is kept wherever columns of W sum to 1; see
            `mixing`. Needed where columns do and rows do not, and on directed graphs that may lose ranks.

    With "drop", the survivors form a new group and the weight `W_ij` of a lost neighbour j goes to the rank's
    own: `W_ii <- W_ii + W_ij`. So rows still sum to 1, and if the matrix was symmetric, what is left of it is
    symmetric and keeps the mean over the survivors. With push-sum a rank keeps what it would have given to a
    lost one, `W_ii <- W_ii + W_ji`, so that columns still sum to 1. It costs the timeout where nobody's
    connection broke, the roll call of 2 to 30 s (half the timeout) where a rank is silent, and a new meeting.
    A rank that was a mixing behind when it noticed leaves that one out, so that all are in step again; the
    mean may move by that one. PeerLost is raised all the same where it is not known who was lost, or where
    the lost rank 0 hosted the store at which the survivors would meet (with torchrun and `run_local` it does
    not).

    Attributes:
        step: number of mixings.
        events: for each loss the step, the ranks that were lost and the seconds until training went on.
        share: this rank's push-sum weight, 1 at the beginning; None without push-sum.
        skipped: number of them in which this rank or a neighbour was not finite, and was left out; see
            `mixing`. The first is told by a warning.

    Raises:
        ConfigError: the topology does not fit the number of ranks, or `topology.check` refuses it, or `lost`
            is another word; or a codec is given with a graph that changes or is directed, with consensus
            outside its range, with push-sum, or with lost="drop".
        MethodError: `how` cannot travel to neighbours; see `codec_of`.
        MismatchError: the ranks' topologies or their `lost` differ.
        LaunchError: lost ranks are to be dropped, in a group that `stenograd.init` did not make, and a rank
            has no address at which the others could ask whether it is there.
        PeerLost: a rank did not come.

    Example:
        >>> from stenograd.launch.process_group import init, shutdown
        >>> from stenograd.topology import Ring
        >>> _ = init()
        >>> x = torch.ones(2)
        >>> Gossip(Driver(), Ring()).mix([x])  # alone, so nothing changes
        >>> x.tolist()
        [1.0, 1.0]
        >>> shutdown()
    """

    def __init__(
        self,
        driver: Driver,
        topology: Topology,
        how: str | Method = "dense",
        *,
        consensus: float = 1.0,
        lost: str = "raise",
        push_sum: bool = False,
    ) -> None:
        self.driver = driver.private()
        self.method = method(how)
        what = {"topology": describe(topology, driver.world_size), "lost": lost, "push-sum": push_sum}
        described = {**what, "method": self.method.text, "consensus": consensus}
        # Before anything is checked, so that all ranks are told of one rank's mistake.
        compare(self.driver, described)
        self._checked = Checked(topology, driver.world_size, push_sum=push_sum)
        if lost not in _LOST:
            raise bad_value("lost", f"must be one of {', '.join(_LOST)}", lost, "use 'raise'")
        self._drops = lost == "drop"
        codec = codec_of(self.method)
        if not 0 < consensus <= 1:
            raise bad_value(
                "consensus", "must be in (0, 1]", consensus, "1 goes all the way to the estimates"
            )
        if codec is not None:
            self._check_fixed(topology, push_sum)
        self._estimates = None if codec is None else Estimates(codec, consensus)
        self._whole = driver.rank, driver.world_size
        self._left = list(range(driver.world_size))  # those of the whole group that are left
        self._skip_to = 0
        self._held = 0  # collectives of all ranks; see `together`
        self._last: Callable[[], object] | None = None
        self.events: list[dict[str, Any]] = []
        self.share = torch.ones((), dtype=torch.float64, device="cpu") if push_sum else None
        self.topology = topology
        self.step = 0
        self.skipped = 0
        if self._drops:
            watch_ranks(self.driver, self)

    def anchor(self, tensors: Sequence[Tensor]) -> None:
        """Start afresh from tensors that are equal on all ranks: estimates are exact, all weights are 1."""
        if self.share is not None:
            self.share.fill_(1.0)
        if self._estimates is not None:
            row = self._weights()
            for number, group in enumerate(by_dtype(self._split(tensors)[0])):
                self._estimates.anchor(f"0.{number}", group, list(row))

    def mix(
        self,
        tensors: Sequence[Tensor],
        *,
        carried: Sequence[Tensor] = (),
        separately: bool = False,
        passes: int | None = None,
    ) -> None:
        """Mix tensors in place with the weights of this step.

        Args:
            tensors: as for `mixing`, in the same order on all ranks. With a codec, those with fewer elements
                than the method's `dense_below` travel as they are.
            carried: buffers, in the same message, which decide nothing; as for `mixing`.
            separately: one message a tensor and neighbour instead of one for all: less memory, more latency.
            passes: number of this rank's backward passes, which neighbours compare.

        Raises:
            StenogradError: this rank and a neighbour are at different backward passes; both raise.
            TensorTypeError: a tensor is integer, boolean or complex.
            PeerLost: a neighbour did not answer in time; the tensors of that message are kept.
            ConfigError: `separately`, and lost ranks are to be dropped: a mixing must fail or succeed as one;
                or the topology is not symmetric at this step.
        """
        if separately and (self._drops or self.share is not None):
            raise ConfigError(
                "separately must be False where lost ranks are dropped, or with push-sum: mix all in one "
                "message"
            )
        for t in (*tensors, *carried):
            if not can_average(t):
                advice = "leave it out, or mix its real and imaginary parts"
                raise TensorTypeError(
                    f"only real floating-point tensors can be mixed, got {t.dtype}: {advice}"
                )
        coded, plain = self._split(tensors)
        parts = [(coded, plain, list(carried))]
        if separately:
            parts = [*(([t], [], []) for t in coded), *(([], [t], []) for t in plain)]
            parts += [([], [], [t]) for t in carried]
        while self.step >= self._skip_to:
            try:
                self._mix(parts, passes)
                break
            except PeerLost as error:
                if not (self._drops and error.ranks):
                    raise
                self._drop(error)
        self.step += 1

    def together(self, collective: Callable[[], T]) -> T:
        """Hold a collective of all ranks, such as their mean, again without those lost meanwhile.

        A rank may have its result when others find that somebody is lost. It takes part again when it meets
        them, in its next mixing or collective, so that nobody waits in vain.

        Args:
            collective: what all ranks call, by `driver`, which may be another one each time. It changes
                nothing of this rank's.

        Raises:
            PeerLost: a rank is lost, and lost=raise or nobody knows which.
        """
        while True:
            try:
                found = collective()
                break
            except PeerLost as error:
                if not (self._drops and error.ranks):
                    raise
                self._drop(error)
        self._held, self._last = self._held + 1, collective
        return found

    def _mix(
        self, parts: Sequence[tuple[list[Tensor], list[Tensor], list[Tensor]]], passes: int | None
    ) -> None:
        weights, targets, driver = self._weights(), self._targets(), self.driver
        pipeline: Pipeline[bool] = Pipeline(driver)
        site = Site(shapes=(), rank=driver.rank, world_size=driver.world_size, step=self.step)
        number = None if passes is None else Number(passes)
        for at, (coded, plain, carried) in enumerate(parts):
            if plain or carried:
                if self.share is not None:
                    self.share = self.share.to((plain or carried)[0].device)  # one message lies on one device
                rounds = mixing(plain, weights, driver.rank, targets, self.share, carried=carried)
                pipeline.add(rounds if number is None else number.carried_by(rounds), Label(method="gossip"))
            if self._estimates is None:
                continue
            for i, group in enumerate(by_dtype(coded)):
                mixed = self._estimates.mix(f"{at}.{i}", group, weights, replace(site, key=at + i))
                mixed = mixed if number is None else number.carried_by(mixed)
                pipeline.add(mixed, Label(method=self.method.text))
        if not all(pipeline.finish()):
            self._left_out()
        if number is not None:
            number.refuse_others()

    def _split(self, tensors: Sequence[Tensor]) -> tuple[list[Tensor], list[Tensor]]:
        """Return the tensors that travel by codes, and those that travel as they are."""
        if self._estimates is None:
            return [], list(tensors)
        least = self.method.dense_below
        return [t for t in tensors if t.numel() >= least], [t for t in tensors if t.numel() < least]

    def _check_fixed(self, topology: Topology, push_sum: bool) -> None:
        """Refuse what estimates of neighbours cannot follow."""
        rank, size = self.driver.rank, self.driver.world_size
        if self._drops:
            raise ConfigError(f"lost must be 'raise' with {self.method}, got 'drop': or mix densely")
        if push_sum:
            raise ConfigError(f"push_sum must be False with {self.method}, got True: or mix densely")
        if isinstance(topology, Directed):
            raise ConfigError(
                f"the topology must be symmetric with {self.method}, got {topology!r}: use a ring or another "
                "fixed graph, or mix densely"
            )
        first = topology.weights(rank, size, 0)
        if any(topology.weights(rank, size, step) != first for step in range(1, 2 * size)):
            raise ConfigError(
                f"the topology must be the same at every step with {self.method}, got {topology!r}: use "
                "a ring or another fixed graph, or mix densely"
            )

    def _weights(self) -> dict[int, float]:
        """Return this rank's weights of those that are left, by their ranks in the driver's group."""
        rank, _ = self._whole
        row = dict(self._checked.row(rank, self.step))
        lost = {other: row.pop(other) for other in list(row) if other not in self._left}
        if self.share is None:
            row[rank] += math.fsum(lost.values())
        else:
            gone = [r for r in self._checked.targets(rank, self.step) if r not in self._left]
            row[rank] += math.fsum(self._checked.row(other, self.step)[rank] for other in gone)
        return {self._left.index(other): weight for other, weight in row.items()}

    def _targets(self) -> list[int]:
        """Return whom this rank sends to in this step, by their ranks in the driver's group."""
        found = self._checked.targets(self._whole[0], self.step)
        return [self._left.index(other) for other in found if other in self._left]

    def _drop(self, error: PeerLost) -> None:
        """Go on without the lost ranks, all survivors from the same step."""
        start, before = time.monotonic(), self.driver
        me = before.name_of(before.rank)
        self.driver = before.without(error.ranks)
        self._left = [rank for i, rank in enumerate(self._left) if before.name_of(i) not in error.ranks]
        mine = torch.tensor([self.step, self._held], device="cpu")
        told = [row.tolist() for (row,) in self.driver.run(gather(mine), Label(method="gossip"))]
        self._skip_to = max(step for step, _ in told)
        if self._last is not None and self._held > min(held for _, held in told):
            self._last()  # the others wait for it
        seconds = time.monotonic() - start
        self.events.append({"step": self.step, "lost": list(error.ranks), "seconds": seconds})
        warnings.warn(
            f"rank {me}: rank(s) {', '.join(map(str, error.ranks))} were lost after {self.step} "
            f"mixings; {len(self._left)} of {self._whole[1]} ranks go on without them",
            RuntimeWarning,
            stacklevel=4,
        )

    def _left_out(self) -> None:
        self.skipped += 1
        if self.skipped == 1:
            me = self.driver.name_of(self.driver.rank)
            warnings.warn(
                f"rank {me}: its own tensors or a neighbour's were not finite after {self.step} mixings and "
                "were left out; later ones are only counted. Skip steps whose gradients are not finite",
                RuntimeWarning,
                stacklevel=3,
            )

    def state_dict(self) -> dict[str, Any]:
        """Return what decides the next mixing: the number of those before it, and estimates of neighbours."""
        estimates = {} if self._estimates is None else {"estimates": self._estimates.state_dict()}
        share = {} if self.share is None else {"share": float(self.share)}
        return {"step": self.step, **share, **estimates}

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Continue from a saved `state_dict()`.

        Raises:
            CheckpointError: it is no such state.
        """
        if not isinstance(state.get("step"), int):
            raise CheckpointError(f"a gossip state holds the number of its step, got {state!r}")
        if self._estimates is not None:
            self._estimates.load_state_dict(state.get("estimates", {}))
        if self.share is not None:
            self.share.fill_(float(state.get("share", 1.0)))
        self.step = state["step"]
