"""Parameters and pseudo-gradients averaged in rounds: `local` and `diloco`."""

from __future__ import annotations

import warnings
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor, nn

from stenograd.comm.driver import Driver
from stenograd.comm.drivers import AnyDriver
from stenograd.data.requests import gather
from stenograd.errors import ConfigError, NonFiniteError
from stenograd.schedules.diloco import DiLoCo
from stenograd.schedules.local import Local
from stenograd.schedules.rounds import Rounds
from stenograd.sync.fragments import fragments_of
from stenograd.sync.gossip import Gossip
from stenograd.sync.lost_ranks import Survivors
from stenograd.sync.optimizer_states import average_states, forget_states
from stenograd.sync.outer_averaging import OuterPart
from stenograd.sync.pair_averaging import PairPart
from stenograd.sync.parameter_averaging import average
from stenograd.sync.round_parts import LocalPart, Part, floating_buffers
from stenograd.sync.round_state import check_shapes, joined, of_part
from stenograd.sync.round_sync import RoundSync
from stenograd.topology.pairs import RandomPairs

__all__ = ["ParameterSync"]


class ParameterSync(RoundSync):
    """The running synchronisation of a model whose ranks meet every H steps; see `Local` and `DiLoCo`.

    A round in which some rank's parameters are not finite is void: nobody takes anything from it. The rank in
    question starts from the last common parameters, without the optimizer's memory of them, and says so in a
    warning; the second time in a row it is a NonFiniteError on every rank.

    Attributes:
        round: number of rounds held; equal on every rank.
    """

    @property
    def _schedule(self) -> Rounds:
        schedule = self.method.schedule
        if not isinstance(schedule, (Local, DiLoCo)):
            raise ConfigError(
                f"rounds need a schedule such as local:every=8 or diloco:every=30, got {self.method}"
            )
        return schedule

    @property
    def pending(self) -> bool:
        """Whether a round is due, or an exchange under way."""
        return bool(self._due) or any(part.under_way for part in self._parts)

    @property
    def _dense_passes(self) -> int:
        return self._schedule.after

    @property
    def _levels(self) -> tuple[str, int] | None:
        return (self._schedule.inside, self._schedule.node_size) if self._schedule.inside else None

    def _check_settings(self, check_every: int) -> None:
        schedule = self._schedule
        self._exact = isinstance(schedule, Local) and self._each_round.lossless
        if check_every and (schedule.delay or not self._shared or schedule.lost == "drop"):
            why = "a comparison needs all ranks" if schedule.lost == "drop" else "replicas differ by design"
            raise ConfigError(
                f"check_every must be 0 with {self.method}, got {check_every}: {why} there; leave it out"
            )
        self._survivors: Survivors | None = None
        self._pairs: Gossip | None = None  # what mixes with a partner, where rounds are held in pairs
        for warning in schedule.doubts():
            warnings.warn(f"{self.method}: {warning}", UserWarning, stacklevel=5)
        self._flying: dict[int, int] = {}  # fragments under way, with the pass that sent them
        self._next = schedule.every  # the pass of the next round of `local`
        self._common_at: int | None = 0  # the pass after which all ranks' parameters were equal
        self._owed: list[dict[str, Any]] = []  # a round to end when the model is loaded, too
        self._void: set[int] = set()  # ranks that made the last round void
        self._parts: list[Part] = []

    def _build(self, parameters: Mapping[str, nn.Parameter], chunk: int) -> None:
        self._dismantle()
        if not self._parts:  # else the clock goes on
            self._next = self._period()
            if isinstance(self._schedule, DiLoCo) and self._schedule.topology == "pairs":
                self._pairs = Gossip(Driver.own(self._driver), RandomPairs(), lost=self._schedule.lost)
            elif self._schedule.lost == "drop":
                self._survivors = Survivors(Driver.own(self._driver), self)
        schedule, how, nodes = self._schedule, self._each_round, self._nodes
        self._parts, self._whole = [], fragments_of(parameters, schedule.fragments, schedule.layout)
        driver = self._driver if nodes is None else nodes.between
        for whole in self._whole:
            part = whole if nodes is None else nodes.share_of(whole)
            if isinstance(schedule, DiLoCo) and self._pairs is not None:
                beside: Any = list if self._parts else self._buffers  # in the first fragment's message
                self._parts.append(PairPart(part, driver, self._pairs, schedule, chunk, beside))
            elif isinstance(schedule, DiLoCo):
                self._parts.append(OuterPart(part, driver, how, schedule, chunk))
            else:
                self._parts.append(LocalPart(part, driver, how, chunk))
        self._common_at = max(self._passes - schedule.after, 0)

    def _begin_rounds(self) -> None:
        for part in self._parts:
            part.anchor()
        self._next = self._period()

    def _dismantle(self) -> None:
        for part in self._parts:
            part.close()

    @torch.no_grad()
    def refresh(self) -> None:
        """Find the parameters anew, on every rank alike; needed after unfreezing some, or `model.to(...)`.

        A round that has begun is ended, so that no rank's steps are lost; the outer momentum starts again.
        """
        if self._parts and not self._is_common:
            self.flush()
            for part, whole in zip(self._parts, self._whole, strict=True):
                means = {name: p.detach().clone() for name, p in part.parameters.items()}
                average(list(means.values()), part.driver, in_order=True)
                part.settle(means)
                if self._nodes is not None:
                    self._nodes.spread(whole)
        super().refresh()

    def flush(self) -> None:
        """Hold the round that is due because a step was skipped, and finish what is under way."""
        super().flush()
        for fragment in list(self._flying):
            self._finish(fragment)

    def _drivers(self) -> list[AnyDriver]:
        found = [*super()._drivers(), *(part.side for part in self._parts)]
        return [driver for driver in found if driver is not None]

    @contextmanager
    def consensus(self) -> Iterator[None]:
        """Put the parameters to evaluate or export in place for a `with` block, on all ranks.

        With `diloco` these are the outer parameters, and nothing is sent (except with eager=true, where
        they differ and their mean is taken). Otherwise they are the exact mean of the ranks' parameters;
        right after an exact round they are in place already, and nothing is sent. Floating buffers are
        averaged with them.
        """
        self._hold_if_due()
        if self._is_common:
            yield
            return
        tensors = [*self._parameters.values(), *self._buffers()]
        own = [t.detach().clone() for t in tensors]
        alone = [part.take_common() for part in self._parts]
        if self._nodes is not None:
            for whole in self._whole:  # by fragments: that is how a node's ranks share them out
                self._nodes.spread(whole)
        if apart := self._buffers() if all(alone) else tensors:
            average([t.detach() for t in apart], self._driver, in_order=True)
        try:
            yield
        finally:
            with torch.no_grad():
                for t, mine in zip(tensors, own, strict=True):
                    t.copy_(mine)

    def state_dict(self) -> dict[str, Any]:
        """Return what decides the next rounds on this rank, besides the model and its optimizer.

        What is due is done first, and what is under way is waited for, so call it on all ranks. A re-sharded
        state (see `stenograd.reshard`) ends the round under way by the mean of all ranks' parameters.
        """
        self._hold_if_due()
        counters = {
            "passes": self._passes,
            "round": self.round,
            "next": self._next,
            "common": self._common_at,
        }
        flying = {str(f): t for f, t in self._flying.items()}
        return {
            **self._identity(),
            **counters,
            **joined(self._parts, own=not self._is_common),
            "flying": flying,
            "void": sorted(self._void),
            "own": {"skipped": self.skipped},
        }

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Continue from a saved `state_dict()`, also in mid-round; load the model and its optimizer, too.

        Raises:
            CheckpointError: it is of another format, method, rank, world size or model; nothing is changed.
        """
        self._check_identity(state)
        check_shapes(self._parts, state)
        parts = [of_part(part, i, state) for i, part in enumerate(self._parts)]
        for part, mine in zip(self._parts, parts, strict=True):
            part.load_state_dict(mine)
        self._passes, self.round = int(state["passes"]), int(state["round"])
        self._next, self._void, self._common_at = int(state["next"]), set(state["void"]), state["common"]
        self._flying = {int(f): int(t) for f, t in state["flying"].items()}
        self._skipped = int(state["own"]["skipped"])
        self._due, self._finite = [], True
        self._stepped.clear()
        if self._passes >= self._dense_passes:
            self._end_dense()
        self._owed = parts if state.get("resharded") else []

    @torch.no_grad()
    def after_load(self) -> None:
        """End the round that was under way when another number of ranks saved, with the mean of theirs.

        `load_checkpoint` calls it. After a `load_state_dict` of a re-sharded state it happens with the next
        training forward pass at the latest.
        """
        owed, self._owed = self._owed, []
        if not owed:
            return
        self._flying.clear()
        self._void.clear()
        if self._passes < self._dense_passes:  # no round has begun: the first starts from what was loaded
            self._begin_rounds()
            return
        ended = [
            part.settle(state["tensors"].get("own")) for part, state in zip(self._parts, owed, strict=True)
        ]
        self.round += any(ended)
        self._common_at = self._passes - self._dense_passes

    def _hold_if_due(self) -> None:
        self.after_load()
        super()._hold_if_due()

    @property
    def _is_common(self) -> bool:
        """Whether all ranks' parameters are known to be equal now."""
        return self._common_at == max(self._passes - self._dense_passes, 0)

    def _period(self) -> int:
        """Return the number of steps of a round of `local` that starts now."""
        schedule = self._schedule
        if not isinstance(schedule, Local) or not schedule.qsr:
            return schedule.every
        return schedule.period(float(self._optimizers[0].param_groups[0]["lr"]))

    def _buffers(self) -> list[Tensor]:
        return floating_buffers(self._model, self._schedule.buffers)

    def _starts(self, t: int) -> list[int]:
        if isinstance(self._schedule, Local):
            return [0] if t == self._next else []
        return self._schedule.starts(t)

    def _is_due(self, t: int) -> bool:
        ends = any(t >= sent + self._schedule.delay for sent in self._flying.values())
        late = isinstance(self._schedule, Local) and t >= self._next  # an earlier round is still due
        return ends or late or bool(self._starts(t))

    def _meet(self, t: int) -> None:
        """Finish what was sent long enough ago, then send what is due: one exchange at a time is under way.

        Raises:
            NonFiniteError: on every rank, if some rank's parameters are not finite a second time.
        """
        for fragment, sent in list(self._flying.items()):
            if t >= sent + self._schedule.delay:
                self._finish(fragment)
        for fragment in self._starts(t):
            self._parts[fragment].send()
            if self._schedule.delay:
                self._flying[fragment] = t
            elif self._finish(fragment) and self._shared:
                self._common_at = t
        if isinstance(self._schedule, Local) and t >= self._next:
            self._next = t + self._agreed_period()

    def _agreed_period(self) -> int:
        """Return the number of steps until the next round; by QSR it depends on the learning rate.

        Raises:
            ConfigError: on every rank, if their learning rates differ: they would never meet again.
        """
        period = self._period()
        if not isinstance(self._schedule, Local) or not self._schedule.qsr:
            return period
        mine = torch.tensor([period], device=self._driver.words_device())
        found = [int(theirs) for (theirs,) in self._driver.run(gather(mine))]
        if len(set(found)) > 1:
            raise ConfigError(
                f"qsr needs the same learning rate on every rank, got rounds of {found} steps: step the "
                "scheduler alike on all ranks"
            )
        return period

    @property
    def _shared(self) -> bool:
        """Whether a round without delay leaves all ranks with equal parameters."""
        schedule = self._schedule
        return self._exact or (
            isinstance(schedule, DiLoCo) and schedule.fragments == 1 and schedule.shares_outer
        )

    def _finish(self, fragment: int) -> bool:
        """Take what was sent, and do what belongs to a round when its first fragment has come.

        Returns:
            False where the round is void.
        """
        part = self._parts[fragment]
        sound = self._merge(part, first=not fragment)
        self._flying.pop(fragment, None)
        again = False if sound else self._end_void(part)
        if self._nodes is not None:
            again = self._nodes.worst(int(again)) == 1
            self._nodes.spread(self._whole[fragment])
        if again:
            raise NonFiniteError(
                f"round {self.round} of {self.method} found parameters that are not finite on a rank, as the "
                "round before did, or on all: lower the learning rate or clip gradients, and go back to a "
                "checkpoint"
            )
        if not sound:
            return False
        if part.lost_own:
            self._start_afresh(part)
        self._void = set()
        if self._schedule.states == "reset":
            forget_states(self._optimizers, part.parameters.values())
        if fragment:
            return True
        if self._survivors is None:
            self._average_others()
        self.round += 1
        if self._check_every and self.round % self._check_every == 0:
            self._guard.check(self.round)
        return True

    def _merge(self, part: Part, first: bool) -> bool:
        """Take what was sent; where lost ranks are dropped, average before what else belongs to the round."""
        if self._survivors is None:
            sound = part.merge()
            self._driver = self._driver if self._pairs is None else self._pairs.driver
            return sound
        others = [self._average_others] if first else []
        sound = self._survivors.merge(part, self._parts, others, self.round)
        self._driver = self._survivors.driver
        return sound

    @property
    def events(self) -> list[dict[str, Any]]:
        """For each loss the round, the ranks that were lost, and the seconds until training went on."""
        keeper = self._pairs or self._survivors
        return [] if keeper is None else keeper.events

    def _average_others(self) -> None:
        """Average buffers and the optimizers' states, where this round does."""
        driver = self._driver if self._survivors is None else self._survivors.driver
        if self._pairs is None and (buffers := self._buffers()):
            average(buffers, driver, in_order=True)
        number = self.round + 1
        if self._schedule.states == "average" and number % self._schedule.states_every == 0:
            second = number % (2 * self._schedule.states_every) == 0
            average_states(self._optimizers, self._parameters, driver, second=second)

    def _end_void(self, part: Part) -> bool:
        """Find out whose parameters are not finite, and let them start from the last common ones.

        Returns:
            Whether that cannot help: one made the last round void as well, or no rank is left.
        """
        sound, driver = part.is_finite(), part.driver
        mine = torch.tensor([sound], dtype=torch.uint8, device=driver.words_device())
        told = driver.run(gather(mine))
        bad = {rank for rank, (theirs,) in enumerate(told) if not int(theirs)}
        again, self._void = bool(self._void & bad), bad
        if again or len(bad) == driver.world_size:
            return True
        part.restart(bad)
        if not sound:
            self._start_afresh(part)
        return False

    def _start_afresh(self, part: Part) -> None:
        """Say that this rank has lost its part of a round, and forget what led there."""
        forget_states(self._optimizers, part.parameters.values())
        warnings.warn(
            f"rank {self.rank}: its parameters were not finite in round {self.round}, which took nothing "
            "from it; it goes on from the last common ones (in pairs: from its partner's), with a new "
            "optimizer state",
            RuntimeWarning,
            stacklevel=9,
        )
