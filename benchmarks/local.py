"""What attaching, the first step, the others and a check of replicas take, on ranks of this machine.

    python benchmarks/local.py --cold --ranks 8                           # every method, a million parameters
    python benchmarks/local.py --works many-tensors --rivals none ddp dense topk:ratio=0.01 --rounds 5
    python benchmarks/local.py --works mlp cnn --rivals dense topk --rounds 5

Medians over the rounds, of the slowest rank. `--cold`: kernels are on disk, and none is loaded; then the bar
is that the first step takes at most twice the median step and 0.5 s, and the status is 1 where one is late.
"""

from __future__ import annotations

import statistics
import time

import torch
from harness import Place, command_line, main, number, publish, table, turns
from rivals import FLOOR, RIVALS, Rival, check_names
from scenarios import WORKS

from stenograd.sync.replica_guard import ReplicaGuard

_STEPS, _CHECKS = 12, 4
_SLACK_S = 0.5
_CHECK_EVERY = 100  # steps between two checks, for the share that they take
_KINDS = ("attach", "first step", "step", "check")


def measure(rank: int, work: str, name: str, cold: bool) -> list[float]:
    """Be a rank; return the seconds of each of `_KINDS`."""
    if not cold:
        Rival.on("million", name, rank).attached.close()  # imports and kernels
    start = time.perf_counter()
    rival = Rival.on(work, name, rank)
    attach_s, steps_s = time.perf_counter() - start, [ms / 1e3 for ms in rival.steps(_STEPS)]
    guard, checks_s = ReplicaGuard(rival.model), []
    for step in range(_CHECKS if name != FLOOR else 0):
        start = time.perf_counter()
        guard.check(step)
        checks_s.append(time.perf_counter() - start)
    rival.attached.close()
    check_s = statistics.median(checks_s) if checks_s else 0.0
    return [attach_s, steps_s[0], statistics.median(steps_s[1:]), check_s]


def local() -> None:
    """Measure and print."""
    parser = command_line(__doc__)
    parser.add_argument("--works", nargs="+", choices=list(WORKS), default=["million"])
    parser.add_argument("--rivals", nargs="+", default=RIVALS)
    parser.add_argument("--ranks", type=int, default=2)
    parser.add_argument("--rounds", type=int, default=1)
    parser.add_argument("--cold", action="store_true", help="load kernels within the first step")
    args = parser.parse_args()
    check_names(args.rivals)
    torch.set_num_threads(1)
    lines, told, late = [], {}, 0
    for work in args.works:
        found: dict[str, list[list[float]]] = {name: [] for name in args.rivals}
        for name in turns(args.rivals, args.rounds):
            ranks = Place(ranks=args.ranks).run(measure, work, name, args.cold)
            found[name].append([max(column) for column in zip(*ranks, strict=True)])
        told[work] = found
        medians = {n: [statistics.median(c) for c in zip(*r, strict=True)] for n, r in found.items()}
        base = medians.get("ddp")
        for name, (attach, first, step, check) in medians.items():
            is_late = args.cold and first > 2 * step + _SLACK_S
            late += is_late
            lines.append(
                [
                    f"{work}: {name}",
                    number(attach, 3),
                    number(attach / base[0] if base else None, 2),
                    number(1e3 * first) + " LATE" * is_late,
                    number(1e3 * step, 2),
                    number(step / base[2] if base else None, 3),
                    number(1e3 * check, 2),
                    number(100 * check / (_CHECK_EVERY * step), 3),
                ]
            )
    head = ["", "attach, s", "x DDP", "first step, ms", "step, ms", "x DDP", "check, ms"]
    body = table([*head, f"% at check_every={_CHECK_EVERY}"], lines)
    publish(args, f"Steps on {args.ranks} ranks of one machine", told, body)
    raise SystemExit(1 if late else 0)


if __name__ == "__main__":
    main(local)
