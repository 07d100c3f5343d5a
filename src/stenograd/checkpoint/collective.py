"""Checkpoints that all ranks write and read together: all take the same one, and fail with the same error."""

from __future__ import annotations

import contextlib
import json
import secrets
from collections.abc import Callable, Iterator, Mapping
from dataclasses import asdict
from pathlib import Path
from typing import Any, NamedTuple

from stenograd.checkpoint.rank_files import (
    Manifest,
    RankFile,
    check_rank,
    drop_others,
    manifest_path,
    map_rank,
    rank_path,
    read_manifest,
    read_rank,
    saved_steps,
    versions,
    write_manifest,
    write_rank,
)
from stenograd.comm.agreement import agree, everyone
from stenograd.comm.drivers import AnyDriver
from stenograd.errors import CheckpointError, PeerLost, StenogradError

__all__ = ["Found", "read_set", "write_set"]


class Found(NamedTuple):
    """A checkpoint that every rank has found whole.

    manifest: what belongs to it.
    content: this rank's where as many ranks saved it, else rank 0's.
    folder: where its files are.
    refused: why newer ones were not taken, one line each.
    """

    manifest: Manifest
    content: dict[str, Any]
    folder: Path
    refused: tuple[str, ...]

    def each(self) -> Iterator[dict[str, Any]]:
        """Yield what each of the ranks saved, in rank order, to re-shard it.

        Tensors are read from the disk where they are used: whoever takes what he needs of one rank before he
        asks for the next has one of them in memory at a time. Copy what shall be kept.

        Raises:
            CheckpointError: a file cannot be read any more.
        """
        for rank in range(self.manifest.world_size):
            yield map_rank(self.folder, self.manifest, rank)


def write_set(
    driver: AnyDriver,
    folder: Path,
    step: int,
    content: Mapping[str, Any],
    *,
    method: str = "",
    identity: Mapping[str, Any] | None = None,
    keep: int = 2,
) -> Path:
    """Write a checkpoint on all ranks, and delete all but the newest when it is whole.

    Every rank writes its file under the name of this save; when all files are on the disk, rank 0 writes the
    manifest, which makes the checkpoint count. A crash before that leaves the older ones as they were.
    Where ranks do not share the folder, each writes the manifest to its own.

    Args:
        driver: the way to the other ranks.
        folder: exists.
        step: number of steps taken, equal on all ranks.
        content: this rank's tensors and plain values.
        method: text of the method, for the manifest.
        identity: what must be equal for the run to be continued; JSON-able.
        keep: number of checkpoints to keep, at least 1.

    Returns:
        The manifest's path.

    Raises:
        CheckpointError: a rank cannot write, or has something to save that could not be loaded, on every
            rank; earlier checkpoints are as they were.
    """
    set_id = everyone(driver, secrets.token_hex(4))[0]
    try:
        record = agree(driver, lambda: write_rank(folder, step, set_id, driver.rank, content))
        told = [json.loads(text) for text in everyone(driver, json.dumps(asdict(record)))]
        manifest = Manifest(
            step=step,
            set_id=set_id,
            world_size=driver.world_size,
            method=method,
            identity=identity or {},
            versions=versions(),
            files=tuple(RankFile(**file) for file in told),
        )
        agree(driver, lambda: write_manifest(folder, manifest) if driver.rank == 0 else None)
        agree(driver, lambda: _copied(folder, manifest, driver.rank))
    except PeerLost:
        raise  # what the others did is not known; the next save deletes what is left
    except StenogradError:
        _take_back(folder, step, set_id, driver.rank)
        raise
    drop_others(folder, step, driver.rank, keep)
    return manifest_path(folder, step)


def read_set(
    driver: AnyDriver,
    folder: Path,
    *,
    step: int | None = None,
    check: Callable[[Manifest], None] = lambda manifest: None,
) -> Found | None:
    """Read the newest checkpoint that every rank can read whole; None where there is none at all.

    Args:
        driver: the way to the other ranks.
        folder: where `write_set` wrote.
        step: of the one to read; None tries from the newest on.
        check: raises if a checkpoint, though whole, is not one to continue from.

    Raises:
        CheckpointError: no checkpoint is whole, or not that of `step`, naming the files and what is wrong;
            or what `check` raised. On every rank alike.
    """
    told = [set(json.loads(text)) for text in everyone(driver, json.dumps(saved_steps(folder)))]
    steps = sorted(set.union(*told), reverse=True)
    if step is not None:
        if step not in steps:
            known = ", ".join(map(str, sorted(steps))) or "none"
            raise CheckpointError(f"{folder}: no checkpoint of step {step}; it holds those of steps: {known}")
        steps = [step]
    refused: list[str] = []
    for number in steps:
        manifest, content, wrong = _attempt(driver, folder, number)
        if wrong or manifest is None:
            refused.append(wrong)
            continue
        agree(driver, lambda manifest=manifest: check(manifest))  # type: ignore[misc]
        return Found(manifest, content, folder, tuple(refused))
    if refused:
        raise CheckpointError("no whole checkpoint: " + "; ".join(refused) if step is None else refused[0])
    return None


def _attempt(driver: AnyDriver, folder: Path, step: int) -> tuple[Manifest | None, dict[str, Any], str]:
    """Check one checkpoint and read this rank's content; the text says what is wrong, equally on all ranks.

    Where another number of ranks saved it, each rank takes rank 0's content, and the ranks share the work of
    checking the other files, so that each is read whole once and not once a rank.
    """
    manifest, content, wrong = None, dict[str, Any](), ""
    try:
        manifest = read_manifest(folder, step)
        same = manifest.world_size == driver.world_size
        for rank in range(1, 1 if same else manifest.world_size):
            check_rank(folder, manifest, rank, whole=rank % driver.world_size == driver.rank)
        content = read_rank(folder, manifest, driver.rank if same else 0)
    except CheckpointError as error:
        wrong = str(error)
    set_id = manifest.set_id if manifest is not None else ""
    told = [json.loads(text) for text in everyone(driver, json.dumps([set_id, wrong]))]
    for rank, (other, theirs) in enumerate(told):
        if theirs:
            return None, {}, theirs if told.count([other, theirs]) == len(told) else f"rank {rank}: {theirs}"
        if other != told[0][0]:
            path = manifest_path(folder, step)
            return None, {}, f"{path}: ranks 0 and {rank} have manifests of two saves ({told[0][0]}, {other})"
    return manifest, content, ""


def _copied(folder: Path, manifest: Manifest, rank: int) -> None:
    """Write the manifest where rank 0's does not show: the ranks' folders lie on different disks."""
    path = manifest_path(folder, manifest.step)
    if _is_of(folder, manifest.step, manifest.set_id):
        return
    scratch = folder / f".rank{rank}"  # several ranks of a host may do so at once
    try:
        scratch.mkdir(exist_ok=True)
        write_manifest(scratch, manifest)
        manifest_path(scratch, manifest.step).replace(path)
        scratch.rmdir()
    except OSError as cause:
        raise CheckpointError(f"{path}: cannot be written ({cause.strerror}): make room") from cause


def _take_back(folder: Path, step: int, set_id: str, rank: int) -> None:
    """Delete what a failed save has written; an older checkpoint of the same step stays."""
    with contextlib.suppress(OSError):
        if _is_of(folder, step, set_id):
            manifest_path(folder, step).unlink(missing_ok=True)
        rank_path(folder, step, set_id, rank).unlink(missing_ok=True)


def _is_of(folder: Path, step: int, set_id: str) -> bool:
    """Whether the folder's manifest of this step is that of this save."""
    try:
        return read_manifest(folder, step).set_id == set_id
    except CheckpointError:
        return False
