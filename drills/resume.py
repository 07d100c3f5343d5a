"""Kill training at random moments, resume it, and compare with an uninterrupted run bit for bit.

For each method and seed: a small run on handwritten digits is killed (signal 9) shortly after a random step,
one random rank or all of them; it is started again with --resume, and must end with the same parameters,
optimizer state, method's state and metrics as the run that nobody disturbed. TMPDIR=/dev/shm is faster where
the disk is slow to force files to it.
"""

from __future__ import annotations

import argparse
import json
import random
import sys
import tempfile
import time
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from functools import partial
from pathlib import Path

sys.path.insert(0, str(Path(__file__).parent))

from forked_ranks import ForkedRanks

from stenograd.testing.methods import by_name

METHODS = by_name()
_SAVE_STEPS = 3
_EPOCHS = 3
_STEP_S = 0.04  # about what a step with its share of saving takes


@dataclass(frozen=True)
class Case:
    """One run to disturb."""

    method: str
    seed: int
    workers: int


@dataclass(frozen=True)
class Result:
    """What came of a case; `wrong` is empty where all is as it should be. lost: steps to be trained again."""

    case: Case
    killed: tuple[int, ...]
    lost: int
    wrong: str


def main() -> int:
    """Print a table; the exit status is 1 if a run ended otherwise than it should."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--methods", default=";".join(METHODS), help="separated by semicolons")
    parser.add_argument("--seeds", type=int, default=10)
    parser.add_argument("--jobs", type=int, default=3, help="cases at a time")
    args = parser.parse_args()
    start = time.perf_counter()
    cases = [
        Case(method, seed, 2 + (seed % 5 == 4))
        for method in args.methods.split(";")
        for seed in range(args.seeds)
    ]
    print(f"{'method':<24} {'bit-identical':>14} {'one rank':>9} {'all ranks':>10} {'most steps lost':>16}")
    results: list[Result] = []
    with ForkedRanks() as forks, ThreadPoolExecutor(args.jobs) as jobs:
        for result in jobs.map(partial(_drilled, forks), cases):
            results.append(result)
            if len(results) % args.seeds == 0:
                _show(results[-args.seeds :])
    print(f"{len(results)} kills, {time.perf_counter() - start:.0f} s")
    return 1 if any(result.wrong for result in results) else 0


def _drilled(forks: ForkedRanks, case: Case) -> Result:
    try:
        result = _drill(forks, case)
    except Exception as error:
        result = Result(case, (), 0, f"{type(error).__name__}: {error}")
    if result.wrong:
        print(f"{case}: {result.wrong}", flush=True)
    return result


def _drill(forks: ForkedRanks, case: Case) -> Result:
    common = ["--method", case.method, "--seed", case.seed, "--batch-size", 240 // case.workers]
    common += ["--timeout-s", 30, "--epochs", _EPOCHS, "--save-steps", _SAVE_STEPS]
    draw = random.Random(f"{case.method} {case.seed}")
    with tempfile.TemporaryDirectory(prefix="drill-") as parent:
        straight, broken = Path(parent) / "straight", Path(parent) / "broken"
        codes, output = forks.train([*common, "--out", straight], case.workers)
        if any(codes):
            return Result(case, (), 0, f"the uninterrupted run ended with {codes}:\n{output[-800:]}")
        steps = sum(json.loads(line)["steps"] for line in _lines(straight))
        ranks = range(case.workers) if draw.random() < 0.5 else [draw.randrange(case.workers)]
        last = draw.randint(1, steps - 1)  # the last step whose update was made
        fault = {"at": "step", "nth": last, "do": "kill", "after_s": draw.uniform(0, _STEP_S)}
        killed, faults = tuple(ranks), dict.fromkeys(ranks, fault)
        codes, output = forks.train([*common, "--out", broken], case.workers, faults)
        if any(codes[rank] != -9 for rank in killed) or 0 in codes:
            return Result(case, killed, 0, f"{fault} gave exit codes {codes}:\n{output[-800:]}")
        codes, output = forks.train([*common, "--out", broken, "--resume"], case.workers)
        if any(codes):
            return Result(case, killed, 0, f"the resumed run ended with {codes}:\n{output[-800:]}")
        at = int(output.split("(step ")[1].split(")")[0]) if "(step " in output else 0
        lost = max(0, last - at)
        wrong = _differences(straight, broken)
        if lost > _SAVE_STEPS:
            wrong = f"{lost} steps were lost; {wrong}"
        return Result(case, killed, lost, wrong)


def _differences(a: Path, b: Path) -> str:
    """Say what differs between two finished runs; empty if nothing does."""
    from stenograd.checkpoint.files import read_manifest, read_rank, saved_steps
    from stenograd.checkpoint.reshard import alike

    steps = saved_steps(a)[-1], saved_steps(b)[-1]
    if steps[0] != steps[1]:
        return f"they ended at steps {steps}"
    manifests = [read_manifest(folder, steps[0]) for folder in (a, b)]
    for rank in range(manifests[0].world_size):
        one, other = (read_rank(f, m, rank) for f, m in zip((a, b), manifests, strict=True))
        for key in ("model", "optimizer", "sync"):
            if not alike(one[key], other[key]):
                return f"{key} of rank {rank} differs"
    rows = [[{**json.loads(line), "seconds": 0} for line in _lines(folder)] for folder in (a, b)]
    return "" if rows[0] == rows[1] else f"metrics differ: {rows}"


def _lines(folder: Path) -> list[str]:
    return (folder / "metrics.jsonl").read_text().splitlines()


def _show(rows: list[Result]) -> None:
    """Print one method's line; "one rank" and "all ranks" say how many of its runs lost whom."""
    alone = sum(len(row.killed) == 1 for row in rows)
    good = f"{sum(not row.wrong for row in rows)} of {len(rows)}"
    lost = max(row.lost for row in rows)
    method = rows[0].case.method
    print(f"{method:<24} {good:>14} {alone:>9} {len(rows) - alone:>10} {lost:>16}", flush=True)


if __name__ == "__main__":
    sys.exit(main())
