"""Break a training in many ways, and check that every survivor says so in time and leaves nothing behind.

    python drills/faults.py [--kinds kill,stop] [--seeds 10] [--ranks 0] [--timeout-s 3] [--jobs 1]

Each run starts 3 or 4 ranks of `stenograd train` on the digits with a method, a moment and a victim that the
seed draws, breaks something, and checks: the error and the ranks that each survivor names, the time from the
fault to the last survivor's end, exit statuses, processes that are left, and that every file under its final
name is whole. Prints a table; the exit status is 1 if a run failed. The two kinds of broken links need root
and emulated hosts (see stenograd.emulate).
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
from functools import partial
from pathlib import Path

from fault_run import FaultRun, Verdict
from forked_ranks import ForkedRanks

from stenograd.cli.table import show

__all__ = ["KINDS", "break_one"]

GRACE_S = 5.0  # after timeout_s, the time in which all survivors must have ended on idle cores
_PEERS = "PeerLost"


def _at_once(do: str, rank_0: bool, run: FaultRun, verdict: Verdict) -> None:
    """A rank is killed, stopped, raises, quits or sleeps at a moment of its own."""
    victim = 0 if rank_0 else run.draw.randrange(1, run.size)
    fault = run.fault(do)
    run.start({victim: fault})
    run.await_fault(victim)
    rest = [r for r in range(run.size) if r != victim]
    run.await_end(rest)
    if do == "raise" and fault["at"] == "save":  # all ranks agree on how a save went
        run.await_end([victim])
        run.expect(verdict, range(run.size), "StenogradError", None, f"rank {victim}: ZeroDivisionError")
        return
    run.expect(verdict, rest, _PEERS, [victim])
    if do == "stop":  # whoever continues it must not keep it for ever
        run.resume(victim)
    if do == "nap":
        run.kill(victim)
    run.await_end([victim])
    if do == "raise":
        run.expect(verdict, [victim], "ZeroDivisionError", [])
    if do == "stop":
        run.expect(verdict, [victim], _PEERS, None)


def _link(run: FaultRun, verdict: Verdict) -> None:
    """A host's link goes down, on its own side or the switch's; all ranks survive, apart from each other."""
    victim = run.draw.randrange(run.size)
    inside = run.draw.random() < 0.5
    run.start({victim: run.fault("mark")})
    run.await_fault(victim)
    run.cut(victim, inside)
    _apart(run, verdict, victim)


def _slow(run: FaultRun, verdict: Verdict) -> None:
    """A host's link becomes so slow that no step ends, or loses all packets longer than its burst."""
    victim = run.draw.randrange(run.size)
    how = run.draw.choice(["tbf rate 1kbit burst 1540 latency 60s", "tbf rate 1kbit burst 32 latency 60s"])
    run.start({victim: run.fault("mark")})
    run.await_fault(victim)
    run.slow(victim, how)
    verdict.what += f", {how}"
    _apart(run, verdict, victim)


def _apart(run: FaultRun, verdict: Verdict, victim: int) -> None:
    everyone = list(range(run.size))
    run.await_end(everyone)
    run.expect(verdict, [r for r in everyone if r != victim], _PEERS, [victim])
    run.expect(verdict, [victim], _PEERS, None)


def _disk(action: str, run: FaultRun, verdict: Verdict) -> None:
    """The output folder's disk becomes full, or read-only, at a moment; every rank says so."""
    text = {"fill": "No space left", "freeze": "Read-only file system"}[action]
    run.mount()
    run.start({0: run.fault("mark")})
    run.await_fault(0)
    run.fill() if action == "fill" else run.freeze()
    everyone = list(range(run.size))
    run.await_end(everyone)
    run.expect(verdict, everyone, "StenogradError|CheckpointError|OSError", None, text)


def _port(run: FaultRun, verdict: Verdict) -> None:
    """A second job is started with the first one's port: it says so, and the first goes on."""
    run.start({0: run.fault("mark")})
    run.await_fault(0)
    first, run.ranks = run.ranks, []
    run.begin_fault()
    run.start({})
    everyone = list(range(run.size))
    run.await_end(everyone)
    run.expect(verdict, everyone, "LaunchError", None)
    run.ranks += first
    if not run.goes_on(first):
        verdict.wrong.append("the first job did not go on")
    for rank in range(run.size, 2 * run.size):
        run.kill(rank)
    run.await_end(list(range(run.size, 2 * run.size)))


def _absent(run: FaultRun, verdict: Verdict) -> None:
    """A rank never comes: the others name it within the timeout."""
    victim = run.draw.randrange(run.size)
    run.begin_fault()
    run.start({}, without=victim)
    rest = [r for r in range(run.size) if r != victim]
    run.await_end(rest)
    run.expect(verdict, rest, "LaunchError", None, "" if victim == 0 else f"missing: {victim}")


def _mismatch(run: FaultRun, verdict: Verdict) -> None:
    """One rank was started with another method."""
    victim = run.draw.randrange(run.size)
    run.begin_fault()
    run.start({}, other_method=victim)
    everyone = list(range(run.size))
    run.await_end(everyone)
    run.expect(verdict, everyone, "MismatchError", None, "method")


KINDS: dict[str, Callable[[FaultRun, Verdict], None]] = {
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


def break_one(
    forks: ForkedRanks,
    kind: str,
    seed: int,
    ranks: int = 0,
    timeout_s: float = 3.0,
    grace_s: float = GRACE_S,
) -> Verdict:
    """Break one training.

    Args:
        forks: where ranks come from.
        kind: a key of `KINDS`.
        seed: chooses victim, moment, method and meeting point.
        ranks: number of ranks; 0 lets the seed choose 3 or 4.
        timeout_s: what the training gets as `--timeout-s`.
        grace_s: seconds that survivors have on top of it.
    """
    draw = random.Random(f"{kind}/{seed}")
    size = ranks or draw.choice([3, 4])
    verdict = Verdict(kind, seed)
    with tempfile.TemporaryDirectory(prefix="faults-", ignore_cleanup_errors=True) as folder:
        meet = "tcp" if "rank0" in kind or kind in ("one-port", *_ON_HOSTS) else draw.choice(["tcp", "file"])
        with FaultRun(forks, draw, size, Path(folder), timeout_s, grace_s, meet, kind in _ON_HOSTS) as run:
            verdict.what = f"{size} ranks, {run.method}, {meet}"
            try:
                KINDS[kind](run, verdict)
                verdict.what += f", {run.moment}" if run.moment else ""
                verdict.seconds = run.seconds
                if run.seconds > timeout_s + grace_s:
                    verdict.wrong.append(f"took {run.seconds:.1f} s")
                verdict.wrong += run.leftovers()
            except TimeoutError as error:
                verdict.wrong.append(str(error))
            if verdict.wrong:
                verdict.wrong.append(run.logs())
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
    parser.add_argument("--grace-s", type=float, default=GRACE_S, help="on top; more where others compute")
    parser.add_argument("--jobs", type=int, default=1, help="runs at once")
    parser.add_argument("--json", action="store_true", help="print one JSON line a run instead of the table")
    args = parser.parse_args()
    kinds = list(KINDS) if args.kinds == "all" else args.kinds.split(",")
    unknown = [kind for kind in kinds if kind not in KINDS]
    if unknown:
        parser.error(f"there is no kind {unknown[0]!r}: choose from {', '.join(KINDS)}")
    seeds = range(args.first_seed, args.first_seed + args.seeds)
    start = time.monotonic()
    with ForkedRanks() as forks, ThreadPoolExecutor(args.jobs) as pool:
        one = partial(break_one, forks, ranks=args.ranks, timeout_s=args.timeout_s, grace_s=args.grace_s)
        verdicts = []
        for verdict in pool.map(lambda pair: one(*pair), [(kind, seed) for kind in kinds for seed in seeds]):
            verdicts.append(verdict)
            _show(verdict, args.json)
    good = sum(not v.wrong for v in verdicts)
    if not args.json:
        print(f"\ntimeout_s = {args.timeout_s:g}; survivors have {args.timeout_s + args.grace_s:g} s")
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
