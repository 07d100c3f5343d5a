"""Parameters mixed with neighbours while every rank trains a model of its own: `gossip`."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor, nn

from stenograd.comm.driver import Driver
from stenograd.data.requests import gather
from stenograd.errors import ConfigError, StenogradError
from stenograd.schedules.gossip import Gossip as Schedule
from stenograd.sync.attached import as_in_training
from stenograd.sync.gossip import Gossip
from stenograd.sync.parameter_averaging import average, average_carried
from stenograd.sync.round_parts import floating_buffers
from stenograd.sync.round_sync import RoundSync

__all__ = ["GossipSync"]

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
        self._gossip = Gossip(
            Driver.own(self._driver),
            schedule.topology(self.world_size),
            self._each_round,
            consensus=schedule.gamma,
            lost=schedule.lost,
            push_sum=schedule.push_sum,
        )
        self._driver = self._gossip.driver
        self._gossip.step = self.round
        self._gossip.anchor(self._tensors())

    def _dismantle(self) -> None:
        """There is nothing to stop."""

    def _tensors(self) -> list[Tensor]:
        return [p.detach() for p in self._parameters.values()]

    def _buffers(self) -> list[Tensor]:
        return floating_buffers(self._model, self._schedule.buffers)

    def _is_due(self, t: int) -> bool:
        return t % self._schedule.every == 0

    def _meet(self, t: int) -> None:
        """Mix once.

        Raises:
            PeerLost: a neighbour did not answer in time, and lost=raise or nobody knows which.
            StenogradError: a neighbour is at another backward pass.
        """
        with self._copies.follow(self._parameters.values()):
            self._gossip.mix(self._tensors(), carried=self._buffers(), passes=self._begun)
        self._driver = self._gossip.driver  # another one, if ranks were lost
        self.round += 1

    def _hold_if_due(self) -> None:
        self.after_load()
        super()._hold_if_due()

    def _before_step(
        self, optimizer: torch.optim.Optimizer, *, zeros: bool = False, again: bool = False
    ) -> None:
        """Drop a bad gradient first, for a mixing may end with an error; then mix, if that is due now."""
        super()._before_step(optimizer, zeros=zeros)
        if self._before and not again:  # else the step may have moved the parameters for a while, as SAM does
            self._hold_if_due()
            self._copies.steps()

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

        kept = self._gossip.together(mean)
        _swap(tensors, kept)
        try:
            yield
        finally:
            _swap(tensors, kept)

    def _weights(self) -> list[float]:
        """Return all ranks' weights in the mean, whose mean is 1."""
        if self._gossip.share is None:
            return [1.0] * self.world_size
        told = self._driver.run(gather(self._gossip.share.cpu()))
        shares = [float(theirs) for (theirs,) in told]
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
            wide = p.detach().to(torch.promote_types(p.dtype, torch.float32), copy=True)
            parameters[name] = {"own": wide.mul_(self.share)}
        if self._gossip.share is not None:
            parameters[_SHARE] = {"own weight": self._gossip.share.cpu().clone()}
        known = self._gossip.state_dict().get("estimates", {})
        neighbours = {group: {str(r): t for r, t in found.items()} for group, found in known.items()}
        return {
            **self._identity(),
            "passes": self._passes,
            "round": self.round,
            "own": {"skipped": self.skipped, "neighbours": neighbours},
            "parameters": parameters,
        }

    @as_in_training
    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Continue from a saved `state_dict()`; load the model and its optimizer, too.

        Raises:
            CheckpointError: it is of another format, method, rank, world size or graph; nothing is changed.
        """
        self._check_identity(state)
        found = {name: dict(tensors) for name, tensors in state["parameters"].items()}
        share = float(found.pop(_SHARE, {}).get("own weight", 1.0))
        named = {"step": int(state["round"])}
        if state.get("resharded"):
            self._owed = {name: tensors["own"] / share for name, tensors in found.items()}
            self._gossip.load_state_dict(named)
        else:
            self._owed = {}
            known = state["own"]["neighbours"]
            estimates = {group: {int(r): t for r, t in theirs.items()} for group, theirs in known.items()}
            self._gossip.load_state_dict({**named, "share": share, "estimates": estimates})
        self._passes = self._begun = int(state["passes"])
        self.round = int(state["round"])
        self._skipped = int(state["own"]["skipped"])
        self._due, self._finite, self._unread = [], True, []
        self._stepped.clear()

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


@torch.no_grad()
def _swap(tensors: Sequence[Tensor], others: Sequence[Tensor]) -> None:
    for t, other in zip(tensors, others, strict=True):
        mine = t.clone()
        t.copy_(other)
        other.copy_(mine)
