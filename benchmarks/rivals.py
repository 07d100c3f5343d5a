"""The ways to train that are compared: no exchange, DistributedDataParallel's hooks, Stenograd's methods."""

from __future__ import annotations

import importlib.util
from collections.abc import Callable
from contextlib import AbstractContextManager, nullcontext
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.nn.parallel import DistributedDataParallel

import stenograd
from stenograd import simulate
from stenograd.emulate.hosts import sent_bytes

__all__ = ["DDP_HOOKS", "EPFML", "FLOOR", "Attached", "check_names", "host_bytes"]

FLOOR = "none"  # every rank trains for itself
_ONE_BUCKET_MB = 1 << 20


def check_names(names: list[str]) -> None:
    """Check the rivals' names before anything is started.

    Raises:
        MethodError: a name is none of the others' and no Stenograd method either.
        ValueError: its package is not here.
    """
    for name in names:
        if name in EPFML and importlib.util.find_spec("powersgd") is None:
            raise ValueError(f"{name} needs github.com/epfml/powersgd: put its folder into PYTHONPATH")
        if name != FLOOR and name not in DDP_HOOKS and name not in EPFML:
            stenograd.method(name)


def host_bytes() -> int:
    """Return the bytes that this host's interface has sent, by the kernel's counter."""
    return sent_bytes()


class Attached:
    """A model attached to the other ranks.

    Args:
        name: "none", "ddp", "ddp-fp16", "ddp-bf16", "ddp-powersgd", "epfml-powersgd" (which sends both
            factors of rank 4 each step), "epfml-powersgd-1" (one in turns), or a Stenograd method such as
            "topk:ratio=0.01".
        model: the model; `module` is what to call in its place.
        optimizer: over the model's parameters.

    Raises:
        RuntimeError, TypeError, ValueError: DDP refuses this hook on this machine.
    """

    def __init__(self, name: str, model: nn.Module, optimizer: torch.optim.Optimizer) -> None:
        self.module = model
        self._sync: Any = None
        if name in DDP_HOOKS:
            self.module = DDP_HOOKS[name](model)
        elif name in EPFML:
            _epfml_powersgd(model, optimizer, EPFML[name])
        elif name != FLOOR:
            _compile(name)
            self._sync = stenograd.distribute(model, optimizer, name)

    def consensus(self) -> AbstractContextManager[None]:
        """Put the parameters to evaluate in place for a `with` block, on all ranks."""
        return nullcontext() if self._sync is None else self._sync.consensus()

    @property
    def moved_bytes(self) -> int | None:
        """Bytes that this rank sent by Stenograd's own count; None for the others, which do not count."""
        return self._sync.traffic.moved_bytes if self._sync is not None else None

    def close(self) -> None:
        """Detach."""
        if self._sync is not None:
            self._sync.close()


def _compile(name: str) -> None:
    """Exchange a few numbers in this process, so that kernels are compiled or loaded before time counts."""
    shapes, generator = [torch.Size((64, 64)), torch.Size((64,))], torch.Generator().manual_seed(0)
    xs = [torch.randn(64 * 65, generator=generator) for _ in range(dist.get_world_size())]
    simulate.exchange(stenograd.method(name).compressor, xs, shapes=shapes)


def _ddp_cast(hook: str) -> Callable[[nn.Module], nn.Module]:
    def wrap(model: nn.Module) -> nn.Module:
        from torch.distributed.algorithms.ddp_comm_hooks import default_hooks

        wrapped = DistributedDataParallel(model)
        wrapped.register_comm_hook(None, getattr(default_hooks, hook))
        return wrapped

    return wrap


def _ddp_powersgd(model: nn.Module) -> nn.Module:
    from torch.distributed.algorithms.ddp_comm_hooks.powerSGD_hook import PowerSGDState

    # With several buckets on gloo the ranks' collectives get out of step, and the run hangs or aborts.
    wrapped = DistributedDataParallel(model, bucket_cap_mb=_ONE_BUCKET_MB)
    state = PowerSGDState(
        process_group=None,
        matrix_approximation_rank=4,
        start_powerSGD_iter=2,  # the least it takes; by default the first 1,000 steps are dense
    )
    # DDP compares annotations with its own classes; a lambda has none.
    wrapped.register_comm_hook(state, lambda state, bucket: _powersgd_on_one_bucket(state, bucket))
    return wrapped


def _powersgd_on_one_bucket(state: Any, bucket: Any) -> torch.futures.Future[Tensor]:
    from torch.distributed.algorithms.ddp_comm_hooks.powerSGD_hook import powerSGD_hook

    if bucket.index() or not bucket.is_last():
        raise RuntimeError("DDP's PowerSGD hook must get one bucket, or the run hangs: raise bucket_cap_mb")
    return powerSGD_hook(state, bucket)


DDP_HOOKS: dict[str, Callable[[nn.Module], nn.Module]] = {
    "ddp": DistributedDataParallel,
    "ddp-fp16": _ddp_cast("fp16_compress_hook"),
    "ddp-bf16": _ddp_cast("bf16_compress_hook"),
    "ddp-powersgd": _ddp_powersgd,
}

EPFML = {"epfml-powersgd": 2, "epfml-powersgd-1": 1}  # factors that are sent each step


def _epfml_powersgd(model: nn.Module, optimizer: torch.optim.Optimizer, factors: int) -> None:
    """Let a step exchange gradients by the package of PowerSGD's authors, as its `optimizer_step` does.

    The gradients hold what was left out when a step has ended, so nobody may set them to zero.
    """
    from powersgd import Config, PowerSGD

    held = list(model.parameters())
    settings = Config(rank=4, num_iters_per_step=factors, start_compressing_after_num_steps=0)
    exchange = PowerSGD(held, settings)
    left: list[Tensor] = []

    def before(*_: object) -> None:
        left[:] = [p.grad for p in held if p.grad is not None]
        for p, mean in zip(held, exchange.aggregate(left), strict=True):
            p.grad = mean

    def after(*_: object) -> None:
        for p, residual in zip(held, left, strict=True):
            p.grad = residual

    optimizer.register_step_pre_hook(before)
    optimizer.register_step_post_hook(after)
    optimizer.zero_grad = lambda set_to_none=True: None  # type: ignore[method-assign]
