"""Parameters and pseudo-gradients averaged in rounds: `local` and `diloco`."""

from __future__ import annotations

import time
import warnings
from collections.abc import Callable, Iterator, Mapping
from contextlib import AbstractContextManager, contextmanager, nullcontext
from dataclasses import dataclass, replace
from functools import partial
from typing import Any, TypeVar

import torch
from torch import Tensor, nn

from stenograd.errors import ConfigError, NonFiniteError, StenogradError
from stenograd.exchange.bucket_states import check_state
from stenograd.kernels.hash import hash_tensors
from stenograd.schedules.diloco import DiLoCo
from stenograd.schedules.local import Local
from stenograd.schedules.rounds import Rounds
from stenograd.sync.attached import as_in_training
from stenograd.sync.averaging import average, average_carried, average_states
from stenograd.sync.clock import RoundSync, beside
from stenograd.sync.gossip import Gossip
from stenograd.sync.outer import Part, check_shapes, forget_states, fragments_of, joined, of_part, overwrite
from stenograd.sync.survivors import Survivors
from stenograd.topology.pairs import RandomPairs
from stenograd.wire.agreement import sum_over_ranks
from stenograd.wire.driver import Driver
from stenograd.wire.drivers import AnyDriver
from stenograd.wire.requests import gather

__all__ = ["ParameterSync"]

T = TypeVar("T")

# What a rank comes for, where rounds go by time.
_ROUND, _CONSENSUS, _SAVE, _FLUSH, _POLL = range(5)
_WORDS = ("a round", "consensus()", "saving", "flush() or refresh()", "poll()")
_STOP = 8  # added by a rank that asks all to stop
_LOST, _VOID = 1, 2  # this rank's parameters were not finite; so nobody took anything from the round


@dataclass(frozen=True)
class _Outcome:
    """What came of a round; nothing has changed for it yet. On one level every rank is a node.

    Attributes:
        sound: whether the round is, in all places of all nodes; alike on all ranks, as are the next two.
        bad: names of the nodes that made it void, which stay when ranks are lost.
        hopeless: whether no node is left in some place from which the others could start.
        lost: places in this rank's node that have lost their part of it.
        taken: whether this rank takes what its part brought.
        start: gives the ranks that made the round void finite parameters.
    """

    sound: bool
    lost: list[int]
    taken: bool
    bad: frozenset[int] = frozenset()
    hopeless: bool = False
    start: Callable[[], object] = bool  # called without arguments, it does nothing


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
        """Whether a round is due, or an exchange under way that `flush()` would end."""
        return bool(self._due or self._flying)

    @property
    def events(self) -> list[dict[str, Any]]:
        """For each loss the round, the ranks that were lost, and the seconds until training went on."""
        keeper = self._pairs or self._survivors
        return [] if keeper is None else keeper.events

    def _check_settings(self, check_every: int) -> None:
        schedule = self._schedule
        self._dense_passes = schedule.after
        self._levels = (schedule.inside, schedule.node_size) if schedule.inside else None
        if check_every and (schedule.delay or not self._shared or schedule.lost == "drop"):
            why = "a comparison needs all ranks" if schedule.lost == "drop" else "replicas differ by design"
            raise ConfigError(
                f"check_every must be 0 with {self.method}, got {check_every}: {why} there; leave it out"
            )
        self._survivors: Survivors | None = None
        self._pairs: Gossip | None = None  # what mixes with a partner, where rounds are held in pairs
        for warning in schedule.doubts(self._each_round):
            warnings.warn(f"{self.method}: {warning}", UserWarning, stacklevel=5)
        self._flying: dict[int, int] = {}  # fragments under way, with the pass that sent them
        self._next, self._began = schedule.every, 0  # passes of the next round of `local`, and of the last
        self._common_at: int | None = 0  # the pass after which all ranks' parameters were equal
        self._owed: list[dict[str, Any]] = []  # a round to end when the model is loaded, too
        self._saved_by = 0  # ranks that saved what was loaded; by time, until the next round
        self._void: set[int] = set()  # names of the nodes that made the last round void
        self._parts: list[Part] = []
        self._trained_at: dict[int, float] = {}  # what was trained when each fragment's last round began
        self._kept: dict[int, float] = {}  # what each fragment's rounds counted that are under way or void
        self._ends_at, self._held_at = 0.0, 0  # by time: when the next round is due; passes at the last
        self._side: Driver | None = None  # for what is under way while training goes on, whichever fragment

    def _build(self, parameters: Mapping[str, nn.Parameter], chunk: int) -> None:
        self._dismantle()
        self._flying.clear()
        if not self._parts:  # else the clock goes on
            self._next = self._period()
            # Once: pairs and survivors, with their events, outlive the parts that `refresh` builds anew.
            if isinstance(self._schedule, DiLoCo) and self._schedule.topology == "pairs":
                self._pairs = Gossip(Driver.own(self._driver), RandomPairs(), lost=self._schedule.lost)
            elif self._schedule.lost == "drop" and not self._schedule.quorum:
                self._survivors = Survivors(Driver.own(self._driver), self)
        schedule, how, nodes = self._schedule, self._each_round, self._nodes
        self._parts, self._whole = [], fragments_of(parameters, schedule.fragments, schedule.layout)
        driver = self._driver if nodes is None else nodes.between
        if isinstance(schedule, DiLoCo) and (schedule.eager or schedule.delay):
            self._side = beside(driver, "rounds")
        for whole in self._whole:
            part = whole if nodes is None else nodes.share_of(whole)
            shared: dict[str, Any] = {"side": self._side, "pairs": self._pairs}
            if not self._parts:  # in pairs, in the first fragment's message
                shared["beside"] = self._buffers
            self._parts.append(Part(part, driver, how, schedule, chunk, **shared))
        self._common_at = 0 if schedule.seconds else max(self._counted - schedule.after, 0)
        self._count_afresh()

    def _check_weighing(self) -> None:
        diloco = self._schedule if isinstance(self._schedule, DiLoCo) else None
        if diloco is not None and (diloco.eager or diloco.topology == "pairs"):
            raise ConfigError(
                f"weights need rounds in which all ranks count at once, got {self.method}, whose ranks take "
                "plain means (of pairs, or with shares a round late): use diloco or local, or leave weights "
                "out"
            )

    def _begin_rounds(self) -> None:
        for part in self._parts:
            part.anchor()
        self._next, self._began = self._period(), 0
        self._count_afresh()

    def _count_afresh(self) -> None:
        """Let the next rounds count what is trained from now on."""
        trained = 0.0 if self._weighing is None else self._weighing.trained
        self._trained_at = dict.fromkeys(range(len(self._parts)), trained)
        self._kept.clear()
        self._ends_at, self._held_at = time.monotonic() + self._schedule.seconds, self._counted

    def _dismantle(self) -> None:
        for part in self._parts:
            part.close()
        if self._side is not None:
            self._side.close()

    @as_in_training
    def _end_begun(self) -> None:
        """End a round that has begun by the ranks' mean; the outer momentum starts again."""
        self._come_for(_FLUSH)
        if not self._parts or self._is_common:
            return
        if len({*self._numbers(hash_tensors(self._parameters.values()))}) == 1:
            return  # as where the program has loaded weights, over which nothing under way must come
        for fragment in list(self._flying):
            self._finish(fragment)
        steps = float(self._counted - self._held_at) if self._schedule.seconds else None
        asks = steps is not None and self._shared and not (self._void or self._saved_by)  # were all equal?
        if asks and not any(self._numbers(int(steps or 0))):
            return
        with self._copies.follow(self._parameters.values()):
            for fragment, (part, whole) in enumerate(zip(self._parts, self._whole, strict=True)):
                part.end_by_mean(self._counts(fragment, steps))
                if self._nodes is not None:
                    self._nodes.spread(whole)

    @as_in_training
    def flush(self) -> None:
        """Hold the round that is due because a step was skipped, and finish what is under way."""
        self._come_for(_FLUSH)
        for fragment in list(self._flying):
            self._finish(fragment)

    @as_in_training
    def before_save(self) -> None:
        """Do what is due before anything is saved; all ranks call it, first of all."""
        self._come_for(_SAVE)

    @as_in_training
    def poll(self) -> bool:
        """Ask all ranks, which call it together, whether one was asked to stop; see `Sync.poll`."""
        if not self._schedule.seconds:
            return super().poll()
        if not self._stopping:  # else all know, and the others need not come
            self._come_for(_POLL)
        return self._stopping

    def _drivers(self) -> list[AnyDriver]:
        return [*super()._drivers(), *([] if self._side is None else [self._side])]

    @contextmanager
    @as_in_training
    def consensus(self) -> Iterator[None]:
        """Put the parameters to evaluate or export in place for a `with` block, on all ranks.

        With `diloco` these are the outer parameters, and nothing is sent (except with eager=true, where their
        mean is taken). Otherwise they are the exact mean of the ranks' parameters, which right after an exact
        round is in place already, without a message. Floating buffers are averaged with them.
        """
        self._come_for(_CONSENSUS)
        if self._is_common:
            yield
            return
        parameters, buffers = [p.detach() for p in self._parameters.values()], self._buffers()
        with self._aside([*parameters, *buffers]):
            alone = [part.take_common() for part in self._parts]
            if self._nodes is not None:
                for whole in self._whole:  # by fragments: that is how a node's ranks share them out
                    self._nodes.spread(whole)
            apart = [] if all(alone) else parameters

            # Of clones: after a loss `_together` calls it again, from parameters that must not have changed.
            def means() -> list[Tensor]:
                found = [p.clone() for p in apart]
                average(found, self._way, in_order=True)
                return [*found, *average_carried(buffers, self._way)]

            if apart or buffers:
                overwrite([*apart, *buffers], self._together(means))
            yield

    @as_in_training
    def state_dict(self) -> dict[str, Any]:
        """Return what decides the next rounds on this rank, besides the model and its optimizer.

        What is due is done first, and what is under way is waited for, so call it on all ranks. A re-sharded
        state (see `stenograd.reshard`) ends the round under way by the mean of all ranks' parameters.
        """
        self._hold_counted()
        counters = {
            # By time each rank makes as many as it can.
            "passes": min(self._counted, self._dense_passes) if self._schedule.seconds else self._counted,
            "round": self.round,
            "next": self._next,
            "common": self._common_at,
            **({"began": self._began} if self._schedule.qsr else {}),
        }
        return {
            **self._identity(),
            **counters,
            **joined(self._parts, own=not self._is_common),
            "flying": {str(f): t for f, t in self._flying.items()},
            "void": [i for i, name in enumerate(self._names()) if name in self._void],
            "own": {"skipped": self.skipped, **self._counts_so_far()},
        }

    @as_in_training
    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Continue from a saved `state_dict()`, also in mid-round; load the model and its optimizer, too.

        Raises:
            CheckpointError: it is of another format, method, rank, world size or model; nothing is changed.
        """
        check_state(state, self._identity(), {})
        check_shapes(self._parts, state)  # all parts before any changes
        parts = [of_part(part, i, state) for i, part in enumerate(self._parts)]
        for part, own in zip(self._parts, parts, strict=True):
            part.load_state_dict(own)
        self._take_counters(state)
        self._next, self._common_at = int(state["next"]), state["common"]
        self._began = int(state.get("began", max(self._counted - self._dense_passes, 0)))
        self._ends_at, self._held_at = time.monotonic() + self._schedule.seconds, self._counted
        # `Weights` begins at 0 in each process, so states hold differences.
        trained = 0.0 if self._weighing is None else self._weighing.trained
        self._trained_at = {int(f): trained - n for f, n in state["own"].get("trained", {}).items()}
        self._kept = {int(f): float(n) for f, n in state["own"].get("kept", {}).items()}
        self._void = {name for i, name in enumerate(self._names()) if i in state["void"]}
        self._flying = {int(f): int(t) for f, t in state["flying"].items()}
        self._saved_by = int(state.get("saved_by", self.world_size))
        self._owed = parts if state.get("resharded") else []

    @as_in_training
    def after_load(self) -> None:
        """Do what needs all ranks: average gradients or not, as when the state was saved, and end a round.

        A round that was under way when another number of ranks saved ends with the mean of theirs.
        `load_checkpoint` calls this. After `load_state_dict` it happens with the next training forward pass
        at the latest.
        """
        # With 0 due the change comes from there: `_hold_if_due` calls this before it takes the 0.
        if self._dense != (dense := self._counted < self._dense_passes) and not self._due:
            self._average_elsewhere(dense=dense)
        owed, self._owed = self._owed, []
        if not owed:
            return
        self._flying.clear()
        self._void.clear()
        if self._counted < self._dense_passes:  # no round has begun: the first starts from what was loaded
            self._begin_rounds()
            return
        owns = [state["tensors"].get("own") for state in owed]
        with self._copies.follow(self._parameters.values()):
            ended = [
                part.end_resharded(own, self._saved_by) for part, own in zip(self._parts, owns, strict=True)
            ]
        self.round += any(ended)
        self._common_at = self._counted - self._dense_passes
        self._count_afresh()

    # The steps of a round, in their order.

    def _period(self) -> int:
        """Return the number of steps of a round of `local` that starts now."""
        if not self._schedule.qsr:
            return self._schedule.every
        return self._schedule.period(float(self._optimizers[0].param_groups[0]["lr"]))

    def _starts(self, t: int) -> list[int]:
        if isinstance(self._schedule, Local):
            return [0] if t == self._next else []
        return self._schedule.starts(t)

    def _is_due(self, t: int) -> bool:
        if self._schedule.seconds:
            return time.monotonic() >= self._ends_at
        if self._schedule.qsr:  # a rate that rises makes the round that has begun shorter
            self._next = min(self._next, max(self._began + self._period(), t))
        if isinstance(self._schedule, Local) and t > self._next:  # an earlier round is still due
            return bool(self._schedule.qsr) or (t - self._next) % self._schedule.every == 0
        # With what an earlier pass is still to send, and other ranks have sent in time.
        sent = [*self._flying.values(), *filter(self._starts, self._due if self._schedule.delay else ())]
        return any(t >= at + self._schedule.delay for at in sent) or bool(self._starts(t))

    def _meet(self, t: int) -> None:
        """Finish what was sent long enough ago, then send what is due: one exchange at a time is under way.

        Raises:
            NonFiniteError: on every rank, if some rank's parameters are not finite a second time.
            StenogradError: on every rank, if they are at different backward passes (in pairs: on both ranks).
        """
        if self._schedule.seconds:
            self._assemble(_ROUND)
            return
        for fragment, sent in list(self._flying.items()):
            if t >= sent + self._schedule.delay:
                self._finish(fragment)
        for fragment in self._starts(t):
            self._parts[fragment].passes = self._begun_by(t)
            self._parts[fragment].weight = self._counts(fragment)
            self._parts[fragment].stop = self._asks_in_rounds()
            self._parts[fragment].send()
            if self._schedule.delay:
                self._flying[fragment] = t
            elif self._finish(fragment) and self._shared:
                self._common_at = t
        if isinstance(self._schedule, Local) and t >= self._next:
            self._next, self._began = t + self._agreed_period(), t

    def _come_for(self, what: int) -> None:
        """Do what is due before something that all ranks do together."""
        self._hold_counted()
        if self._schedule.seconds and self._parts and not self._closed:
            self.after_load()
            self._assemble(what)

    def _hold_counted(self) -> None:
        """Hold what is due by a number of passes; by time that is only where averaged gradients end."""
        if not self._schedule.seconds or 0 in self._due:
            self._hold_if_due()

    def _assemble(self, what: int) -> None:
        """Come together with all ranks, where rounds go by time; if some come for a round, all hold it first.

        So a rank that has ended its loop, and exports or saves what came of it, goes on taking part in the
        rounds of slower ones until these have ended, too.

        Raises:
            StenogradError: on all ranks: they have come for different things.
        """
        while True:
            own = _ROUND if self._due else what  # a step that was skipped has left a round due
            asked = self._numbers(own + (_STOP if self._asks() else 0))
            self._hear(any(number & _STOP for number in asked))
            came = [number & ~_STOP for number in asked]
            if _ROUND in came:
                with super()._around_round():  # every rank is there now
                    self._hold_timed()
                if what == _ROUND or (what == _POLL and self._stopping):  # which the round has brought
                    return
            elif set(came) == {what}:
                return
            else:
                purposes = ", ".join(f"rank {rank} for {_WORDS[other]}" for rank, other in enumerate(came))
                raise StenogradError(
                    f"ranks came for different things: {purposes}: call these on all ranks, in one order"
                )

    def _around_round(self) -> AbstractContextManager[None]:
        # By time, a rank does not know yet whether all come for a round.
        return nullcontext() if self._schedule.seconds else super()._around_round()

    def _hold_timed(self) -> None:
        """Hold a round of ranks that have made as many steps as they could since the last."""
        (part,) = self._parts
        steps, self._held_at, self._saved_by = self._counted - self._held_at, self._counted, 0
        # `part.stop` stays as it is: `_assemble` has asked, and without `passes` no flag travels to carry it.
        part.passes, part.weight = None, self._counts(0, float(steps))
        part.send()
        self._finish(0)
        self._due = []  # another rank's round was this one's, too
        self._ends_at = time.monotonic() + self._schedule.seconds

    @property
    def needs_poll(self) -> bool:
        """Whether only `poll()` tells of requests to stop: in pairs, which are not all ranks."""
        return isinstance(self._schedule, DiLoCo) and self._schedule.topology == "pairs"

    def _asks_in_rounds(self) -> bool:
        """Return whether this rank asks all to stop; in a node, which sends in parts, all do or none."""
        if self._nodes is None:
            return self._asks()
        return self._gradients is not None and self._gradients._stopping

    def _counts(self, fragment: int, steps: float | None = None) -> float | None:
        """Return what this rank (or node) counts for: what it has trained since the fragment's last round.

        With what void rounds counted that it has kept. Unweighted, that is of `steps`, or None.
        """
        since = steps
        if self._weighing is not None:
            # First: what follows are collectives that only ranks with weights take part in.
            self._weighing.agree()
            trained = self._weighing.trained
            since, self._trained_at[fragment] = trained - self._trained_at.get(fragment, 0.0), trained
            if self._nodes is not None:
                since = sum(sum_over_ranks(self._nodes.inside, [since]))
        if since is None:
            return None
        self._kept[fragment] = self._kept.get(fragment, 0.0) + since
        return self._kept[fragment]

    def _count_anew(self, fragment: int, *, lost: bool) -> None:
        """Count no more what this rank has brought to a round: all have taken that, or it is lost."""
        self._kept.pop(fragment, None)
        # What was trained while the round was under way is lost, too; in a node only of a part of the model.
        if lost and self._weighing is not None and self._nodes is None:
            self._trained_at[fragment] = self._weighing.trained

    def _counts_so_far(self) -> dict[str, Any]:
        """Return for a state what this rank would count for: since each fragment's last round, and before."""
        found = {"kept": {str(f): n for f, n in self._kept.items()}} if self._kept else {}
        if self._weighing is None:
            return found
        now = self._weighing.trained
        since = {str(i): now - self._trained_at.get(i, 0.0) for i in range(len(self._parts))}
        return {"trained": since, **found}

    def _finish(self, fragment: int) -> bool:
        """Take what was sent, and do what belongs to a round when its first fragment has come.

        Returns:
            False where the round is void.
        """
        part = self._parts[fragment]
        with self._copies.follow(self._whole[fragment].values()):
            outcome = self._merge(part, first=not fragment)
            self._flying.pop(fragment, None)
            self._hear(part.stopped)
            sound = self._end(fragment, outcome)
        # A void round leaves the others what they have trained, so it counts in the next one.
        lost = (0 if self._nodes is None else self._nodes.place) in outcome.lost
        if outcome.taken or lost:
            self._count_anew(fragment, lost=lost)
        if not sound:
            return False
        if self._schedule.states == "reset":
            forget_states(self._optimizers, self._whole[fragment].values())
        if fragment:
            return True
        # With survivors `_merge` has taken these together with the parameters: all of a round, or nothing.
        if self._survivors is None:
            for put in self._other_means():
                put()
        self.round += 1
        if self._check_every and self.round % self._check_every == 0 and self._guard.check(self.round):
            for each in self._parts:  # or outer parameters that differ would undo it in each round
                each.retake()
        return True

    def _merge(self, part: Part, first: bool) -> _Outcome:
        """Take what was sent; where lost ranks are dropped, all that belongs to the round or nothing."""
        if self._survivors is None:
            sound = part.merge()
            self._driver = self._driver if self._pairs is None else self._pairs.driver
            return self._outcome(part, sound)

        def bring() -> tuple[list[Callable[[], None]], _Outcome]:
            sound = part.arrive()
            return (self._other_means() if sound and first else []), self._outcome(part, sound)

        puts, outcome = self._survivors.hold(bring, self._parts, part, self.round)
        self._driver = self._survivors.driver
        for put in puts:
            put()
        if not part.merge() and outcome.sound:  # the step led too far, on all ranks alike
            return replace(outcome, sound=False, lost=[], taken=False)
        return outcome

    def _outcome(self, part: Part, sound: bool) -> _Outcome:
        """Find out what came of a round, on all ranks alike, and bring what ends it; changes nothing."""
        lost = part.lost_own if sound else not part.is_finite()
        code = (0 if sound else _VOID) | (_LOST if lost else 0)
        # Also after a sound exchange: a part of the model that this rank does not exchange may be void.
        if self._nodes is not None:
            received, node, place = self._nodes.tell(code), self._nodes.node, self._nodes.place
            names = list(range(len(received)))
        elif sound:  # nobody asks the others
            return _Outcome(True, [0] if lost else [], taken=True)
        else:
            driver = part.driver
            own = torch.tensor([code], dtype=torch.uint8, device="cpu")
            received = [[int(other)] for (other,) in driver.run(gather(own))]
            node, place, names = driver.rank, 0, [driver.name_of(rank) for rank in range(driver.world_size)]
        columns = zip(*received, strict=True)
        bad = [{i for i, code in enumerate(column) if code == _VOID | _LOST} for column in columns]
        hopeless = any(len(nodes) == len(received) for nodes in bad)
        return _Outcome(
            not any(code & _VOID for codes in received for code in codes),
            [at for at, code in enumerate(received[node]) if code & _LOST],
            sound,
            frozenset(names[i] for nodes in bad for i in nodes),
            hopeless,
            bool if sound or hopeless else part.restart(bad[place]),
        )

    def _other_means(self) -> list[Callable[[], None]]:
        """Average buffers and the optimizers' states, where this round does; return what takes the means."""
        found: list[Callable[[], None]] = []
        if self._pairs is None and (buffers := self._buffers()):
            found.append(partial(overwrite, buffers, average_carried(buffers, self._way)))
        number = self.round + 1
        if self._schedule.states == "average" and number % self._schedule.states_every == 0:
            way, second = self._way, number % (2 * self._schedule.states_every) == 0
            found.append(average_states(self._optimizers, self._parameters, way, self._copies, second=second))
        return found

    def _end(self, fragment: int, outcome: _Outcome) -> bool:
        """End a round for all ranks alike: those whose parameters are not finite start from the common ones.

        With two levels a round is void in all places if it is in one; what other places have taken stays,
        and all ranks of a node forget what led there.

        Returns:
            Whether the round is sound.

        Raises:
            NonFiniteError: on every rank: one made the last round void as well, or none is left.
        """
        whole = self._whole[fragment]
        before, self._void = self._void, {*outcome.bad}
        # Nobody is to blame, so all are noted: whatever makes the next round void as well ends training.
        if not outcome.sound and not outcome.bad:
            self._void = {*self._names()}
            self._tell_too_far(again=bool(before))
        elif before & self._void or outcome.hopeless:
            raise NonFiniteError(
                f"round {self.round} of {self.method} found parameters that are not finite on a rank, as the "
                "round before did, or on all: lower the learning rate or clip gradients, and go back to a "
                "checkpoint"
            )
        outcome.start()
        shares = [whole]
        # After `start`: the node takes over what the rank that speaks for a part has by now.
        if self._nodes is not None:
            self._nodes.spread(whole)
            shares = self._nodes.shares(whole)
        if outcome.lost:
            self._start_afresh([p for place in outcome.lost for p in shares[place].values()])
            self._bring_back_others(fragment)
        return outcome.sound

    def _bring_back_others(self, fragment: int) -> None:
        """Bring the model's other fragments back, too: the next of them would make its round void as well."""
        for other, (part, whole) in enumerate(zip(self._parts, self._whole, strict=True)):
            # A node goes back as a whole: `spread` needs all its ranks, and one alone may see what is bad.
            if other == fragment or (self._nodes is None and part.is_finite()):
                continue
            with self._copies.follow(whole.values()):
                part.take_outer()
                if self._nodes is not None:
                    self._nodes.spread(whole)
            forget_states(self._optimizers, whole.values())
            self._count_anew(other, lost=True)

    def _tell_too_far(self, *, again: bool) -> None:
        """Say that all parameters were finite, but would not have been after the round.

        Raises:
            NonFiniteError: the last round was void as well.
        """
        what = (
            f"round {self.round} of {self.method} found numbers too large for it, or would have led beyond "
            "what parameters of this type hold (float16: 65,504)"
        )
        if again:
            raise NonFiniteError(
                f"{what}, as the round before did, or found parameters that are not finite: lower the "
                "learning rate or outer_lr, and go back to a checkpoint"
            )
        if self.rank == 0:
            warnings.warn(
                f"{what}, so it took nothing; ranks go on by themselves", RuntimeWarning, stacklevel=9
            )

    def _start_afresh(self, parameters: list[Tensor]) -> None:
        """Say that this rank has lost its part of a round, and forget what led there."""
        forget_states(self._optimizers, parameters)
        warnings.warn(
            f"rank {self.rank}: its parameters were not finite in round {self.round}, which took nothing "
            "from it (nor from its node), or would not have been after it; it goes on from the last common "
            "ones (in pairs: from its partner's), with a new optimizer state",
            RuntimeWarning,
            stacklevel=9,
        )

    def _agreed_period(self) -> int:
        """Return the number of steps until the next round; by QSR it depends on the learning rate.

        Raises:
            ConfigError: on every rank, if their learning rates differ: they would never meet again.
        """
        period = self._period()
        # Without it the period is in the method's text, which was compared: nothing to ask.
        found = self._numbers(period) if self._schedule.qsr else [period]
        if len(set(found)) > 1:
            raise ConfigError(
                f"qsr needs the same learning rate on every rank, got rounds of {found} steps: step the "
                "scheduler alike on all ranks"
            )
        return period

    def _numbers(self, number: int) -> list[int]:
        """Return every rank's number."""
        return [int(other) for (other,) in self._ask_all(torch.tensor([number], device="cpu"))]

    def _ask_all(self, own: Tensor) -> list[tuple[Tensor, ...]]:
        return self._together(lambda: self._way.run(gather(own)))

    def _together(self, collective: Callable[[], T]) -> T:
        """Hold a collective of all ranks that changes nothing; again, where lost ranks are dropped."""
        if self._pairs is not None:
            found = self._pairs.together(collective)
        elif self._survivors is not None:
            found = self._survivors.hold(collective, self._parts, None, self.round)
        else:
            return collective()
        self._driver = self._way
        return found

    @property
    def _way(self) -> AnyDriver:
        """The way to all ranks that are left, also in the middle of a round."""
        keeper = self._pairs or self._survivors
        return self._driver if keeper is None else keeper.driver

    def _names(self) -> list[int]:
        """Return what `_void` calls nodes: the ranks' numbers in the whole world, on one level."""
        if self._nodes is not None:
            return list(range(self.world_size))
        return [self._driver.name_of(rank) for rank in range(self.world_size)]

    @property
    def _shared(self) -> bool:
        """Whether a round without delay leaves all ranks with equal parameters."""
        if isinstance(self._schedule, DiLoCo):
            return self._schedule.fragments == 1 and self._schedule.shares_outer
        return self._each_round.lossless

    @property
    def _is_common(self) -> bool:
        """Whether all ranks' parameters are known to be equal; in rounds by time, others may go on."""
        local = self._counted - self._dense_passes
        return local < 0 or (not self._schedule.seconds and self._common_at == local)
