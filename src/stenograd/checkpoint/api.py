"""`save_checkpoint` and `load_checkpoint`: save and restore all that decides the next step, on all ranks."""

from __future__ import annotations

import io
import warnings
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch
from torch import nn

from stenograd.checkpoint.collective import read_set, write_set
from stenograd.checkpoint.reshard import reshard_rank
from stenograd.checkpoint.restoring import Stateful, after_load, held, load_parts, share_of
from stenograd.comm.agreement import agree
from stenograd.comm.driver import Driver
from stenograd.devices import random_state
from stenograd.errors import CheckpointError, ConfigError, bad_value
from stenograd.launch.process_group import join

__all__ = ["Loaded", "PerRank", "Stateful", "load_checkpoint", "save_checkpoint"]

_Optimizers = torch.optim.Optimizer | Sequence[torch.optim.Optimizer] | None


@dataclass(frozen=True, kw_only=True)
class Loaded:
    """The checkpoint that `load_checkpoint` loaded.

    Attributes:
        step: as it was saved.
        extra: as it was saved; rank 0's where the number of ranks has changed.
        world_size: number of ranks that saved it.
        resharded: whether that differs from the number of ranks now.
        path: the folder that holds its manifest.
        refused: why newer checkpoints could not be loaded, one line each.
    """

    step: int
    extra: Any
    world_size: int
    resharded: bool
    path: Path
    refused: tuple[str, ...] = field(default=())


def save_checkpoint(
    folder: str | Path,
    *,
    step: int,
    model: nn.Module,
    optimizer: _Optimizers = None,
    sync: Stateful | None = None,
    scheduler: Stateful | None = None,
    sampler: Stateful | None = None,
    generators: Mapping[str, torch.Generator] | None = None,
    extra: Any = None,
    keep: int = 2,
    group: Any = None,
    timeout_s: float = 300.0,
) -> Path:
    """Save all that decides the next step: one file per rank, and a manifest. All ranks call it.

    Every rank saves its own model (batch-norm statistics differ from rank to rank), optimizer, state of the
    method, random states (PyTorch's own on CPU and CUDA, and `generators`) and the rest. If the machine stops
    before this checkpoint is whole, the folder's earlier ones still count.

    Args:
        folder: made where it does not exist. Ranks on several hosts may each write to a disk of their own,
            but only a folder that all share can be loaded with another number of ranks.
        step: number of steps taken, at least 0, equal on all ranks; names the checkpoint.
        model: its parameters and buffers.
        optimizer: one or several.
        sync: from `stenograd.distribute`.
        scheduler: of learning rates.
        sampler: the position in the data: anything with `state_dict` and `load_state_dict`. To be loaded with
            another number of ranks, its state must be equal on all of them (samples seen by all together).
        generators: the caller's own, by name; private to the rank or equal on all.
        extra: anything made of numbers, texts, None, tensors, lists, tuples and dictionaries.
        keep: number of checkpoints to keep, at least 1; with 2, one is left if the newest is damaged.
        group: process group; None for all ranks.
        timeout_s: seconds after which a silent peer is an error.

    Returns:
        The manifest's path.

    Raises:
        ConfigError: on every rank: step or keep is out of range on one, or the model is sharded.
        MismatchError: on every rank: they give different steps.
        CheckpointError: on every rank, if one lacks room or permission to write, or holds something that
            could not be loaded again (a NumPy number in `extra`); earlier checkpoints are unchanged.
        StenogradError: a part's `state_dict()` raised on a rank; raised on every rank.
        PeerLost: a rank did not answer within timeout_s.

    Example:
        >>> import tempfile, stenograd
        >>> model = torch.nn.Linear(4, 2)
        >>> optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
        >>> sync = stenograd.distribute(model, optimizer, "topk:ratio=0.5")
        >>> with tempfile.TemporaryDirectory() as folder:
        ...     path = save_checkpoint(folder, step=7, model=model, optimizer=optimizer, sync=sync)
        ...     loaded = load_checkpoint(folder, model=model, optimizer=optimizer, sync=sync)
        >>> path.name, loaded.step
        ('checkpoint-step7.json', 7)
        >>> sync.close(); stenograd.shutdown()
    """
    path, driver = Path(folder), connected(group, timeout_s)

    # Whatever may fail on one rank alone runs in agree(): the others would wait for it until the timeout.
    def ready() -> None:
        if not isinstance(step, int) or step < 0:
            raise bad_value("step", "must be a whole number from 0", step, "give the number of steps taken")
        if keep < 1:
            raise bad_value(
                "keep", "must be at least 1", keep, "use 2, so that one is left if one is damaged"
            )
        if suffix_of(sync):
            raise ConfigError(
                "save_checkpoint needs a whole model on every rank, got one sharded by FSDP: save model and "
                "optimizer with torch.distributed.checkpoint, and sync with "
                "stenograd.save_state(folder, sync)"
            )
        make_folder(path)

    hold_due(sync)  # first of all: others may be waiting in a round
    agree(driver, ready)

    def content() -> dict[str, Any]:
        return {
            "model": model.state_dict(),
            "optimizer": [optimizer.state_dict() for optimizer in as_list(optimizer)],
            "held": held(model, as_list(optimizer)),
            **{name: part.state_dict() for name, part in _parts(sync, scheduler, sampler).items()},
            "random": random_state(),
            "generators": {name: generator.get_state() for name, generator in (generators or {}).items()},
            "extra": extra,
        }

    method = str(getattr(sync, "method", ""))
    return write_set(driver, path, step, agree(driver, content), method=method, keep=keep)


def hold_due(sync: Any) -> None:
    """Hold the round that a rank may still have to hold after a skipped step: the others wait in it."""
    before = getattr(sync, "before_save", None)
    if before is not None:
        before()


def load_checkpoint(
    folder: str | Path,
    *,
    model: nn.Module,
    optimizer: _Optimizers = None,
    sync: Stateful | None = None,
    scheduler: Stateful | None = None,
    sampler: Stateful | None = None,
    generators: Mapping[str, torch.Generator] | None = None,
    step: int | None = None,
    group: Any = None,
    timeout_s: float = 300.0,
) -> Loaded | None:
    """Continue from the newest whole checkpoint; all ranks call it, with what `save_checkpoint` was given.

    With as many ranks as saved it, the next steps equal an uninterrupted run's bit for bit. With another
    number the state is re-sharded: residuals as in `stenograd.reshard`; model, optimizer, scheduler and
    `extra` are rank 0's; PyTorch's random state is derived from rank 0's and the rank. A generator that was
    equal on all ranks is copied; otherwise each rank keeps its own, and new ranks derive theirs from rank
    0's. A sampler's state must have been equal on all ranks.

    Args:
        folder: where `save_checkpoint` wrote.
        model: built like the one saved; the same holds for the other parts.
        optimizer: see model.
        sync: see model.
        scheduler: see model.
        sampler: see model.
        generators: see model.
        step: of the checkpoint to load; None loads the newest whole one, and warns of newer ones that are
            damaged.
        group: process group; None for all ranks.
        timeout_s: seconds after which a silent peer is an error.

    Returns:
        What was loaded; None where the folder holds no checkpoint at all.

    Raises:
        CheckpointError: a file is missing, truncated, altered or of another checkpoint, and no older
            checkpoint is whole (or `step` names this one); or its content does not fit what was given.
            Raised on every rank.
        MismatchError: on every rank: they ask for different steps.
        PeerLost: a rank did not answer within timeout_s.
    """
    driver = connected(group, timeout_s)
    found = read_set(driver, Path(folder), step=step)
    if found is None:
        return None
    resharded = found.manifest.world_size != driver.world_size
    parts = _parts(sync, scheduler, sampler)

    def take() -> dict[str, Any]:
        if found.refused and driver.rank == 0:  # a program may turn warnings into errors
            lines = "; ".join(found.refused)
            warnings.warn(f"continuing from step {found.manifest.step}, because {lines}", stacklevel=4)
        content = share_of(found, driver) if resharded else found.content
        load_parts(content, model, as_list(optimizer), parts, generators or {})
        return content

    content = agree(driver, take)
    after_load(sync)
    return Loaded(
        step=found.manifest.step,
        extra=content.get("extra"),
        world_size=found.manifest.world_size,
        resharded=resharded,
        path=Path(folder),
        refused=found.refused,
    )


class PerRank:
    """A sync's state under the rank's own keys, for `torch.distributed.checkpoint` (DCP).

    DCP saves tensors of equal names once, but each rank has its own residuals. Here they are called
    `rank0...`, `rank1...`: `dcp.save({"model": model, "sync": PerRank(sync)}, checkpoint_id=folder)`.

    Args:
        sync: from `stenograd.distribute`.
        saved_by: number of ranks that saved what is to be loaded; None for as many as now. Otherwise every
            rank reads all states and takes its share, as in `stenograd.reshard`.

    Example:
        >>> import stenograd
        >>> model = torch.nn.Linear(4, 2)
        >>> sync = stenograd.distribute(model, torch.optim.SGD(model.parameters(), lr=0.1), "topk")
        >>> list(PerRank(sync).state_dict()), list(PerRank(sync, saved_by=2).state_dict())
        (['rank0'], ['rank0', 'rank1'])
        >>> sync.close(); stenograd.shutdown()
    """

    def __init__(self, sync: Stateful, saved_by: int | None = None) -> None:
        if saved_by is not None and saved_by < 1:
            raise bad_value("saved_by", "must be at least 1", saved_by, "give the number of ranks that saved")
        self.sync, self.saved_by = sync, saved_by

    def state_dict(self) -> dict[str, Any]:
        """Return this rank's state under its key; to load from `saved_by` ranks, a key for each.

        A state is one value of bytes: DCP loads only what it is given a place for, and what a state holds
        (a share that is under way, the parameters of a round) differs from step to step.
        """
        mine = self.sync.state_dict()
        if self.saved_by in (None, mine["world_size"]):
            written = io.BytesIO()
            torch.save(mine, written)
            return {self._key(mine["rank"]): written.getvalue()}
        return {self._key(rank): b"" for rank in range(self.saved_by or 0)}

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Continue from what DCP has read."""
        mine = self.sync.state_dict()
        rank, world_size = mine["rank"], mine["world_size"]
        if self.saved_by in (None, world_size):
            self.sync.load_state_dict(_read(state[self._key(rank)]))
            return
        states = (_read(state[self._key(number)]) for number in range(self.saved_by or 0))
        self.sync.load_state_dict(reshard_rank(states, rank, world_size))

    def _key(self, rank: int) -> str:
        """Return the name of a rank's state; ranks that hold other shards of a model have other names."""
        return f"rank{rank}{suffix_of(self.sync)}"


def _read(written: bytes) -> Any:
    """Return a rank's state; tensors and plain values only, so that reading it runs no code."""
    return torch.load(io.BytesIO(written), weights_only=True)


def connected(group: Any, timeout_s: float) -> Driver:
    """Return the way to the other ranks of a group, after joining them where that has not happened yet."""
    join(timeout_s=timeout_s)
    return Driver(group, timeout_s=timeout_s)


def suffix_of(sync: Any) -> str:
    """Return what tells a sync's states from those of ranks that hold other shards of a model."""
    return str(getattr(sync, "suffix", ""))


def make_folder(folder: Path) -> None:
    """Make a folder and those above it.

    Raises:
        CheckpointError: it cannot be made.
    """
    try:
        folder.mkdir(parents=True, exist_ok=True)
    except OSError as cause:
        raise CheckpointError(
            f"{folder}: cannot be created ({cause.strerror}): give a folder that can be written"
        ) from cause


def _parts(sync: Any, scheduler: Any, sampler: Any) -> dict[str, Stateful]:
    named = {"sync": sync, "scheduler": scheduler, "sampler": sampler}
    return {name: part for name, part in named.items() if part is not None}


def as_list(optimizer: _Optimizers) -> list[torch.optim.Optimizer]:
    """Return none, one or several optimizers as a list."""
    if optimizer is None:
        return []
    return [optimizer] if isinstance(optimizer, torch.optim.Optimizer) else list(optimizer)
