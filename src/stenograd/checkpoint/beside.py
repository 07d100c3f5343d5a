"""`save_state` and `load_state`: what each rank keeps, beside a checkpoint that a framework writes."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any

import torch
from torch import nn

from stenograd.checkpoint.api import as_list, connected, hold_due, make_folder, suffix_of
from stenograd.checkpoint.collective import read_set, write_set
from stenograd.checkpoint.restoring import after_load, held, load_parts, share_of
from stenograd.comm.agreement import agree
from stenograd.errors import CheckpointError, ConfigError

__all__ = ["MissingState", "load_state", "save_state"]

_Optimizers = torch.optim.Optimizer | Sequence[torch.optim.Optimizer] | None


class MissingState(CheckpointError):
    """A folder holds no state of a method: whoever wrote the checkpoint around it had none."""


def save_state(
    folder: str | Path,
    sync: Any,
    *,
    model: nn.Module | None = None,
    optimizer: _Optimizers = None,
    name: str = "stenograd",
    group: Any = None,
    timeout_s: float = 300.0,
) -> Path:
    """Save what each rank keeps for itself, beside a checkpoint that a framework writes. All ranks call it.

    Frameworks write user state on rank 0 only, but every rank has residuals of its own. This writes one file
    per rank and a manifest to the folder `name` inside `folder`, where a state saved before is replaced once
    the new one is whole.

    Args:
        folder: the framework's; made where it does not exist.
        sync: from `stenograd.distribute` or `stenograd.ddp.register`.
        model: needed where ranks' parameters differ between rounds ("local", "diloco", "gossip"), because the
            framework would keep rank 0's only.
        optimizer: likewise, one or several.
        name: of the folder inside; a second sync needs another.
        group: process group; None for the one that sync was given.
        timeout_s: seconds after which a silent peer is an error.

    Returns:
        The manifest's path.

    Raises:
        ConfigError: on every rank: model or optimizer is missing on one where ranks' parameters differ.
        CheckpointError: on every rank, if one cannot write; an earlier state is unchanged.
        PeerLost: a rank did not answer within timeout_s.

    Example:
        >>> import tempfile, stenograd
        >>> model = torch.nn.Linear(4, 2)
        >>> sync = stenograd.distribute(model, torch.optim.SGD(model.parameters(), lr=0.1), "topk:ratio=0.5")
        >>> with tempfile.TemporaryDirectory() as folder:
        ...     path = save_state(folder, sync)
        ...     load_state(folder, sync)
        >>> path.parent.name, path.name
        ('stenograd', 'checkpoint-step0.json')
        >>> sync.close(); stenograd.shutdown()
    """
    path, driver = _place(folder, name, sync), connected(group or sync.group, timeout_s)

    def ready() -> None:
        if not sync.method.averages_gradients and (model is None or optimizer is None):
            raise ConfigError(
                f"save_state needs the model and the optimizer with {sync.method}, whose ranks have "
                "parameters of their own between rounds: pass model=model, optimizer=optimizer"
            )
        make_folder(path)

    hold_due(sync)  # first of all: others may be waiting in a round
    agree(driver, ready)

    def content() -> dict[str, Any]:
        return {
            "model": None if model is None else model.state_dict(),
            "optimizer": [o.state_dict() for o in as_list(optimizer)],
            "held": [] if model is None else held(model, as_list(optimizer)),
            "sync": sync.state_dict(),
            "random": None,
            "generators": {},
        }

    return write_set(driver, path, sync.step, agree(driver, content), method=str(sync.method), keep=1)


def load_state(
    folder: str | Path,
    sync: Any,
    *,
    model: nn.Module | None = None,
    optimizer: _Optimizers = None,
    name: str = "stenograd",
    group: Any = None,
    timeout_s: float = 300.0,
) -> None:
    """Continue from what `save_state` wrote; all ranks call it, after the framework has loaded its own part.

    With another number of ranks, residuals are re-sharded as in `stenograd.reshard`, and model and optimizer,
    where they were saved, are those of the last round.

    Args:
        folder: see `save_state`.
        sync: see `save_state`.
        model: given if it was given to `save_state`.
        optimizer: see model.
        name: see `save_state`.
        group: process group; None for the one that sync was given.
        timeout_s: seconds after which a silent peer is an error.

    Raises:
        MissingState: the folder holds no state at all; on every rank.
        CheckpointError: it holds one that is not whole or does not fit; on every rank.
        PeerLost: a rank did not answer within timeout_s.
    """
    path, driver = _place(folder, name, sync), connected(group or sync.group, timeout_s)
    found = read_set(driver, path)
    if found is None:
        raise MissingState(
            f"{path}: holds no state of a method: it was saved without save_state, or on another disk"
        )
    whole = found

    def take() -> None:
        same = whole.manifest.world_size == driver.world_size
        content = whole.content if same else share_of(whole, driver)
        load_parts(content, model, as_list(optimizer), {"sync": sync}, {})

    agree(driver, take)
    after_load(sync)


def _place(folder: str | Path, name: str, sync: Any) -> Path:
    """Return where a state belongs; ranks that hold other shards of a model have a folder of their own."""
    return Path(folder) / f"{name}{suffix_of(sync)}"
