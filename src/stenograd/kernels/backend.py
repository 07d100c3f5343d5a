"""Which version of a kernel runs: numba for float32 in the CPU's memory, plain torch for everything else.

The environment variable STENOGRAD_KERNELS forces one: `reference`, `numba`, or `triton` (for CUDA tensors).
Without it, NUMBA_DISABLE_JIT forces `reference`.
numba is a dependency of the package; where it cannot be imported all the same, plain torch runs, and a
warning says so once.
"""

from __future__ import annotations

import importlib
import importlib.util
import os
import warnings
from collections.abc import Callable, Sequence
from functools import cache
from typing import Any, TypeVar

import torch
from torch import Tensor

from stenograd.errors import ConfigError, TensorTypeError

__all__ = ["check_out", "corrected", "landed", "length_of", "matching", "pick", "present", "wanted"]

F = TypeVar("F", bound=Callable[..., Any])
_CHOICES = ("reference", "numba", "triton")
_MOST = 1 << 31  # elements, whose indices an int32 holds


def pick(function: F, *tensors: Tensor, numel: int = 0) -> F | None:
    """Return the fast version of a kernel that suits some tensors; None where plain torch shall run.

    A fast version is registered by where it lies: `kernels.cpu.sign.f` is that of `kernels.sign.f`, and takes
    the same arguments. numba is imported on the first call that needs it, not with Stenograd.

    Args:
        function: the kernel, whose own body is in plain torch.
        tensors: what it will work on.
        numel: elements of a result that is not among the tensors.

    Raises:
        ConfigError: STENOGRAD_KERNELS has an unknown value, or asks for what is not installed.

    Example:
        >>> from stenograd.kernels.sign import sign_encode_feedback
        >>> pick(sign_encode_feedback, torch.zeros(3, dtype=torch.float64)) is None
        True
    """
    asked = _asked()
    if asked and asked not in _CHOICES:
        raise ConfigError(
            f"STENOGRAD_KERNELS must be one of {list(_CHOICES)}, got {asked!r}: or leave it out"
        )
    if asked == "triton" and all(t.is_cuda for t in tensors):
        fast: F | None = _triton(function)
        return fast
    # Tensors in the CPU's memory go to numba, also where triton is asked for.
    suits = numel <= _MOST and all(map(_suits_numba, tensors))
    if asked != "reference" and suits and _numba_runs(asked == "numba"):
        compiled: F = _load(function)
        return compiled
    return None


def _suits_numba(t: Tensor) -> bool:
    fits = t.dtype is torch.float32 or not t.is_floating_point()
    return t.is_cpu and fits and t.is_contiguous() and t.numel() <= _MOST


@cache
def _load(function: Any) -> Any:
    folder, _, family = function.__module__.rpartition(".")
    return getattr(importlib.import_module(f"{folder}.cpu.{family}"), function.__name__)


@cache
def _triton(function: Any) -> Any:
    cuda = importlib.import_module("stenograd.kernels.triton")
    if cuda.triton is None:
        raise ConfigError("STENOGRAD_KERNELS is 'triton', which needs Triton 3.6: pip install 'triton>=3.6'")
    return getattr(cuda, function.__name__, None)


def wanted() -> str:
    """Return which kernels this process will use on the CPU, without importing any.

    Ranks that differ in it would differ in the last bits of an average.

    Example:
        >>> wanted() in ("reference", "numba", "triton")
        True
    """
    return _asked() or ("numba" if importlib.util.find_spec("numba") else "reference")


def _asked() -> str:
    # Where the program has numba compile nothing, for its own kernels say, ours cannot run.
    is_off = os.environ.get("NUMBA_DISABLE_JIT", "0") != "0"
    return os.environ.get("STENOGRAD_KERNELS", "") or "reference" * is_off


@cache
def _numba_runs(asked: bool) -> bool:
    try:
        importlib.import_module("numba")
    except ImportError as reason:
        if asked:
            raise ConfigError(f"STENOGRAD_KERNELS is 'numba', which cannot be used: {reason}") from reason
        warnings.warn(
            f"numba is not installed: compression runs several times slower; pip install numba ({reason})",
            RuntimeWarning,
            stacklevel=3,
        )
        return False
    return True


def present(*tensors: Tensor | None) -> list[Tensor]:
    """Return those that are not None.

    Example:
        >>> present(torch.ones(1), None)
        [tensor([1.])]
    """
    return [t for t in tensors if t is not None]


def matching(x: Tensor, residual: Tensor | None) -> Tensor:
    """Return x, contiguous and in the residual's type.

    Raises:
        ConfigError: the residual has another length.
        TensorTypeError: one of them is not flat and floating.

    Example:
        >>> matching(torch.ones(2, dtype=torch.bfloat16), torch.zeros(2))
        tensor([1., 1.])
    """
    for t in present(x, residual):
        if t.ndim != 1 or not t.is_floating_point():
            raise TensorTypeError(f"tensors must be flat and floating, got {t.dtype} of {tuple(t.shape)}")
    if residual is None:
        return x.contiguous()
    if residual.numel() != x.numel():
        raise ConfigError(f"residual must have the {x.numel()} elements of x, got {residual.numel()}")
    return x.to(residual.dtype).contiguous()


def corrected(x: Tensor | None, residual: Tensor | None) -> Tensor:
    """Return `x + residual` in residual's memory, or the only one that there is.

    Example:
        >>> corrected(torch.ones(2), torch.ones(2)), corrected(None, torch.ones(1))
        (tensor([2., 2.]), tensor([1.]))
    """
    if x is None or residual is None:
        return present(x, residual)[0]
    return residual.add_(x)


def length_of(x: Tensor | None, residual: Tensor | None) -> int:
    """Return the number of elements that both have.

    Raises:
        ConfigError: neither is there.

    Example:
        >>> length_of(None, torch.ones(3))
        3
    """
    for t in present(x, residual):
        return t.numel()
    raise ConfigError("x and residual are both None: give what is to be sent")


def check_out(
    payloads: Sequence[tuple[Tensor, Tensor]], n: int, out: Tensor | None
) -> tuple[Tensor, Tensor | None]:
    """Return a tensor of the kind in which a mean of payloads is summed, and out if that is of this kind.

    Types of 16 bits are summed in float32: four numbers of 4e4 have a mean in float16, and no sum.

    Raises:
        ConfigError: there are no payloads, or out has another shape.

    Example:
        >>> check_out([(torch.zeros(1), torch.zeros(1))], 5, None)
        (tensor([]), None)
    """
    if not payloads:
        raise ConfigError("payloads must not be empty, got none: give one per rank")
    if out is not None and out.shape != (n,):
        raise ConfigError(f"out must have the shape {(n,)}, got {tuple(out.shape)}")
    if out is not None and out.element_size() > 2:
        return out, out
    # Nothing to sum in yet: this tells `pick` and the caller the device and the type of the sum.
    return payloads[0][1].new_empty(0, dtype=torch.float32), None


def landed(mean: Tensor, out: Tensor | None) -> Tensor:
    """Return a mean, in out where it was to be written there.

    Example:
        >>> landed(torch.ones(1), torch.zeros(1, dtype=torch.float16))
        tensor([1.], dtype=torch.float16)
    """
    return mean if out is None or out is mean else out.copy_(mean)
