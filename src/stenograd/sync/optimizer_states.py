"""Optimizers' own states: averaged over the ranks, taken from one of them, or forgotten."""

from __future__ import annotations

import json
import math
from collections.abc import Callable, Iterable, Mapping, MutableMapping, Sequence
from typing import Any

import torch
from torch import Tensor

from stenograd.comm.drivers import AnyDriver
from stenograd.data.finite import are_finite
from stenograd.errors import NonFiniteError, StenogradError
from stenograd.sync.averaging import average_carried
from stenograd.sync.handshake import broadcast_tensors

__all__ = ["average_states", "forget_states", "take_states"]

_SECOND = ("exp_avg_sq", "max_exp_avg_sq", "square_avg", "sum", "exp_inf", "acc_delta")


@torch.no_grad()
def average_states(
    optimizers: Sequence[torch.optim.Optimizer],
    parameters: Mapping[str, Tensor],
    driver: AnyDriver,
    *,
    second: bool,
) -> Callable[[], None]:
    """Average the optimizers' moments over the ranks, and return what puts the means in place.

    Moments are those of their tensors that have the parameter's shape. Their mean is that of the ranks that
    have one, and of what is finite there: it divides by the number of those, element by element. A rank
    without the state of a parameter (all its steps so far were skipped) takes that mean, and the rest of the
    state, such as the number of steps, of the lowest rank that has one. If it counted as zero, second moments
    would shrink, and the next step would be too long. All moments of such a parameter are averaged.

    Args:
        optimizers: the same on all ranks.
        parameters: by name, alike on all ranks.
        driver: the way to the other ranks; nothing of this user's may be under way.
        second: whether second moments (those of squares) are averaged, too.

    Raises:
        NonFiniteError: on every rank, if a moment has an element that is finite nowhere; all are kept then.
    """
    mine = _moments(optimizers, parameters)
    told = [set(json.loads(text)) for text in driver.gather_bytes(json.dumps([*mine]).encode())]
    having = [{name.rsplit("|", 1)[0] for name in theirs} for theirs in told]
    lacking = {of: [of in theirs for theirs in having] for of in set().union(*having)}
    lacking = {of: has for of, has in lacking.items() if not all(has)}
    names = [
        name
        for name in sorted(set().union(*told))
        if second or name.rsplit("|", 1)[1] not in _SECOND or name.rsplit("|", 1)[0] in lacking
    ]
    none = {n: torch.full_like(parameters[n.rsplit("|", 1)[0]], math.nan) for n in names if n not in mine}
    means = average_carried([mine[n] if n in mine else none[n] for n in names], driver)
    if not are_finite(means):
        raise NonFiniteError(
            "optimizer states to average must be finite on some rank, got NaN or infinity on all: lower the "
            "learning rate, clip gradients or use a GradScaler, and go back to a checkpoint"
        )
    new: list[tuple[MutableMapping[Any, Any], Tensor, Any]] = []
    for source in sorted({has.index(True) for has in lacking.values()}):
        of = sorted(name for name, has in lacking.items() if has.index(True) == source)
        held = [parameters[name] for name in of]
        owners = _owners(held, optimizers)
        # What comes from there is put aside; ranks that have a state of their own keep theirs.
        states = [o.state if driver.rank == source else {} for o in owners]
        take_states(driver, held, states, source)
        new += [
            (o.state, p, state[p])
            for name, o, p, state in zip(of, owners, held, states, strict=True)
            if not lacking[name][driver.rank] and p in state
        ]

    @torch.no_grad()
    def put() -> None:
        for state, p, entries in new:
            state[p] = entries
        now = _moments(optimizers, parameters)
        for name, mean in zip(names, means, strict=True):
            if name in now:
                now[name].copy_(mean)

    return put


@torch.no_grad()
def take_states(
    driver: AnyDriver,
    parameters: Sequence[Tensor],
    states: Sequence[MutableMapping[Any, Any]],
    source: int,
) -> None:
    """Give every rank one rank's optimizer states of some parameters; they may have entries that others lack.

    Args:
        driver: the way to the other ranks.
        parameters: alike on all ranks.
        states: for each of them the mapping that holds its state, such as `optimizer.state`, by parameter.
        source: whose states all take.

    Raises:
        StenogradError: on every rank: a state there holds something else than tensors and plain values.
    """
    mine = driver.rank == source
    form: Any = [_form(state.get(p, {})) for p, state in zip(parameters, states, strict=True)] if mine else []
    try:
        said = json.dumps(form)
    except TypeError as cause:
        said = json.dumps(str(cause))
    form = json.loads(driver.gather_bytes(said.encode())[source])
    if isinstance(form, str):
        raise StenogradError(
            f"an optimizer's state must be tensors and plain values to be shared with ranks that lack it "
            f"({form}): keep other things elsewhere"
        )
    tensors: list[Tensor] = []
    for p, entries, kept in zip(parameters, form, states, strict=True):
        state = kept.setdefault(p, {}) if entries else {}
        for key, (kind, value, where) in entries.items():
            if kind == "value":
                state[key] = value
                continue
            if not mine:
                dtype, place = getattr(torch, kind), p.device if where == "parameter" else torch.device("cpu")
                state[key] = torch.empty(value, dtype=dtype, device=place)
            tensors.append(state[key])
    broadcast_tensors(driver, tensors, source)


def forget_states(optimizers: Sequence[torch.optim.Optimizer], parameters: Iterable[Tensor]) -> None:
    """Drop what the optimizers remember of parameters, so that their next steps start afresh."""
    wanted = list(parameters)
    for optimizer in optimizers:
        for p in wanted:
            optimizer.state.pop(p, None)


def _owners(
    parameters: Iterable[Tensor], optimizers: Sequence[torch.optim.Optimizer]
) -> list[torch.optim.Optimizer]:
    """Return the optimizers that hold parameters."""
    owners = {id(p): o for o in reversed(optimizers) for group in o.param_groups for p in group["params"]}
    return [owners[id(p)] for p in parameters]


def _moments(
    optimizers: Sequence[torch.optim.Optimizer], parameters: Mapping[str, Tensor]
) -> dict[str, Tensor]:
    """Return moments by "parameter|key", in the order of the parameters."""
    found = {}
    for name, p in parameters.items():
        for optimizer in optimizers:
            for key, value in sorted(optimizer.state.get(p, {}).items()):
                moment = isinstance(value, Tensor) and value.shape == p.shape and value.is_floating_point()
                if moment and key != "step":
                    found[f"{name}|{key}"] = value
    return found


def _form(state: Mapping[str, Any]) -> dict[str, tuple[str, Any, str]]:
    """Describe one parameter's state: of tensors the type, shape and place."""
    form: dict[str, tuple[str, Any, str]] = {}
    for key, value in state.items():
        if isinstance(value, Tensor):
            place = "cpu" if value.device.type == "cpu" else "parameter"
            form[key] = (str(value.dtype).removeprefix("torch."), list(value.shape), place)
        else:
            form[key] = ("value", value, "")
    return form
