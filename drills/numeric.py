"""One NaN, one infinity and one overflow among 33 steps: are exactly these lost, and the 30 others applied?

For every method on 3 ranks; parameters must equal, bit for bit, those of a run without the bad steps.

    python drills/numeric.py [--methods topk,gossip]
"""

from __future__ import annotations

import argparse
import time
import warnings
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from typing import Any

import torch
from common import BUCKET_BYTES, METHODS, data, flat, mlp
from torch import Tensor, nn
from torch.nn.parallel import DistributedDataParallel

import stenograd
from stenograd.cli.table import show
from stenograd.comm.driver import Driver
from stenograd.heat.across import ParameterAverager
from stenograd.mlbench.decentralized import DecentralizedSGD
from stenograd.testing.methods import by_name, differences
from stenograd.testing.pool import RankPool

WORLD, STEPS = 3, 33
BAD = {7: "nan", 17: "inf", 25: "overflow"}
BAD_RANK = 1
LARGEST = torch.finfo(torch.float32).max
# Overflows where float32 all but does, and cannot be told from a bad gradient for free.
_SILENT = ("bf16", "powersgd")  # how their texts begin
_EVERY_ELEMENT = ("powersgd", "random")  # likewise; see `harm`


def harm(values: Tensor, kind: str, rank: int, method: str) -> Tensor:
    """Return a copy with one bad element: on rank 1, or on all ranks where only their sum overflows.

    PowerSGD sums over a matrix, and random methods send other elements in every step: there, all
    elements are as large as can be.
    """
    half = method.startswith("fp16")
    if kind != "overflow":
        bad: float | None = float(kind) if rank == BAD_RANK else None
    elif half:
        bad = 1e6 if rank == BAD_RANK else None
    else:
        bad = LARGEST
    out = values.clone()
    if bad == LARGEST and method.startswith(_EVERY_ELEMENT):
        out.fill_(bad)
    elif bad is not None:
        out.view(-1)[3] = bad
    return out


@contextmanager
def harmed(model: nn.Module, kind: str | None, rank: int, method: str) -> Iterator[None]:
    """Harm the gradient of one matrix inside the block."""
    weight = dict(model.named_parameters())["2.weight"]
    handle = weight.register_hook(lambda g: harm(g, kind, rank, method)) if kind else None
    yield
    if handle is not None:
        handle.remove()


def overflows(rank: int, method: str) -> bool:
    """Return whether the method's averages can overflow where no rank's values did."""
    model = mlp(0)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.05)
    with (
        stenograd.distribute(model, optimizer, method, bucket_bytes=BUCKET_BYTES, timeout_s=60) as sync,
        harmed(model, "overflow", rank, method),
    ):
        x, y = data(rank, 0)
        nn.functional.mse_loss(model(x), y).backward()
        return not sync.finite


def gradients(rank: int, method: str, bad: dict[int, str], steps: Sequence[int]) -> dict[str, Any]:
    """Train with `stenograd.distribute`."""
    model = mlp(0)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.05, momentum=0.9)
    sync = stenograd.distribute(model, optimizer, method, bucket_bytes=BUCKET_BYTES, timeout_s=60)
    lost, agree = [], True
    for step in steps:
        x, y = data(rank, step)
        optimizer.zero_grad()
        with harmed(model, bad.get(step), rank, method):
            nn.functional.mse_loss(model(x), y).backward()
        agree = agree and sync.finite == all(bool(p.grad.isfinite().all()) for p in model.parameters())
        if sync.finite:
            optimizer.step()
        else:
            lost.append(step)
    sync.close()
    return {"lost": lost, "skipped": sync.skipped, "applied": sync.step, "flat": flat(model), "agree": agree}


def hooked(rank: int, method: str, bad: dict[int, str], steps: Sequence[int]) -> dict[str, Any]:
    """Train with the communication hook of DistributedDataParallel."""
    model = DistributedDataParallel(mlp(0), bucket_cap_mb=BUCKET_BYTES / (1 << 20))
    optimizer = torch.optim.SGD(model.parameters(), lr=0.05, momentum=0.9)
    hook = stenograd.ddp.register(model, method, timeout_s=60)
    lost = []
    for step in steps:
        x, y = data(rank, step)
        optimizer.zero_grad()
        with harmed(model.module, bad.get(step), rank, method):
            nn.functional.mse_loss(model(x), y).backward()
        if all(bool(p.grad.isfinite().all()) for p in model.parameters()):
            optimizer.step()
        else:
            lost.append(step)
    hook.close()
    return {
        "lost": lost,
        "skipped": hook.skipped,
        "applied": hook._exchange.step,
        "flat": flat(model),
        "agree": True,
    }


def gossip(rank: int, method: str, bad: dict[int, str], steps: Sequence[int]) -> dict[str, Any]:
    """Train by gossip on a ring; a bad gradient costs its own rank's step, and the others go on."""
    model = mlp(rank)
    neighbors = [r for r in range(WORLD) if r != rank]
    optimizer = DecentralizedSGD(rank, neighbors, model, lr=0.05, momentum=0.9, timeout_s=60)
    lost = []
    for step in range(STEPS):
        x, y = data(rank, step)
        optimizer.zero_grad()
        if step in steps or rank != BAD_RANK:  # the run to compare with has no such gradient on that rank
            with harmed(model, bad.get(step), rank, method):
                nn.functional.mse_loss(model(x), y).backward()
        before = optimizer.skipped
        optimizer.step()
        lost += [step] * (optimizer.skipped - before)
    skipped = optimizer.skipped if rank == BAD_RANK else len(bad)
    lost = lost if rank == BAD_RANK or lost else list(bad)
    return {"lost": lost, "skipped": skipped, "applied": STEPS - skipped, "flat": flat(model), "agree": True}


def averaging(rank: int, method: str, bad: dict[int, str], steps: Sequence[int]) -> dict[str, Any]:
    """Take local steps and average parameters; before a bad exchange, one parameter is harmed."""
    model = mlp(0)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.05, momentum=0.9)
    parameters = dict(model.named_parameters())
    averager = ParameterAverager(parameters, Driver(timeout_s=60), method, chunk=300)
    averager.anchor()
    lost, agree = [], True
    for step in steps:
        x, y = data(rank, step)
        kept = parameters["2.weight"].detach().clone()
        if step in bad:
            parameters["2.weight"].data.copy_(harm(kept, bad[step], rank, method))
        else:
            optimizer.zero_grad()
            nn.functional.mse_loss(model(x), y).backward()
            optimizer.step()
        before = flat(model)
        averager.pack()
        averager.send()
        if not averager.merge(1.0):
            lost.append(step)
            agree = agree and torch.equal(before.nan_to_num(), flat(model).nan_to_num())  # nothing moved
            parameters["2.weight"].data.copy_(kept)
    averager.close()
    applied = len(steps) - len(lost)
    return {"lost": lost, "skipped": len(lost), "applied": applied, "flat": flat(model), "agree": agree}


def both(rank: int, kind: str, method: str, bad: dict[int, str]) -> dict[str, Any]:
    """Run with the bad steps and without them, and compare."""
    run = {"sync": gradients, "ddp": hooked, "gossip": gossip, "averaging": averaging}[kind]
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        seen = run(rank, method, bad, range(STEPS))
    clean = run(rank, method, {}, [s for s in range(STEPS) if s not in bad])
    told = sum("overflowed" in str(w.message) for w in caught)
    return {**seen, "equal": torch.equal(seen["flat"], clean["flat"]), "reports": told}


def cases() -> dict[str, tuple[str, str]]:
    """Return what to run: the kind of training and the method, by name."""
    out = {text: ("sync", text) for text in METHODS}
    out |= {f"DDP hook, {text}": ("ddp", text) for text in by_name()}
    out |= {f"parameter averaging, {text}": ("averaging", text) for text in differences()}
    return {**out, "gossip": ("gossip", "dense")}


def drill(pool: RankPool, kind: str, method: str) -> tuple[bool, list[object]]:
    """Return whether one case passed, and its row of the table."""
    bad = dict(BAD)
    if kind == "gossip" or (kind in ("sync", "ddp") and not any(pool.run(WORLD, overflows, method))):
        bad = {step: what for step, what in BAD.items() if what != "overflow"}
    elif kind == "averaging" and not method.startswith("fp16"):
        bad[25] = "inf"  # parameters travel exactly or as differences: only a wire of 16 bits overflows
    ranks = pool.run(WORLD, both, kind, method, bad)
    first = ranks[0]
    exact = all(row["lost"] == list(bad) and row["skipped"] == len(bad) and row["agree"] for row in ranks)
    good = all(row["applied"] == STEPS - len(bad) for row in ranks)
    equal = all(row["equal"] for row in ranks)
    own = kind == "gossip" or (kind == "averaging" and method != "dense")  # parameters of each rank's own
    alike = own or all(torch.equal(row["flat"], first["flat"]) for row in ranks)
    reports = sum(row["reports"] for row in ranks)
    told = reports == (kind != "gossip" and bad.get(25) == "overflow" and not method.startswith(_SILENT))
    others = f"{first['applied']} of {STEPS - len(bad)}"
    overflow = (
        bad.get(25, "none possible") if kind != "averaging" or method.startswith("fp16") else "a second inf"
    )
    row = [others, first["lost"], first["skipped"], overflow, "yes" if equal else "NO", reports]
    return exact and good and equal and alike and told, row


def main() -> int:
    """Run all cases; return the exit status."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--methods", default="", help="parts of names, comma-separated; none for all")
    args = parser.parse_args()
    start, rows, failures = time.perf_counter(), [], 0
    wanted = args.methods.split(",")
    with RankPool(WORLD) as pool:
        for name, (kind, method) in cases().items():
            if any(part in name for part in wanted):
                passed, row = drill(pool, kind, method)
                rows.append([name, *row, "pass" if passed else "FAIL"])
                print(*rows[-1], sep=", ", flush=True)
                failures += not passed
    header = [
        "method",
        "others applied",
        "lost",
        "skipped",
        "overflow",
        "as without them",
        "reports",
        "result",
    ]
    show(header, rows)
    print(f"bad steps: {BAD}; {len(rows) - failures} of {len(rows)} in {time.perf_counter() - start:.0f} s")
    return 1 if failures else 0


if __name__ == "__main__":
    raise SystemExit(main())
