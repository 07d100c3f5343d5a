"""The rules of the conformance suite: each takes a compressor and raises AssertionError if it is broken."""

from __future__ import annotations

from collections.abc import Callable, Sequence

import torch

from stenograd.comm.simulate import exchange
from stenograd.compression.contract import Compressor, Feedback, State
from stenograd.compression.feedback import ErrorFeedback
from stenograd.data.requests import REDUCTIONS
from stenograd.testing.checks import (
    NUMEL,
    SHAPES,
    base,
    close,
    data,
    error_of,
    expect,
    mean_of,
    requests_of,
    same,
    same_states,
    votes,
    wire_eps,
)
from stenograd.testing.staterules import restart_changes_nothing, state_keeps_its_form
from stenograd.testing.transport_rules import TRANSPORT_RULES

__all__ = ["RULES"]

WORLDS = (1, 2, 3, 4)  # from four ranks on some compressors share the work of averaging
DTYPES = (torch.float32, torch.float64, torch.float16, torch.bfloat16)


def averages_agree(c: Compressor) -> None:
    """All ranks get the same bits, and they are the mean of x without the errors."""
    for world in WORLDS:
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
    for dtype in DTYPES:
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
    for world in WORLDS:
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
    *TRANSPORT_RULES,
)
