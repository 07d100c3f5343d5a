"""Kill a rank in any phase of a round, a hundred times: what the others make of it.

Number of ranks, victim, method, round and phase follow from the drill's number. With `lost=drop` survivors
must hold the round, be equal bit for bit, and have taken the outer step along the mean of those left (or of
all, if the lost rank's share had come); without it every survivor must get a `PeerLost` that names it:

    python drills/killed_rounds.py                # 100 drills, some minutes
    python drills/killed_rounds.py --drills 5 --first 40
    python drills/killed_rounds.py --drills 50 --phase torn
"""

from __future__ import annotations

import argparse
import os
import pickle
import random
import tempfile
import threading
import time
import warnings
from collections import Counter
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

import stenograd
from stenograd.data.requests import exchange
from stenograd.errors import PeerLost
from stenograd.testing.pool import RankPool, RanksFailed

_EVERY, _ROUNDS = 3, 3
_TIMEOUT_S = 15.0
_MOST_RANKS = 5
_OUTER_LR, _MOMENTUM = 0.7, 0.9  # DiLoCo's defaults
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
        schedule: local or diloco.
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
        return f"{schedule}:every={_EVERY}{',lost=drop' * self.drop}{'/' * bool(codec)}{codec}"


def case(number: int, phase: str | None = None) -> Case:
    """Return a drill by its number, in a phase of its own or in this one.

    Example:
        >>> case(3) == case(3), case(3).phase in PHASES
        (True, True)
    """
    chance = random.Random(number)
    drawn = chance.choice(list(PHASES))
    ranks = chance.randint(3, _MOST_RANKS)
    victim = chance.randrange(ranks)
    others = [rank for rank in range(ranks) if rank != victim]
    return Case(
        ranks=ranks,
        victim=victim,
        schedule=chance.choice(["local", "diloco", "diloco/topk"]),
        phase=phase or drawn,
        round=chance.randrange(_ROUNDS - 1),  # one more has to follow, or nobody notices
        drop=number % 5 != 0 or (phase or drawn) in ("confirming", "torn"),  # without drop nobody confirms
        hearing=tuple(chance.sample(others, chance.randrange(ranks))),
    )


def main() -> None:
    """Run the drills and print what came of them; the status is 1 if any went wrong."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--drills", type=int, default=100)
    parser.add_argument("--first", type=int, default=0)
    parser.add_argument("--phase", choices=list(PHASES), help="for all drills; by their numbers otherwise")
    args = parser.parse_args()
    good: Counter[tuple[str, str]] = Counter()
    wrong, start = 0, time.monotonic()
    with RankPool(_MOST_RANKS) as pool:
        for number in range(args.first, args.first + args.drills):
            one = case(number, args.phase)
            try:
                good[one.phase, _drill(pool, one)] += 1
            except (AssertionError, EOFError, OSError) as error:
                wrong += 1
                print(f"drill {number}, {one}: {error}", flush=True)
    for (phase, outcome), count in sorted(good.items()):
        print(f"{phase:10s} {outcome:48s} {count:4d}")
    print(f"{sum(good.values())} right, {wrong} wrong, {time.monotonic() - start:.0f} s")
    raise SystemExit(1 if wrong else 0)


def _drill(pool: RankPool, one: Case) -> str:
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
        _demand(len(found["ends"]) == _ROUNDS, f"{len(found['ends'])} rounds were held")
        _demand([e["lost"] for e in found["events"]] == [[one.victim]], f"events: {found['events']}")
        same = all(map(torch.equal, found["ends"], survivors[0]["ends"]))
        _demand(same, "survivors are not equal")
    return _means(one, told, survivors)


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
    sync = stenograd.distribute(model, optimizer, one.method, timeout_s=_TIMEOUT_S, bucket_bytes=64)
    told: dict[str, Any] = {"brought": [], "ends": []}
    file = folder / f"{rank}"

    def die() -> None:
        file.write_bytes(pickle.dumps(told))
        os._exit(9)

    _watch(sync, told, one, die if rank == one.victim else None)
    for step in range(_EVERY * _ROUNDS):
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
        if (step + 1) % _EVERY == 0:
            told["ends"].append(_flat(sync))
    file.write_bytes(pickle.dumps(told | {"events": sync.events}))
    sync.close()


def _watch(sync: Any, told: dict[str, Any], one: Case, die: Callable[[], None] | None) -> None:
    """Note what this rank brings to each round, and let the victim die in its phase."""
    meet, part = sync._meet, sync._parts[0]
    if die is not None and one.phase in ("sent", "arrived"):
        name = {"sent": "send", "arrived": "arrive"}[one.phase]
        work = getattr(part, name)

        def then_die() -> Any:
            done = work()
            if len(told["brought"]) > one.round:
                die()
            return done

        setattr(part, name, then_die)
    if die is not None and one.phase == "confirming":
        confirm, wait = sync._survivors._confirm, random.Random().uniform(0, 0.002)

        def confirming() -> None:
            if len(told["brought"]) > one.round:
                threading.Timer(wait, die).start()
            confirm()
            if len(told["brought"]) > one.round:
                time.sleep(60)  # it dies here at the latest, not in the next round

        sync._survivors._confirm = confirming
    if one.phase == "torn":
        _tear(sync._survivors, told, one, die)

    def meeting(t: int) -> None:
        own = _flat(sync)
        there = bool(part._outer)
        outer = (part._outer[0].clone(), part._momentum[0].clone()) if there else (own * 0, own * 0)
        told["brought"].append((*outer, own))
        last = die is not None and len(told["brought"]) > one.round
        if last and one.phase == "before":
            die()
        meet(t)
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


def _flat(sync: Any) -> Tensor:
    """Return this rank's parameters in a row."""
    return torch.cat([p.detach().reshape(-1) for p in sync._parts[0].parameters.values()])


if __name__ == "__main__":
    main()
