"""Break a training in many ways, and check that every survivor says so in time and leaves nothing behind.

    python drills/faults.py [--kinds kill,stop] [--seeds 10] [--ranks 0] [--timeout-s 3] [--jobs 1]

Each run starts 3 or 4 ranks of `stenograd train` on the digits with a method, a moment and a victim that the
seed draws, breaks something, and checks: the error and the ranks that each survivor names, the time from the
fault to the last survivor's end, exit statuses, processes that are left, and that every file under its final
name is whole. Prints a table; the exit status is 1 if a run failed. The two kinds of broken links need root
and emulated hosts (see benchmarks/hosts.py).
"""

from __future__ import annotations

import argparse
import json
import random
import sys
import tempfile
import time
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path

from crime_scene import Scene
from forks import Forks

__all__ = ["KINDS", "Verdict", "run"]

GRACE_S = 5.0  # after timeout_s, the time in which all survivors must have ended
_PEERS = "PeerLost"


@dataclass
class Verdict:
    """What one run showed; no `wrong` means that all was as it should be."""

    kind: str
    seed: int
    what: str = ""
    seconds: float = 0.0
    errors: set[str] = field(default_factory=set)
    wrong: list[str] = field(default_factory=list)


def _at_once(do: str, rank_0: bool, scene: Scene, verdict: Verdict) -> None:
    """A rank is killed, stopped, raises, quits or sleeps at a moment of its own."""
    victim = 0 if rank_0 else scene.draw.randrange(1, scene.size)
    fault = scene.fault(do)
    scene.start({victim: fault})
    scene.await_fault(victim)
    rest = [r for r in range(scene.size) if r != victim]
    scene.await_end(rest, GRACE_S)
    if do == "raise" and fault["at"] == "save":  # all ranks agree on how a save went
        scene.await_end([victim], GRACE_S)
        scene.expect(verdict, range(scene.size), "StenogradError", None, f"rank {victim}: ZeroDivisionError")
        return
    scene.expect(verdict, rest, _PEERS, [victim])
    if do == "stop":  # whoever continues it must not keep it for ever
        scene.resume(victim)
    if do == "nap":
        scene.kill(victim)
    scene.await_end([victim], GRACE_S)
    if do == "raise":
        scene.expect(verdict, [victim], "ZeroDivisionError", [])
    if do == "stop":
        scene.expect(verdict, [victim], _PEERS, None)


def _link(scene: Scene, verdict: Verdict) -> None:
    """A host's link goes down, on its own side or the switch's; all ranks survive, apart from each other."""
    victim = scene.draw.randrange(scene.size)
    inside = scene.draw.random() < 0.5
    scene.start({victim: scene.fault("mark")})
    scene.await_fault(victim)
    scene.cut(victim, inside)
    _apart(scene, verdict, victim)


def _slow(scene: Scene, verdict: Verdict) -> None:
    """A host's link becomes so slow that no step ends, or loses all packets longer than its burst."""
    victim = scene.draw.randrange(scene.size)
    how = scene.draw.choice(["tbf rate 1kbit burst 1540 latency 60s", "tbf rate 1kbit burst 32 latency 60s"])
    scene.start({victim: scene.fault("mark")})
    scene.await_fault(victim)
    scene.slow(victim, how)
    verdict.what += f", {how}"
    _apart(scene, verdict, victim)


def _apart(scene: Scene, verdict: Verdict, victim: int) -> None:
    everyone = list(range(scene.size))
    scene.await_end(everyone, GRACE_S)
    scene.expect(verdict, [r for r in everyone if r != victim], _PEERS, [victim])
    scene.expect(verdict, [victim], _PEERS, None)


def _disk(action: str, scene: Scene, verdict: Verdict) -> None:
    """The output folder's disk becomes full, or read-only, at a moment; every rank says so."""
    text = {"fill": "No space left", "freeze": "Read-only file system"}[action]
    scene.mount()
    scene.start({0: scene.fault("mark")})
    scene.await_fault(0)
    scene.fill() if action == "fill" else scene.freeze()
    everyone = list(range(scene.size))
    scene.await_end(everyone, GRACE_S)
    scene.expect(verdict, everyone, "StenogradError|CheckpointError|OSError", None, text)


def _port(scene: Scene, verdict: Verdict) -> None:
    """A second job is started with the first one's port: it says so, and the first goes on."""
    scene.start({0: scene.fault("mark")})
    scene.await_fault(0)
    first, scene.ranks = scene.ranks, []
    scene.begin_fault()
    scene.start({})
    everyone = list(range(scene.size))
    scene.await_end(everyone, GRACE_S)
    scene.expect(verdict, everyone, "LaunchError", None)
    scene.ranks += first
    if not scene.goes_on(first):
        verdict.wrong.append("the first job did not go on")
    for rank in range(scene.size, 2 * scene.size):
        scene.kill(rank)
    scene.await_end(list(range(scene.size, 2 * scene.size)), GRACE_S)


def _absent(scene: Scene, verdict: Verdict) -> None:
    """A rank never comes: the others name it within the timeout."""
    victim = scene.draw.randrange(scene.size)
    scene.begin_fault()
    scene.start({}, without=victim)
    rest = [r for r in range(scene.size) if r != victim]
    scene.await_end(rest, GRACE_S)
    scene.expect(verdict, rest, "LaunchError", None, "" if victim == 0 else f"missing: {victim}")


def _mismatch(scene: Scene, verdict: Verdict) -> None:
    """One rank was started with another method."""
    victim = scene.draw.randrange(scene.size)
    scene.begin_fault()
    scene.start({}, other_method=victim)
    everyone = list(range(scene.size))
    scene.await_end(everyone, GRACE_S)
    scene.expect(verdict, everyone, "MismatchError", None, "method")


KINDS: dict[str, Callable[[Scene, Verdict], None]] = {
    "kill": partial(_at_once, "kill", False),
    "kill-rank0": partial(_at_once, "kill", True),
    "stop": partial(_at_once, "stop", False),
    "stop-rank0": partial(_at_once, "stop", True),
    "link-down": _link,
    "slow-link": _slow,
    "exception": partial(_at_once, "raise", False),
    "disk-full": partial(_disk, "fill"),
    "read-only": partial(_disk, "freeze"),
    "one-port": _port,
    "quits": partial(_at_once, "quit", False),
    "sleeps": partial(_at_once, "nap", False),
    "absent": _absent,
    "mismatch": _mismatch,
}
_TEN = list(KINDS)[:10]
_ON_HOSTS = ("link-down", "slow-link")


def run(forks: Forks, kind: str, seed: int, ranks: int = 0, timeout_s: float = 3.0) -> Verdict:
    """Break one training.

    Args:
        forks: where ranks come from.
        kind: a key of `KINDS`.
        seed: chooses victim, moment, method and meeting point.
        ranks: number of ranks; 0 lets the seed choose 3 or 4.
        timeout_s: what the training gets as `--timeout-s`.
    """
    draw = random.Random(f"{kind}/{seed}")
    size = ranks or draw.choice([3, 4])
    verdict = Verdict(kind, seed)
    with tempfile.TemporaryDirectory(prefix="faults-", ignore_cleanup_errors=True) as folder:
        meet = "tcp" if "rank0" in kind or kind in ("one-port", *_ON_HOSTS) else draw.choice(["tcp", "file"])
        with Scene(forks, draw, size, Path(folder), timeout_s, meet, kind in _ON_HOSTS) as scene:
            verdict.what = f"{size} ranks, {scene.method}, {meet}"
            try:
                KINDS[kind](scene, verdict)
                verdict.what += f", {scene.moment}" if scene.moment else ""
                verdict.seconds = scene.seconds
                if scene.seconds > timeout_s + GRACE_S:
                    verdict.wrong.append(f"took {scene.seconds:.1f} s")
                verdict.wrong += scene.leftovers()
            except TimeoutError as error:
                verdict.wrong.append(str(error))
            if verdict.wrong:
                verdict.wrong.append(scene.logs())
    return verdict


def _row(kind: str, verdicts: Sequence[Verdict]) -> list[str]:
    good = sum(not v.wrong for v in verdicts)
    slowest = max(v.seconds for v in verdicts)
    errors = ", ".join(sorted(set().union(*(v.errors for v in verdicts))))
    return [kind, f"{good} of {len(verdicts)}", f"{slowest:.1f}", errors]


def main() -> int:
    """Run what the options say, print the table and return the exit status."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--kinds", default=",".join(_TEN), help=f"of {', '.join(KINDS)}; or all")
    parser.add_argument("--seeds", type=int, default=10, help="runs of each kind")
    parser.add_argument("--first-seed", type=int, default=0)
    parser.add_argument("--ranks", type=int, default=0, help="0: the seed chooses 3 or 4")
    parser.add_argument("--timeout-s", type=float, default=3.0)
    parser.add_argument("--jobs", type=int, default=1, help="runs at once")
    parser.add_argument("--json", action="store_true", help="print one JSON line a run instead of the table")
    args = parser.parse_args()
    kinds = list(KINDS) if args.kinds == "all" else args.kinds.split(",")
    unknown = [kind for kind in kinds if kind not in KINDS]
    if unknown:
        parser.error(f"there is no kind {unknown[0]!r}: choose from {', '.join(KINDS)}")
    seeds = range(args.first_seed, args.first_seed + args.seeds)
    start = time.monotonic()
    with Forks() as forks, ThreadPoolExecutor(args.jobs) as pool:
        one = partial(run, forks, ranks=args.ranks, timeout_s=args.timeout_s)
        verdicts = []
        for verdict in pool.map(lambda pair: one(*pair), [(kind, seed) for kind in kinds for seed in seeds]):
            verdicts.append(verdict)
            _show(verdict, args.json)
    good = sum(not v.wrong for v in verdicts)
    if not args.json:
        print(f"\ntimeout_s = {args.timeout_s:g}; survivors have {args.timeout_s + GRACE_S:g} s")
        rows = [_row(kind, [v for v in verdicts if v.kind == kind]) for kind in kinds]
        show(["fault", "as it should be", "slowest (s)", "errors seen"], rows)
        print(f"\n{good} of {len(verdicts)} in {time.monotonic() - start:.0f} s")
    return 0 if good == len(verdicts) else 1


def _show(verdict: Verdict, as_json: bool) -> None:
    if as_json:
        print(json.dumps({**vars(verdict), "errors": sorted(verdict.errors)}), flush=True)
        return
    state = "ok" if not verdict.wrong else "WRONG"
    print(f"{verdict.kind} {verdict.seed}: {state}, {verdict.seconds:.1f} s ({verdict.what})", flush=True)
    for line in verdict.wrong:
        print(f"  {line}", flush=True)


if __name__ == "__main__":
    sys.exit(main())
