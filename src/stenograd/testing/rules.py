"""The rules of the conformance suite: each takes a compressor and raises AssertionError if it is broken.

The last ones are about its facts: what it declares is what `exchange` does.
"""

from __future__ import annotations

import io
from collections.abc import Callable, Sequence

import torch
from torch import Tensor

from stenograd.compression.contract import Compressor, Exchange, Facts, Feedback, Site, State
from stenograd.compression.feedback import ErrorFeedback
from stenograd.exchange.simulate import exchange, run
from stenograd.testing.checks import (
    NUMEL,
    SHAPES,
    base,
    close,
    data,
    error_of,
    expect,
    form_of,
    mean_of,
    requests_of,
    same,
    same_states,
    votes,
    wire_eps,
)
from stenograd.wire.finite import Finite
from stenograd.wire.requests import REDUCTIONS, Op, Request, Rounds, summed

__all__ = ["RULES"]

_WORLDS = (1, 2, 3, 4)  # from four ranks on some compressors share the work of averaging
_DTYPES = (torch.float32, torch.float64, torch.float16, torch.bfloat16)
_MORE_WORLDS = (1, 2, 3, 4, 5, 8)
_BAD = (float("nan"), float("inf"), -float("inf"))
_PLACES = (slice(5, 6), slice(NUMEL - 1, NUMEL), slice(None))
# Finite, but sums of two or squares of it are not; and what only a sum of very many would take to infinity.
_LARGE = (3e38, 1e35)


def state_keeps_its_form(c: Compressor) -> None:
    """Keys, shapes and types depend on neither rank nor data nor step, and a given state is not modified."""
    sites = [Site(shapes=SHAPES, rank=rank, world_size=3) for rank in range(3)]
    states = [
        c.init(x, site) for x, site in zip([torch.zeros(NUMEL, device="cpu"), *data(2)], sites, strict=True)
    ]
    form = form_of(states[0])
    for key, (shape, _) in form.items():
        _, numbered, number = key.partition("/")
        owned = int(number) < len(SHAPES) if numbered else shape == (NUMEL,)
        rule = "a state tensor is flat like x, or named NAME/i after the i-th tensor"
        expect(owned, rule, key=key, shape=shape)
    for step in range(3):
        expect(all(form_of(s) == form for s in states), "the state keeps keys, shapes and types", step=step)
        kept = [{key: t.clone() for key, t in state.items()} for state in states]
        out = exchange(c, data(3, seed=step), states, shapes=SHAPES, step=step)
        unchanged = all(same_states(a, b) for a, b in zip(states, kept, strict=True))
        expect(unchanged, "a given state is not modified", step=step)
        states = [e.state for e in out]
    expect(all(form_of(s) == form for s in states), "the state keeps keys, shapes and types", step=3)


def restart_changes_nothing(c: Compressor) -> None:
    """Saved, loaded and continued equals uninterrupted, bit for bit."""
    _, states = _steps(c, None, range(3))
    buffer = io.BytesIO()
    torch.save([dict(state) for state in states], buffer)
    buffer.seek(0)
    loaded = torch.load(buffer, weights_only=True)
    (averages, ends), (again, ends_again) = (_steps(c, s, range(3, 6)) for s in (states, loaded))
    equal = all(map(same, averages, again)) and all(map(same_states, ends, ends_again))
    expect(equal, "a restart from the saved state changes nothing")


def averages_agree(c: Compressor) -> None:
    """All ranks get the same bits, and they are the mean of x without the errors."""
    for world in _WORLDS:
        xs = data(world)
        for shapes in (SHAPES, None):
            out = exchange(c, xs, shapes=shapes, want_error=True)
            silent = exchange(c, xs, shapes=shapes)
            for rank, (e, s) in enumerate(zip(out, silent, strict=True)):
                expect(same(e.average, out[0].average), "all ranks get the same bits", world=world, rank=rank)
                equal = same(e.average, s.average) and same_states(e.state, s.state)
                expect(equal, "asking for the error changes nothing else", world=world, rank=rank)
            if not votes(c, world):
                sent = [x - error_of(e) for x, e in zip(xs, out, strict=True)]
                close(out[0].average, mean_of(sent), wire_eps(c), "average = mean(x - error)")
            if c.feedback is Feedback.EXACT:
                close(out[0].average, mean_of(xs), wire_eps(c), "lossless: average = mean(x)")
                expect(not any(error_of(e).any() for e in out), "lossless: error = 0")


def forms_are_kept(c: Compressor) -> None:
    """0-d, one-element, empty and non-contiguous tensors of every floating type come back flat and alike."""
    grid = torch.linspace(-2, 3, 35, device="cpu").view(5, 7)
    for dtype in _DTYPES:
        for original in (
            grid,
            grid.t(),
            grid[:, 1:3],
            grid[0, 0],
            grid[1, :1],
            grid[:0],
            torch.zeros(0, device="cpu"),
        ):
            x = original.to(dtype)
            wanted = ((x.numel(),), dtype)
            for e in exchange(c, [x, -2 * x], want_error=True):
                for name, t in (("average", e.average), ("error", error_of(e))):
                    got = (tuple(t.shape), t.dtype)
                    expect(
                        got == wanted, f"the {name} is flat, of x's length and type", got=got, wanted=wanted
                    )
                    expect(t.isfinite().all(), f"a finite x has a finite {name}", dtype=dtype, shape=x.shape)
            (e,) = exchange(c, [x], want_error=True)
            if not votes(c, 1):
                eps = max(torch.finfo(dtype).eps, wire_eps(c))
                close(e.average + error_of(e), x.reshape(-1), eps, f"x = sent + error in {dtype}")


def zeros_stay_zeros(c: Compressor) -> None:
    """Nothing in, nothing out, and nothing stored."""
    for world in _WORLDS:
        states: Sequence[State] | None = None
        for step in range(3):
            zeros = [torch.zeros(NUMEL, device="cpu")] * world
            out = exchange(c, zeros, states, shapes=SHAPES, step=step, want_error=True)
            states = [e.state for e in out]
            nothing = not any(e.average.any() or error_of(e).any() for e in out)
            expect(nothing, "zeros stay zeros", world=world, step=step)


def feedback_telescopes(c: Compressor) -> None:
    """Under error feedback, all that was applied and the residual add up to all that was put in.

    What a decay forgets of the residuals counts as taken out again.
    """
    if base(c).feedback in (Feedback.NEVER, Feedback.OWN, Feedback.EXACT):
        return
    fed = c if isinstance(c, ErrorFeedback) else ErrorFeedback(inner=c)
    # A table over all `cases()` has each compressor twice, also with feedback: all there, half here.
    some = ((2, None), (4, True))
    for world, commits in (*some, (4, None)) if fed is c else some:
        put_in, sent, averaged = (
            torch.zeros(world, NUMEL, device="cpu"),
            torch.zeros(world, NUMEL, device="cpu"),
            torch.zeros(NUMEL, device="cpu"),
        )
        residuals = torch.zeros(world, NUMEL, device="cpu")
        largest, states, forgets = 1.0, None, 1 - fed.decay
        for step in range(6):
            xs = data(world, seed=step)
            out = exchange(fed, xs, states, shapes=SHAPES, step=step, want_error=True, commits=commits)
            put_in += torch.stack(xs)
            if forgets:
                put_in -= forgets * residuals
            states = [e.state for e in out]
            sent += torch.stack([x - error_of(e) for x, e in zip(xs, out, strict=True)])
            averaged += out[0].average
            residuals = torch.stack([e.state["residual"] for e in out])
            largest = max(largest, float(residuals.abs().max()), float(sent.abs().max()))
            rule = "sum of (x - error) + residual = sum of x, on each rank"
            close(sent + residuals, put_in, 2e-6 * largest, rule)
            if not votes(c, world):
                eps = max(2e-6, wire_eps(c)) * largest
                rule = "sum of averages + mean residual = mean of sums of x"
                close(averaged + mean_of([*residuals]), put_in.mean(0), eps, rule)


def errors_do_not_grow(c: Compressor) -> None:
    """What error feedback adds again is never more than x was, or residuals would grow without bound."""
    if not c.feedback.biased:
        return
    normal = data(1)[0]
    spike = torch.zeros(NUMEL, device="cpu").index_fill_(0, torch.tensor([7], device="cpu"), 3.0)
    for name, x in {
        "normal": normal,
        "cubed": normal**3,
        "spike": spike,
        "ones": torch.ones(NUMEL, device="cpu"),
    }.items():
        error = error_of(exchange(c, [x], shapes=SHAPES, want_error=True)[0])
        got, limit = float(error.square().sum()), float(x.square().sum())
        rule = "biased: ||error||^2 <= ||x||^2"
        expect(got <= limit * (1 + 1e-5) + 1e-9, rule, x=name, got=got, limit=limit)


def unbiased_as_declared(c: Compressor) -> None:
    """Without declared bias the mean error over many steps is zero.

    E||mean error||^2 is (mean ||error||^2) / steps; 30 times that is 5.5 standard deviations even where all
    of the error lies in one direction. A compressor that is not random may only round, to 8 bits or finer.
    """
    if c.feedback.biased or c.feedback in (Feedback.OWN, Feedback.EXACT):
        return
    steps, x = 400, torch.linspace(-1, 2, 96, device="cpu")
    shapes = [torch.Size((12, 8))]
    out = [exchange(c, [x], shapes=shapes, step=step, want_error=True)[0] for step in range(steps)]
    errors = torch.stack([error_of(e) for e in out])
    if errors.eq(errors[0]).all():
        fine = errors[0].abs() <= x.abs() * 2**-8
        expect(
            fine.all(), "unbiased: not random, so only rounding to 8 bits", error=float(errors.abs().max())
        )
        return
    mean = errors.mean(0)
    variance = float((errors - mean).square().sum(1).mean())
    got, limit = float(mean.square().sum()), 30 * variance / steps
    expect(got <= limit, "unbiased: the errors of many steps average out", squared_mean=got, limit=limit)
    along = errors @ x
    sigmas = float(along.mean() / (along.std() / steps**0.5).clamp(min=1e-12))
    expect(abs(sigmas) < 6, "unbiased: what is sent is on average as long as x", sigmas=sigmas)


def requests_are_true(c: Compressor) -> None:
    """Bytes asked for are the bytes handed over, and only real numbers are averaged."""
    for request in requests_of(c):
        held = sum(t.reshape(-1).view(torch.uint8).numel() for t in request.tensors)
        expect(request.nbytes == held, "nbytes is what the tensors hold", got=request.nbytes, held=held)
        floating = request.op not in REDUCTIONS or all(t.is_floating_point() for t in request.tensors)
        expect(floating, "MEAN takes floating tensors", dtypes=[t.dtype for t in request.tensors])


def declarations_are_equal(c: Compressor) -> None:
    """Whatever the rank and the step, a compressor declares the same facts."""
    for world in _MORE_WORLDS:
        first = _facts(c, world)
        for rank, step in ((world - 1, 0), (0, 3)):
            found = _facts(c, world, rank, step)
            expect(found == first, "the facts depend on neither rank nor step", world=world, got=found)


def rounds_are_as_declared(c: Compressor) -> None:
    """As many collectives are asked for as `rounds` says, and `COMMIT` only where that is declared."""
    for world in _MORE_WORLDS:
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
    # Some compressors share the work from four ranks on, and top-k from five.
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
                        received = e.finite is not None and int(e.finite) == Finite.NO
                        rule = "finite: every rank hears of a non-finite x"
                        expect(received, rule, world=world, bad=bad, got=e.finite)
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
                received = e.finite is not None and int(e.finite)
                expect(received != Finite.NO or spoilt, rule, world=world, large=large)
                bounded = received == Finite.BOUNDED or Finite.BOUNDED in asked.flags
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


def _facts(c: Compressor, world: int, rank: int = 0, step: int = 0) -> Facts:
    return c.facts(Site(shapes=SHAPES, rank=rank, world_size=world, step=step))


def _steps(
    c: Compressor, states: Sequence[State] | None, steps: range
) -> tuple[list[Tensor], Sequence[State]]:
    """Run some steps on two ranks; return the averages and the last states."""
    averages: list[Tensor] = []
    for step in steps:
        out = exchange(c, data(2, seed=step), states, shapes=SHAPES, step=step)
        averages.append(out[0].average)
        states = [e.state for e in out]
    return averages, states or ()


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
        # x is handed over and may be overwritten, but the rules use it again.
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
            # StopIteration has no type parameter: its value is Any.
            return stop.value  # type: ignore[no-any-return]
        watch(request)
        reply = yield request


def _copies(states: Sequence[State]) -> list[State]:
    return [{key: t.clone() for key, t in state.items()} for state in states]


def _shares(a: Tensor, b: Tensor) -> bool:
    return a.untyped_storage().data_ptr() == b.untyped_storage().data_ptr()


RULES: tuple[Callable[[Compressor], None], ...] = (
    state_keeps_its_form,
    averages_agree,
    forms_are_kept,
    zeros_stay_zeros,
    feedback_telescopes,
    errors_do_not_grow,
    unbiased_as_declared,
    restart_changes_nothing,
    requests_are_true,
    declarations_are_equal,
    rounds_are_as_declared,
    commits_change_no_number,
    bad_numbers_are_reported,
    large_numbers_are_told_from_bad_ones,
    linear_codes_add_up,
)
