"""The files of a checkpoint: one per rank, and a manifest, written last, that names them all."""

from __future__ import annotations

import contextlib
import hashlib
import json
import os
import re
from collections.abc import Iterator, Mapping
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import IO, Any, BinaryIO, cast

import torch

from stenograd.checkpoint.contents import check_readable, unsavable
from stenograd.checkpoint.files import Digest, replacing, write_atomically
from stenograd.errors import CheckpointError
from stenograd.reading import open_regular, read_regular
from stenograd.version import __version__

__all__ = [
    "Manifest",
    "RankFile",
    "check_identity",
    "check_rank",
    "drop_others",
    "manifest_path",
    "map_rank",
    "rank_path",
    "read_manifest",
    "read_rank",
    "saved_steps",
    "versions",
    "write_manifest",
    "write_rank",
]

_FORMAT = 2  # of the files; a reader refuses others
_PIECE_BYTES = 1 << 20  # read at once to hash a file, so that checking needs no memory of the file's size
_MANIFEST = re.compile(r"checkpoint-step(0|[1-9][0-9]*)\.json")
_SHA256 = re.compile(r"[0-9a-f]{64}")
_RANK_FILE = re.compile(r"checkpoint-step([0-9]+)-([0-9a-f]+)-rank([0-9]+)\.pt")


@dataclass(frozen=True, slots=True, kw_only=True)
class RankFile:
    """The manifest's entry for one rank's file.

    Attributes:
        name: its name in the folder.
        nbytes: its length.
        sha256: of its bytes, in hexadecimal.
    """

    name: str
    nbytes: int
    sha256: str


@dataclass(frozen=True, slots=True, kw_only=True)
class Manifest:
    """The list of what belongs to one checkpoint.

    Attributes:
        step: number of the step after which it was made.
        set_id: random, new for each save; it is in the files' names and in the files, so that files of two
            saves cannot be taken for one checkpoint.
        world_size: number of ranks that saved.
        method: text of the method; empty where none was saved.
        identity: what must be equal for a run to continue from it; JSON-able.
        versions: of stenograd and torch.
        files: one per rank, in rank order.
    """

    step: int
    set_id: str
    world_size: int
    method: str = ""
    identity: Mapping[str, Any] = field(default_factory=dict)
    versions: Mapping[str, str] = field(default_factory=dict)
    files: tuple[RankFile, ...]


def manifest_path(folder: Path, step: int) -> Path:
    """Return the path of the manifest of a step's checkpoint.

    Example:
        >>> manifest_path(Path("run"), 4).name
        'checkpoint-step4.json'
    """
    return folder / f"checkpoint-step{step}.json"


def rank_path(folder: Path, step: int, set_id: str, rank: int) -> Path:
    """Return the path of a rank's file.

    Example:
        >>> rank_path(Path("run"), 4, "9f3a", 0).name
        'checkpoint-step4-9f3a-rank0.pt'
    """
    return folder / f"checkpoint-step{step}-{set_id}-rank{rank}.pt"


def saved_steps(folder: Path) -> list[int]:
    """Return the steps for which the folder holds a manifest, ascending; none where there is no folder.

    Raises:
        CheckpointError: it is no folder, or cannot be read.
    """
    try:
        names = os.listdir(folder)
    except FileNotFoundError:
        return []
    except OSError as cause:
        reason = cause.strerror or str(cause)
        raise CheckpointError(f"{folder}: cannot be read ({reason}): give the folder of a run") from cause
    return sorted(int(match[1]) for match in map(_MANIFEST.fullmatch, names) if match is not None)


def write_rank(folder: Path, step: int, set_id: str, rank: int, content: Mapping[str, Any]) -> RankFile:
    """Write a rank's file, so that it is whole or absent whenever the machine stops.

    Nothing is copied: tensors are hashed on their way to the file (see `Digest`).

    Args:
        folder: an existing folder.
        step: of the checkpoint.
        set_id: of the checkpoint.
        rank: whose file it is.
        content: tensors and plain values.

    Raises:
        CheckpointError: it cannot be written, or `read_rank` could not read it; nothing of it is left.
    """
    path = rank_path(folder, step, set_id, rank)
    saved = {"format": _FORMAT, "set_id": set_id, "rank": rank, "content": dict(content)}
    with _write_errors(path), replacing(path) as file:
        digest = Digest(file)
        try:
            torch.save(saved, cast(IO[bytes], digest))
        except Exception as cause:  # an object's own pickling may raise anything
            raise unsavable(dict(content), cause) from cause
        if digest.error is not None:
            raise digest.error
        file.flush()
        check_readable(Path(file.name), dict(content))
    return RankFile(name=path.name, nbytes=digest.nbytes, sha256=digest.sha256.hexdigest())


def write_manifest(folder: Path, manifest: Manifest) -> None:
    """Write the manifest, which makes a checkpoint count; call it when every rank's file is on the disk.

    Raises:
        CheckpointError: it cannot be written; nothing of it is left.
    """
    text = json.dumps({"format": _FORMAT, **asdict(manifest)}, indent=1) + "\n"
    path = manifest_path(folder, manifest.step)
    with _write_errors(path):
        write_atomically(path, text.encode())


def read_manifest(folder: Path, step: int) -> Manifest:
    """Read a manifest; it can name no files but those that `write_rank` makes in the same folder.

    Raises:
        CheckpointError: naming the file and what is wrong with it.
    """
    path = manifest_path(folder, step)
    try:
        said = json.loads(read_regular(path))
        version = said.pop("format", None) if isinstance(said, dict) else "no object"
        if version != _FORMAT:
            reason = f"its format must be {_FORMAT}, got {str(version)[:40]}"
            raise CheckpointError(f"{path}: cannot be read ({reason}): another version of stenograd wrote it")
        manifest = Manifest(**{**said, "files": tuple(RankFile(**file) for file in said["files"])})
    except (OSError, ValueError, KeyError, TypeError, RecursionError) as cause:
        raise _unreadable(path, cause) from cause
    if reason := _malformed(manifest, step):
        raise CheckpointError(f"{path}: cannot be read ({reason}): restore it from a copy")
    return manifest


def read_rank(folder: Path, manifest: Manifest, rank: int) -> dict[str, Any]:
    """Read a rank's file after checking that it is the one that the manifest names.

    Only tensors and plain values are read; a file that would run code is refused.

    Raises:
        CheckpointError: the file is missing, truncated, altered, of another save or another rank.
    """
    with _checked(folder, manifest, rank, whole=True) as file:
        return _content(file, manifest, rank)


def check_rank(folder: Path, manifest: Manifest, rank: int, *, whole: bool = True) -> None:
    """Check a rank's file as `read_rank` does, in pieces of 1 MB, without keeping its content.

    Args:
        folder: of the checkpoint.
        manifest: of the checkpoint.
        rank: whose file to check.
        whole: whether to read it; False checks its length only.

    Raises:
        CheckpointError: as in `read_rank`.
    """
    with _checked(folder, manifest, rank, whole=whole) as file:
        if whole:
            _content(file, manifest, rank, "meta")


def map_rank(folder: Path, manifest: Manifest, rank: int) -> dict[str, Any]:
    """Open a rank's file that `check_rank` has checked; its tensors are read when they are used.

    The tensors are parts of the file, mapped into memory: copy what you keep.

    Raises:
        CheckpointError: the file is missing, of another length, of another save or another rank.
    """
    with _checked(folder, manifest, rank, whole=False) as file:
        return _content(file, manifest, rank, mmap=True)


def check_identity(
    path: Path, saved: Mapping[str, Any], now: Mapping[str, Any], *, except_for: tuple[str, ...] = ()
) -> None:
    """Compare the run that wrote a file with the run that wants to continue from it.

    Args:
        path: the file, for the message.
        saved: the identity of the run that wrote it.
        now: the identity of this run.
        except_for: keys that may differ.

    Raises:
        CheckpointError: naming the file and the first difference.

    Example:
        >>> check_identity(Path("run.json"), {"recipe": {"lr": 0.1}}, {"recipe": {"lr": 0.2}})
        Traceback (most recent call last):
        stenograd.errors.CheckpointError: run.json: recipe.lr is 0.1 there and 0.2 now: ...
    """
    there, here = dict(_flattened(saved)), dict(_flattened(now))
    for key in [*here, *(key for key in there if key not in here)]:
        a, b = there.get(key, "nothing"), here.get(key, "nothing")
        if a != b and key not in except_for:
            raise CheckpointError(
                f"{path}: {key} is {a} there and {b} now: give the run's own options, or another folder"
            )


def drop_others(folder: Path, step: int, rank: int, keep: int) -> None:
    """Delete all checkpoints but the `keep` newest up to `step`, the one just written.

    Each rank deletes its own files, and rank 0 also those of ranks that no longer exist. A checkpoint that
    lacks a file, or has one of another length, is not counted, so that it does not push out a good one. Those
    of later steps are deleted: the run went back before them. What cannot be deleted is left for the next
    save.

    Args:
        folder: where the checkpoints are.
        step: of the newest checkpoint.
        rank: this rank.
        keep: number of checkpoints to keep, at least 1.
    """
    kept: list[Manifest] = []
    for number in reversed(saved_steps(folder)):
        with contextlib.suppress(CheckpointError):
            manifest = read_manifest(folder, number)
            if number <= step and len(kept) < keep and _complete(folder, manifest, rank):
                kept.append(manifest)
    names = {file.name for manifest in kept for file in manifest.files}
    names |= {manifest_path(folder, manifest.step).name for manifest in kept}
    world_size = kept[0].world_size if kept else 0
    # Manifests first: one without its files would be refused with a warning.
    for name in sorted(os.listdir(folder), key=lambda name: not name.endswith(".json")):
        if name not in names and _is_ours(name, rank, world_size):
            with contextlib.suppress(OSError):  # each for itself: a folder of such a name hides no other
                (folder / name).unlink(missing_ok=True)


def versions() -> dict[str, str]:
    """Return the versions that a manifest records.

    Example:
        >>> sorted(versions())
        ['stenograd', 'torch']
    """
    return {"stenograd": __version__, "torch": torch.__version__}


def _complete(folder: Path, manifest: Manifest, rank: int) -> bool:
    """Return whether all files have their lengths; those of other ranks may be missing, on other disks."""
    for number, file in enumerate(manifest.files):
        path = folder / file.name
        if path.is_file():
            if path.stat().st_size != file.nbytes:
                return False
        elif number == rank:
            return False
    return True


def _is_ours(name: str, rank: int, world_size: int) -> bool:
    """Return whether a file, or what a crash left of one, is for this rank to delete."""
    plain = name[1:].removesuffix(".part") if name.startswith(".") else name
    found = _RANK_FILE.fullmatch(plain)
    if found is None:
        return _MANIFEST.fullmatch(plain) is not None
    return int(found[3]) == rank or (rank == 0 and int(found[3]) >= world_size)


@contextlib.contextmanager
def _write_errors(path: Path) -> Iterator[None]:
    """Turn an OSError while a file is written into a CheckpointError that names the file."""
    try:
        yield
    except OSError as cause:
        reason = cause.strerror or str(cause)
        raise CheckpointError(
            f"{path}: cannot be written ({reason}): make room or give another folder; "
            "earlier checkpoints are unchanged"
        ) from cause


def _malformed(manifest: Manifest, step: int) -> str:
    """Return what is wrong with the values that a manifest holds, or nothing."""
    numbers = [manifest.step, manifest.world_size, *(file.nbytes for file in manifest.files)]
    texts = [manifest.set_id, manifest.method, *(text for f in manifest.files for text in (f.name, f.sha256))]
    if not all(type(n) is int and n >= 0 for n in numbers) or not all(type(t) is str for t in texts):
        return "a number or a text in it is of another type"
    if not isinstance(manifest.identity, dict) or not isinstance(manifest.versions, dict):
        return "its identity and versions must be objects"
    count = len(manifest.files)
    if manifest.step != step or count != manifest.world_size or not count:
        return f"it names step {manifest.step} and {count} files of {manifest.world_size}"
    for rank, file in enumerate(manifest.files):
        name = f"checkpoint-step{step}-{manifest.set_id}-rank{rank}.pt"
        if file.name != name or not _RANK_FILE.fullmatch(name) or not _SHA256.fullmatch(file.sha256):
            return f"the name or SHA-256 of rank {rank}'s file has another form"
    return ""


@contextlib.contextmanager
def _checked(folder: Path, manifest: Manifest, rank: int, *, whole: bool) -> Iterator[BinaryIO]:
    """Open a rank's file after comparing its length, and if `whole` its SHA-256, with the manifest's."""
    listed = manifest.files[rank]
    path, reason = folder / listed.name, ""
    try:
        with open_regular(path) as file:
            nbytes = os.fstat(file.fileno()).st_size
            if nbytes != listed.nbytes:
                reason = f"it has {nbytes} bytes and the manifest says {listed.nbytes}"
            elif whole and _sha256(file, nbytes) != listed.sha256:
                reason = "its SHA-256 is not the manifest's"
            if reason:
                raise CheckpointError(f"{path}: cannot be read ({reason}): restore it from a copy")
            file.seek(0)
            yield file
    except OSError as cause:
        raise _unreadable(path, cause) from cause


def _sha256(file: BinaryIO, nbytes: int) -> str:
    """Return the SHA-256 of so many bytes of a file, which may grow meanwhile."""
    digest = hashlib.sha256()
    while piece := file.read(min(_PIECE_BYTES, nbytes)):
        digest.update(piece)
        nbytes -= len(piece)
    return digest.hexdigest()


def _content(
    file: BinaryIO, manifest: Manifest, rank: int, where: str = "cpu", *, mmap: bool = False
) -> dict[str, Any]:
    """Load what `write_rank` wrote, and check the save and the rank that the file itself names."""
    path = Path(file.name)
    try:
        saved = torch.load(path if mmap else file, weights_only=True, map_location=where, mmap=mmap)
    except Exception as cause:  # torch.load raises a dozen types for what is not a checkpoint
        raise _unreadable(path, cause) from cause
    got = (saved.get("set_id"), saved.get("rank")) if isinstance(saved, dict) else None
    if got != (manifest.set_id, rank) or not isinstance(saved.get("content"), dict):
        reason = f"it says set and rank {got}, the manifest {(manifest.set_id, rank)}"
        raise CheckpointError(f"{path}: cannot be read ({reason}): files of two checkpoints are mixed up")
    content: dict[str, Any] = saved["content"]
    return content


def _unreadable(path: Path, cause: Exception) -> CheckpointError:
    reason = (str(cause).strip() or type(cause).__name__).splitlines()[0][:120]
    return CheckpointError(f"{path}: cannot be read ({reason}): restore it from a copy")


def _flattened(values: Mapping[str, Any], prefix: str = "") -> Iterator[tuple[str, Any]]:
    for key, value in values.items():
        if isinstance(value, Mapping):
            yield from _flattened(value, f"{prefix}{key}.")
        else:
            yield prefix + key, list(value) if isinstance(value, tuple) else value
