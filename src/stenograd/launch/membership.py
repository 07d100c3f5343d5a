"""Open runs: who is there, who takes part in a round, and what became of it, agreed on in a store.

The store outlives every worker: `stenograd rendezvous` holds it, or a file does. It knows of each round k

- who came to it (`come`), and with what;
- the plan of an attempt, which the first to find that enough have come writes, by compare-and-set;
- the verdict on an attempt, by compare-and-set as well: that it counts, or that it was broken off, and why.
  The next attempt begins only after that. So a worker that was frozen when it had everything, while others
  went on without it, finds out and never keeps what nobody else has.

torchft agrees on a quorum in the same way, by a server of its own.
"""

from __future__ import annotations

import contextlib
import functools
import json
import math
import os
import queue
import secrets
import threading
import time
from collections.abc import Callable, Iterator, Mapping
from concurrent.futures import Future
from concurrent.futures import TimeoutError as FutureTimeout
from dataclasses import asdict
from datetime import timedelta
from typing import Any, TypeVar, cast

from torch.distributed import FileStore, TCPStore  # type: ignore[attr-defined]
from torch.distributed import Store as TorchStore  # type: ignore[attr-defined]

from stenograd.errors import LaunchError, MismatchError, PeerLost, first_line
from stenograd.launch import network
from stenograd.launch.detect import OPEN_VARIABLE, World, bad_variable
from stenograd.launch.interfaces import interfaces
from stenograd.launch.network import Door, Knocks, Sockets, await_port, sever, silent, unshared
from stenograd.launch.plans import Arrival, Member, Plan, planned

__all__ = ["CONNECT_S", "Broken", "Membership", "host_store"]

T = TypeVar("T")
F = TypeVar("F", bound=Callable[..., Any])

_TICK_S = 0.1  # a worker notices by this much later that others have begun to meet
_BEAT_S = 0.5
# Without a heartbeat for this long a worker counts as lost. Ten beats, because the thread that sends them
# waits for Python's lock and for a core.
LOST_S = 5.0
CONNECT_S = 10.0  # for members that have all said that they are about to connect
_KNOCK_S = 5.0  # from one knock to the next at the door of a worker that was out of reach
_ANSWER_S = 2.0  # in which a door answers: the first packet of TCP is sent again after one
_POLL_S = 0.01  # while waiting for a round, where nothing else is to be done
_COUNTS = "counts"  # the verdict on an attempt that all its members take
_FREE = "free"  # a turn that nobody has
_KEPT = 3  # rounds whose keys stay in the store


def _naming(call: F) -> F:
    """Let a method of `Membership` name the store where that raises an error of torch's."""

    @functools.wraps(call)
    def named(self: Membership, *args: Any) -> Any:
        try:
            return call(self, *args)
        except RuntimeError as error:  # Stenograd's own pass
            raise self._gone(error) from error

    return cast(F, named)


class Broken(Exception):
    """An attempt of a round was broken off, here or elsewhere; it is tried again."""


class Membership:
    """This worker's part in an open run.

    One thread talks to the store: it sends heartbeats, looks who else does, and does what the program asks,
    so that a store that has gone silent holds the program for `timeout_s` at most.

    Args:
        address: HOST:PORT, or a path.
        world: rank and number of workers to begin with; one alone, unless a launcher said otherwise.
        timeout_s: seconds to wait for the store, and for others in a round.

    Attributes:
        rank: this worker's; where no launcher gave it one, the next that is free.
        size: number of workers to begin with.
        pid: the process's, which a forked child has not.
        now: the last round that was held, -1 before the first, as far as this worker has heard.
        stop: whether a worker was asked to stop, likewise.
        entered: whether `enter` was called.

    Raises:
        LaunchError: there is no store, or PeerLost: it is lost just now.
    """

    @_naming
    def __init__(self, address: str, world: World, timeout_s: float) -> None:
        self.address, self.timeout_s, self.now = address, timeout_s, -1
        self.stop = self.entered = False
        self.rank = world.rank
        self._store, self._connecting = _open(address, timeout_s)
        # One without a number that comes first fixes the size, too: its rank would be a launched worker's.
        size = self._store.compare_set("size", "", str(world.world_size)).decode()
        self.size = int(size)
        if world.world_size not in (1, self.size):
            raise LaunchError(
                f"WORLD_SIZE must be that of the run at {address}, {size}, got {world.world_size}: start the "
                "launched workers first, or all workers without a launcher"
            )
        if world.world_size == 1:  # after those that a launcher has numbered
            self.rank = int(self._store.add("ranks", 1)) - 1 + (self.size if self.size > 1 else 0)
        if self._store.check(["now"]):  # the run has begun
            self.now = int(self._store.get("now"))
        self.own = Member(self.rank, secrets.token_hex(6))  # a rank is used again, a life never
        self._entries = 0  # of the store's that are known
        self._unread = list[int]()  # of these: one that is killed as it comes leaves a gap
        self._latest: dict[int, Member] = {}  # by rank: the last that has come
        self._beats: dict[str, tuple[bytes, float]] = {}  # of a life its last beat, and when it came
        self._left = set[str]()
        self._attempts: dict[int, int] = {}  # of a round, the first that is not known to be broken
        self._opened: dict[str, float] = {}  # when an attempt's first arrival was seen here
        self._gathering: tuple[int, float] | None = None
        self._watched: tuple[Plan, Sockets] | None = None
        self._sockets: dict[str, Sockets] = {}
        self._door: Door | None = None
        self._doors: dict[str, tuple[str, int]] = {}  # of each life, its address and port
        self._apart = set[str]()  # lives that this worker does not reach
        self._strange = set[str]()  # those at whose doors it has not knocked yet
        self._knocks, self._knocked = Knocks({}), 0.0
        self._beat, self._beaten, self._looked = 0, 0.0, time.monotonic()
        self._tasks: queue.SimpleQueue[tuple[Callable[[], Any], Future[Any]] | None] = queue.SimpleQueue()
        self._failure: Exception | None = None
        self._thread: threading.Thread | None = None
        self.pid = os.getpid()

    @_naming
    def enter(self, about: Mapping[str, str]) -> None:
        """Begin to be there, with the same model and method as everybody.

        Args:
            about: what must be equal on all workers, by name.

        Raises:
            MismatchError: it is not.
            PeerLost: the store is gone.
        """
        self.entered = True
        said = self._store.compare_set("about", "", json.dumps(dict(about)))
        others = json.loads(said)
        if unlike := [name for name in about if others.get(name) != about[name]]:
            what = "; ".join(f"{name} {about[name]} here, {others.get(name)} there" for name in unlike)
            raise MismatchError(f"rank {self.rank} differs from the run at {self.address}: {what}")
        self._store.set(f"beat/{self.own.life}", "0")  # before the entry, whose readers get() it
        with contextlib.suppress(OSError):  # without a door it is never found out of reach
            self._door = Door(self._own_address())
            self._store.set(f"door/{self.own.life}", json.dumps(self._door.address))
        number = int(self._store.add("entries", 1))
        self._store.set(f"entry/{number}", json.dumps(self.own))
        self._tick()  # so that `now` is known when this returns
        self._thread = threading.Thread(target=self._serve, name="stenograd membership", daemon=True)
        self._thread.start()

    def close(self) -> None:
        """Leave; the others do not wait for this worker any more. A second call does nothing."""
        thread, self._thread = self._thread, None
        if thread is not None and self.pid == os.getpid():
            self._tasks.put(None)
            thread.join(2.0)
            self._knocks.close()
            if self._door is not None:
                self._door.close()

    def alive(self) -> list[Member]:
        """Return who is there, in the order of ranks."""
        now = time.monotonic()
        return [
            member
            for _, member in sorted(self._latest.items())
            if member.life not in self._left and now - self._beats[member.life][1] < LOST_S
        ]

    def has_left(self, rank: int) -> bool:
        """Return whether a rank has ended by itself."""
        return rank in self._latest and self._latest[rank].life in self._left

    def ask_to_stop(self) -> None:
        """Let all workers hear that one was asked to stop."""
        if not self.stop:
            self.stop = True
            self._ask(lambda: self._store.set("stop", "1"))

    def gathers_s(self, k: int) -> float | None:
        """Return for how long workers have been coming to round k; None where they are not, or it is over."""
        gathering = self._gathering
        return time.monotonic() - gathering[1] if gathering is not None and gathering[0] == k else None

    def meet(self, own: Arrival, quorum: float, grace_s: float) -> Plan | None:
        """Come to a round, and wait until it is known who takes part.

        That is so when all that are there have come; or `quorum` of them (a share), and `grace_s` seconds
        have gone by since the first came.

        Returns:
            The plan; None where the round is held without this worker.

        Raises:
            PeerLost: not enough came within timeout_s, or the store is gone, or nobody has what is needed.
        """
        start, come = time.monotonic(), set[str]()
        while True:
            found = self._ask(lambda: self._look(own, quorum, grace_s, come))
            if found is not None:
                return found if isinstance(found, Plan) else None
            if time.monotonic() - start > self.timeout_s:
                raise self._missing(own)
            time.sleep(_POLL_S)

    def connect(self, plan: Plan, make: Callable[[TorchStore, str, int, int], tuple[T, Sockets]]) -> T:
        """Wait until all members of a plan are about to connect, and connect.

        Args:
            plan: of this attempt.
            make: makes a connection, given a store, a name, this member's number, and how many there are.

        Raises:
            Broken: somebody did not come to that.
        """
        keys = [f"ready/{plan.group}/{member.life}" for member in plan.members]
        index = plan.members.index(self.own)
        self._ask(lambda: self._store.set(keys[index], "1"))
        while not self._ask(lambda: self._store.check(keys)):
            self.check(plan)
            time.sleep(_POLL_S)
        made, sockets = make(self._connecting, plan.group, index, len(keys))
        self._sockets[plan.group] = sockets
        return made

    @contextlib.contextmanager
    def watching(self, plan: Plan) -> Iterator[None]:
        """Close the members' connection when one of them is lost, or breaks the attempt off.

        Whoever waits for it would else wait for timeout_s: a frozen process closes no connection.
        """
        self._watched = plan, self._sockets.get(plan.group, frozenset())
        try:
            yield
        finally:
            self._watched = None

    def check(self, plan: Plan) -> None:
        """Raise Broken if a member is lost, or the attempt was broken off."""
        if why := self._ask(lambda: self._broken(plan)):
            raise Broken(why)

    def sever(self, group: str) -> None:
        """End the connections of a group."""
        sever(self._sockets.pop(group, frozenset()))

    def fail(self, plan: Plan, why: str) -> bool:
        """Break an attempt off, for everybody, and say so; False where it counts already.

        Where no member is lost, see whether all are in reach: the next plan needs to know who is not.
        """
        if self._ask(lambda: self._judge(plan.at, why or "broken")) == _COUNTS:  # "" is no verdict
            return False
        if {*plan.members} <= {*self.alive()}:
            knocks, deadline = Knocks(self._ask(lambda: self._answering(plan))), time.monotonic() + _ANSWER_S
            while knocks.unanswered() and time.monotonic() < deadline:
                time.sleep(_POLL_S)
            self._apart |= knocks.unanswered()  # the next arrival says so
            knocks.close()
        return True

    def commit(self, plan: Plan) -> bool:
        """Let an attempt count, all of whose members have everything; False where it was broken off."""
        counts = self._ask(lambda: self._judge(plan.at, _COUNTS)) == _COUNTS
        if counts:
            self._ask(lambda: self._conclude(plan))
        return counts

    def move(self, k: int) -> None:
        """Say that training goes on after round k, of which a checkpoint was loaded."""
        self.now = max(self.now, k)
        self._ask(lambda: self._store.set("now", str(self.now)))

    @contextlib.contextmanager
    def turn(self, what: str) -> Iterator[None]:
        """Do something in a `with` block while no other worker does it; one that is lost gives its turn up.

        Where the store is gone or silent, and after `close`, nobody is waited for: a save may be urgent.
        """
        key = f"turn/{what}"
        with contextlib.suppress(PeerLost, LaunchError):
            while not self._ask(lambda: self._take_turn(key), CONNECT_S):
                time.sleep(_POLL_S)
        try:
            yield
        finally:
            # Always: a silent store may have given the turn since. The thread does what it is asked in order.
            with contextlib.suppress(PeerLost, LaunchError):
                self._ask(lambda: self._store.compare_set(key, self.own.life, _FREE), CONNECT_S)

    def claim(self, what: str) -> bool:
        """Return whether this worker is the first of the run to claim something; without the store it is."""
        with contextlib.suppress(PeerLost):
            said = self._ask(lambda: self._store.compare_set(f"claim/{what}", "", self.own.life))
            return bool(said.decode() == self.own.life)
        return True

    def claimed(self, what: str) -> bool:
        """Return whether a worker has claimed something."""
        return bool(self._ask(lambda: self._store.check([f"claim/{what}"])))

    def await_end(self, member: Member) -> None:
        """Wait until a worker has left, or is lost."""
        while member in self._ask(self.alive):
            time.sleep(_TICK_S)

    # What follows runs in the thread that talks to the store.

    def _serve(self) -> None:
        while True:
            try:
                task = self._tasks.get(timeout=_TICK_S)
            except queue.Empty:
                self._try(self._tick)
                continue
            if task is None:
                self._try(lambda: self._store.set(f"beat/{self.own.life}", "left"))
                return
            call, future = task
            try:
                future.set_result(call())
            except Exception as error:  # for the caller; the store itself may be well
                future.set_exception(error)
            if time.monotonic() - self._beaten > _BEAT_S:  # while the program polls, get() never times out
                self._try(self._tick)

    def _try(self, call: Callable[[], Any]) -> None:
        try:
            call()
        except Exception as error:  # for whoever asks next
            self._failure = error
            self._sever()

    def _tick(self) -> None:
        """Send a heartbeat, see who else does, and where the rounds are."""
        store, now = self._store, time.monotonic()
        if now - self._beaten >= _BEAT_S:
            self._beaten, self._beat = now, self._beat + 1
            store.set(f"beat/{self.own.life}", str(self._beat))
            self._see()
            if self._door is not None and self._door.clear():
                store.set(f"rung/{self.own.life}", "1")
            if self._strange or now - self._knocked >= _KNOCK_S:  # new doors: a knock sets `rung`
                self._knock()
        if store.check(["now"]):
            self.now = max(self.now, int(store.get("now")))
        while store.check([f"held/{self.now + 1}"]):  # members write `now` in any order
            self.now += 1
        self.stop = self.stop or store.check(["stop"])
        at = self._attempt(k := self.now + 1)
        self._gathering = None
        if store.check([f"open/{at}"]) and not store.check([f"plan/{at}"]):
            self._gathering = k, self._opened.setdefault(at, now)
        if self._watched is not None:
            plan, sockets = self._watched
            if silent(sockets, LOST_S):
                self._judge(plan.at, f"a member has not answered rank {self.rank} for {LOST_S:g} s")
            if self._broken(plan):
                self._sever()

    def _knock(self) -> None:
        """Knock, in the background, at the doors of those that are new, or were out of reach."""
        self._knocks.unanswered()
        self._knocks.close()
        self._apart -= self._knocks.answered
        lives = self._strange | ({*self._apart} & {member.life for member in self.alive()})
        doors = {life: self._doors[life] for life in lives}
        self._knocks, self._knocked, self._strange = Knocks(doors), time.monotonic(), set()

    def _answering(self, plan: Plan) -> dict[str, tuple[str, int]]:
        """Return the doors of a plan's members that somebody has reached: a firewall may keep them shut."""
        self._knocks.close()
        self._knocks = Knocks({})  # an answer from before the failure says nothing
        lives = {member.life for member in plan.members} & {*self._doors}
        return {life: self._doors[life] for life in lives if self._store.check([f"rung/{life}"])}

    def _own_address(self) -> str:
        host, _, port = self.address.rpartition(":")
        named = os.environ.get(network.GLOO_INTERFACE, "").split(",")[0]
        if named.startswith("lo"):
            return "127.0.0.1"
        if named and (own := interfaces().get(named)):  # the store may be in reach by another one
            return own
        if os.sep in self.address:
            return network.own_address()
        return network.address_towards(host.strip("[]"), int(port))

    def _see(self) -> None:
        """Read who has come, and everybody's last heartbeat."""
        count = int(self._store.add("entries", 0))
        self._unread += range(self._entries + 1, count + 1)
        self._entries = count
        for number in [n for n in self._unread if self._store.check([f"entry/{n}"])]:
            self._unread.remove(number)
            member = Member(*json.loads(self._store.get(f"entry/{number}")))
            self._beats[member.life] = b"", time.monotonic()
            if member != self.own and self._store.check([key := f"door/{member.life}"]):
                self._doors[member.life] = tuple(json.loads(self._store.get(key)))
                self._strange.add(member.life)
            self._latest[member.rank] = member  # last: the program reads both, in another thread
        now, before, self._looked = time.monotonic(), self._looked, time.monotonic()
        if now - before > LOST_S / 2:  # this process was frozen, and cannot tell who else was
            self._beats = {life: (beat, now) for life, (beat, _) in self._beats.items()}
        for member in self._latest.values():
            if member.life in self._left:
                continue
            beat = self._store.get(f"beat/{member.life}")
            if beat == b"left":
                self._left.add(member.life)
            elif beat != self._beats[member.life][0]:
                self._beats[member.life] = beat, now

    def _take_turn(self, key: str) -> bool:
        """Take a turn that is free, or whose worker is not there any more."""
        holder = self._store.compare_set(key, "", self.own.life).decode()
        if holder != self.own.life:
            self._see()  # first: it may have just come
            if holder not in {member.life for member in self.alive()}:
                holder = self._store.compare_set(key, holder, self.own.life).decode()
        return bool(holder == self.own.life)

    def _judge(self, at: str, verdict: str) -> str:
        """Say that an attempt counts, or why it does not; return what was said first, which holds."""
        return self._verdict(at) or str(self._store.compare_set(f"verdict/{at}", "", verdict).decode())

    def _verdict(self, at: str) -> str:
        key, (k, _, attempt) = f"verdict/{at}", at.partition(".")
        if self._store.check([key]):
            return str(self._store.get(key).decode())
        if not self._store.check([f"held/{k}"]):
            return ""
        # The verdicts of old rounds are forgotten, which a worker that was frozen must not take for none.
        return _COUNTS if self._store.get(f"held/{k}").decode() == attempt else "another attempt counts"

    def _attempt(self, k: int) -> str:
        """Return the first attempt of a round that was not broken off."""
        number = self._attempts.get(k, 0)
        while self._verdict(f"{k}.{number}") not in ("", _COUNTS):
            number += 1
        self._attempts[k] = number
        return f"{k}.{number}"

    def _broken(self, plan: Plan) -> str:
        """Return why an attempt cannot go on; empty where it can."""
        if any(member.life not in self._beats for member in plan.members):
            self._see()  # the one that made the plan has seen it come earlier
        there = self.alive()
        if lost := [member.rank for member in plan.members if member not in there]:
            return f"rank(s) {', '.join(map(str, lost))} lost"
        return self._verdict(plan.at).replace(_COUNTS, "")

    def _sever(self) -> None:
        if self._watched is not None:
            sever(self._watched[1])

    def _look(self, own: Arrival, quorum: float, grace_s: float, come: set[str]) -> Plan | bool | None:
        """Return the plan; False where it is held without this worker; None while nobody knows yet."""
        store, k = self._store, own.round
        if self._latest.get(self.rank, self.own) != self.own:
            raise LaunchError(
                f"another process has come as rank {self.rank} of the run at {self.address}, so this one is "
                "out: give each worker a RANK of its own, or none"
            )
        at = self._attempt(k)
        if store.check([f"held/{k}"]) or self._verdict(at) == _COUNTS:  # old rounds have no verdicts
            self.now = max(self.now, k)
            return False
        if at not in come:
            come.add(at)
            arrival = asdict(own) | {"apart": sorted(self._apart)}
            store.set(f"come/{at}/{self.own.life}", json.dumps(arrival))
            if own.opens:
                store.set(f"open/{at}", "1")
        over = False
        if store.check([f"open/{at}"]):
            over = time.monotonic() - self._opened.setdefault(at, time.monotonic()) >= grace_s
        if not store.check([f"plan/{at}"]):
            self._see()
            plan = self._planned(k, self._arrived(at), quorum, over)
            if plan is None:
                return None
            store.compare_set(f"plan/{at}", "", plan.text())
        plan = Plan.read(store.get(f"plan/{at}"))
        if self.own in plan.members:
            return plan
        return None if own.state < 0 else False  # one that has nothing to train with waits for the result

    def _arrived(self, at: str) -> dict[Member, Arrival]:
        keys = {member: f"come/{at}/{member.life}" for member in self.alive()}
        return {
            member: Arrival(**json.loads(self._store.get(key)))
            for member, key in keys.items()
            if self._store.check([key])
        }

    def _planned(self, k: int, come: Mapping[Member, Arrival], quorum: float, over: bool) -> Plan | None:
        """Return the plan for those that have come; None if more are to be awaited."""
        there = self.alive()
        if k == 0:
            whole = len(come) >= self.size and len(come) == len(there)
        else:
            trained = {member for member, arrival in come.items() if arrival.state >= 0}
            awaited = len(there) - len(come) + len(trained)  # who begins counts for no quorum
            enough = len(trained) >= max(1, math.ceil(quorum * awaited))
            newest = max((arrival.state for arrival in come.values()), default=-1)
            whole = len(come) == len(there) or (enough and over and newest == k - 1)
            if len(come) == len(there) and newest < 0:
                raise PeerLost(
                    f"rank {self.rank}: nobody is left that has the parameters of round {k - 1} of the run "
                    f"at {self.address}: begin anew with another store, and load a checkpoint there"
                )
        if not whole:
            return None
        return planned(k, self._attempts.get(k, 0), come)

    def _conclude(self, plan: Plan) -> None:
        """Let those that took no part hear that a round was held."""
        k = plan.round
        self._store.set(f"held/{k}", str(plan.attempt))  # never deleted: who was away asks for it
        self._store.set("now", str(k))
        self.now = max(self.now, k)
        self._forget(k - _KEPT, shared=self.own == plan.members[0])  # one deletes for all

    def _forget(self, k: int, *, shared: bool) -> None:
        """Forget an old round, but that it was held; if `shared`, in the store, too."""
        for number in range(self._attempts.pop(k, 0) + 1):
            at = f"{k}.{number}"
            self._opened.pop(at, None)
            if not shared or k < 0:
                continue
            if self._store.check([f"plan/{at}"]):
                plan = Plan.read(self._store.get(f"plan/{at}"))
                for member in plan.members:
                    self._store.delete_key(f"come/{at}/{member.life}")
            for what in ("open", "plan", "verdict"):
                self._store.delete_key(f"{what}/{at}")

    # Until here.

    def _ask(self, call: Callable[[], T], limit_s: float | None = None) -> T:
        """Let the thread that talks to the store do something.

        Raises:
            PeerLost: the store is gone, or does not answer within the limit, or timeout_s.
        """
        if self._failure is not None:
            raise self._gone(self._failure)
        if self._thread is None:  # nobody would answer
            raise LaunchError(f"rank {self.rank} is not in the run at {self.address} any more, or not yet")
        future: Future[T] = Future()
        limit_s = self.timeout_s if limit_s is None else limit_s
        self._tasks.put((call, future))
        try:
            return future.result(limit_s)
        except FutureTimeout:
            raise self._gone(f"did not answer within {limit_s:g} s") from None
        except RuntimeError as error:  # raised by torch's store; Stenograd's own pass
            raise self._gone(error) from error

    def _gone(self, why: object) -> PeerLost:
        why = first_line(why) if isinstance(why, Exception) else why
        return PeerLost(
            f"rank {self.rank}: the store of the open run at {self.address} is gone: {why}: look at "
            "`stenograd rendezvous` there, start it anew, and all workers from their last checkpoint"
        )

    def _missing(self, own: Arrival) -> PeerLost:
        there = self.alive()
        came = self._ask(lambda: self._arrived(self._attempt(own.round)))
        silent = [str(member.rank) for member in there if member not in came]
        if own.round == 0:
            present = {member.rank for member in there}
            silent = [str(rank) for rank in range(self.size) if rank not in present]
        error = PeerLost(
            f"rank {self.rank}: round {own.round} was not held within {self.timeout_s:g} s, missing: "
            f"{', '.join(silent) or 'nobody'}: look at those ranks' logs, or give a longer timeout_s"
        )
        error.ranks = tuple(map(int, silent))
        return error


def host_store(port: int) -> TCPStore:
    """Listen at a port for the workers of an open run; the store ends with what is returned.

    Raises:
        LaunchError: the port is not free.
    """
    try:
        return TCPStore("0.0.0.0", port, None, True, timedelta(days=1), wait_for_workers=False)
    except RuntimeError as error:
        raise LaunchError(
            f"port must be free here, got {port}: {first_line(error)}; choose another"
        ) from error


def _open(address: str, timeout_s: float) -> tuple[TorchStore, TorchStore]:
    """Return two ways to the store: a wait in one must not keep heartbeats from the other."""
    if os.sep in address:
        _make_file(address)
        return FileStore(address, -1), FileStore(address, -1)  # -1: no store removes the file
    host, _, port = address.rpartition(":")
    if not host or not port.isdigit() or not 1 <= int(port) <= 65535:
        advice = "export what `stenograd rendezvous` printed"
        raise bad_variable(OPEN_VARIABLE, "must be HOST:PORT, or a path with a slash", address, advice)
    host = host.strip("[]")
    limit = timedelta(seconds=timeout_s)
    try:
        await_port(host, int(port), time.monotonic() + timeout_s)  # torch's own wait prints C++ frames
        with unshared():
            one, two = (
                TCPStore(host, int(port), None, False, limit, wait_for_workers=False, multi_tenant=False)
                for _ in range(2)
            )
    except (OSError, RuntimeError) as error:
        raise LaunchError(
            f"no store of an open run answers at {address} ({first_line(error)}): start `stenograd "
            f"rendezvous` there, and let {OPEN_VARIABLE} name it"
        ) from error
    return one, two


def _make_file(path: str) -> None:
    """Make a store's file as torch does, which would wait for a missing folder, and print C++ frames."""
    try:
        os.close(os.open(path, os.O_RDWR | os.O_CREAT, 0o644))
    except OSError as error:
        rule, advice = f"must be a file that can be written ({error.strerror})", "make its folder first"
        raise bad_variable(OPEN_VARIABLE, rule, path, advice) from error
