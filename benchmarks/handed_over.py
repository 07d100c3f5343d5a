"""Bytes per step that a rank hands to collectives, against what is expected for the character GPT of 0.8 M.

Counted by the ledger over whole rounds of real ranks; a batch of a few characters, because bytes do not
depend on it. Writes NAME.json and NAME.md into --out:

    python benchmarks/handed_over.py
"""

from __future__ import annotations

import argparse
import datetime
import sys
from dataclasses import dataclass
from pathlib import Path

import torch
from models import WORKS, loss
from report import document, number, table, write

import stenograd
from stenograd.testing.pool import RankPool

HERE = Path(__file__).parent
_PASSES = 192  # a multiple of every period below: 8, 30 to within a round, 32 with its moments every 3 and 6
_CHARACTERS = 8


@dataclass(frozen=True)
class Row:
    """A method with its forecast.

    Attributes:
        method: its text.
        kilobytes: expected per step, from formulas in the papers; None where there is none.
        ranks: number of ranks; a ring has two neighbours from three on.
        passes: number of steps, a multiple of the rounds' period.
        adam: whether the optimizer keeps moments.
    """

    method: str
    kilobytes: float | None
    ranks: int = 2
    passes: int = _PASSES
    adam: bool = False


ROWS = [
    Row("dense", 3200),
    Row("gossip", 3200),
    Row("local:every=8", 400),
    Row("gossip:graph=ring,consensus=0.4/sign", 200, ranks=3),
    Row("local:every=32,states=average,states_every=3", 150, adam=True),
    Row("diloco:every=30", 107, passes=180),
    Row("topk:ratio=0.01", 41),
    Row("demo", 34),
    Row("diloco:every=30/lowbit:format=e3m0", 13.5, passes=180),
    Row("dgc:ratio=0.001", 4.4),
    Row("sparseloco:every=30", 0.73, passes=180),
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
        counted = {row.method: pool.run(row.ranks, _count, row)[0] for row in ROWS}
    dense = counted["dense"]
    lines = []
    for row in ROWS:
        got = counted[row.method]
        off = "" if row.kilobytes is None else f"{100 * (got / 1e3 / row.kilobytes - 1):+.1f} %"
        expected = "" if row.kilobytes is None else f"{row.kilobytes:,g}"
        lines.append([f"`{row.method}`", number(got / 1e3, 2), expected, off, f"{dense / got:,.1f}x"])
    body = table(["method", "kB per step", "expected", "difference", "less than dense"], lines)
    print(body)
    text = document("Bytes per step handed over", args.date, sys.argv, body)
    write(args.out / args.name, args.date, {"passes": _PASSES}, counted, text)


def _count(rank: int, row: Row) -> float:
    """Be one rank; return the bytes that this one handed over per step."""
    model, inputs, targets = WORKS["gpt-small"].make(rank)
    inputs, targets = inputs[:1, :_CHARACTERS], targets[:1, :_CHARACTERS]
    kind = torch.optim.AdamW if row.adam else torch.optim.SGD
    optimizer = kind(model.parameters(), lr=1e-4)
    sync = stenograd.distribute(model, optimizer, row.method)
    before = sync.traffic.payload_bytes
    for _ in range(row.passes):
        optimizer.zero_grad()
        loss(model(inputs), targets).backward()
        optimizer.step()
    sync.flush()
    told = sync.traffic.payload_bytes - before
    sync.close()
    return told / row.passes


if __name__ == "__main__":
    main()
