"""One synchronous exchange of named tensors: each has its compressor and state, all share the collectives."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import NamedTuple

import torch
from torch import Tensor, nn

from stenograd.comm import simulate
from stenograd.comm.driver import Driver, Pipeline
from stenograd.comm.traffic import Label
from stenograd.compression.contract import Compressor, Exchange, Site, State
from stenograd.data.requests import Rounds, mean, together
from stenograd.errors import ConfigError, TensorTypeError, bad_value
from stenograd.launch import process_group
from stenograd.sync.handshake import compare, versions

__all__ = ["Part", "Settled", "exchange", "flat_gradient", "join", "meet", "put_gradient", "trainable"]


@dataclass(frozen=True, slots=True)
class Part:
    """One tensor's part in an exchange.

    Args:
        compressor: how it travels.
        x: flat; handed over, so it may be overwritten.
        state: the compressor's; replaced, never modified.
        site: where and when.
        used: whether this rank has something to say (its gradient was not None).
    """

    compressor: Compressor
    x: Tensor
    state: State
    site: Site
    used: bool = True


class Settled(NamedTuple):
    """What an exchange gave.

    exchanges: one a part. used: whether any rank used the part, or its average is not zero.
    applied: False where a rank's x or an average was not finite, if that was asked.
    """

    exchanges: list[Exchange]
    used: list[bool]
    applied: bool


@torch.no_grad()
def exchange(
    parts: Sequence[Part], driver: Driver | None, *, by_layer: bool = False, guarded: bool = False
) -> Settled:
    """Run all parts to their ends.

    Args:
        parts: at least one, of equal compressors and shapes on all ranks.
        driver: the way to the other ranks; None stays on this one.
        by_layer: whether each part has collectives of its own, instead of one a round, dtype and device.
        guarded: whether a non-finite x on any rank must be known, because states are at stake.
    """
    bad = guarded and not all(bool(part.x.isfinite().all()) for part in parts)
    if bad:
        for part in parts:
            part.x.zero_()  # compressors need not be defined on NaN; nothing of this exchange is applied
    jobs = [part.compressor.rounds(part.x, part.state, part.site) for part in parts]
    flags = torch.tensor([float(f) for f in (*(part.used for part in parts), bad)], device=parts[0].x.device)
    units = [[i] for i in range(len(parts))] if by_layer else _by_device(parts)
    merged = [together([jobs[i] for i in unit]) for unit in units[1:]]
    merged.insert(0, together([*(jobs[i] for i in units[0]), _exchange_flags(flags)]))
    first, *rest = _run(merged, driver)
    *first, verdict = first
    done: dict[int, Exchange] = {}
    for unit, results in zip(units, [first, *rest], strict=True):
        done.update(zip(unit, results, strict=True))
    exchanges = [done[i] for i in range(len(parts))]
    *told, harmed = [value > 0 for value in verdict.average.tolist()]
    used = [t or bool(e.average.any()) for t, e in zip(told, exchanges, strict=True)]
    # Averages are equal on all ranks, so an overflow inside the exchange needs no further agreement.
    harmed = harmed or (guarded and not all(bool(e.average.isfinite().all()) for e in exchanges))
    return Settled(exchanges, used, not harmed)


def join(world_size: int | None) -> Driver:
    """Join the process group if this process is in none yet, and check its size.

    Raises:
        ConfigError: world_size is given and is not the group's.
    """
    process_group.join()
    driver = Driver.own()
    if world_size is not None and (isinstance(world_size, bool) or world_size != driver.world_size):
        rule = f"must be {driver.world_size}, the number of ranks that were launched"
        raise bad_value("world_size", rule, world_size, "pass that, or start as many ranks")
    return driver


@torch.no_grad()
def meet(driver: Driver, tensors: Mapping[str, Tensor], options: Mapping[str, object]) -> None:
    """Check that all ranks hold the same parameters and options, and run the same versions and kernels.

    Raises:
        MismatchError: naming the first difference.
    """
    if driver.world_size > 1 and tensors:
        parameters = {f"parameter {name}": f"{tuple(t.shape)} {t.dtype}" for name, t in tensors.items()}
        what = {**versions(), **{k: repr(v) for k, v in options.items()}, **parameters}
        compare(driver, what, next(iter(tensors.values())).device)


def trainable(model: nn.Module) -> dict[str, nn.Parameter]:
    """Return the parameters that require a gradient, by name; tied ones once.

    Raises:
        ConfigError: there is none.
        TensorTypeError: one is complex.
    """
    named = {name: p for name, p in model.named_parameters() if p.requires_grad}
    if not named:
        raise ConfigError("model must have trainable parameters, got none: call requires_grad_() on some")
    for name, p in named.items():
        if not p.is_floating_point():
            raise TensorTypeError(
                f"parameter {name} must be real, got {p.dtype}: keep real and imaginary parts"
            )
    return named


def flat_gradient(parameter: Tensor, dtype: torch.dtype | None = None) -> Tensor:
    """Return a flat copy of a gradient, of its own or another dtype; zeros where it is None.

    Raises:
        TensorTypeError: it is sparse.
    """
    grad = parameter.grad
    if grad is None:
        return torch.zeros(parameter.numel(), dtype=dtype or parameter.dtype, device=parameter.device)
    if grad.layout is not torch.strided:
        raise TensorTypeError(
            f"gradients must be dense, got {grad.layout}: use sparse=False in the embedding"
        )
    return grad.detach().to(dtype or grad.dtype).reshape(-1).clone()


def put_gradient(parameter: Tensor, flat: Tensor) -> None:
    """Make a flat tensor the parameter's gradient, in the memory that the gradient has."""
    if parameter.grad is None:
        parameter.grad = torch.empty_like(parameter)
    parameter.grad.copy_(flat.view(parameter.shape))


def _exchange_flags(flags: Tensor) -> Rounds[Exchange]:
    """Average 0/1 flags: above zero where any rank set one."""
    return Exchange((yield from mean(flags)), {})


def _run(jobs: list[Rounds[list[Exchange]]], driver: Driver | None) -> list[list[Exchange]]:
    if driver is None:
        return [simulate.run([job])[0] for job in jobs]
    pipeline: Pipeline[list[Exchange]] = Pipeline(driver)
    for number, job in enumerate(jobs):
        pipeline.add(job, Label(bucket=number))
    return pipeline.finish()


def _by_device(parts: Sequence[Part]) -> list[list[int]]:
    found: dict[torch.device, list[int]] = {}
    for i, part in enumerate(parts):
        found.setdefault(part.x.device, []).append(i)
    return list(found.values())
