"""What happens once when ranks meet: compare what must be equal, then take rank 0's weights."""

from __future__ import annotations

import json
import socket
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

from laconic.drive import Driver
from laconic.errors import ConfigError, MismatchError, TensorTypeError
from laconic.kernels.backend import wanted
from laconic.version import __version__

__all__ = ["broadcast_model", "compare", "refuse_taken", "synced_parameters", "versions"]

_DTYPES = (torch.float16, torch.bfloat16, torch.float32, torch.float64)


def versions() -> dict[str, str]:
    """Return what must be equal on all ranks whatever they exchange, for `compare`.

    Example:
        >>> sorted(versions())
        ['kernels', 'laconic version', 'torch version']
    """
    # Ranks with other kernels would get averages that differ in the last bits.
    own = {"laconic version": __version__, "torch version": torch.__version__.split("+")[0]}
    return {**own, "kernels": wanted()}


def refuse_taken(model: nn.Module, optimizers: Sequence[torch.optim.Optimizer]) -> None:
    """Refuse a model whose gradients somebody else averages or shards already.

    Raises:
        ConfigError: a part of it is wrapped in DistributedDataParallel or FSDP, or an optimizer is attached.
    """
    if any("add_param_group" in vars(optimizer) for optimizer in optimizers):
        raise ConfigError("optimizer must be attached once, got one attached already: close() the first")
    for name, module in model.named_modules():
        sharded = any(hasattr(p, "device_mesh") for p in module.parameters(recurse=False))
        if sharded or hasattr(module, "register_comm_hook"):
            kind = f"{type(module).__name__} as {name}" if name else type(module).__name__
            raise ConfigError(
                f"model must be a plain module, got {kind}, which exchanges gradients itself: pass "
                "model.module, unwrapped before, or use laconic.ddp.register"
            )


def synced_parameters(
    model: nn.Module, optimizers: Sequence[torch.optim.Optimizer]
) -> dict[str, nn.Parameter]:
    """Return the trainable parameters that the optimizers hold, by name, in the order of definition.

    A trainable parameter that no optimizer holds is left alone: it never moves. It joins when it is added
    with `optimizer.add_param_group`.

    Raises:
        ConfigError: the model has no trainable parameter, or an optimizer holds one that is not the model's.
        TensorTypeError: a parameter is complex.
    """
    held = {id(p) for o in optimizers for group in o.param_groups for p in group["params"] if p.requires_grad}
    named = {name: p for name, p in model.named_parameters() if p.requires_grad}
    if not named:
        raise ConfigError(
            "model must have trainable parameters, got none: call requires_grad_() on some of them"
        )
    strangers = held - {id(p) for p in model.parameters()}
    if strangers:
        raise ConfigError(
            f"optimizer must hold the model's parameters, got {len(strangers)} of {len(held)} not in it: "
            "create the optimizer from model.parameters(), after moving or replacing layers"
        )
    synced = {name: p for name, p in named.items() if id(p) in held}
    if not synced:
        raise ConfigError(
            "optimizer must hold the model's parameters, got none of them: pass model.parameters()"
        )
    for name, p in synced.items():
        if p.is_complex():
            raise TensorTypeError(
                f"parameter {name} must be real, got {p.dtype}: keep real and imaginary parts"
            )
        if p.dtype not in _DTYPES:
            raise TensorTypeError(
                f"parameter {name} must be of 16, 32 or 64 bits, got {p.dtype}, which backends cannot add: "
                "keep master weights in bfloat16 or float32"
            )
    return synced


def compare(driver: Driver, description: Mapping[str, Any], device: torch.device) -> None:
    """Check that every rank describes the same thing; also find out who is on which host, for `traffic`.

    Args:
        driver: the way to the other ranks.
        description: JSON-able values by what they are, such as "method" or "parameter fc.weight".
        device: where messages may live (NCCL wants CUDA).

    Raises:
        MismatchError: on every rank, naming the first difference and the two ranks.
    """
    messages = driver.gather_bytes(json.dumps([_host(), description]).encode(), device)
    told: list[tuple[str, dict[str, Any]]] = [json.loads(message) for message in messages]
    driver.traffic.hosts = [host for host, _ in told]
    first = told[0][1]
    for rank, (_, other) in enumerate(told[1:], start=1):
        for what in [*first, *(k for k in other if k not in first)]:
            a, b = first.get(what, "nothing"), other.get(what, "nothing")
            if a != b:
                raise MismatchError(
                    f"ranks differ in {what}: rank 0 has {a}, rank {rank} has {b}: make them equal"
                )


@torch.no_grad()
def broadcast_model(driver: Driver, model: nn.Module) -> None:
    """Overwrite all parameters and buffers with rank 0's."""
    seen: set[int] = set()
    tensors: list[Tensor] = [*model.parameters(), *model.buffers()]
    for t in tensors:
        if id(t) not in seen:
            seen.add(id(t))
            driver.broadcast(t.detach())


def _host() -> str:
    """Name this host, or its part with a network of its own: from there, others are across a link."""
    try:
        network = Path("/proc/self/ns/net").stat().st_ino
    except OSError:  # not Linux
        network = 0
    return f"{socket.gethostname()}/{network}"
