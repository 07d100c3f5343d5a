"""N ranks in one process and no network: the same coroutines, driven in step.

Results are those of real ranks (averages divide before summing and sum in rank order), so a compressor's
mathematics is tested in milliseconds.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import replace
from typing import TypeVar

import torch
from torch import Tensor

from stenograd.compression.contract import Compressor, Exchange, Site, State
from stenograd.errors import WireError
from stenograd.wire.finite import Finite
from stenograd.wire.requests import Op, Reply, Request, Rounds

__all__ = ["answers", "exchange", "run"]

T = TypeVar("T")


def run(
    ranks: Sequence[Rounds[T]],
    *,
    spy: Callable[[Request], None] | None = None,
    refuse_commits: bool = False,
) -> list[T]:
    """Drive one coroutine per rank to its end and return what each returned.

    Args:
        ranks: coroutines in rank order.
        spy: called with every request of rank 0, to count bytes and rounds.
        refuse_commits: answer every `COMMIT` as if another part of the step had not been finite.

    Raises:
        WireError: the ranks asked for different collectives, or for different shapes in one, or one waits
            for a rank that sends it nothing, or sends to one that does not expect it; real ranks would hang
            or corrupt data there.

    Example:
        >>> import torch
        >>> from stenograd.wire.requests import mean
        >>> run([mean(torch.tensor([1.0])), mean(torch.tensor([3.0]))])
        [tensor([2.]), tensor([2.])]
    """
    replies: list[Reply] = [None] * len(ranks)
    while True:
        asked: list[Request] = []
        results: list[T] = []
        for rank, reply in zip(ranks, replies, strict=True):
            try:
                asked.append(rank.send(reply))
            except StopIteration as stop:
                results.append(stop.value)
        if len(results) == len(ranks):
            return results
        if results:
            raise WireError(
                f"{len(results)} of {len(ranks)} ranks ended while the others ask for a collective"
            )
        if spy is not None:
            for request in asked[0].parts or asked[:1]:
                spy(request)
        replies = answers(asked, refuse_commits)


def exchange(
    compressor: Compressor,
    xs: Sequence[Tensor],
    states: Sequence[State] | None = None,
    *,
    shapes: Sequence[torch.Size] | None = None,
    step: int = 0,
    key: int = 0,
    want_error: bool = False,
    commits: bool | None = None,
    spy: Callable[[Request], None] | None = None,
) -> list[Exchange]:
    """Run one exchange of `compressor` over `len(xs)` simulated ranks.

    Args:
        compressor: what to run.
        xs: every rank's tensor, of any shape; not modified.
        states: as the last exchange left them; None starts afresh.
        shapes: the tensors inside each x, if it is a bucket of several; default: x itself.
        step: number of exchanges before this one.
        key: number of the bucket, which random choices depend on.
        want_error: whether the exchanges must carry `error`.
        commits: None keeps `states` as they are. True commits the step as soon as all ranks know it to be
            finite, as in training: averages may then take the memory of old residuals, so `states` must not
            be used again. False lets compressors ask, and takes the step back.
        spy: called with every request of rank 0.

    Example:
        >>> import torch
        >>> from stenograd.compressors.topk import TopK
        >>> ranks = exchange(TopK(ratio=0.5), [torch.tensor([4.0, 1.0]), torch.tensor([1.0, 2.0])])
        >>> ranks[0].average
        tensor([2., 1.])
    """
    cut = tuple(torch.Size(s) for s in (shapes if shapes is not None else [xs[0].shape]))
    sites = [Site(cut, r, len(xs), step, key, x.dtype, x.device) for r, x in enumerate(xs)]
    flats = [x.reshape(-1).clone() for x in xs]
    if states is None:
        states = [compressor.init(x, site) for x, site in zip(flats, sites, strict=True)]
    ranks = []
    for x, state, site in zip(flats, states, sites, strict=True):
        frees = commits is not None and compressor.facts(site).frees_residual
        asked = replace(site, error=want_error, frees_residual=frees)
        ranks.append(compressor.exchange(x, None, state, asked))
    return run(ranks, spy=spy, refuse_commits=commits is False)


def answers(asked: list[Request], refuse_commits: bool = False) -> list[Reply]:
    """Return the reply to each rank's request in one collective.

    Raises:
        WireError: the ranks asked for different collectives.
    """
    # Without peers, which differ from rank to rank by design; `_check_peers` compares them.
    forms = [(r.op, len(r.parts), [(tuple(t.shape), t.dtype) for t in r.tensors]) for r in asked]
    for rank, form in enumerate(forms):
        if form != forms[0]:
            raise WireError(f"rank 0 asks for {forms[0]}, rank {rank} for {form}: all must ask for the same")
    if asked[0].op is Op.SEVERAL:
        replies = [
            answers(list(same), refuse_commits) for same in zip(*(r.parts for r in asked), strict=True)
        ]
        return [list(own) for own in zip(*replies, strict=True)]
    # Copies: ranks may be threads, and each may write over what it got.
    if asked[0].op is Op.GATHER:
        return [[tuple(t.clone() for t in r.tensors) for r in asked] for _ in asked]
    if asked[0].op is Op.SCATTER:
        asked[0].check_rows(len(asked))
        return [[tuple(t[rank].clone() for t in r.tensors) for r in asked] for rank in range(len(asked))]
    if asked[0].op is Op.COMMIT:
        bounded = all(int(t) == Finite.BOUNDED for r in asked for t in r.tensors)
        return [bounded and not refuse_commits] * len(asked)
    if asked[0].op is Op.READ:
        return [[t.tolist() for t in r.tensors] for r in asked]
    if asked[0].op is Op.EXCHANGE:
        _check_peers(asked)
        return [{p: tuple(t.clone() for t in asked[p].tensors) for p in r.senders} for r in asked]
    parts = 1 if asked[0].op is Op.SUM else len(asked)
    sums = [t / parts for t in asked[0].tensors]
    for request in asked[1:]:
        for total, t in zip(sums, request.tensors, strict=True):
            total += t / parts
    if len(sums) == 1:  # as the real driver: one tensor is averaged in place
        return [(r.tensors[0].copy_(sums[0]),) for r in asked]
    return [tuple(t.clone() for t in sums) for _ in asked]


def _check_peers(asked: list[Request]) -> None:
    for rank, request in enumerate(asked):
        for other in (*request.peers, *request.senders):
            if not 0 <= other < len(asked) or other == rank:
                raise WireError(f"rank {rank} of {len(asked)} cannot exchange with rank {other}")
        for peer in request.peers:
            received = asked[peer]
            if rank in received.senders:
                continue
            if request.sources is None and received.sources is None:
                raise WireError(
                    f"rank {rank} exchanges with rank {peer}, whose peers are {list(received.peers)}: "
                    "the relation must be symmetric"
                )
            raise WireError(
                f"rank {rank} sends to rank {peer}, whose sources are {list(received.senders)}: it must be "
                "among them"
            )
        for source in request.senders:
            if rank not in asked[source].peers:
                raise WireError(
                    f"rank {rank} waits for rank {source}, which sends to {list(asked[source].peers)}: it "
                    "must be among them"
                )
