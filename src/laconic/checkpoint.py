"""Checkpoint files: one a rank and epoch, whole or absent, and refused where they belong to another run."""

from __future__ import annotations

import contextlib
import io
import os
import re
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

import torch

from laconic.errors import CheckpointError

__all__ = [
    "check_identity",
    "checkpoint_path",
    "drop_others",
    "load",
    "save",
    "saved_epochs",
    "write_atomically",
]

_FORMAT = 1  # of the files; a reader refuses others
_NAME = re.compile(r"checkpoint-epoch(\d+)-rank(\d+)\.pt")


def checkpoint_path(folder: Path, epoch: int, rank: int) -> Path:
    """Return where a rank's checkpoint after `epoch` epochs lies.

    The epoch is in the name, so that a crash between two ranks' writes leaves the older set complete.

    Example:
        >>> checkpoint_path(Path("run"), 4, 0).name
        'checkpoint-epoch4-rank0.pt'
    """
    return folder / f"checkpoint-epoch{epoch}-rank{rank}.pt"


def saved_epochs(folder: Path, rank: int) -> list[int]:
    """Return the epochs of which the folder holds this rank's checkpoint, ascending."""
    names = [path.name for path in folder.iterdir()] if folder.is_dir() else []
    matches = [match for match in map(_NAME.fullmatch, names) if match is not None]
    return sorted(int(match[1]) for match in matches if int(match[2]) == rank)


def save(path: Path, identity: Mapping[str, Any], content: Mapping[str, Any]) -> None:
    """Write a checkpoint, so that the file is whole or absent whenever the machine stops.

    Args:
        path: the file; its folder exists.
        identity: what must be equal for the run to be continued; JSON-able.
        content: tensors and plain values.
    """
    buffer = io.BytesIO()
    torch.save({"format": _FORMAT, "identity": dict(identity), "content": dict(content)}, buffer)
    write_atomically(path, buffer.getbuffer())


def load(path: Path, identity: Mapping[str, Any]) -> dict[str, Any]:
    """Read the content of a checkpoint that this run may continue from.

    Only tensors and plain values are read; a file that would run code is refused.

    Raises:
        CheckpointError: the file is unreadable, truncated, of another format or of another run.
    """
    try:
        with path.open("rb") as file:
            saved = torch.load(file, map_location="cpu", weights_only=True)
    except Exception as cause:  # torch.load raises a dozen types for what is not a checkpoint
        reason = (str(cause).strip() or type(cause).__name__).splitlines()[0][:120]
        raise CheckpointError(
            f"{path}: cannot be read ({reason}): remove it, or restore it from a copy"
        ) from cause
    if not isinstance(saved, dict) or saved.get("format") != _FORMAT or "content" not in saved:
        got = saved.get("format", "nothing") if isinstance(saved, dict) else type(saved).__name__
        raise CheckpointError(
            f"{path}: format must be {_FORMAT}, got {got}: it was not written by this laconic"
        )
    check_identity(path, saved.get("identity", {}), identity)
    content: dict[str, Any] = saved["content"]
    return content


def check_identity(path: Path, saved: Mapping[str, Any], now: Mapping[str, Any]) -> None:
    """Compare what a file says of its run with the run that wants to continue from it.

    Raises:
        CheckpointError: naming the file and the first difference.

    Example:
        >>> check_identity(Path("run.json"), {"recipe": {"lr": 0.1}}, {"recipe": {"lr": 0.2}})
        Traceback (most recent call last):
        laconic.errors.CheckpointError: run.json: recipe.lr is 0.1 there and 0.2 now: ...
    """
    there, here = dict(_flattened(saved)), dict(_flattened(now))
    for key in [*here, *(key for key in there if key not in here)]:
        a, b = there.get(key, "nothing"), here.get(key, "nothing")
        if a != b:
            raise CheckpointError(
                f"{path}: {key} is {a} there and {b} now: give the run's own options, or another folder"
            )


def drop_others(folder: Path, epoch: int, rank: int) -> None:
    """Delete this rank's checkpoints of all other epochs; call it when every rank has written this one."""
    for other in saved_epochs(folder, rank):
        if other != epoch:
            checkpoint_path(folder, other, rank).unlink(missing_ok=True)


def write_atomically(path: Path, content: bytes | memoryview) -> None:
    """Write a file beside its place, force it to the disk, then put it in place in one step."""
    temporary = path.with_name(f".{path.name}.part")
    with temporary.open("wb") as file:
        file.write(content)
        file.flush()
        os.fsync(file.fileno())
    temporary.replace(path)
    with contextlib.suppress(OSError):  # not every system lets a folder be opened
        folder = os.open(path.parent, os.O_RDONLY)
        try:
            os.fsync(folder)
        finally:
            os.close(folder)


def _flattened(values: Mapping[str, Any], prefix: str = "") -> Iterator[tuple[str, Any]]:
    for key, value in values.items():
        if isinstance(value, Mapping):
            yield from _flattened(value, f"{prefix}{key}.")
        else:
            yield prefix + key, list(value) if isinstance(value, tuple) else value
