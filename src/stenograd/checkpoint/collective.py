"""Write and read checkpoints on all ranks at once: all load the same one, and all raise the same error."""

from __future__ import annotations

import contextlib
import json
import secrets
from collections.abc import Callable, Iterator, Mapping, Sequence
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
from stenograd.errors import CheckpointError, MismatchError, PeerLost, StenogradError

__all__ = ["Found", "read_set", "write_set"]


class Found(NamedTuple):
    """A checkpoint that is whole on every rank.

    manifest: the list of its files.
    content: what this rank saved; what rank 0 saved where another number of ranks did.
    folder: where its files are.
    refused: why newer ones could not be loaded, one line each.
    """

    manifest: Manifest
    content: dict[str, Any]
    folder: Path
    refused: tuple[str, ...]

    def each(self) -> Iterator[dict[str, Any]]:
        """Yield what each saving rank saved, in rank order, to re-shard it.

        Tensors are read from the disk when they are used. Take what you need of one rank before asking for
        the next, and only one is in memory at a time; copy what you keep.

        Raises:
            CheckpointError: a file can no longer be read.
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
    """Write a checkpoint on all ranks and, when it is whole, delete all but the `keep` newest.

    Every rank writes its file under the name of this save; when all files are on the disk, rank 0 writes the
    manifest, which makes the checkpoint count. A crash before that leaves the older ones as they were.
    Where ranks do not share the folder, each writes the manifest to its own.

    Args:
        driver: the way to the other ranks.
        folder: an existing folder.
        step: number of steps taken, equal on all ranks.
        content: this rank's tensors and plain values.
        method: text of the method, for the manifest.
        identity: what must be equal for a run to continue from it; JSON-able.
        keep: number of checkpoints to keep, at least 1.

    Returns:
        The manifest's path.

    Raises:
        CheckpointError: a rank cannot write, or its content could not be loaded again; raised on every rank,
            and earlier checkpoints are unchanged.
        MismatchError: on every rank: they save different steps.
        StenogradError: on every rank: the checkpoint is whole, but on one the folder cannot be looked through
            for older ones.
    """
    mine = json.dumps([step, secrets.token_hex(4)], default=str)
    told = [json.loads(text) for text in everyone(driver, mine)]
    _refuse_others([theirs for theirs, _ in told], "save")
    set_id = told[0][1]  # rank 0's
    try:
        record = agree(driver, lambda: write_rank(folder, step, set_id, driver.rank, content))
        records = [json.loads(text) for text in everyone(driver, json.dumps(asdict(record)))]
        manifest = Manifest(
            step=step,
            set_id=set_id,
            world_size=driver.world_size,
            method=method,
            identity=identity or {},
            versions=versions(),
            files=tuple(RankFile(**file) for file in records),
        )
        agree(driver, lambda: write_manifest(folder, manifest) if driver.rank == 0 else None)
        agree(driver, lambda: _copy_manifest(folder, manifest, driver.rank))
    except PeerLost:
        raise  # the others may have finished, so nothing is deleted; the next save removes what is left
    except StenogradError:
        _delete_failed_save(folder, step, set_id, driver.rank)
        raise
    # Only now: until here the older ones are all there is.
    agree(driver, lambda: drop_others(folder, step, driver.rank, keep))
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
        step: of the one to read; None for the newest that is whole.
        check: raises if a whole checkpoint is not one to continue from.

    Raises:
        CheckpointError: no checkpoint is whole, or the one of `step` is not, naming the files and what is
            wrong with them; or what `check` raised. The same on every rank.
        MismatchError: on every rank: they ask for different steps.
    """
    mine = agree(driver, lambda: saved_steps(folder))  # which may fail on one rank alone
    told = [json.loads(text) for text in everyone(driver, json.dumps([step, mine], default=str))]
    _refuse_others([theirs for theirs, _ in told], "load")
    steps = sorted(set().union(*(found for _, found in told)), reverse=True)
    if step is not None:
        if step not in steps:
            known = ", ".join(map(str, sorted(steps))) or "none"
            raise CheckpointError(f"{folder}: no checkpoint of step {step}; it holds those of steps: {known}")
        steps = [step]
    refused: list[str] = []
    for number in steps:
        manifest, content, wrong = _read_if_whole(driver, folder, number)
        if wrong or manifest is None:
            refused.append(wrong)
            continue
        agree(driver, lambda manifest=manifest: check(manifest))  # type: ignore[misc]
        return Found(manifest, content, folder, tuple(refused))
    if refused:
        raise CheckpointError("no whole checkpoint: " + "; ".join(refused) if step is None else refused[0])
    return None


def _refuse_others(steps: Sequence[int | None], what: str) -> None:
    """Refuse to save or load different steps on different ranks: that would be no checkpoint."""
    for rank, theirs in enumerate(steps):
        if theirs != steps[0]:
            raise MismatchError(
                f"ranks differ in step: rank 0 has {steps[0]}, rank {rank} has {theirs}: {what} the same "
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
        for rank in range(1, 1 if same else manifest.world_size):
            check_rank(folder, manifest, rank, whole=rank % driver.world_size == driver.rank)
        content = read_rank(folder, manifest, driver.rank if same else 0)
    except CheckpointError as error:
        wrong = str(error)
    set_id = manifest.set_id if manifest is not None else ""
    verdicts = [json.loads(text) for text in everyone(driver, json.dumps([set_id, wrong]))]
    first = verdicts[0][0]
    for rank, (other, theirs) in enumerate(verdicts):
        if theirs:
            on_all = verdicts.count([other, theirs]) == len(verdicts)
            return None, {}, theirs if on_all else f"rank {rank}: {theirs}"
        if other != first:
            path = manifest_path(folder, step)
            return None, {}, f"{path}: ranks 0 and {rank} have manifests of two saves ({first}, {other})"
    return manifest, content, ""


def _copy_manifest(folder: Path, manifest: Manifest, rank: int) -> None:
    """Write the manifest unless rank 0's is here already; it is not where ranks have disks of their own."""
    path = manifest_path(folder, manifest.step)
    if _is_manifest_of(folder, manifest.step, manifest.set_id):
        return
    scratch = folder / f".rank{rank}"  # several ranks of one host may write at the same time
    try:
        scratch.mkdir(exist_ok=True)
        write_manifest(scratch, manifest)
        manifest_path(scratch, manifest.step).replace(path)
        scratch.rmdir()
    except OSError as cause:
        raise CheckpointError(f"{path}: cannot be written ({cause.strerror}): make room") from cause


def _delete_failed_save(folder: Path, step: int, set_id: str, rank: int) -> None:
    """Delete what a failed save has written; an older checkpoint of the same step stays."""
    with contextlib.suppress(OSError):
        if _is_manifest_of(folder, step, set_id):
            manifest_path(folder, step).unlink(missing_ok=True)
        rank_path(folder, step, set_id, rank).unlink(missing_ok=True)


def _is_manifest_of(folder: Path, step: int, set_id: str) -> bool:
    """Return whether the folder's manifest of a step was written by this save."""
    try:
        return read_manifest(folder, step).set_id == set_id
    except CheckpointError:
        return False
