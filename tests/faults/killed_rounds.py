"""Kill a rank in any phase of a round: what the others make of it.

Number of ranks, victim, method, round and phase follow from the case's number. With `lost=drop` survivors
must hold the round, be equal bit for bit, and have taken the outer step along the mean of those left (or of
all, if the lost rank's share had come); without it every survivor must get a `PeerLost` that names it.

Where each rank meets a few others only (`noloco`, `gossip` on a directed graph and on a ring) nothing is
confirmed: in the phases of that name the victim dies in the exchange itself. Survivors must hold all rounds,
keep the sums that the method keeps once all have noticed, and evaluate the same mean, bit for bit.
"""

from __future__ import annotations

import os
import pickle
import random
import tempfile
import threading
import time
import warnings
from collections.abc import Callable
from dataclasses import dataclass
from datetime import timedelta
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

import stenograd
from stenograd.errors import PeerLost
from stenograd.testing.pool import RankPool, RanksFailed
from stenograd.wire.requests import exchange

_EVERY, _ROUNDS, _MORE_ROUNDS = 3, 3, 5  # more where ranks that are no neighbours notice later
_TIMEOUT_S, _NEIGHBOURS_S = 15.0, 6.0  # all of it passes until ranks that are no neighbours notice
MOST_RANKS = 5
_OUTER_LR, _MOMENTUM = 0.7, 0.9  # DiLoCo's defaults
_PAIRS_MOMENTUM = 0.5  # NoLoCo's, without Nesterov's form
_SCHEDULES = ["local", "diloco", "diloco/topk"]
_NEIGHBOURS = ["noloco", "gossip", "gossip:graph=ring"]
PHASES = {
    "training": "between two rounds, before a backward pass",
    "before": "when a round is due, before its first message",
    "sent": "after what it has to send was handed over",
    "arrived": "when everything has arrived, before it is used",
    "confirming": "up to 2 ms after it began to confirm that everything has arrived",
    "torn": "when some have its word that everything has arrived there, and others have not",
    "after": "after the round",
}


@dataclass(frozen=True)
class Case:
    """One drill.

    Attributes:
        ranks: number of ranks.
        victim: which dies.
        schedule: one of `_SCHEDULES` or `_NEIGHBOURS`.
        phase: one of `PHASES`.
        round: in which, from 0.
        drop: whether the method says lost=drop.
        hearing: those that have its last word, where that is torn.
    """

    ranks: int
    victim: int
    schedule: str
    phase: str
    round: int
    drop: bool
    hearing: tuple[int, ...]

    @property
    def method(self) -> str:
        """The method's text."""
        schedule, _, codec = self.schedule.partition("/")
        schedule += "," if ":" in schedule else ":"
        return f"{schedule}every={_EVERY}{',lost=drop' * self.drop}{'/' * bool(codec)}{codec}"

    @property
    def neighbours(self) -> bool:
        """Whether a rank meets a few others only."""
        return self.schedule in _NEIGHBOURS

    @property
    def rounds(self) -> int:
        """Number of rounds."""
        return _MORE_ROUNDS if self.neighbours else _ROUNDS


def case(number: int, phase: str | None = None, *, neighbours: bool = False) -> Case:
    """Return a drill by its number, in a phase of its own or in this one.

    Example:
        >>> case(3) == case(3), case(3).phase in PHASES
        (True, True)
    """
    chance = random.Random(number)
    drawn = chance.choice(list(PHASES))
    ranks = chance.randint(3, MOST_RANKS)
    victim = chance.randrange(ranks)
    others = [rank for rank in range(ranks) if rank != victim]
    return Case(
        ranks=ranks,
        victim=victim,
        schedule=chance.choice(_NEIGHBOURS if neighbours else _SCHEDULES),
        phase=phase or drawn,
        round=chance.randrange(_ROUNDS - 1),  # one more has to follow, or nobody notices
        drop=number % 5 != 0 or (phase or drawn) in ("confirming", "torn"),  # without drop nobody confirms
        hearing=tuple(chance.sample(others, chance.randrange(ranks))),
    )


def drill(pool: RankPool, one: Case) -> str:
    """Run a drill and return what survivors did.

    Raises:
        AssertionError: not what they should.
    """
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        try:
            pool.run(one.ranks, _rank, one, folder, timeout_s=120)
        except RanksFailed as failed:
            _demand(list(failed.errors) == [one.victim], f"ranks failed: {failed.errors}")
        else:
            _demand(False, "nobody died")
        told = [pickle.loads((folder / f"{rank}").read_bytes()) for rank in range(one.ranks)]
    survivors = [told[rank] for rank in range(one.ranks) if rank != one.victim]
    if not one.drop:
        _demand(all(found == (one.victim,) for found in survivors), f"expected PeerLost, got {survivors}")
        return "PeerLost names it on every survivor"
    for found in survivors:
        _demand(isinstance(found, dict), f"PeerLost in spite of lost=drop, naming {found}")
        _demand(len(found["ends"]) == one.rounds, f"{len(found['ends'])} rounds were held")
        _demand([e["lost"] for e in found["events"]] == [[one.victim]], f"events: {found['events']}")
        _demand(torch.equal(found["common"], survivors[0]["common"]), "survivors evaluate other parameters")
        if not one.neighbours:
            same = all(map(torch.equal, found["ends"], survivors[0]["ends"]))
            _demand(same, "survivors are not equal")
    return _sums(one, told, survivors) if one.neighbours else _means(one, told, survivors)


def _sums(one: Case, told: list[Any], survivors: list[Any]) -> str:
    """Check the sums over all ranks before the loss, and over survivors since all of them had noticed.

    Raises:
        AssertionError: a round has not kept them, or the mean that is evaluated is another.
    """
    met = max(event["step"] for found in survivors for event in found["events"])
    held = [(number, told) for number in range(one.round)]
    held += [(number, survivors) for number in range(met, one.rounds)]
    for number, group in held:
        ends = [found["ends"][number] for found in group]
        shares = [found["shares"][number] for found in group]
        brought = [found["brought"][number] for found in group]
        outer, momentum, own = (sum(parts) for parts in zip(*brought, strict=True))
        if one.schedule == "noloco":
            wanted = outer - _OUTER_LR * (_PAIRS_MOMENTUM * momentum + outer - own)
        else:
            wanted = sum(w * x for w, (*_, x) in zip((before for before, _ in shares), brought, strict=True))
            kept = [sum(column) for column in zip(*shares, strict=True)]
            _demand(abs(kept[0] - kept[1]) < 1e-12, f"round {number}: weights {kept[0]} became {kept[1]}")
        found = sum(w * x for (_, w), x in zip(shares, ends, strict=True))
        _demand(torch.allclose(found, wanted, rtol=1e-10, atol=1e-12), f"round {number}: another sum")
    weights = [found["shares"][-1][1] for found in survivors]
    mean = sum(w * found["last"] for w, found in zip(weights, survivors, strict=True)) / sum(weights)
    common = survivors[0]["common"]
    _demand(torch.allclose(common, mean, rtol=1e-10, atol=1e-12), "what is evaluated is not the mean")
    return f"sums kept before it, and {'from the next round on' if met <= one.round + 1 else 'later'}"


def _means(one: Case, told: list[Any], survivors: list[Any]) -> str:
    """Return whose mean was taken in the first round that the lost rank did not end.

    Raises:
        AssertionError: some round took another mean than those that it may.
    """
    if "/" in one.schedule:
        return "equal; what a codec leaves out is in no mean"
    outcome = ""
    for number in range(_ROUNDS):
        left = _expected(one, [found["brought"][number] for found in survivors])
        end = survivors[0]["ends"][number]
        is_left = torch.allclose(end, left, rtol=1e-10, atol=1e-12)
        there = number < len(told[one.victim]["brought"])
        everyone = _expected(one, [found["brought"][number] for found in told]) if there else left
        is_all = there and torch.allclose(end, everyone, rtol=1e-10, atol=1e-12)
        _demand(is_left or is_all, f"round {number}: a mean of neither the survivors nor of all")
        if number < one.round:
            _demand(is_all, f"round {number}, before the loss: not the mean of all")
        if number > one.round:
            _demand(is_left, f"round {number}, after the loss: not the mean of those left")
        if number == one.round:
            outcome = "mean of those left" if is_left else "mean of all, the lost rank's share had come"
            _demand(is_left or one.phase not in ("training", "before"), "a dead rank's share was used")
            _demand(is_all or one.phase != "after", "a round that had ended was held again")
    return outcome


def _demand(holds: bool, what: str) -> None:
    if not holds:
        raise AssertionError(what)


def _expected(one: Case, brought: list[tuple[Tensor, Tensor, Tensor]]) -> Tensor:
    """Return what a round of these ranks must give; each brought outer parameters, momentum and its own."""
    outer, momentum, _ = brought[0]
    mean = sum(own for *_, own in brought) / len(brought)
    if one.schedule == "local":
        return mean
    delta = outer - mean
    return outer - _OUTER_LR * (delta + _MOMENTUM * (_MOMENTUM * momentum + delta))


def _rank(rank: int, one: Case, folder: Path) -> None:
    """Be one rank: train, note what is brought to every round and what comes of it, or die."""
    warnings.simplefilter("ignore")  # the one that tells of the loss
    model = nn.Sequential(nn.Linear(4, 3), nn.Tanh(), nn.Linear(3, 1)).double()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9)
    timeout_s = _NEIGHBOURS_S if one.neighbours else _TIMEOUT_S
    sync = stenograd.distribute(model, optimizer, one.method, timeout_s=timeout_s, bucket_bytes=64)
    told: dict[str, Any] = {"brought": [], "ends": [], "shares": []}
    file = folder / f"{rank}"

    def die() -> None:
        file.write_bytes(pickle.dumps(told))
        os._exit(9)

    _watch(sync, told, one, die if rank == one.victim else None)
    for step in range(_EVERY * one.rounds):
        if rank == one.victim and one.phase == "training" and step == _EVERY * one.round + 1:
            die()
        optimizer.zero_grad()
        generator = torch.Generator().manual_seed(10 * step + rank)
        model(torch.randn(5, 4, dtype=torch.float64, generator=generator)).square().mean().backward()
        try:
            optimizer.step()
        except PeerLost as error:
            file.write_bytes(pickle.dumps(error.ranks))
            return
    try:
        told["last"] = _flat(sync)
        with sync.consensus():
            told["common"] = _flat(sync)
    except PeerLost as error:
        file.write_bytes(pickle.dumps(error.ranks))
        return
    file.write_bytes(pickle.dumps(told | {"events": sync.events}))
    sync.close()


def _watch(sync: Any, told: dict[str, Any], one: Case, die: Callable[[], None] | None) -> None:
    """Note what this rank brings to each round, and let the victim die in its phase."""
    meet, part = sync._meet, None if "gossip" in one.schedule else sync._parts[0]
    if one.neighbours:
        if die is not None and one.phase in ("sent", "arrived", "confirming", "torn"):
            _die_in_exchange(sync._gossip if part is None else sync._pairs, told, one, die)
    elif die is not None and one.phase in ("sent", "arrived"):
        name = {"sent": "send", "arrived": "arrive"}[one.phase]
        work = getattr(part, name)

        def then_die() -> Any:
            done = work()
            if len(told["brought"]) > one.round:
                die()
            return done

        setattr(part, name, then_die)
    elif die is not None and one.phase == "confirming":
        confirm, wait = sync._survivors._confirm, random.Random().uniform(0, 0.002)

        def confirming() -> None:
            if len(told["brought"]) > one.round:
                threading.Timer(wait, die).start()
            confirm()
            if len(told["brought"]) > one.round:
                time.sleep(60)  # it dies here at the latest, not in the next round

        sync._survivors._confirm = confirming
    elif one.phase == "torn":
        _tear(sync._survivors, told, one, die)

    def meeting(t: int) -> None:
        own = _flat(sync)
        there = part is not None and bool(part._outer)
        outer = (part._outer[0].clone(), part._momentum[0].clone()) if there else (own * 0, own * 0)
        told["brought"].append((*outer, own))
        share = sync.share
        last = die is not None and len(told["brought"]) > one.round
        if last and one.phase == "before":
            die()
        meet(t)
        told["ends"].append(_flat(sync))
        told["shares"].append((share, sync.share))
        if last and one.phase == "after":
            die()

    sync._meet = meeting


def _tear(survivors: Any, told: dict[str, Any], one: Case, die: Callable[[], None] | None) -> None:
    """Confirm one round by messages from each rank to each other one; the victim dies after some of its."""
    confirm, done = survivors._confirm, list[int]()
    others = [rank for rank in range(one.ranks) if rank != one.victim]

    def torn() -> None:
        if done or len(told["brought"]) <= one.round:
            confirm()
            return
        done.append(one.round)
        word = [torch.zeros(1)]
        if die is not None:
            survivors.driver.run(exchange(word, one.hearing, ()))
            die()
        mine = survivors.driver.rank
        peers = [rank for rank in others if rank != mine]
        survivors.driver.run(exchange(word, peers, [*peers, one.victim]))

    survivors._confirm = torn


def _die_in_exchange(gossip: Any, told: dict[str, Any], one: Case, die: Callable[[], None]) -> None:
    """Let the victim die in an exchange with its neighbours: some may have its message, or all."""
    real, wait = gossip.driver._transmit_to, random.Random().uniform(0, 0.002)

    def transmit(peers: Any, sources: Any, mine: Tensor, theirs: Tensor) -> Any:
        if len(told["brought"]) <= one.round:
            return real(peers, sources, mine, theirs)
        if one.phase == "confirming":
            threading.Timer(wait, die).start()
            real(peers, sources, mine, theirs)
            time.sleep(60)
        if one.phase == "arrived":
            real(peers, sources, mine, theirs).wait(timedelta(seconds=_NEIGHBOURS_S))
            die()
        hearing = [peer for peer in peers if one.phase == "sent" or peer in one.hearing]
        if hearing:
            real(hearing, (), mine, theirs[:0]).wait(timedelta(seconds=_NEIGHBOURS_S))
        return die()

    gossip.driver._transmit_to = transmit


def _flat(sync: Any) -> Tensor:
    """Return this rank's parameters in a row."""
    return torch.cat([p.detach().reshape(-1) for p in sync._parameters.values()])
