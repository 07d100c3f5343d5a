"""PowerSGD: each gradient matrix as the product of two thin ones."""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import KW_ONLY, dataclass, replace
from functools import lru_cache
from typing import Any, ClassVar

import torch
from torch import Tensor

from stenograd.compression.contract import (
    Compressor,
    Exchange,
    Facts,
    Feedback,
    Site,
    State,
    require_floating,
)
from stenograd.compression.means import half_means, half_rounds, small_means, small_rounds
from stenograd.compression.orthogonalize import orthogonalize
from stenograd.devices import bring
from stenograd.errors import MethodError, bad_value, check_count
from stenograd.kernels.lowrank import Place, expand, project_columns, project_rows, take_out
from stenograd.wire.finite import finite_of
from stenograd.wire.requests import Rounds, commit, means

__all__ = ["PowerSGD"]

_VALUES = ("bfloat16", "float32")


@dataclass(frozen=True)
class PowerSGD(Compressor):
    """Send a rank-r approximation of each matrix: `P = orthonormal(mean(M Q))`, `Q = mean(M^T P)`, `P Q^T`.

    A tensor of shape (n, ...) with m = numel/n is an n x m matrix M; one that the factors would not make
    smaller (biases, scales, small or thin matrices) travels whole, together with P. One step of
    subspace iteration an exchange; with `warm_start` it goes on from the last Q, so that over the steps P
    tends to the leading left singular vectors. Biased: use error feedback.

    A rank's error is its own projection error, `M_r - P (M_r^T P)^T`: the mean of what the ranks sent is then
    the average, and no error exceeds M_r. The reference implementations subtract the average, `M_r - P Q^T`,
    whose residual also gathers the differences between the ranks and so walks at random.

    With `alternate` an exchange is half a step of the iteration: `P = mean(M Q)` for the last Q, made
    orthonormal, with `P Q^T` as the average, and next time `Q = mean(M^T P)` likewise. One factor travels
    instead of two, in one average, and one projection is computed instead of two.

    Wire: `16 r (n + m)` bits a matrix with `r = min(n, m, rank)` and 16 bits an element for the others, in
    two averages; with `alternate` `16 r n` and `16 r m` in turns. Twice as many with `values=float32`, four
    times for float64. What rounding loses stays in the error (`stenograd.compression.means`).

    Args:
        rank: largest rank of an approximation, 1 to 2^31 - 1; 1 to 4 are usual.
        warm_start: whether to start from the last Q (state "q/i" for tensor i) instead of a random one.
        seed: of the random Q; any integer, the same on every rank.
        alternate: whether to send one factor per exchange, in turns, instead of both; it goes on from the
            last exchange's factor (states "p/i" and "q/i"), so it needs `warm_start`.
        values: how the factors and what travels whole are written, unless x is float64: "bfloat16", or
            "float32", which is averaged by all-reduces.

    Raises:
        MethodError: rank outside its range, alternate without warm_start, or another word for values.

    Example:
        >>> import torch
        >>> from stenograd.simulate import exchange
        >>> rank_one = torch.outer(torch.arange(3.0), torch.arange(4.0))
        >>> method = PowerSGD(rank=1, values="float32")
        >>> exchange(method, [rank_one])[0].average.view(3, 4).round(decimals=3).abs()
        tensor([[0., 0., 0., 0.],
                [0., 1., 2., 3.],
                [0., 2., 4., 6.]])

    Reference: Vogels et al., "PowerSGD: Practical Low-Rank Gradient Compression for Distributed
    Optimization", NeurIPS 2019; the turns are those of its authors' later implementation (epfml/powersgd).
    """

    names: ClassVar[Mapping[str, Mapping[str, Any]]] = {"powersgd": {}}
    summary: ClassVar[str] = "low-rank factors of each matrix, by all-reduce"

    rank: int = 4
    _: KW_ONLY
    warm_start: bool = True
    seed: int = 0
    alternate: bool = False
    values: str = "bfloat16"

    def __post_init__(self) -> None:
        check_count("rank", self.rank, "use 4", MethodError)
        if self.alternate and not self.warm_start:
            rule = "must be true with alternate=true, which goes on from the last exchange"
            raise bad_value("warm_start", rule, self.warm_start, "leave one of the two out", MethodError)
        if self.values not in _VALUES:
            wanted = f"must be one of {', '.join(_VALUES)}"
            raise bad_value("values", wanted, self.values, "leave it out for bfloat16", MethodError)

    @classmethod
    def examples(cls) -> Iterator[PowerSGD]:
        """Yield a low and a higher rank, the latter also in turns and without memory."""
        yield cls(rank=1)
        yield cls(rank=4)
        yield cls(rank=4, alternate=True)
        yield cls(rank=4, warm_start=False)
        yield cls(rank=2, values="float32")
        yield cls(rank=2, values="float32", alternate=True)

    feedback = Feedback.ON  # what lies outside the leading subspace is dropped

    def facts(self, site: Site) -> Facts:
        """Averages of the factors on both sides; the first round tells what is finite."""
        return Facts(rounds=self._round_count(site), finite=True, frees_residual=True)

    def exchange(self, x: Tensor, residual: Tensor | None, state: State, site: Site) -> Rounds[Exchange]:
        """Project on both sides in two rounds, or on one in turns."""
        run = self._one_factor if self.alternate else self._two_factors
        return run(x, residual, state, site)

    def _round_count(self, site: Site) -> int:
        batches, dense = _plan(site.shapes, self.rank)
        if self.halves(site.dtype):
            return half_rounds(site.world_size) * (1 if self.alternate else 1 + bool(batches))
        width = torch.promote_types(site.dtype, torch.float32).itemsize
        left = sum(len(b.tensors) * b.rank * b.rows for b in batches) + sum(b - a for a, b in dense)
        right = sum(len(b.tensors) * b.rank * b.columns for b in batches)
        if self.alternate:
            dense_bytes = width * sum(b - a for a, b in dense)
            # The longer of the two turns decides for both: a bucket chooses its transport once.
            largest = max(width * left, dense_bytes + width * right)
            return small_rounds(largest, site.world_size, site.device)
        sizes = [width * left] + [width * right] * bool(batches)
        return sum(small_rounds(nbytes, site.world_size, site.device) for nbytes in sizes)

    def halves(self, dtype: torch.dtype) -> bool:
        """Return whether numbers travel as bfloat16 for x of a type."""
        return self.values == "bfloat16" and dtype is not torch.float64

    def init(self, like: Tensor, site: Site) -> State:
        """Draw the first Q of every compressed tensor, equal on all ranks; with `alternate` P as well."""
        require_floating(like)
        return self._random_queries(like, site) if self.warm_start else {}

    def queries(self, state: State, like: Tensor, site: Site) -> State:
        """Return Q of every compressed tensor: the last ones, or new random ones."""
        return state if self.warm_start else self._random_queries(like, site)

    def _random_queries(self, like: Tensor, site: Site) -> State:
        dtype = torch.promote_types(like.dtype, torch.float32)
        generator = site.generator(self.seed, shared=True)
        batches = _plan(site.shapes, self.rank)[0]
        shapes = {f"q/{i}": (b.columns, b.rank) for b in batches for i in b.tensors}
        if self.alternate:
            shapes |= {f"p/{i}": (b.rows, b.rank) for b in batches for i in b.tensors}
        found = {}
        for name in sorted(shapes, key=_order):  # by tensor: what is drawn does not depend on the batches
            first = torch.empty(shapes[name], dtype=torch.float32, device="cpu")
            if self.alternate:  # ranks expand these as they are; normal ones need the processor's logarithm
                first.uniform_(-1, 1, generator=generator)
            else:
                first.normal_(generator=generator)
            found[name] = bring(first.to(dtype), like.device)
        return found

    def _two_factors(self, x: Tensor, residual: Tensor | None, state: State, site: Site) -> Rounds[Exchange]:
        """Average P, orthogonalise it, average Q; the residual is added while projecting."""
        batches, dense = _plan(site.shapes, self.rank)
        work = x.to(torch.promote_types(x.dtype, torch.float32))
        queries = self.queries(state, x, site)
        # Here only to what travels whole: `project_rows` adds it to the matrices in the pass that reads them.
        if residual is not None:
            for start, stop in dense:
                work[start:stop] += residual[start:stop]
        qts = [torch.stack([queries[f"q/{i}"].mT for i in b.tensors]) for b in batches]  # (count, r, m)
        # M_r Q, (count, r, n)
        thin = [project_rows(work, residual, b.place, qt) for b, qt in zip(batches, qts, strict=True)]
        exact = [work[a:b] for a, b in dense]
        reply, sent = yield from _averages(thin, exact, self, site)
        finite = finite_of(reply)  # what is not finite makes the mean of M Q so
        pts = [orthogonalize(p.mT).mT.contiguous() for p in reply[: len(batches)]]  # (count, r, n)
        # M_r^T P, (count, r, m)
        local = [project_columns(work, b.place, pt) for b, pt in zip(batches, pts, strict=True)]
        # `local` as it travelled, so that what rounding loses stays in the error.
        qts, local = (yield from _averages(local, [], self, site)) if batches else ([], [])
        # An element that meets a zero of Q shows in M^T P, if anywhere.
        finite = torch.minimum(finite, finite_of(qts).to(finite.device))
        # Behind the last collective: the pipeline refuses one that is asked for after a commit.
        if site.frees_residual and (yield from commit(finite)):
            site = replace(site, buffer=residual)
        # work keeps this rank's error, so the average then needs memory of its own.
        average = site.out(work) if site.error else work
        _put_exact(average, work if site.error else None, dense, reply[len(batches) :], sent[len(batches) :])
        for b, pt, own, mean in zip(batches, pts, local, qts, strict=True):
            expand(average, b.place, (pt, mean))  # P Q^T
            if site.error:
                take_out(work, b.place, (pt, own))  # M_r - P (M_r^T P)^T
        state = _next("q", batches, qts) if self.warm_start else state
        error = work.to(x.dtype) if site.error else None
        return Exchange(average.to(x.dtype), state, error, finite)

    def _one_factor(self, x: Tensor, residual: Tensor | None, state: State, site: Site) -> Rounds[Exchange]:
        """Average P for the last Q, or Q for the last P, in turns."""
        batches, dense = _plan(site.shapes, self.rank)
        work = x.to(torch.promote_types(x.dtype, torch.float32))
        # By the number of applied exchanges, so a skipped step repeats its turn and a resumed run goes on.
        left = site.step % 2 == 0  # whether P is sent
        known, new = ("q", "p") if left else ("p", "q")
        bases = [
            orthogonalize(torch.stack([state[f"{known}/{i}"] for i in b.tensors])).mT.contiguous()
            for b in batches
        ]
        if residual is not None:
            for start, stop in dense if left else [(0, work.numel())]:  # projecting on the left adds the rest
                work[start:stop] += residual[start:stop]
        pairs = list(zip(batches, bases, strict=True))
        if left:
            local = [project_rows(work, residual, b.place, basis) for b, basis in pairs]  # (count, r, n)
        else:
            local = [project_columns(work, b.place, basis) for b, basis in pairs]  # (count, r, m)
        exact = [work[a:b] for a, b in dense]
        # `facts` gave both turns one number of rounds, so a short turn must not take two hops by itself.
        reply, sent = yield from _averages(local, exact, self, site, small=self._round_count(site) > 1)
        finite = finite_of(reply)  # what is not finite makes the projections so
        if site.frees_residual and (yield from commit(finite)):
            site = replace(site, buffer=residual)
        average = site.out(work) if site.error else work
        _put_exact(average, work if site.error else None, dense, reply[len(batches) :], sent[len(batches) :])
        for (b, basis), own, mean in zip(pairs, sent, reply, strict=False):
            expand(average, b.place, (mean, basis) if left else (basis, mean))
            if site.error:
                take_out(work, b.place, (own, basis) if left else (basis, own))
        fresh, kept = _next(new, batches, reply), {n: t for n, t in state.items() if n.startswith(known)}
        state = {**fresh, **kept} if left else {**kept, **fresh}  # p before q, as `init` has them
        error = work.to(x.dtype) if site.error else None
        return Exchange(average.to(x.dtype), state, error, finite)


@dataclass(frozen=True, slots=True)
class _Batch:
    """Matrices of one shape at equal distances in the flat x, so that one place tells them all.

    tensors: their indices in `Site.shapes`. start, stride: in elements of x.
    """

    tensors: tuple[int, ...]
    start: int
    stride: int
    rows: int
    columns: int
    rank: int

    @property
    def place(self) -> Place:
        return self.start, self.stride, len(self.tensors), self.rows, self.columns


# Asked for by `facts`, `init` and every exchange. The lists are shared: nobody may change them.
@lru_cache(maxsize=1024)
def _plan(shapes: tuple[torch.Size, ...], rank: int) -> tuple[list[_Batch], list[tuple[int, int]]]:
    """Return the batches of matrices to compress, and the stretches of x to send as they are."""
    indices: dict[tuple[int, int], list[tuple[int, int]]] = {}
    dense: list[tuple[int, int]] = []
    start = 0
    for i, shape in enumerate(shapes):
        n, m = (shape[0], math.prod(shape[1:])) if shape else (1, 1)
        r = min(n, m, rank)
        if r * (n + m) < n * m:
            indices.setdefault((n, m), []).append((i, start))
        elif dense and dense[-1][1] == start:
            dense[-1] = (dense[-1][0], start + n * m)
        else:
            dense.append((start, start + n * m))
        start += n * m
    runs = [(n, m, run) for (n, m), found in indices.items() for run in _even_runs(found)]
    return [_batch(n, m, min(n, m, rank), run) for n, m, run in runs], dense


def _batch(n: int, m: int, r: int, run: list[tuple[int, int]]) -> _Batch:
    tensors, starts = zip(*run, strict=True)
    stride = starts[1] - starts[0] if len(run) > 1 else n * m
    return _Batch(tensors, starts[0], stride, rows=n, columns=m, rank=r)


def _even_runs(found: Sequence[tuple[int, int]]) -> Iterator[list[tuple[int, int]]]:
    """Cut (tensor, start) pairs into runs whose starts are equally far apart."""
    run = [found[0]]
    for place in found[1:]:
        if len(run) > 1 and place[1] - run[-1][1] != run[1][1] - run[0][1]:
            yield run
            run = []
        run.append(place)
    yield run


def _averages(
    factors: Sequence[Tensor], exact: Sequence[Tensor], codec: PowerSGD, site: Site, *, small: bool = True
) -> Rounds[tuple[list[Tensor], list[Tensor]]]:
    """Average factors and what is not compressed; return the averages and what of this rank is in them."""
    tensors = [*factors, *exact]
    if codec.halves(site.dtype):
        flat = torch.cat([t.reshape(-1) for t in tensors])
        average, sent = yield from half_means(flat, site.rank, site.world_size)
        return _cut(average, tensors), _cut(sent, tensors)
    # A mean may be taken where its tensor lies, and what this rank sent is needed afterwards.
    # `exact` needs no copy: nothing of it is lost, and `_put_exact` subtracts that memory from itself.
    asked = [*(t.clone() for t in factors), *exact]
    return list((yield from (small_means(asked, site.world_size) if small else means(asked)))), tensors


def _cut(row: Tensor, like: Sequence[Tensor]) -> list[Tensor]:
    return [part.view(t.shape) for part, t in zip(row.split([t.numel() for t in like]), like, strict=True)]


def _put_exact(
    average: Tensor,
    work: Tensor | None,
    dense: Sequence[tuple[int, int]],
    means: Sequence[Tensor],
    sent: Sequence[Tensor],
) -> None:
    """Write the averages of what is not compressed, and leave in work, if it is wanted, what was not sent."""
    for (start, stop), mean, own in zip(dense, means, sent, strict=True):
        average[start:stop] = mean  # before work changes: mean and own may lie in it
        if work is not None:
            work[start:stop] -= own


def _next(name: str, batches: Sequence[_Batch], thin: Sequence[Tensor]) -> State:
    """Keep a factor's directions; its length would be squared in the next one and leave float32's range."""
    state: dict[str, Tensor] = {}
    for b, t in zip(batches, thin, strict=False):  # behind the factors a reply has exact means
        largest = t.abs().amax(2, keepdim=True)  # (count, r, 1)
        found = (t / torch.where(largest > 0, largest, 1.0)).mT  # (b, n or m, r)
        for i, factor in zip(b.tensors, found, strict=True):
            # A copy, because a view would keep the memory of the whole batch.
            state[f"{name}/{i}"] = factor.clone(memory_format=torch.contiguous_format)
    return dict(sorted(state.items(), key=lambda item: _order(item[0])))  # the order that `init` has


def _order(name: str) -> tuple[str, int]:
    """Return what sorts the names of state by factor and then by tensor."""
    factor, tensor = name.split("/")
    return factor, int(tensor)
