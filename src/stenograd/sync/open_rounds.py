"""Rounds of workers that come, leave, return and lag: `quorum=` of `local` and `diloco`."""

from __future__ import annotations

import hashlib
import json
import logging
import os
import time
from collections import OrderedDict
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from functools import partial
from typing import Any, NoReturn, TypeVar

import torch
from torch import Tensor, nn

from stenograd.errors import ConfigError, MismatchError, PeerLost, StenogradError, first_line
from stenograd.launch.detect import OPEN_VARIABLE
from stenograd.launch.membership import Broken, Membership
from stenograd.launch.plans import Arrival, Member, Plan
from stenograd.launch.process_group import connect_members, membership
from stenograd.sync.attached import as_in_training
from stenograd.sync.handshake import own_host
from stenograd.sync.outer import Part
from stenograd.sync.rounds import ParameterSync
from stenograd.version import __version__
from stenograd.wire.carried import in_memory
from stenograd.wire.driver import Driver
from stenograd.wire.packing import as_bytes
from stenograd.wire.requests import exchange, gather
from stenograd.wire.traffic import ATTACH, Label

__all__ = ["OpenRounds"]

T = TypeVar("T")

_log = logging.getLogger("stenograd")
_SAID = {
    "joined": "rank {rank} has joined",
    "back": "rank {rank} is back after {seconds:.1f} s",
    "late": "rank {rank} is late",
    "lost": "rank {rank} is lost",
    "left": "rank {rank} has left",
}
# After so many a worker comes to the next round and waits for it, or what it has trained would never count.
_MOST_MISSED = 3
_CONNECTED = 4  # sets of members whose connection is kept, for when they meet again
_START = (
    "start it by `stenograd train --keep`, or start `stenograd rendezvous` and export what it prints to all "
    "workers"
)


class _Late(Exception):
    """The round is held without this worker, or another attempt of it counts."""


class OpenRounds(ParameterSync):
    """The running synchronisation of an open run; see `Rounds` for `quorum` and `grace`.

    Every worker knows by number which round it has: state s is what round s left. To hold round k a worker
    says that it has come; the store tells who takes part (see `Membership`). Who is behind gets the newest
    outer parameters, their momentum, the compressor's rules and the number of the round from a member that
    has them, over the wire, and checks them by their SHA-256. Its own local steps count from there:

        theta_i <- theta_i + phi_new - phi_old        (theta_i <- phi_new, for one that has just begun)

    so its pseudo-gradient stays what it trained since it last took part, and counts by as many steps, or by
    the weights given. Where all have come in time with equally many, the round is that of a fixed world, bit
    for bit. A member takes the outcome when the store has noted that it counts, which happens when all
    members have everything.

    Attributes:
        round: number of rounds held, by the others, too.
    """

    def _check_settings(self, check_every: int) -> None:
        if OPEN_VARIABLE not in os.environ:
            raise ConfigError(f"quorum needs a store that outlives workers, got none: {_START}")
        if check_every:
            raise ConfigError(
                f"check_every must be 0 with {self.method}, got {check_every}: a comparison needs all ranks"
            )
        super()._check_settings(0)
        self._here: Membership | None = None
        self._plan: Plan | None = None
        self._undo = False  # whether what was sent in this round must be taken back
        self._state = -1  # the last round whose outcome this worker has
        self._last_known = -1  # the last that it has heard of
        self._met_at = 0  # passes when this worker last met others, or missed them
        self._met_s = time.monotonic()
        self._missed = 0  # rounds running that were held without this worker
        self._counted_at: dict[int, int] = {}  # passes when each fragment last took part
        self._groups: OrderedDict[str, tuple[str, Driver]] = OrderedDict()
        self._events: list[dict[str, Any]] = []
        self._knows: dict[int, Member] = {}  # by rank, who took part the last time
        self._absent: dict[int, tuple[float, str]] = {}  # ranks that took part once: since when not, and why
        self._tokens: dict[int, float] = {}
        self._sent_fragment, self._host = 0, own_host()
        self.driver: Driver

    def __init__(self, model: nn.Module, optimizer: Any, how: Any, **settings: Any) -> None:
        super().__init__(model, optimizer, how, **settings)
        with self._wholly():
            here = membership()
            if here is None:  # `join` took the group that it found
                raise ConfigError(
                    f"{OPEN_VARIABLE} is set, but torch.distributed was initialised by other means: leave "
                    "that out, or call stenograd.init() in its place"
                )
            if here.entered:
                raise ConfigError("an open run takes one model for each process, got another: use one")
            self._here, self.driver = here, self._driver  # type: ignore[assignment]
            self._alone: Driver = self._driver  # type: ignore[assignment]
            self._alone.names = [here.rank]
            self._survivors = self  # type: ignore[assignment]
            # Last: once this worker has entered, the others count on it.
            here.enter(self._about())
            self._begin()

    @property
    def rank(self) -> int:
        """This worker's rank in the run."""
        return self._run.rank

    @property
    def members(self) -> tuple[int, ...]:
        """Ranks that took part in the last round."""
        return () if self._plan is None else self._plan.ranks

    @property
    def events(self) -> list[dict[str, Any]]:
        """What changed between rounds, as this worker saw it; newest last.

        Each with `round`, `rank`, `what` ("joined", "back", "late", "lost" or "left") and `seconds` since it
        was first missed.
        """
        return self._events

    @property
    def tokens(self) -> dict[int, float]:
        """By rank, what it has brought to rounds: passes, or the sum of its weights; equal on all members."""
        return dict(sorted(self._tokens.items()))

    @property
    def stopping(self) -> bool:
        """Whether a worker was asked to stop; true on all members of a round after it, on others soon."""
        return super().stopping or self._run.stop

    def poll(self) -> bool:
        """Return whether a worker was asked to stop, and let all know if this one was; waits for nobody."""
        if self._asks():
            self._run.ask_to_stop()
        self._hear(self._run.stop or self._asks())
        return self.stopping

    def trace(self, *_: Any, **__: Any) -> NoReturn:
        """Refuse what all ranks would have to begin together.

        Raises:
            ConfigError: always.
        """
        raise ConfigError(
            f"a trace needs the same workers in all rounds, got {self.method}, whose workers come and go: "
            "leave the trace or the quorum out"
        )

    def refresh(self) -> None:
        """Find the parameters, once; later they cannot change."""
        if self._here is not None:
            raise StenogradError("parameters of an open run cannot change: unfreeze them before distribute()")
        super().refresh()

    def _begin_anew(self) -> None:
        self.refresh()  # which refuses

    @contextmanager
    @as_in_training
    def consensus(self) -> Iterator[None]:
        """Put the outer parameters in place that this worker's last round has left; sends nothing."""
        with self._aside([p.detach() for p in self._parameters.values()]):
            for part in self._parts:
                part.take_outer()
            yield

    def _detach(self) -> None:
        super()._detach()
        for _, driver in self._groups.values():
            driver.close()
        if self._here is not None:
            self._here.close()

    def _identity(self) -> dict[str, Any]:
        # Any worker may continue from any worker's.
        return {**super()._identity(), "rank": 0, "world_size": 1}

    @as_in_training
    def state_dict(self) -> dict[str, Any]:
        """Return what this worker needs to go on, besides the model and its optimizer.

        A round that is due is held first. All workers of a run may load what one has saved.
        """
        found = super().state_dict()  # first: it holds the round, of which the rest tells
        since = {str(f): self._counted - self._counted_at.get(f, 0) for f in range(len(self._parts))}
        more = {"state": self._state, "tokens": [*map(list, self._tokens.items())], "since": since}
        return {**found, **more}

    @as_in_training
    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Continue from a saved `state_dict()`; load the model and its optimizer, too."""
        super().load_state_dict(state)
        self._state = self._last_known = int(state["state"])
        self._tokens = {int(rank): float(n) for rank, n in state["tokens"]}
        self._met_at = self._counted
        self._counted_at = {int(f): self._counted - since for f, since in state["since"].items()}
        self._run.move(self._state)

    @property
    def _run(self) -> Membership:
        assert self._here is not None
        return self._here

    @property
    def _is_common(self) -> bool:
        return False

    def _around_round(self) -> Any:
        # Without a driver: who will take part is not known yet, so there is nobody to ask.
        return self._copies.round(None)

    def _about(self) -> dict[str, str]:
        shapes = [(n, list(p.shape), str(p.dtype)) for n, p in self._model.named_parameters()]
        shapes += [(n, list(b.shape), str(b.dtype)) for n, b in self._model.named_buffers()]
        model = hashlib.sha256(json.dumps([shapes, list(self._parameters)]).encode()).hexdigest()[:16]
        own = {"method": self.method.text, "model": model, "bucket_bytes": str(self._bucket_bytes)}
        return {**own, "stenograd version": __version__}

    # When a round is due.

    def _fragment_of(self, k: int) -> int:
        return k % self._schedule.fragments  # 1, 2, ..., 0, as `Rounds.starts` has them

    @property
    def _apart(self) -> int:
        return self._schedule.every // self._schedule.fragments

    def _is_due(self, t: int) -> bool:
        now = self._run.now
        if now > self._last_known:  # a round was held meanwhile, so the others begin anew
            self._missed += 1
            self._last_known = now
            self._count_from_here()
        if self._missed >= _MOST_MISSED:
            return True
        steps = self._counted - self._met_at
        waited_s = self._run.gathers_s(now + 1)
        if self._schedule.seconds:
            return waited_s is not None or time.monotonic() >= self._ends_at
        if steps >= self._apart or waited_s is None:
            return steps >= self._apart
        # The others wait already: come now, unless there is time for the steps that are left.
        left_s = (self._apart - steps) * (time.monotonic() - self._met_s) / max(steps, 1)
        return left_s > self._schedule.grace - waited_s

    def _count_from_here(self) -> None:
        self._met_at, self._met_s = self._counted, time.monotonic()
        self._ends_at = self._met_s + self._schedule.seconds

    # The steps of a round, in their order.

    def _begin(self) -> None:
        """Take part for the first time: with all others in a new run, else in the next round that is held."""
        while self._state < 0:
            k = self._run.now + 1
            if self._come(k):
                try:
                    self._take_part(k)
                except _Late:
                    self._withdraw()
        self._last_known = self._run.now

    def _meet(self, t: int) -> None:
        now, k = self._run.now, self._run.now + 1
        if now > self._last_known and self._missed < _MOST_MISSED:
            # The round that this worker would have come to is over: coming to the next would call the others.
            self._missed += 1
            self._last_known = now
            self._count_from_here()
            return
        self._missed += 1
        try:
            if self._come(k):
                self._take_part(k)
                self._missed = 0
        except _Late:
            self._withdraw()
        self._last_known = self._run.now
        self._count_from_here()
        # Those that took no part in the round hear of it from the store.
        if self._stopping:
            self._run.ask_to_stop()

    def _come_for(self, what: int) -> None:
        self._hold_if_due()

    def _come(self, k: int) -> bool:
        """Come to a round until an attempt of it has begun; False where it is held without this worker."""
        while True:
            plan = self._run.meet(self._arrival(k), self._schedule.quorum, self._schedule.grace)
            if plan is None:
                return False
            try:
                self._open(plan)
            except (Broken, PeerLost) as error:
                self._leave(plan)
                self._run.fail(plan, first_line(error))
            else:
                return True

    def _arrival(self, k: int) -> Arrival:
        fragment, given = self._fragment_of(k), self._weighing is not None
        if self._weighing is not None:
            weight = self._weighing.trained - self._trained_at.get(fragment, 0.0)
        else:
            weight = float(self._counted - self._counted_at.get(fragment, 0))
        groups = {lives: name for name, (lives, _) in self._groups.items()}
        # A newcomer, or one that has missed too many rounds, does not call the others early. Hence `<=`:
        # `_meet` counts the round that it comes to as missed until it is held.
        opens = self._state >= 0 and self._missed <= _MOST_MISSED
        weight = 0.0 if self._state < 0 else weight
        return Arrival(k, self._state, weight, given, self._host, opens, groups)

    def _open(self, plan: Plan) -> None:
        """Connect with the members, and let who is behind catch up."""
        units = {given for given, state in zip(plan.given, plan.states, strict=True) if state >= 0}
        if len(units) > 1:
            raise MismatchError(
                f"ranks {plan.ranks}: some give weights and some do not: call sync.weight(n) before each "
                "backward pass, on every worker"
            )
        driver = self._connected(plan)
        self._alone.traffic.move(plan.members.index(self._run.own), plan.hosts)
        with self._run.watching(plan):
            self._move(driver)
            if plan.behind:
                self._catch_up(plan, driver)
        self._plan = plan

    def _connected(self, plan: Plan) -> Driver:
        """Return the way to the members, made anew unless all of them still have it."""
        if len(plan.members) == 1:
            return self._alone
        if plan.group in self._groups:
            self._groups.move_to_end(plan.group)
            return self._groups[plan.group][1]
        group = self._run.connect(plan, partial(connect_members, timeout_s=self._alone.timeout_s))
        driver = Driver.of_members(group, plan.ranks, self._alone)
        self._groups[plan.group] = plan.lives, driver
        if len(self._groups) > _CONNECTED:
            name, (_, oldest) = self._groups.popitem(last=False)
            # Parts that would still send by the oldest connection leave it before it ends.
            if oldest is self.driver:
                self._move(driver)
            self._run.sever(name)
            oldest.close()
        return driver

    def _move(self, driver: Driver) -> None:
        """Exchange by another way from now on; what has arrived is kept."""
        for part in self._parts:
            if part.driver is not driver:
                part.move(driver, undo=False)
        self.driver = self._driver = driver

    def _take_part(self, k: int) -> None:
        """Hold a round whose attempt has begun.

        Raises:
            _Late: it does not count, and another one does.
        """
        fragment = self._fragment_of(k)
        if k == 0:  # all have the same parameters now, and that is all
            self.hold(lambda: None, self._parts, None, k)
            return
        part = self._parts[fragment]
        # A number that all members know, so that messages are as long as in a fixed world, and summed alike.
        part.passes, part.stop = k, self._asks()
        self._sent_fragment = fragment
        self._send(part)
        if self._finish(fragment):
            plan = self._plan
            assert plan is not None
            for rank, weight in zip(plan.ranks, plan.weights, strict=True):
                self._tokens[rank] = self._tokens.get(rank, 0.0) + weight / self._schedule.fragments

    def _count_anew(self, fragment: int, *, lost: bool) -> None:
        # Not after a void round: what was trained before it is still to be counted, unless it is lost.
        self._counted_at[fragment] = self._counted
        self._trained_at[fragment] = 0.0 if self._weighing is None else self._weighing.trained

    @property
    def _plan_weight(self) -> float:
        plan = self._plan
        assert plan is not None
        return plan.weights[plan.members.index(self._run.own)]

    def _send(self, part: Part) -> None:
        """Send what this worker has of the round, which counts by its weight, or alike if all weigh alike."""
        plan = self._plan
        assert plan is not None
        part.weight = self._plan_weight if len({*plan.weights}) > 1 else None
        self._undo = True
        part.send()

    def hold(self, bring: Callable[[], T], parts: Sequence[Part], sent: Part | None, number: int) -> T:
        """Return what `bring` returned, once it counts; as `Survivors.hold`.

        Raises:
            _Late: the round is held without this worker.
        """
        while True:
            plan, brought = self._plan, list[T]()
            assert plan is not None
            try:
                with self._run.watching(plan):
                    brought.append(bring())
                    self.driver.run(gather(torch.zeros(1, dtype=torch.float32, device="cpu")))  # all have it
                if self._run.commit(plan):
                    break
            except (Broken, PeerLost) as error:
                if not self._run.fail(plan, first_line(error)):  # it counts: another has heard from all
                    self._leave(plan)
                    break
            self._leave(plan)
            if not self._come(plan.round):
                raise _Late
            if sent is not None:
                sent.move(self.driver, undo=True)
                self._send(sent)
        self._undo, self._state = False, plan.round
        self._tell_changes(plan)
        return brought[0]

    def _leave(self, plan: Plan) -> None:
        """Leave a connection on which something may be under way; what has arrived is kept."""
        # First: `_move` ends the thread that sends, which may wait for a peer until the connection is cut.
        self._run.sever(plan.group)
        if plan.group in self._groups:
            _, driver = self._groups.pop(plan.group)
            if driver is self.driver:
                self._move(self._alone)
            driver.close()

    def _withdraw(self) -> None:
        """Take back what was sent: the round is held without it."""
        if self._undo:
            self._undo = False
            # `_move` keeps what was sent, so the part that sent it moves once more, to what it had before.
            self._move(self._alone)
            self._parts[self._sent_fragment].move(self._alone, undo=True)

    # What a worker that is behind gets.

    def _catch_up(self, plan: Plan, driver: Driver) -> None:
        """Bring the newest outer parameters, and what goes with them, to the members that lack them.

        Raises:
            PeerLost: what arrived is not what was sent.
        """
        donor, behind, me = plan.donor, plan.behind, plan.members.index(self._run.own)
        fresh = min(plan.states) < 0
        found, tensors = self._common_state(fresh) if me == donor else ({}, [])
        if me == donor:
            found |= {"digest": _digest(tensors), "sizes": [[_name(t), list(t.shape)] for t in tensors]}
        found = json.loads(driver.gather_bytes(json.dumps(found).encode())[donor])
        if me != donor:
            tensors = [torch.empty(s, dtype=getattr(torch, kind), device="cpu") for kind, s in found["sizes"]]
        # Not earlier: all members take part in the gather.
        if me != donor and me not in behind:
            return
        for t in tensors:
            peers, sources = (behind, []) if me == donor else ([], [donor])
            got = driver.run(exchange([t], peers, sources), Label(ATTACH))
            if me != donor:
                (received,) = got[donor]
                t.copy_(received)
        if me == donor:
            return
        # PeerLost, because `_come` then breaks the attempt off and tries again.
        if _digest(tensors) != found["digest"]:
            raise PeerLost(f"what rank {plan.ranks[donor]} sent of round {plan.round} did not arrive whole")
        self._adopt(found, tensors, fresh, plan.states[me] < 0)
        self._state = max(plan.states)

    def _common_state(self, fresh: bool) -> tuple[dict[str, Any], list[Tensor]]:
        """Return what is equal on all workers that are not behind: how it is called, and tensors."""
        codec = [part.equal_state() for part in self._parts]
        names = [list(state) for state in codec]
        tensors = [t for part in self._parts for t in part.common()]
        tensors += [t for state in codec for t in state.values()]
        others = self._others() if fresh else {}
        tensors += others.values()
        about = {
            "round": self.round,
            "void": sorted(self._void),
            "tokens": [*self._tokens.items()],
            "clocks": [part.clock() for part in self._parts],
            "codec": names,
            "others": [*others],
        }
        return about, [in_memory(t.detach()).cpu().contiguous() for t in tensors]

    def _others(self) -> dict[str, Tensor]:
        """Return what the model holds besides the parameters that rounds average, by name."""
        averaged = self._averaged()
        held = [*self._model.named_parameters(), *self._model.named_buffers()]
        return {name: in_memory(t.detach()) for name, t in held if id(t) not in averaged}

    @torch.no_grad()
    def _adopt(self, found: Mapping[str, Any], tensors: list[Tensor], fresh: bool, begins: bool) -> None:
        """Take what another worker has; only this changes anything here."""
        rest = iter(tensors)
        with self._copies.follow(self._parameters.values()):
            for part in self._parts:
                part.adopt([next(rest) for _ in part.common()], begins=begins)
        for part, clock, names in zip(self._parts, found["clocks"], found["codec"], strict=True):
            part.adopt_codec(clock, {tuple(name): next(rest) for name in names})
        # One that has trained keeps its own, though they were sent: another member has just begun.
        if fresh and begins:
            own = self._others()
            for name, value in zip(found["others"], rest, strict=True):
                # One of another form, such as a cache that has grown there, is each rank's; see `Carried`.
                if name in own and own[name].shape == value.shape:
                    own[name].copy_(value)
        self.round, self._void = int(found["round"]), {*found["void"]}
        self._tokens = dict(found["tokens"])

    # What a person sees.

    def _tell_changes(self, plan: Plan) -> None:
        """Note who is new, back, late, or gone since the last round; the lowest that was there says so."""
        now, there = time.monotonic(), {member.rank for member in self._run.alive()}
        present, first = {member.rank: member for member in plan.members}, not self._knows
        for rank, member in present.items():
            if first or self._knows.get(rank) == member:
                continue
            since, _ = self._absent.pop(rank, (0.0, ""))
            again = since or rank in self._knows  # in another process, between two rounds
            self._note(plan, rank, "back" if again else "joined", now - (since or now))
        for rank in sorted({*self._knows, *self._absent} - {*present}):
            what = "late" if rank in there else "left" if self._run.has_left(rank) else "lost"
            since, before = self._absent.get(rank, (now, ""))
            self._absent[rank] = since, what
            if what != before:
                self._note(plan, rank, what, now - since)
        self._knows = present

    def _note(self, plan: Plan, rank: int, what: str, seconds: float) -> None:
        self._events.append({"round": plan.round, "rank": rank, "what": what, "seconds": seconds})
        if plan.members[plan.donor] == self._run.own:  # who has missed a round sees no change
            said = _SAID[what].format(rank=rank, seconds=seconds)
            there, members = len(self._run.alive()), len(plan.members)
            _log.warning("round %d: %s; %d of %d workers took part", plan.round, said, members, there)


def _name(t: Tensor) -> str:
    return str(t.dtype).removeprefix("torch.")


def _digest(tensors: Sequence[Tensor]) -> str:
    found = hashlib.sha256()
    for t in tensors:
        found.update(as_bytes(t).numpy().tobytes())
    return found.hexdigest()
