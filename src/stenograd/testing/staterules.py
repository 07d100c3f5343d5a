"""The rules of the conformance suite about state: its form, and what saving and loading may change."""

from __future__ import annotations

import io
from collections.abc import Sequence

import torch
from torch import Tensor

from stenograd.comm.simulate import exchange
from stenograd.compression.contract import Compressor, Site, State
from stenograd.testing.checks import NUMEL, SHAPES, data, expect, form_of, same, same_states

__all__ = ["restart_changes_nothing", "state_keeps_its_form"]


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
