"""Averaging with neighbours, step after step, and while every rank trains a model of its own."""

from __future__ import annotations

import math
import time
import warnings
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import replace
from typing import Any, TypeVar

import torch
from torch import Tensor, nn

from stenograd.catalog.method import Method, method
from stenograd.compression.contract import Site
from stenograd.errors import (
    CheckpointError,
    ConfigError,
    PeerLost,
    StenogradError,
    TensorTypeError,
    bad_value,
)
from stenograd.exchange.bucket_states import check_state
from stenograd.schedules.gossip import Gossip as Schedule
from stenograd.sync.attached import as_in_training
from stenograd.sync.averaging import average, average_carried
from stenograd.sync.clock import RoundSync
from stenograd.sync.handshake import compare
from stenograd.sync.mixing import Estimates, Number, by_dtype, codec_of, mixing
from stenograd.sync.outer import overwrite
from stenograd.sync.survivors import watch_ranks
from stenograd.topology.directed import Directed
from stenograd.topology.mixing import Checked, Topology, describe
from stenograd.wire.carried import can_average
from stenograd.wire.driver import Driver, Pipeline
from stenograd.wire.requests import gather
from stenograd.wire.traffic import Label

__all__ = ["Gossip", "GossipSync"]

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
        # Of the start: the graph is drawn for all ranks, and `_weights` moves what belongs to lost ones.
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
        while self.step >= self._skip_to:  # else the ranks that are left are past this mixing already
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
        # Last, when the messages of this mixing have gone both ways, so that both ends raise.
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
        # By names in the whole world, as `error.ranks` are; `_left` holds ranks of the group at the start.
        self._left = [rank for i, rank in enumerate(self._left) if before.name_of(i) not in error.ranks]
        own = torch.tensor([self.step, self._held], device="cpu")
        received = [row.tolist() for (row,) in self.driver.run(gather(own), Label(method="gossip"))]
        self._skip_to = max(step for step, _ in received)
        if self._last is not None and self._held > min(held for _, held in received):
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
        self.step, self._skip_to = state["step"], 0  # a loss before says nothing of what comes now


_SHARE = "push-sum in rounds"  # names no parameter: a state's tensors are sorted by name


class GossipSync(RoundSync):
    """The running synchronisation of a model that mixes with its neighbours'; see `schedules.gossip.Gossip`.

    A mixing is due after every so many backward passes outside `no_sync()`. With combine-then-adapt it is
    done when the first optimizer begins to step: `x_i <- sum_j W_ij x_j`, and then `x_i <- x_i - opt(g_i)`
    with the gradient g_i taken at the old x_i. With adapt-then-combine it is done when the last optimizer has
    stepped. If a step was skipped, it is done before the next training forward pass, or by `flush()`.

    A gradient that is not finite costs this rank its own step and nobody else anything. A rank whose
    parameters are not finite is left out by its neighbours, and takes theirs; see `mixing`.

    Attributes:
        round: number of mixings; equal on every rank.
    """

    @property
    def left_out(self) -> int:
        """Number of mixings in which this rank's parameters or a neighbour's were not finite."""
        return self._gossip.skipped

    @property
    def events(self) -> list[dict[str, Any]]:
        """For each loss, the mixing, the lost ranks, and the seconds until training went on."""
        return self._gossip.events

    @property
    def share(self) -> float:
        """This rank's push-sum weight; 1 where there are none."""
        return 1.0 if self._gossip.share is None else float(self._gossip.share)

    @property
    def _schedule(self) -> Schedule:
        schedule = self.method.schedule
        if not isinstance(schedule, Schedule):
            raise ConfigError(f"gossip needs a schedule such as gossip:graph=ring, got {self.method}")
        return schedule

    def _check_weighing(self) -> None:
        raise ConfigError(
            f"weights need rounds in which all ranks count at once, got {self.method}, whose ranks mix with "
            "neighbours: use diloco or local, or leave weights out"
        )

    def _check_settings(self, check_every: int) -> None:
        schedule = self._schedule
        self._before = schedule.order == "combine-then-adapt"
        self._owed: dict[str, Tensor] = {}  # the mean to start from when the model is loaded, too
        if check_every:
            raise ConfigError(
                f"check_every must be 0 with {self.method}, got {check_every}: replicas differ by design "
                "there; leave it out, and evaluate the ranks' mean inside `with sync.consensus():`"
            )

    def _build(self, parameters: Mapping[str, nn.Parameter], chunk: int) -> None:
        schedule = self._schedule
        before: Gossip | None = vars(self).get("_gossip")
        self._gossip = Gossip(
            Driver.own(self._driver),
            schedule.topology(self.world_size),
            self._each_round,
            consensus=schedule.gamma,
            lost=schedule.lost,
            push_sum=schedule.push_sum,
        )
        self._driver = self._gossip.driver
        self._gossip.step = self.round  # a new one, after refresh(), goes on in the graph's order
        if before is not None:
            self._gossip.events, self._gossip.skipped = before.events, before.skipped
        self._gossip.anchor(self._tensors())

    def _dismantle(self) -> None:
        """There is nothing to stop."""

    def _tensors(self) -> list[Tensor]:
        return [p.detach() for p in self._parameters.values()]

    def _is_due(self, t: int) -> bool:
        return t % self._schedule.every == 0

    def _meet(self, t: int) -> None:
        """Mix once.

        Raises:
            PeerLost: a neighbour did not answer in time, and lost=raise or nobody knows which.
            StenogradError: a neighbour is at another backward pass.
        """
        with self._copies.follow(self._parameters.values()):
            self._gossip.mix(self._tensors(), carried=self._buffers(), passes=self._begun_by(t))
        self._driver = self._gossip.driver  # another one, if ranks were lost
        self.round += 1

    def _check_step(
        self, optimizer: torch.optim.Optimizer, *, zeros: bool = False, again: bool = False
    ) -> None:
        """Drop a bad gradient first, for a mixing may end with an error; then mix, if that is due now."""
        super()._check_step(optimizer, zeros=zeros)
        if self._before and not again:  # else the step may have moved the parameters for a while, as SAM does
            self._hold_if_due()
            self._copies.steps()  # the step starts from what was mixed, not from what `super()` has noted

    def _after_step(self, optimizer: torch.optim.Optimizer, *_: Any) -> None:
        if self._before and self._due:
            raise StenogradError(
                "optimizer.step(closure) evaluates its closure again after the parameters were mixed: use an "
                "optimizer that does so once, step() without a closure, or write order=adapt-then-combine"
            )
        super()._after_step(optimizer)

    @contextmanager
    @as_in_training
    def consensus(self) -> Iterator[None]:
        """Put the exact mean of the ranks' models in place for a `with` block, on all ranks.

        By push-sum that is `sum_i w_i x_i / sum_i w_i`. Floating buffers are averaged with buffers=average,
        and otherwise stay each rank's own. With lost=drop it is the mean of those that are left.

        Raises:
            NonFiniteError: on all ranks: some rank's parameters are not finite.
            PeerLost: a rank is lost, and lost=raise or nobody knows which.
        """
        self._hold_if_due()
        parameters, buffers = self._tensors(), self._buffers()
        tensors = [*parameters, *buffers]

        def mean() -> list[Tensor]:
            self._driver = self._gossip.driver  # another one, if ranks were lost
            found, weights = [t.clone() for t in parameters], self._weights()
            average(found, self._driver, weights[self.rank], in_order=True)
            means = average_carried(buffers, self._driver, weights)
            return [*found, *(mean.to(b.dtype) for b, mean in zip(buffers, means, strict=True))]

        with self._aside(tensors):
            overwrite(tensors, self._gossip.together(mean))
            yield

    @property
    def needs_poll(self) -> bool:
        """Whether only `poll()` tells of requests to stop: always, for neighbours are not all ranks."""
        return True

    def _ask_all(self, own: Tensor) -> list[tuple[Tensor, ...]]:
        found = self._gossip.together(lambda: self._gossip.driver.run(gather(own)))
        self._driver = self._gossip.driver
        return found

    def _weights(self) -> list[float]:
        """Return all ranks' weights in the mean, whose mean is 1."""
        if self._gossip.share is None:
            return [1.0] * self.world_size
        received = self._driver.run(gather(self._gossip.share.cpu()))
        shares = [float(other) for (other,) in received]
        return [share * self.world_size / sum(shares) for share in shares]

    @as_in_training
    def state_dict(self) -> dict[str, Any]:
        """Return what decides the next mixings on this rank, besides the model and its optimizer.

        A mixing that is due is done first, so call it on all ranks. The parameters are a part of it, times
        the push-sum weight, so that a re-sharded state (see `stenograd.reshard`) starts all ranks from the
        exact mean; what ranks know of their neighbours is then left out.
        """
        self._hold_if_due()
        parameters: dict[str, dict[str, Tensor]] = {}
        for name, p in self._parameters.items():
            # A copy also of float32, because it is scaled in place.
            wide = p.detach().to(torch.promote_types(p.dtype, torch.float32), copy=True)
            parameters[name] = {"own": wide.mul_(self.share)}
        if self._gossip.share is not None:
            parameters[_SHARE] = {"own weight": self._gossip.share.cpu().clone()}
        known = self._gossip.state_dict().get("estimates", {})
        neighbours = {group: {str(r): t for r, t in found.items()} for group, found in known.items()}
        return {
            **self._identity(),
            "passes": self._counted,
            "round": self.round,
            "own": {"skipped": self.skipped, "neighbours": neighbours},
            "parameters": parameters,
        }

    @as_in_training
    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Continue from a saved `state_dict()`; load the model and its optimizer, too.

        Raises:
            CheckpointError: it is of another format, method, rank, world size, model or graph; nothing is
                changed.
        """
        check_state(state, self._identity(), {})
        found = {name: dict(tensors) for name, tensors in state["parameters"].items()}
        share = float(found.pop(_SHARE, {}).get("own weight", 1.0))
        check_state({"parameters": found}, {}, {name: {"own": p} for name, p in self._parameters.items()})
        named = {"step": int(state["round"])}
        if state.get("resharded"):
            self._owed = {name: tensors["own"] / share for name, tensors in found.items()}
            self._gossip.load_state_dict(named)
        else:
            self._owed = {}
            known = state["own"]["neighbours"]
            estimates = {group: {int(r): t for r, t in other.items()} for group, other in known.items()}
            self._gossip.load_state_dict({**named, "share": share, "estimates": estimates})
        self._take_counters(state)

    @as_in_training
    def after_load(self) -> None:
        """Start all ranks from the mean, where another number of ranks saved.

        `load_checkpoint` calls it. After a `load_state_dict` of a re-sharded state it happens with the next
        training forward pass at the latest.
        """
        owed, self._owed = self._owed, {}
        if not owed:
            return
        with self._copies.follow(self._parameters.values()):
            for name, p in self._parameters.items():
                p.copy_(owed[name])
        self._gossip.anchor(self._tensors())
