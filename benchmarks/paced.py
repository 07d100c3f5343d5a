"""A model that sleeps for as long as another computes: many ranks on few cores do not slow each other.

Gradients become ready in the order and after the times of a real backward pass, with its values. Engine,
codecs and collectives are real, but they do not compete with computing for a host's cores.
"""

from __future__ import annotations

import ctypes
import random
import statistics
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from itertools import pairwise
from typing import Any

import torch
from torch import Tensor, nn

__all__ = ["Pace", "Paced", "pace_of"]

_WARM_UP, _STEPS = 3, 8
_PR_SET_TIMERSLACK = 29


@dataclass(frozen=True)
class Pace:
    """How long the parts of a step take, in seconds.

    Args:
        forward_s: until the backward pass begins.
        ready_s: for each parameter, what passes before its gradient is ready, since the one before was.
        order: the parameters' numbers, in the order in which they become ready.
        spread: factors by which steps differ from the usual one; each step draws one.
    """

    forward_s: float
    ready_s: tuple[float, ...]
    order: tuple[int, ...]
    spread: tuple[float, ...] = (1.0,)


def pace_of(model: nn.Module, loss: Callable[[], Tensor], spread: Sequence[float] = (1.0,)) -> Pace:
    """Measure a model's pace.

    Args:
        model: whose parameters get gradients.
        loss: computes what `backward()` is called on.
        spread: see `Pace`.
    """
    parameters = list(model.parameters())
    ready: list[tuple[int, float]] = []
    hooks = [
        p.register_post_accumulate_grad_hook(lambda _, at=at: ready.append((at, time.perf_counter())))
        for at, p in enumerate(parameters)
    ]
    forwards, gaps = [], []
    order: tuple[int, ...] = ()
    for number in range(_WARM_UP + _STEPS):
        model.zero_grad()
        ready.clear()
        began = time.perf_counter()
        value = loss()
        backward = time.perf_counter()
        value.backward()
        if number >= _WARM_UP:
            order = tuple(at for at, _ in ready)
            times = [backward, *(when for _, when in ready)]
            forwards.append(backward - began)
            gaps.append([b - a for a, b in pairwise(times)])
    for hook in hooks:
        hook.remove()
    usual = tuple(statistics.median(each) for each in zip(*gaps, strict=True))
    return Pace(statistics.median(forwards), usual, order, tuple(spread))


class _Ready(torch.autograd.Function):
    """Passes a scalar on; backward, it sleeps and hands a parameter its gradient."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, parameter: Tensor, owner: Paced, place: int) -> Tensor:
        ctx.owner, ctx.place = owner, place
        return x.clone()

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> Any:
        return grad, ctx.owner.ready(ctx.place), None, None


class Paced(nn.Module):
    """Stands in for a model whose pace was measured.

    Args:
        model: gives the parameters and, by one real pass, their gradients.
        loss: computes what `backward()` is called on, of that model.
        pace: see `Pace`.
        seed: of the factors that steps draw.
    """

    def __init__(self, model: nn.Module, loss: Callable[[], Tensor], pace: Pace, seed: int) -> None:
        super().__init__()
        self.inner = model
        model.zero_grad()
        loss().backward()
        self._parameters_in_order = [list(model.parameters())[at] for at in pace.order]
        self._gradients = [p.grad.detach().clone() for p in self._parameters_in_order if p.grad is not None]
        model.zero_grad()
        self._pace, self._random, self._times = pace, random.Random(seed), 1.0
        # The kernel may wake a sleeper 50 us late, which adds up over many parameters.
        ctypes.CDLL(None).prctl(_PR_SET_TIMERSLACK, 1000, 0, 0, 0)

    def forward(self) -> Tensor:
        """Sleep as the forward pass would compute, and return a scalar to call `backward()` on."""
        self._times = self._random.choice(self._pace.spread)
        until = time.perf_counter() + self._times * self._pace.forward_s
        x = torch.zeros((), requires_grad=True)
        for place in reversed(range(len(self._parameters_in_order))):
            x = _Ready.apply(x, self._parameters_in_order[place], self, place)
        _sleep(until)
        return x

    def ready(self, place: int) -> Tensor:
        """Sleep until a gradient is ready, and return it."""
        until = time.perf_counter() + self._times * self._pace.ready_s[place]
        gradient = self._gradients[place].clone()
        _sleep(until)
        return gradient


def _sleep(until: float) -> None:
    left = until - time.perf_counter()
    if left > 0:
        time.sleep(left)
