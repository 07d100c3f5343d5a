"""Save and restore, on all ranks together, all that decides the next step.

All ranks load the same checkpoint, and all raise the same error.
"""

from __future__ import annotations

import contextlib
import io
import json
import secrets
import warnings
from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict, dataclass, field
from functools import partial
from pathlib import Path
from typing import Any

import torch
from torch import nn

from stenograd.checkpoint.files import (
    Found,
    Manifest,
    RankFile,
    check_rank,
    complete,
    drop_others,
    manifest_path,
    rank_path,
    read_manifest,
    read_rank,
    saved_steps,
    write_manifest,
    write_rank,
)
from stenograd.checkpoint.reshard import Stateful, held, load_parts, reshard_rank, share_of
from stenograd.devices import random_state
from stenograd.errors import (
    CheckpointError,
    ConfigError,
    MismatchError,
    PeerLost,
    StenogradError,
    bad_value,
)
from stenograd.launch.process_group import join, membership
from stenograd.version import __version__
from stenograd.wire.agreement import agree, everyone
from stenograd.wire.driver import Driver
from stenograd.wire.drivers import AnyDriver

__all__ = [
    "Loaded",
    "MissingState",
    "PerRank",
    "Stateful",
    "load_checkpoint",
    "load_state",
    "read_set",
    "save_checkpoint",
    "save_state",
    "steps_of",
    "write_set",
]

_Optimizers = torch.optim.Optimizer | Sequence[torch.optim.Optimizer] | None


class MissingState(CheckpointError):
    """A folder holds no state of a method: whoever wrote the checkpoint around it had none."""


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

    def check() -> None:
        if not isinstance(step, int) or step < 0:
            raise bad_value("step", "must be a whole number from 0", step, "give the number of steps taken")
        if keep < 1:
            raise bad_value("keep", "must be at least 1", keep, "use 2: one is left if the other is damaged")
        if _suffix(sync):
            raise ConfigError(
                "save_checkpoint needs a whole model on every rank, got one sharded by FSDP: save model and "
                "optimizer with torch.distributed.checkpoint, and sync with "
                "stenograd.save_state(folder, sync)"
            )

    def more() -> dict[str, Any]:
        own = {name: generator.get_state() for name, generator in (generators or {}).items()}
        return {"random": random_state(), "generators": own, "extra": extra}

    driver, parts = _connected(group, timeout_s), _parts(sync, scheduler, sampler)
    return _save(driver, Path(folder), step, model, optimizer, parts, more, keep, check)


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
    equal on all ranks is copied, so also what one rank saved: seed it anew if it is private. Otherwise each
    rank keeps its own, and new ranks derive theirs from rank 0's. A sampler's state must have been equal on
    all ranks.

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
    driver = _connected(group, timeout_s)
    found = read_set(driver, Path(folder), step=step)
    if found is None:
        return None

    def warn() -> None:
        if driver.rank == 0:
            lines = "; ".join(found.refused)
            # The four: this function, `agree`, `load_checkpoint`, and the program, whose line is to be shown.
            warnings.warn(f"continuing from step {found.manifest.step}, because {lines}", stacklevel=4)

    if found.refused:  # the same on all ranks
        agree(driver, warn)  # a program may turn warnings into errors
    parts = _parts(sync, scheduler, sampler)
    content = _load(driver, found, model, optimizer, parts, generators or {})
    return Loaded(
        step=found.manifest.step,
        extra=content.get("extra"),
        world_size=found.manifest.world_size,
        resharded=found.manifest.world_size != driver.world_size,
        path=Path(folder),
        refused=found.refused,
    )


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

    def check() -> None:
        if not sync.method.averages_gradients and (model is None or optimizer is None):
            raise ConfigError(
                f"save_state needs the model and the optimizer with {sync.method}, whose ranks have "
                "parameters of their own between rounds: pass model=model, optimizer=optimizer"
            )

    path, driver = _place(folder, name, sync), _connected(group or sync.group, timeout_s)
    more: dict[str, Any] = {"random": None, "generators": {}}
    return _save(driver, path, None, model, optimizer, {"sync": sync}, lambda: more, 1, check)


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
    path, driver = _place(folder, name, sync), _connected(group or sync.group, timeout_s)
    found = read_set(driver, path)
    if found is None:
        raise MissingState(
            f"{path}: holds no state of a method: it was saved without save_state, or on another disk"
        )
    _load(driver, found, model, optimizer, {"sync": sync}, {})


class PerRank:
    """A sync's state under the rank's own keys, for `torch.distributed.checkpoint` (DCP).

    DCP saves tensors of equal names once, but each rank has its own residuals. Here they are called
    `rank0...`, `rank1...`: `dcp.save({"model": model, "sync": PerRank(sync)}, checkpoint_id=folder)`. Where
    ranks meet in rounds, name model and optimizer by rank, too.

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
        own = self.sync.state_dict()
        if self.saved_by in (None, own["world_size"]):
            written = io.BytesIO()
            torch.save(own, written)
            return {self._key(own["rank"]): written.getvalue()}
        return {self._key(rank): b"" for rank in range(self.saved_by or 0)}

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Continue from what DCP has read."""
        own = self.sync.state_dict()
        rank, world_size = own["rank"], own["world_size"]
        if self.saved_by in (None, world_size):
            self.sync.load_state_dict(_unpacked(state[self._key(rank)]))
            return
        states = (_unpacked(state[self._key(number)]) for number in range(self.saved_by or 0))
        self.sync.load_state_dict(reshard_rank(states, rank, world_size))

    def _key(self, rank: int) -> str:
        """Return the name of a rank's state; ranks that hold other shards of a model have other names."""
        return f"rank{rank}{_suffix(self.sync)}"


def steps_of(sync: Any) -> int:
    """Return a number of steps that is equal on all ranks; of rounds where these go by time."""
    return int(sync.round if getattr(sync.method.schedule, "seconds", 0) else sync.step)


def _unpacked(written: bytes) -> Any:
    """Return a rank's state; tensors and plain values only, so that reading it runs no code."""
    return torch.load(io.BytesIO(written), weights_only=True)


def _connected(group: Any, timeout_s: float) -> Driver:
    """Return the way to the other ranks of a group, after joining them where that has not happened yet."""
    join(timeout_s=timeout_s, open_run=True)
    return Driver(group, timeout_s=timeout_s)


def _suffix(sync: Any) -> str:
    """Return what tells a sync's states from those of ranks that hold other shards of a model."""
    return str(getattr(sync, "suffix", ""))


def _place(folder: str | Path, name: str, sync: Any) -> Path:
    """Return where a state belongs; ranks that hold other shards of a model have a folder of their own."""
    return Path(folder) / f"{name}{_suffix(sync)}"


def _parts(sync: Any, scheduler: Any, sampler: Any) -> dict[str, Stateful]:
    named = {"sync": sync, "scheduler": scheduler, "sampler": sampler}
    return {name: part for name, part in named.items() if part is not None}


def _as_list(optimizer: Any) -> list[torch.optim.Optimizer]:
    if optimizer is None:
        return []
    # Not by its class: `distribute` takes what frameworks put around an optimizer, too.
    return [optimizer] if hasattr(optimizer, "param_groups") else list(optimizer)


def _save(
    driver: Driver,
    folder: Path,
    step: int | None,
    model: nn.Module | None,
    optimizer: _Optimizers,
    parts: Mapping[str, Any],
    more: Callable[[], Mapping[str, Any]],
    keep: int,
    check: Callable[[], None],
) -> Path:
    """Save a training's parts and what `more` returns, after a step or the sync's own; see `write_set`.

    What `check` raises, on one rank or all, is raised on all.
    """
    sync: Any = parts.get("sync")
    optimizers = _as_list(optimizer)
    # First of all: the others wait in a round that this rank may still have to hold after a skipped step.
    getattr(sync, "before_save", bool)()

    def content() -> dict[str, Any]:
        return {
            "model": None if model is None else model.state_dict(),
            "optimizer": [one.state_dict() for one in optimizers],
            "held": [] if model is None else held(model, optimizers),
            **{name: part.state_dict() for name, part in parts.items()},
            **more(),
        }

    def ready() -> None:
        check()
        _make_folder(folder)

    # Whatever may fail on one rank alone runs in agree(): the others would wait for it until the timeout.
    agree(driver, ready)
    taken, method = steps_of(sync) if step is None else step, str(getattr(sync, "method", ""))
    saved = agree(driver, content)
    # Not earlier: who has its turn must not wait for a round to which another would come after its own.
    with _turn():
        return write_set(driver, folder, taken, saved, method=method, keep=keep)


def _turn() -> contextlib.AbstractContextManager[None]:
    """Let workers of an open run, each of which saves alone, do so in turn: a save deletes what it finds."""
    here = membership()
    return contextlib.nullcontext() if here is None else here.turn("save")


def _load(
    driver: Driver,
    found: Found,
    model: nn.Module | None,
    optimizer: _Optimizers,
    parts: Mapping[str, Any],
    generators: Mapping[str, torch.Generator],
) -> dict[str, Any]:
    """Load a checkpoint's parts, re-sharded where another number of ranks saved it; return its content."""

    def take() -> dict[str, Any]:
        same = found.manifest.world_size == driver.world_size
        content = found.content if same else share_of(found, driver.rank, driver.world_size)
        load_parts(content, model, _as_list(optimizer), parts, generators)
        return content

    content = agree(driver, take)
    getattr(parts.get("sync"), "after_load", bool)()  # what loading left over may need all ranks
    return content


def _make_folder(folder: Path) -> None:
    try:
        folder.mkdir(parents=True, exist_ok=True)
    except OSError as cause:
        raise CheckpointError(
            f"{folder}: cannot be created ({cause.strerror}): give a folder that can be written"
        ) from cause


def write_set(
    driver: AnyDriver,
    folder: Path,
    step: int,
    content: Mapping[str, Any],
    *,
    method: str = "",
    keep: int = 2,
) -> Path:
    """Write a checkpoint on all ranks, delete all but the `keep` newest, and return the manifest's path.

    Every rank writes its file under the name of this save; when all files are on the disk, rank 0 writes the
    manifest, which makes the checkpoint count. A crash before that leaves the older ones as they were.
    Where ranks do not share the folder, each writes the manifest to its own.

    Args:
        driver: the way to the other ranks.
        folder: an existing folder.
        step: number of steps taken, equal on all ranks.
        content: this rank's tensors and plain values.
        method: text of the method, for the manifest.
        keep: number of checkpoints to keep, at least 1.

    Raises:
        CheckpointError: a rank cannot write, or its content could not be loaded again; raised on every rank,
            and earlier checkpoints are unchanged.
        MismatchError: on every rank: they save different steps.
        StenogradError: on every rank: the checkpoint is whole, but on one the folder cannot be looked through
            for older ones.
    """
    # default=str: json would refuse another type on this rank alone, and the others would wait for it.
    own = json.dumps([step, secrets.token_hex(4)], default=str)
    received = [json.loads(text) for text in everyone(driver, own)]
    _refuse_others([other for other, _ in received], "save")
    set_id = received[0][1]  # rank 0's
    try:
        record = agree(driver, lambda: write_rank(folder, step, set_id, driver.rank, content))
        records = [json.loads(text) for text in everyone(driver, json.dumps(asdict(record)))]
        manifest = Manifest(
            step=step,
            set_id=set_id,
            world_size=driver.world_size,
            method=method,
            versions={"stenograd": __version__, "torch": torch.__version__},
            files=tuple(RankFile(**file) for file in records),
        )
        agree(driver, lambda: write_manifest(folder, manifest) if driver.rank == 0 else None)
        # Where ranks have disks of their own, rank 0's manifest is not there yet.
        is_there = partial(_is_manifest_of, folder, step, set_id)
        agree(driver, lambda: None if is_there() else write_manifest(folder, manifest, driver.rank))
    except PeerLost:
        raise  # the others may have finished, so nothing is deleted; the next save removes what is left
    except StenogradError:
        _delete_failed_save(folder, step, set_id, driver.rank)
        raise
    # Only now: until here the older ones are all there is. All ranks choose alike: a checkpoint that has lost
    # a file, which only that file's rank may see, must not push out a good one.
    seen = agree(driver, lambda: complete(folder, step, driver.rank))
    first, *others = (json.loads(text) for text in everyone(driver, json.dumps(seen)))
    older = [one for one in first if all(one in other for other in others)]
    kept = [[step, set_id], *older][:keep]
    agree(driver, lambda: drop_others(folder, kept, driver.rank, driver.world_size))
    return manifest_path(folder, step)


def read_set(driver: AnyDriver, folder: Path, *, step: int | None = None) -> Found | None:
    """Read the newest checkpoint that every rank can read whole; None where there is none at all.

    Args:
        driver: the way to the other ranks.
        folder: where `write_set` wrote.
        step: of the one to read; None for the newest that is whole.

    Raises:
        CheckpointError: no checkpoint is whole, or the one of `step` is not, naming the files and what is
            wrong with them; the same on every rank.
        MismatchError: on every rank: they ask for different steps.
    """
    own = agree(driver, lambda: saved_steps(folder))  # which may fail on one rank alone
    received = [json.loads(text) for text in everyone(driver, json.dumps([step, own], default=str))]
    _refuse_others([other for other, _ in received], "load")
    # Those of all ranks, because checking one is a collective: all must try the same, in one order.
    steps = sorted(set().union(*(found for _, found in received)), reverse=True)
    if step is not None:
        if step not in steps:
            known = ", ".join(map(str, sorted(steps))) or "none"
            raise CheckpointError(f"{folder}: no checkpoint of step {step}; it holds those of steps: {known}")
        steps = [step]
    refused: list[str] = []
    for number in steps:
        manifest, content, wrong = _read_if_whole(driver, folder, number)
        if manifest is not None:
            return Found(manifest, content, folder, tuple(refused))
        refused.append(wrong)
    if refused:
        raise CheckpointError("no whole checkpoint: " + "; ".join(refused) if step is None else refused[0])
    return None


def _refuse_others(steps: Sequence[int | None], what: str) -> None:
    """Refuse to save or load different steps on different ranks: that would be no checkpoint."""
    for rank, other in enumerate(steps):
        if other != steps[0]:
            raise MismatchError(
                f"ranks differ in step: rank 0 has {steps[0]}, rank {rank} has {other}: {what} the same "
                "step on all ranks"
            )


def _read_if_whole(driver: AnyDriver, folder: Path, step: int) -> tuple[Manifest | None, dict[str, Any], str]:
    """Check one checkpoint and read this rank's content; the text says what is wrong, the same on all ranks.

    Where another number of ranks saved it, each rank reads rank 0's content, and the ranks share the work of
    checking the other files: each is read whole once, not once per rank.
    """
    manifest, content, wrong = None, dict[str, Any](), ""
    try:
        manifest = read_manifest(folder, step)
        same = manifest.world_size == driver.world_size
        # With as many ranks as saved it, each reads its own file whole below, which checks them all.
        for rank in range(1, 1 if same else manifest.world_size):
            check_rank(folder, manifest, rank, whole=rank % driver.world_size == driver.rank)
        content = read_rank(folder, manifest, driver.rank if same else 0)
    except CheckpointError as error:
        wrong = str(error)
    set_id = manifest.set_id if manifest is not None else ""
    verdicts = [json.loads(text) for text in everyone(driver, json.dumps([set_id, wrong]))]
    first = verdicts[0][0]
    for rank, (other, received) in enumerate(verdicts):
        if received:
            on_all = verdicts.count([other, received]) == len(verdicts)
            return None, {}, received if on_all else f"rank {rank}: {received}"
        if other != first:
            path = manifest_path(folder, step)
            return None, {}, f"{path}: ranks 0 and {rank} have manifests of two saves ({first}, {other})"
    return manifest, content, ""


def _delete_failed_save(folder: Path, step: int, set_id: str, rank: int) -> None:
    """Delete what a failed save has written; an older checkpoint of the same step stays."""
    with contextlib.suppress(OSError):  # the save's own error is the one to tell
        if _is_manifest_of(folder, step, set_id):
            manifest_path(folder, step).unlink(missing_ok=True)
        rank_path(folder, step, set_id, rank).unlink(missing_ok=True)


def _is_manifest_of(folder: Path, step: int, set_id: str) -> bool:
    """Return whether the folder's manifest of a step was written by this save."""
    try:
        return read_manifest(folder, step).set_id == set_id
    except CheckpointError:
        return False
