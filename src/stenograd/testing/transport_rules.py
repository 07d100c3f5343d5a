"""The rules of the conformance suite about facts: what a compressor declares is what `exchange` does."""

from __future__ import annotations

from collections.abc import Callable, Sequence

import torch
from torch import Tensor

from stenograd.comm.simulate import run
from stenograd.compression.contract import Compressor, Exchange, Facts, Site, State
from stenograd.data.finite import Finite
from stenograd.data.requests import Op, Request, Rounds, summed
from stenograd.testing.checks import NUMEL, SHAPES, close, data, expect, mean_of, same, same_states

__all__ = ["TRANSPORT_RULES"]

_WORLDS = (1, 2, 3, 4, 5, 8)
_BAD = (float("nan"), float("inf"), -float("inf"))
_PLACES = (slice(5, 6), slice(NUMEL - 1, NUMEL), slice(None))
# Finite, but sums of two or squares of it are not; and what only a sum of very many would take to infinity.
_LARGE = (3e38, 1e35)


def _facts(c: Compressor, world: int, rank: int = 0, step: int = 0) -> Facts:
    return c.facts(Site(shapes=SHAPES, rank=rank, world_size=world, step=step))


def declarations_are_equal(c: Compressor) -> None:
    """Whatever the rank and the step, a compressor declares the same facts."""
    for world in _WORLDS:
        first = _facts(c, world)
        for rank, step in ((world - 1, 0), (0, 3)):
            found = _facts(c, world, rank, step)
            expect(found == first, "the facts depend on neither rank nor step", world=world, got=found)


def rounds_are_as_declared(c: Compressor) -> None:
    """As many collectives are asked for as `rounds` says, and `COMMIT` only where that is declared."""
    for world in _WORLDS:
        facts, asked = _facts(c, world), _Asked()
        _run(c, data(world), frees=facts.frees_residual, watch=asked)
        expect(
            asked.rounds == facts.rounds,
            "rounds declared = rounds run",
            world=world,
            declared=facts.rounds,
            run=asked.rounds,
        )
        expect(
            asked.commits == facts.frees_residual,
            "frees_residual: asks once by COMMIT, and only if that is declared",
            world=world,
            asked=asked.commits,
        )


def commits_change_no_number(c: Compressor) -> None:
    """Averages and states are the same whether a step is kept, committed or taken back.

    Old state is whole when `COMMIT` is asked, and stays so if the answer is no. If it is yes, the average
    takes the memory of the residual.
    """
    for world in (2, 4, 5):
        frees = _facts(c, world).frees_residual
        states = [e.state for e in _run(c, data(world))]
        xs = data(world, seed=1)
        kept = _run(c, xs, _copies(states))
        refused = _copies(states)
        intact = _Intact(states[0], refused[0])
        taken_back = _run(c, xs, refused, frees=frees, refuse=True, watch=intact)
        for rank, (old, new) in enumerate(zip(states, refused, strict=True)):
            whole = same_states(old, new)
            expect(
                whole, "a step that is taken back leaves the given state as it was", world=world, rank=rank
            )
        given = _copies(states)
        intact = _Intact(states[0], given[0])
        committed = _run(c, xs, given, frees=frees, watch=intact)
        expect(intact.whole, "old state is whole until the step is committed", world=world)
        for name, out in (("committed", committed), ("taken back", taken_back)):
            equal = all(same(a.average, b.average) for a, b in zip(kept, out, strict=True))
            equal = equal and all(same_states(a.state, b.state) for a, b in zip(kept, out, strict=True))
            expect(equal, "a commit changes no number", world=world, step=name)
        if frees and "residual" in given[0]:
            freed = [_shares(e.average, s["residual"]) for e, s in zip(committed, given, strict=True)]
            expect(all(freed), "frees_residual: the average takes the residual's memory", world=world)


def bad_numbers_are_reported(c: Compressor) -> None:
    """NaN and infinity on one rank raise nothing, and are told of or seen in the average on every rank."""
    for world in (1, 2, 4, 5):
        facts = _facts(c, world)
        for i, bad in enumerate(_BAD):
            for where in _PLACES if world in (1, 4) else _PLACES[i : i + 1]:
                xs = data(world)
                xs[-1][where] = bad
                asked = _Asked()
                for e in _run(c, xs, frees=facts.frees_residual, watch=asked):
                    expect(e.average.shape == (NUMEL,), "a non-finite x still has an average", bad=bad)
                    if facts.finite:
                        told = e.finite is not None and int(e.finite) == Finite.NO
                        rule = "finite: every rank hears of a non-finite x"
                        expect(told, rule, world=world, bad=bad, got=e.finite)
                    if facts.linear:
                        rule = "linear: a non-finite x makes the average non-finite"
                        expect(not e.average.isfinite().all(), rule, world=world, bad=bad)
                rule = "a non-finite x is never committed"
                expect(all(flag != Finite.BOUNDED for flag in asked.flags), rule, world=world, bad=bad)


def large_numbers_are_told_from_bad_ones(c: Compressor) -> None:
    """A finite x is not reported as bad, and what is reported as bounded has a finite average and state.

    Unless what was made of it has overflowed, such as a transform that adds up a block.
    """
    for world in (1, 2, 4, 5):
        facts = _facts(c, world)
        if not facts.finite:
            continue
        for large in (0.0, 1.0, *_LARGE):
            xs = data(world)
            xs[-1] = torch.full((NUMEL,), large, device="cpu")
            asked = _Asked()
            out = _run(c, xs, frees=facts.frees_residual, watch=asked)
            made = all(t.isfinite().all() for e in out for t in (e.average, *e.state.values()))
            for e in out:
                rule = "finite: a finite x is not reported as NaN or infinity"
                expect(e.finite is not None, "finite: every exchange tells", world=world)
                spoilt = large in _LARGE and not made
                told = e.finite is not None and int(e.finite)
                expect(told != Finite.NO or spoilt, rule, world=world, large=large)
                bounded = told == Finite.BOUNDED or Finite.BOUNDED in asked.flags
                rule = "what is reported as bounded has a finite average and state"
                expect(not bounded or made, rule, world=world, large=large)


def linear_codes_add_up(c: Compressor) -> None:
    """A linear compressor takes x that is divided, may be cut anywhere, and leaves the state alone."""
    for world in (1, 2, 3, 4):
        facts = _facts(c, world)
        if not facts.linear:
            continue
        xs = data(world)
        plain = _run(c, xs)
        divided = facts.rounds == 1  # as the engine does it
        scaled = _run(c, [x / world for x in xs], sums=True) if divided else plain
        for a, b in zip(plain, scaled, strict=True):
            worst = float((a.average - b.average).abs().max())
            limit = 2**-6 * max(1.0, float(mean_of(xs).abs().max()))
            expect(worst <= limit, "linear: x may come divided by the world size", world=world, worst=worst)
            expect(not a.state, "linear: no state that NaN could harm", got=sorted(a.state))
        at = NUMEL // 3
        parts = [_run(c, [x[cut] for x in xs], cut=True) for cut in (slice(at), slice(at, None))]
        joined = torch.cat([part[0].average for part in parts])
        close(joined, plain[0].average, 1e-7, "linear: x may be cut anywhere")


class _Asked:
    """Counts what rank 0 asks for."""

    def __init__(self) -> None:
        self.rounds = self.commits = 0
        self.flags: list[int] = []

    def __call__(self, request: Request) -> None:
        if request.op is Op.COMMIT:
            self.commits += 1
            self.flags += [int(flag) for flag in request.tensors]
        else:
            self.rounds += 1


class _Intact:
    """Compares a state with what it was when `COMMIT` is asked."""

    def __init__(self, wanted: State, given: State) -> None:
        self._wanted, self._given, self.whole = wanted, given, True

    def __call__(self, request: Request) -> None:
        if request.op is Op.COMMIT:
            self.whole &= same_states(self._wanted, self._given)


def _run(
    c: Compressor,
    xs: Sequence[Tensor],
    states: Sequence[State] | None = None,
    *,
    frees: bool = False,
    refuse: bool = False,
    sums: bool = False,
    watch: Callable[[Request], None] | None = None,
    cut: bool = False,
) -> list[Exchange]:
    """Run one exchange; rank 0 is watched."""
    shapes = (xs[0].shape,) if cut else SHAPES
    ranks: list[Rounds[Exchange]] = []
    for rank, x in enumerate(xs):
        site = Site(shapes, rank, len(xs), device=xs[0].device, frees_residual=frees)
        state = c.init(x, site) if states is None else states[rank]
        rounds = c.exchange(x.clone(), None, state, site)
        rounds = summed(rounds) if sums else rounds
        ranks.append(_watched(rounds, watch) if watch is not None and not rank else rounds)
    return run(ranks, refuse_commits=refuse)


def _watched(rounds: Rounds[Exchange], watch: Callable[[Request], None]) -> Rounds[Exchange]:
    reply = None
    while True:
        try:
            request = rounds.send(reply)
        except StopIteration as stop:
            return stop.value  # type: ignore[no-any-return]
        watch(request)
        reply = yield request


def _copies(states: Sequence[State]) -> list[State]:
    return [{key: t.clone() for key, t in state.items()} for state in states]


def _shares(a: Tensor, b: Tensor) -> bool:
    return a.untyped_storage().data_ptr() == b.untyped_storage().data_ptr()


TRANSPORT_RULES: tuple[Callable[[Compressor], None], ...] = (
    declarations_are_equal,
    rounds_are_as_declared,
    commits_change_no_number,
    bad_numbers_are_reported,
    large_numbers_are_told_from_bad_ones,
    linear_codes_add_up,
)
