"""Fifteen kinds of ordinary training programs under every method: do they run as they do without Stenograd?

Every program is a user's loop (`program_networks.py`, `program_collectives.py`) and shows that Stenograd gets
along with what it does:

    gan, gan-one            alternating losses; a pass reaches another engine's parameters; frozen layers
    actor-critic, -one      two engines in one backward pass; two optimizers on one
    three                   two or three models in one backward pass, reached in another order on every rank
    clip                    all-gather with gradients on the default group
    mixture                 all-to-all with gradients on the default group; parameters unused in some steps
    metrics                 all-reduces in gradient hooks, registered after Stenograd's
    backward-sum            an all-reduce in a backward function, between the gradients of two models
    beside-a-thread         all-reduces on the default group in a thread of the user's
    ddp, ...                the DDP hook with unused parameters, static graph, bucket views, no_sync
    sparse                  sparse embeddings with SparseAdam beside a dense head
    uneven, ddp-uneven      ranks with different numbers of batches, by Join
    penalty                 double backward
    averaged                averages and copies of the weights, gradient clipping, a schedule
    alternating             optimizers that step in turn; layers frozen and unfrozen
    checkpointed            activation checkpointing

It passes if it ends in time, all ranks' parameters are equal bit for bit and finite, every parameter has a
gradient where some rank used it and keeps what it had where none did, no step is skipped, and

    mean over ranks of sum g = sum of what was applied + mean over ranks of the residual

for each parameter, to 1e-5 of the norm of the left side. The last holds for methods with error feedback,
except those that vote, whose average is not the mean of what was sent; for lossless ones; and for sparse
gradients. Methods without feedback lose what they lose; for them the losses must fall instead, and in runs
of 1,000 steps for all, unless two networks play against each other.

Under a schedule that averages parameters in rounds, such as local:every=4, ranks train by themselves in
between. Then parameters must be equal bit for bit right after an exact round; after one that a codec wrote,
the mean of what was sent, and in the end the parameters inside `consensus()`. Every round that came due must
have been held, and the losses must fall. Programs that such a schedule refuses are skipped.
"""

from __future__ import annotations

import warnings
from collections.abc import Callable, Iterator
from contextlib import ExitStack
from functools import partial
from statistics import fmean
from typing import Any

import program_collectives as collectives
import program_networks as networks
from accounts import Job, digest, scheduled, watched

from stenograd.testing.methods import configurations

PROGRAMS: dict[str, Callable[[Job], list[float]]] = {
    "gan": partial(networks.gan, engines=2),
    "gan-one": partial(networks.gan, engines=1),
    "actor-critic": partial(networks.actor_critic, engines=2),
    "actor-critic-one": partial(networks.actor_critic, engines=1),
    "three": networks.three,
    "clip": collectives.clip,
    "mixture": collectives.mixture,
    "metrics": collectives.metrics,
    "backward-sum": collectives.backward_sum,
    "beside-a-thread": collectives.beside_a_thread,
    "ddp-unused": partial(collectives.ddp, unused=True),
    "ddp-unused-views": partial(collectives.ddp, unused=True, gradient_as_bucket_view=True),
    "ddp-static": partial(collectives.ddp, static_graph=True),
    "ddp-views": partial(collectives.ddp, gradient_as_bucket_view=True),
    "ddp-no-sync": partial(collectives.ddp, accumulate=2),
    "sparse": networks.sparse,
    "uneven": collectives.uneven,
    "ddp-uneven": collectives.ddp_uneven,
    "penalty": networks.penalty,
    "averaged": networks.averaged,
    "alternating": networks.alternating,
    "checkpointed": networks.checkpointed,
}
METHODS = configurations()
SCHEDULED = scheduled()
TOLERANCE = 1e-5  # of the norm of a parameter's summed gradient; in float32, 200 steps lose about 1e-6
FALLS = 0.9  # at most this part of the first losses must be left, from 50 steps on
LONG = 1000  # steps from which on it must be so for methods with error feedback, too, which start later
# Not of these: two networks that play against each other circle. With sign 0.36 of the distance was left
# after 200 steps and 0.93 after 1,000, with every gradient accounted for.
ADVERSARIAL = ("gan", "gan-one")


def run(rank: int, world: int, program: str, method: str, steps: int) -> dict[str, Any]:
    """Run a program on this rank and return what to judge it by."""
    warnings.filterwarnings(
        "ignore", "torch.distributed.nn.functional", FutureWarning
    )  # it is what users use
    job = Job(rank, world, steps, method)
    with watched(job):
        losses = PROGRAMS[program](job)
    with ExitStack() as stack:
        for ledger in job.ledgers:
            stack.enter_context(ledger.settled())
        tensors = [p for ledger in job.ledgers for p in ledger.model.parameters()]
        tensors += [] if method in SCHEDULED else job.alike
        ends = digest(tensors), all(bool(t.isfinite().all()) for t in tensors)
    out = {
        "program": program,
        "digest": ends[0],
        "finite": ends[1],
        "told": [ledger.told() for ledger in job.ledgers],
        "losses": losses,
        "lost": {f"{i}.{n}": e for i, one in enumerate(job.ledgers) for n, e in one.lost().items()},
        "misused": [found for ledger in job.ledgers for found in ledger.misused()],
        "skipped": sum(ledger.sync.skipped for ledger in job.ledgers),
    }
    for ledger in job.ledgers:
        ledger.sync.close()
    return out


def faults(ranks: list[dict[str, Any]]) -> Iterator[str]:
    """Say what is wrong with a run, given what all ranks returned."""
    first = ranks[0]
    if len({row["digest"] for row in ranks}) > 1:
        yield "replicas differ"
    if any(row["told"] != first["told"] for row in ranks):
        yield f"parameters differ right after a round: {[row['told'] for row in ranks]}"[:400]
    if not all(row["finite"] for row in ranks):
        yield "not finite"
    if any(row["skipped"] for row in ranks):
        yield f"{first['skipped']} steps skipped"
    if first["misused"]:
        yield f"gradients wrongly there or missing, or rounds: {first['misused'][:4]}"
    worst = max(first["lost"], key=first["lost"].__getitem__, default=None)
    if worst is not None and not first["lost"][worst] <= TOLERANCE:
        yield f"lost {first['lost'][worst]:.1e} of {worst}"
    long = len(first["losses"]) >= LONG and first["program"] not in ADVERSARIAL
    if (long or not first["lost"]) and fallen(ranks) > FALLS:
        yield f"losses fell to {fallen(ranks):.2f} only"


def fallen(ranks: list[dict[str, Any]]) -> float:
    """Return what part of the first losses is left in the end; of few steps nothing is asked, so 0."""
    if min(len(row["losses"]) for row in ranks) < 50:
        return 0.0
    tenth = len(ranks[0]["losses"]) // 10
    start = fmean(fmean(row["losses"][:tenth]) for row in ranks)
    return fmean(fmean(row["losses"][-tenth:]) for row in ranks) / start
