"""Bytes per step that a rank hands to collectives under the character GPT of 0.8 M, against the formulas.

Counted by the ledger over whole rounds of real ranks; a batch of a few characters, because bytes do not
depend on it. Writes NAME.json and NAME.md into --out:

    python benchmarks/handed_over.py
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence

import torch
from harness import command_line, main, number, publish, table
from scenarios import HANDED_OVER, WORKS, Expected, loss

import stenograd
from stenograd.testing.pool import RankPool

_CHARACTERS = 8


def count(rank: int, row: Expected) -> tuple[float, float]:
    """Be one rank; return what it handed to collectives per step, and what it sent for that, in bytes."""
    model, inputs, targets = WORKS["gpt-small"].make(rank)
    kind = torch.optim.AdamW if row.adam else torch.optim.SGD
    optimizer = kind(model.parameters(), lr=1e-4)
    with stenograd.distribute(model, optimizer, row.method) as sync:
        before = sync.traffic.payload_bytes, sync.traffic.moved_bytes
        for _ in range(row.steps):
            optimizer.zero_grad()
            loss(model(inputs[:1, :_CHARACTERS]), targets[:1, :_CHARACTERS]).backward()
            optimizer.step()
        sync.flush()
        after = sync.traffic.payload_bytes, sync.traffic.moved_bytes
    return (after[0] - before[0]) / row.steps, (after[1] - before[1]) / row.steps


def summary(counted: Mapping[str, Sequence[float]]) -> str:
    """Format a line per method: what a rank handed over and sent per step, each against the forecast."""
    lines = []
    for row in HANDED_OVER:
        line = [f"`{row.method}`", f"{row.kilobytes:,g}"]
        for told in counted[row.method]:
            line += [number(told / 1e3, 2), f"{100 * (told / 1e3 / row.kilobytes - 1):+.1f} %"]
        lines.append([*line, f"{counted['dense'][0] / counted[row.method][0]:,.1f}x"])
    head = ["method", "expected kB", "handed over", "", "sent", "", "handed over, less than dense"]
    return table(head, lines)


def handed_over() -> None:
    """Count, print and write."""
    args = command_line(__doc__, "handed_over").parse_args()
    with RankPool(3) as pool:
        counted = {row.method: pool.run(row.ranks, count, row, timeout_s=600)[0] for row in HANDED_OVER}
    publish(args, "Bytes per step handed over", counted, summary(counted))


if __name__ == "__main__":
    main(handed_over)
