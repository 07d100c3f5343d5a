"""Train on 4 ranks, go on with 2, then with 3, and compare with runs on 4 ranks that nobody disturbed.

For each method and seed: digits, a third of the epochs on each number of ranks, by `stenograd train
--resume`. The residuals' sum is compared before and after each change, and the last accuracy with the
uninterrupted one.
"""

from __future__ import annotations

import argparse
import json
import sys
import tempfile
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).parent))

from forked_ranks import ForkedRanks

WORLDS = (4, 2, 3)
_EPOCHS = 15


def main() -> int:
    """Print a table; the exit status is 1 if a mean accuracy is more than a point below the uninterrupted."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--methods", default="topk:ratio=0.05;powersgd", help="separated by semicolons")
    parser.add_argument("--seeds", type=int, default=3)
    args = parser.parse_args()
    worst = 0.0
    print(f"{'method':<20} {'4 -> 2 -> 3':>12} {'4 ranks':>9} {'points':>7} {'sum off by':>11}", flush=True)
    with ForkedRanks() as forks:
        for method in args.methods.split(";"):
            pairs = [_compared(forks, method, seed) for seed in range(args.seeds)]
            changed, straight = (
                100 * sum(column) / len(pairs) for column in list(zip(*pairs, strict=True))[:2]
            )
            off = max(pair[2] for pair in pairs)
            worst = max(worst, straight - changed)
            scores = f"{changed:>10.2f} % {straight:>7.2f} % {changed - straight:>+7.2f}"
            print(f"{method:<20} {scores} {off:>11.1e}", flush=True)
    return 1 if worst > 1 else 0


def _compared(forks: ForkedRanks, method: str, seed: int) -> tuple[float, float, float]:
    """Return both accuracies and the largest relative error of a residual's sum over the ranks."""
    # Equal samples a step on all numbers of ranks would need other batches; the command keeps batch and rate.
    common = ["--method", method, "--seed", seed, "--batch-size", 16, "--timeout-s", 60, "--save-every", 5]
    with tempfile.TemporaryDirectory(prefix="drill-") as parent:
        straight, changed = Path(parent) / "straight", Path(parent) / "changed"
        _run(forks, WORLDS[0], [*common, "--epochs", _EPOCHS, "--out", straight])
        off = 0.0
        for i, workers in enumerate(WORLDS):
            more = ["--resume"] if i else []
            off = max(off, _sum_error(changed, workers)) if i else 0.0
            _run(forks, workers, [*common, "--epochs", _EPOCHS * (i + 1) // 3, "--out", changed, *more])
        scores = [
            json.loads((folder / "result.json").read_text())["eval_accuracy"]
            for folder in (changed, straight)
        ]
    return scores[0], scores[1], off


def _run(forks: ForkedRanks, workers: int, arguments: list[object]) -> None:
    codes, output = forks.train(arguments, workers, limit_s=300)
    if any(codes):
        raise RuntimeError(f"exit codes {codes}:\n{output[-800:]}")


def _sum_error(folder: Path, workers: int) -> float:
    """Re-shard what is saved as loading will, and compare the sums."""
    from stenograd.checkpoint.files import read_manifest, read_rank, saved_steps
    from stenograd.checkpoint.reshard import reshard

    manifest = read_manifest(folder, saved_steps(folder)[-1])
    old = [read_rank(folder, manifest, rank)["sync"] for rank in range(manifest.world_size)]
    before, after = _sums(old), _sums(reshard(old, workers))
    norms = [
        float((after[name] - total).norm() / total.norm()) for name, total in before.items() if total.any()
    ]
    return max(norms)


def _sums(states: list[dict[str, Any]]) -> dict[str, Any]:
    return {
        name: sum(state["parameters"][name]["residual"].double() for state in states)
        for name in states[0]["parameters"]
    }


if __name__ == "__main__":
    sys.exit(main())
