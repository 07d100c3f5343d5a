"""A storm: workers of an open run are killed, frozen and cut off, and come back; what is left of training.

    sudo python benchmarks/storm.py                  # 5 minutes undisturbed, then 20 of the storm
    sudo python benchmarks/storm.py --minutes 2 --calm-minutes 1 --name storm_short

Eight workers on emulated hosts at 100 Mbit/s, whose store is on a ninth. Faults come at random, as a Poisson
process: half kill a worker (which is started again at once), a quarter freeze one, and a quarter unplug its
cable, for 5 to 15 seconds. Steps are emulated: each lasts 50 ms, most of which the worker sleeps, because
eight workers share two cores here.
"""

from __future__ import annotations

import hashlib
import json
import os
import random
import signal
import statistics
import sys
import tempfile
import time
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

import torch
from harness import command_line, main, number, publish, table
from pictures import timeline

import stenograd
from stenograd.emulate.hosts import Hosts
from stenograd.tasks import load

_WORKERS, _STEP_S = 8, 0.05
_STORE = f"10.77.0.{_WORKERS + 1}:29400"
_METHOD = "diloco:every=40,quorum=0.75,grace=0.5"
_KINDS = ("kill", "kill", "freeze", "cut")
_AWAY_S = (5.0, 15.0)


def work(folder: str, method: str) -> None:
    """Be a worker until the file "end" is there; note each round."""
    stop, world = stenograd.stop_on(), stenograd.init(timeout_s=120)
    task = load("glyphs")
    model, samples = task.model(0), torch.Generator().manual_seed(1000 * os.getpid() + world.rank)
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3)
    Path(folder, f"came-{world.rank}-{os.getpid()}").write_text(str(time.time()))
    sync: Any = stenograd.distribute(model, optimizer, method, timeout_s=120)
    state = -1
    with Path(folder, f"log-{world.rank}-{os.getpid()}").open("w") as log:
        while not (stop.requested or Path(folder, "end").exists()):
            if sync._state != state:
                state = sync._state
                row = {"at": time.time(), "state": state, "round": sync.round, "members": sync.members}
                row |= {"digest": _digest(sync), "tokens": sum(sync.tokens.values())}
                row |= {"attempt": sync._plan.attempt, "life": os.getpid()}
                if sync.rank == min(sync.members) and state % 5 == 0:
                    row["loss"] = _loss(task, model, sync)
                print(json.dumps(row), file=log, flush=True)
            began = time.monotonic()
            picked = torch.randint(task.train_size, (16,), generator=samples)
            optimizer.zero_grad()
            task.loss(model, *task.train_batch(picked))[0].backward()
            time.sleep(max(0.0, _STEP_S - (time.monotonic() - began)))
            optimizer.step()
    sync.close()


def _digest(sync: Any) -> str:
    held = [t.numpy().tobytes() for part in sync._parts for t in part.common()]
    return hashlib.sha256(b"".join(held)).hexdigest()[:16]


@torch.no_grad()
def _loss(task: Any, model: torch.nn.Module, sync: Any) -> float:
    with sync.consensus():
        loss = float(task.loss(model.eval(), *task.eval_batch(torch.arange(task.eval_size)))[0])
    model.train()
    return loss


class _Run:
    """The workers of one run, and what is done to them."""

    def __init__(self, hosts: Hosts, folder: Path, method: str) -> None:
        self._hosts, self._folder, self._method = hosts, folder, method
        self._env = {k: v for k, v in os.environ.items() if k not in ("RANK", "WORLD_SIZE")}
        self._env |= {"OMP_NUM_THREADS": "1", "STENOGRAD_OPEN": _STORE, "GLOO_SOCKET_IFNAME": "eth0"}
        command = [sys.executable, "-m", "stenograd", "rendezvous", "--port", _STORE.split(":")[1]]
        self._store = hosts.start(_WORKERS, command, self._env)
        self._workers = [self._begin(rank) for rank in range(_WORKERS)]
        self._away: list[tuple[float, str, int]] = []
        self.faults: list[dict[str, Any]] = []

    def _begin(self, rank: int) -> Any:
        own = {"RANK": str(rank), "WORLD_SIZE": str(_WORKERS), "LOCAL_RANK": "0", "LOCAL_WORLD_SIZE": "1"}
        command = [sys.executable, __file__, "--work", str(self._folder), self._method]
        return self._hosts.start(rank, command, self._env | own)

    def last(self, seconds: float, per_hour: float, seed: int) -> None:
        """Let the run last so long after its first round, with faults at this rate."""
        draw = random.Random(seed)
        while not logs(self._folder):
            time.sleep(0.2)
        end = time.time() + seconds
        following = time.time() + draw.expovariate(per_hour / 3600) if per_hour else end
        while time.time() < end:
            time.sleep(0.05)
            self._mend()
            if time.time() >= following and per_hour:
                following += draw.expovariate(per_hour / 3600)
                self._fault(draw)
        self._mend(at_once=True)
        (self._folder / "end").touch()
        for process in self._workers:
            process.wait(120)
        self.stop()

    def _fault(self, draw: random.Random) -> None:
        away = {rank for *_, rank in self._away}
        rank = draw.choice([rank for rank in range(_WORKERS) if rank not in away])
        kind, seconds = draw.choice(_KINDS), draw.uniform(*_AWAY_S)
        if kind == "kill":
            self._workers[rank].kill()
            seconds = 0.0
        else:
            self._away.append((time.time() + seconds, kind, rank))
            if kind == "freeze":
                self._workers[rank].send_signal(signal.SIGSTOP)
            else:
                self._hosts.cut(rank)
        self.faults.append({"at": time.time(), "kind": kind, "rank": rank, "seconds": round(seconds, 1)})

    def _mend(self, *, at_once: bool = False) -> None:
        """Let workers go on whose time away is over, and start those again that have ended."""
        for until, kind, rank in [*self._away]:
            if at_once or time.time() >= until:
                self._away.remove((until, kind, rank))
                if kind == "freeze":
                    self._workers[rank].send_signal(signal.SIGCONT)
                else:
                    self._hosts.cut(rank, mend=True)
        for rank, process in enumerate(self._workers):
            if process.poll() is not None and not at_once:
                self._workers[rank] = self._begin(rank)

    def stop(self) -> None:
        """End everything."""
        for process in [*self._workers, self._store]:
            process.kill()
            process.wait()


def logs(folder: Path) -> dict[tuple[int, int], list[dict[str, Any]]]:
    """Return what each process has noted, by rank and process."""
    found = {}
    for path in folder.glob("log-*"):
        rank, life = map(int, path.name.split("-")[1:])
        found[rank, life] = [json.loads(line) for line in path.read_text().splitlines() if line[-1:] == "}"]
    return {who: rows for who, rows in found.items() if rows}


def waits(folder: Path, found: Mapping[tuple[int, int], Sequence[Mapping[str, Any]]]) -> list[float]:
    """Return of each process that came later the seconds from then, torch imported, to its first round."""
    began = {tuple(map(int, path.name.split("-")[1:])): path for path in folder.glob("came-*")}
    came = {who: float(path.read_text()) for who, path in began.items()}
    start = max(rows[0]["at"] for who, rows in found.items() if rows[0]["state"] == 0)
    return [rows[0]["at"] - came[who] for who, rows in found.items() if came[who] > start]


def rounds_of(found: Mapping[tuple[int, int], Sequence[Mapping[str, Any]]]) -> list[dict[str, Any]]:
    """Return what is known of each round: when, by whom, which attempt, and whether all were equal."""
    rounds: dict[int, dict[str, Any]] = {}
    for rows in found.values():
        for row in rows:
            one = rounds.setdefault(row["state"], {**row, "digests": set()})
            one["digests"].add(row["digest"])
            one["at"] = min(one["at"], row["at"])
            one |= {"loss": row["loss"]} if "loss" in row else {}
    return [
        {**rounds[k], "equal": len(rounds[k]["digests"]) == 1, "digests": len(rounds[k]["digests"])}
        for k in sorted(rounds)
    ]


def returns(
    faults: Sequence[Mapping[str, Any]], found: Mapping[tuple[int, int], Sequence[Mapping[str, Any]]]
) -> Iterator[float]:
    """Yield for each fault but the last ones the seconds from its end until its rank was in a round again."""
    for fault in faults:
        over = fault["at"] + fault["seconds"]
        rows = [row for (rank, _), held in found.items() if rank == fault["rank"] for row in held]
        back = [row["at"] for row in rows if row["at"] > over and fault["rank"] in row["members"]]
        if back:
            yield min(back) - over


def summary(found: Any, faults: Sequence[Mapping[str, Any]]) -> dict[str, Any]:
    """Work out what is published of a run, from what its workers noted."""
    rounds = rounds_of(found)
    held, seconds = rounds[-1]["state"], rounds[-1]["at"] - rounds[0]["at"]
    back = sorted(returns(faults, found))
    began = rounds[0]["at"]
    return {
        # A line for each round: seconds since the first, and the members.
        "when": [" ".join([f"{one['at'] - began:.2f}", *map(str, one["members"])]) for one in rounds],
        "what": [{**fault, "at": round(fault["at"] - began, 2)} for fault in faults],
        "seconds": seconds,
        "rounds": held,
        "attempts": held + sum(one["attempt"] for one in rounds if one["state"] > 0),
        "tokens_a_second": (rounds[-1]["tokens"] - rounds[0]["tokens"]) / seconds,
        "all_equal": all(one["equal"] for one in rounds),
        "faults": len(faults),
        "back_s": [statistics.median(back), back[-1]] if back else [],
        "losses": [(one["tokens"], one["loss"]) for one in rounds if "loss" in one],
    }


def at_tokens(losses: Sequence[Sequence[float]], tokens: float) -> float:
    """Return the mean of the last five losses that were measured by so many tokens."""
    return statistics.fmean([loss for done, loss in losses if done <= tokens][-5:])


def storm() -> None:
    """Measure and print."""
    form = command_line(__doc__, "storm")
    form.add_argument("--minutes", type=float, default=20.0, help="of the storm")
    form.add_argument("--calm-minutes", type=float, default=5.0, help="undisturbed, before it")
    form.add_argument("--faults", type=float, default=60.0, help="an hour")
    form.add_argument("--method", default=_METHOD)
    form.add_argument("--seed", type=int, default=0)
    args = form.parse_args()
    results: dict[str, Any] = {}
    for name, minutes, per_hour in (("calm", args.calm_minutes, 0.0), ("storm", args.minutes, args.faults)):
        with Hosts(_WORKERS + 1, "100mbit") as hosts, tempfile.TemporaryDirectory() as place:
            run = _Run(hosts, Path(place), args.method)
            try:
                run.last(60 * minutes, per_hour, args.seed)
            finally:
                run.stop()
            found = logs(Path(place))
            results[name] = summary(found, run.faults)
            results[name]["joined_s"] = sorted(waits(Path(place), found))
    publish(args, "A storm of faults", results, tell(results))
    if args.out is not None:
        print(timeline(args.out / f"{args.name}.png", results["storm"]["when"], results["storm"]["what"]))


def tell(results: Mapping[str, Any]) -> str:
    """Return the tables of the results."""
    calm, wild = results["calm"], results["storm"]
    tokens = min(one["losses"][-1][0] for one in (calm, wild))
    rows = [
        ["rounds held", number(calm["rounds"], 0), number(wild["rounds"], 0)],
        ["of the attempts", *(f"{100 * one['rounds'] / one['attempts']:.1f} %" for one in (calm, wild))],
        ["steps a second, all workers", *(number(one["tokens_a_second"], 1) for one in (calm, wild))],
        ["goodput", "100 %", f"{100 * wild['tokens_a_second'] / calm['tokens_a_second']:.1f} %"],
        ["faults", "0", str(wild["faults"])],
        ["seconds until back, median (most)", "", " ".join(f"{s:.1f}" for s in wild["back_s"])],
        ["seconds from coming to the first round (most)", "", number(max(wild["joined_s"], default=0.0), 1)],
        ["seconds of a round", *(number(one["seconds"] / one["rounds"], 2) for one in (calm, wild))],
        ["members equal after every round", *("yes" if one["all_equal"] else "no" for one in (calm, wild))],
        [
            f"loss at {tokens:,.0f} steps",
            *(f"{at_tokens(one['losses'], tokens):.4f}" for one in (calm, wild)),
        ],
    ]
    return table(["", "undisturbed", "storm"], rows)


if __name__ == "__main__":
    if sys.argv[1:2] == ["--work"]:
        work(*sys.argv[2:])
    else:
        main(storm)
