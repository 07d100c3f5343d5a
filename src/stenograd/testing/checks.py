"""What the rules of the conformance suite share: data, comparisons and the error they raise."""

from __future__ import annotations

import os
from collections.abc import Sequence
from functools import wraps
from importlib import import_module
from typing import Any

import torch
from torch import Tensor

from stenograd.compression.contract import Compressor, Exchange, Site, State
from stenograd.compression.feedback import ErrorFeedback
from stenograd.exchange.simulate import exchange
from stenograd.wire.requests import REDUCTIONS, Request

__all__ = [
    "NUMEL",
    "SHAPES",
    "Plain",
    "base",
    "close",
    "data",
    "error_of",
    "expect",
    "form_of",
    "mean_of",
    "requests_of",
    "same",
    "same_states",
    "votes",
    "wire_eps",
]

# Two equal matrices, a vector, an empty tensor, a scalar and an odd shape: what a bucket may hold.
SHAPES = tuple(torch.Size(s) for s in [(24, 20), (3,), (0,), (), (24, 20), (5, 3, 7)])
NUMEL = sum(shape.numel() for shape in SHAPES)


def base(c: Compressor) -> Compressor:
    """Return a compressor without error feedback around it."""
    return c.inner if isinstance(c, ErrorFeedback) else c


def votes(c: Compressor, world: int) -> bool:
    """Tell whether averages are something else than the mean of what the ranks send."""
    return not c.facts(Site(shapes=SHAPES, world_size=world)).average.is_mean


def expect(condition: object, rule: str, **values: object) -> None:
    """Raise AssertionError with the rule and the values unless the condition holds."""
    if not condition:
        got = ", ".join(f"{name}={value!r}" for name, value in values.items())
        raise AssertionError(f"broken rule: {rule} ({got})")


def same(a: Tensor, b: Tensor) -> bool:
    """Tell whether two tensors are equal bit for bit, NaN included."""
    if (a.shape, a.dtype) != (b.shape, b.dtype):
        return False
    return torch.equal(a.reshape(-1).view(torch.uint8), b.reshape(-1).view(torch.uint8))


def same_states(a: State, b: State) -> bool:
    """Tell whether two states have the same keys and are equal bit for bit."""
    return a.keys() == b.keys() and all(same(t, b[key]) for key, t in a.items())


def data(world: int, seed: int = 0) -> list[Tensor]:
    """Return one bucket of normally distributed numbers for each rank."""
    generator = torch.Generator(device="cpu").manual_seed(1000 + seed)
    return [torch.randn(NUMEL, generator=generator, device="cpu") for _ in range(world)]


def mean_of(tensors: Sequence[Tensor]) -> Tensor:
    """Return the mean of tensors of one shape."""
    return torch.stack(list(tensors)).mean(0)


def error_of(e: Exchange) -> Tensor:
    """Return the error of an exchange that was asked for it."""
    if e.error is None:
        raise AssertionError("broken rule: the exchange carries an error when asked for one")
    return e.error


def close(got: Tensor, wanted: Tensor, eps: float, rule: str) -> None:
    """Expect two tensors to be equal up to a few roundings of `eps` of the largest element."""
    worst = float((got.double() - wanted.double()).abs().max()) if got.numel() else 0.0
    limit = 8 * eps * max(1.0, float(wanted.abs().max()) if wanted.numel() else 0.0)
    expect(worst <= limit, rule, largest_difference=worst, limit=limit)


def requests_of(c: Compressor) -> list[Request]:
    """Return what one rank of two asks for in one exchange."""
    found: list[Request] = []
    exchange(c, data(2), shapes=SHAPES, spy=found.append)
    return found


def wire_eps(c: Compressor) -> float:
    """Return the rounding of the coarsest type in which the collectives sum."""
    types = {t.dtype for request in requests_of(c) if request.op in REDUCTIONS for t in request.tensors}
    return max(torch.finfo(dtype).eps for dtype in types | {torch.float32})


def form_of(state: State) -> dict[str, tuple[tuple[int, ...], torch.dtype]]:
    """Return shape and type of every tensor in a state."""
    return {key: (tuple(t.shape), t.dtype) for key, t in state.items()}


class Plain:
    """The kernels of a family in plain torch, which faster versions are compared with.

    Args:
        family: a module of `stenograd.kernels`.

    Example:
        >>> Plain("select").select(torch.tensor([1.0, -3.0]), 1)
        (tensor([1], dtype=torch.int32), tensor([-3.]))
    """

    def __init__(self, family: str) -> None:
        self._module = import_module(f"stenograd.kernels.{family}")

    def __getattr__(self, name: str) -> Any:
        found = getattr(self._module, name)

        @wraps(found)
        def plain(*args: Any, **options: Any) -> Any:
            before = os.environ.get("STENOGRAD_KERNELS")
            os.environ["STENOGRAD_KERNELS"] = "reference"
            try:
                return found(*args, **options)
            finally:
                os.environ.pop("STENOGRAD_KERNELS")
                if before is not None:
                    os.environ["STENOGRAD_KERNELS"] = before

        return plain
