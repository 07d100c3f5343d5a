"""Bytes per step that a rank hands to collectives under the character GPT of 0.8 M, against the formulas.

Counted by the ledger over whole rounds of real ranks; a batch of a few characters, because bytes do not
depend on it. Writes NAME.json and NAME.md into --out:

    python benchmarks/handed_over.py
"""

from __future__ import annotations

import argparse
import datetime
import sys
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

import torch
from models import WORKS, loss
from report import document, number, table, write

import stenograd
from stenograd.testing.pool import RankPool

HERE = Path(__file__).parent
_CHARACTERS = 8


@dataclass(frozen=True)
class Row:
    """A method with its forecast.

    Attributes:
        method: its text.
        kilobytes: expected per step, from formulas in the papers.
        ranks: number of ranks; a ring has two neighbours from three on.
        passes: number of steps, a multiple of the period in which bytes repeat.
        adam: whether the optimizer keeps moments.
    """

    method: str
    kilobytes: float
    ranks: int = 2
    passes: int = 4
    adam: bool = False


ROWS = [
    Row("dense", 3200),
    Row("gossip", 3200),
    Row("local:every=8", 400, passes=8),
    Row("gossip:graph=ring,consensus=0.4/sign", 200, ranks=3),
    # Second moments are averaged in every sixth round. With every=32 it is an eighth of this: 150 kB.
    Row("local:every=4,states=average,states_every=3", 1200, passes=24, adam=True),
    Row("diloco:every=30", 107, passes=30),
    Row("topk:ratio=0.01", 41),
    Row("demo", 34),
    Row("diloco:every=30/lowbit:format=e3m0", 13.5, passes=30),
    Row("dgc:ratio=0.001", 4.4),
    Row("sparseloco:every=30", 0.73, passes=30),
]


def main() -> None:
    """Count, print and write."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--out", type=Path, default=HERE / "results")
    parser.add_argument("--name", default="handed_over", help="name of the files, without an ending")
    parser.add_argument("--date", default=datetime.date.today().isoformat())
    args = parser.parse_args()
    with RankPool(3) as pool:
        counted = {row.method: pool.run(row.ranks, _count, row, timeout_s=600)[0] for row in ROWS}
    body = summary(counted)
    print(body)
    text = document("Bytes per step handed over", args.date, sys.argv, body)
    write(args.out / args.name, args.date, {row.method: row.passes for row in ROWS}, counted, text)


def summary(counted: Mapping[str, Sequence[float]]) -> str:
    """Format a line per method: what a rank handed over and sent per step, each against the forecast."""
    dense = counted["dense"][0]
    lines = []
    for row in ROWS:
        line = [f"`{row.method}`", f"{row.kilobytes:,g}"]
        for told in counted[row.method]:
            line += [number(told / 1e3, 2), f"{100 * (told / 1e3 / row.kilobytes - 1):+.1f} %"]
        lines.append([*line, f"{dense / counted[row.method][0]:,.1f}x"])
    head = ["method", "expected kB", "handed over", "", "sent", "", "handed over, less than dense"]
    return table(head, lines)


def _count(rank: int, row: Row) -> tuple[float, float]:
    """Be one rank; return what it handed to collectives per step, and what it sent for that, in bytes."""
    model, inputs, targets = WORKS["gpt-small"].make(rank)
    inputs, targets = inputs[:1, :_CHARACTERS], targets[:1, :_CHARACTERS]
    kind = torch.optim.AdamW if row.adam else torch.optim.SGD
    optimizer = kind(model.parameters(), lr=1e-4)
    sync = stenograd.distribute(model, optimizer, row.method)
    traffic = sync.traffic
    before = traffic.payload_bytes, traffic.moved_bytes
    for _ in range(row.passes):
        optimizer.zero_grad()
        loss(model(inputs), targets).backward()
        optimizer.step()
    sync.flush()
    traffic = sync.traffic
    told = traffic.payload_bytes - before[0], traffic.moved_bytes - before[1]
    sync.close()
    return told[0] / row.passes, told[1] / row.passes


if __name__ == "__main__":
    main()
