"""The files of a checkpoint, whole or absent whenever the machine stops: one per rank, and a manifest.

The manifest is written last and names all the others. Whatever reads a file checks its length, its SHA-256,
and the save and the rank that the file itself names.
"""

from __future__ import annotations

import contextlib
import errno
import hashlib
import io
import json
import math
import os
import re
from collections import OrderedDict
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import IO, Any, BinaryIO, NamedTuple, TypeVar, cast

import torch
from torch import Tensor, nn

from stenograd.errors import CheckpointError, StenogradError, first_line
from stenograd.reading import open_regular, read_regular

__all__ = [
    "Digest",
    "Found",
    "Manifest",
    "RankFile",
    "check_identity",
    "check_rank",
    "complete",
    "drop_others",
    "finite",
    "manifest_path",
    "rank_path",
    "read_json",
    "read_manifest",
    "read_rank",
    "replacing",
    "saved_steps",
    "strict_json",
    "write_atomically",
    "write_json",
    "write_manifest",
    "write_rank",
    "write_tensors",
]

T = TypeVar("T")

_FORMAT = 2  # of the files; a reader refuses others
_PIECE_BYTES = 1 << 20  # read at once to hash a file, so that checking needs no memory of the file's size
_MANIFEST = re.compile(r"checkpoint-step(0|[1-9][0-9]*)\.json")
_SHA256 = re.compile(r"[0-9a-f]{64}")
_RANK_FILE = re.compile(r"checkpoint-step([0-9]+)-([0-9a-f]+)-rank([0-9]+)\.pt")
_LEFT = re.compile(r"\.(.+?)(?:(?:\.[0-9a-f]+)?\.rank[0-9]+)?\.part")  # what a crash leaves, see `replacing`
# What `torch.load(weights_only=True)` surely reads; of anything else `_survives` finds out.
_PLAIN = (type(None), bool, int, float, complex, str, bytes, Tensor, nn.Parameter)


def write_atomically(path: Path, content: bytes) -> None:
    """Write a file under another name, force it to the disk, then rename it in one step; see `replacing`."""
    with replacing(path) as file:
        file.write(content)


@contextlib.contextmanager
def replacing(path: Path, mark: str = "") -> Iterator[BinaryIO]:
    """Open a file that replaces the one at a path once it is on the disk, unless the block raises.

    Args:
        path: of the file.
        mark: what tells its temporary name from those of others who may write the same file meanwhile.

    Raises:
        OSError: it cannot be written; an earlier file of that name is unchanged, and nothing else is left.
    """
    # Such as /dev/null, which root would replace by a file, for all programs.
    if path.exists() and not (path.is_file() or path.is_dir()):
        raise OSError(errno.EINVAL, "no regular file", str(path))
    temporary = path.with_name(f".{path.name}{mark}.part")
    try:
        with temporary.open("wb") as file:
            yield file
            # On the disk before the rename: a name must not stand for content that a crash can lose.
            file.flush()
            os.fsync(file.fileno())
        temporary.replace(path)
    except BaseException:  # Ctrl-C, too
        with contextlib.suppress(OSError):  # the first error is the one to tell
            temporary.unlink(missing_ok=True)
        raise
    # The new name is on the disk only when its folder is. Not every system lets a folder be opened.
    with contextlib.suppress(OSError):
        folder = os.open(path.parent, os.O_RDONLY)
        try:
            os.fsync(folder)
        finally:
            os.close(folder)


def write_json(path: Path, values: Any) -> None:
    """Write a JSON file in one step; what is not finite becomes null."""
    write_atomically(path, (strict_json(values) + "\n").encode())


def read_json(path: Path, make: Callable[[Any], T], error: type[StenogradError], what: str, advice: str) -> T:
    """Return what is made of the values in a JSON file.

    Args:
        path: the file.
        make: may raise whatever values of another kind than it expects make Python raise.
        error: to raise.
        what: is wrong then, such as "cannot be read as a link".
        advice: what to do.

    Raises:
        StenogradError: `error`, where the file cannot be read or nothing can be made of it.
    """
    try:
        return make(json.loads(read_regular(path)))
    except (OSError, ValueError, KeyError, TypeError, AttributeError, RecursionError) as cause:
        raise error(f"{path}: {what} ({first_line(cause)}): {advice}") from cause


def strict_json(values: Any, indent: int | None = 2) -> str:
    """Return values as JSON, which has neither NaN nor infinities: they become null.

    Example:
        >>> strict_json({"loss": float("nan"), "steps": (1, 2)}, indent=None)
        '{"loss": null, "steps": [1, 2]}'
    """
    return json.dumps(finite(values), indent=indent, allow_nan=False)


def finite(value: Any) -> Any:
    """Return a JSON-able value with None for NaN and infinities."""
    if isinstance(value, Mapping):
        return {key: finite(item) for key, item in value.items()}
    if isinstance(value, (list, tuple)):
        return [finite(item) for item in value]
    return None if isinstance(value, float) and not math.isfinite(value) else value


class Digest:
    """A file-like object for `torch.save` that writes to a file and hashes what it writes.

    Hashing on the way saves gathering the bytes in memory first: for 100 MB of state on one core a save took
    0.6 s that way, and takes 0.4 s with the check that reads the file back. `torch.save` writes from C++ and
    would turn an error raised here into one about positions in the file, so `error` keeps the first.

    Args:
        file: the file to write to.

    Attributes:
        nbytes: number of bytes so far.
        sha256: their hash.
        error: the first error that the file raised; nothing was written after it.

    Example:
        >>> digest = Digest(io.BytesIO())
        >>> digest.write(b"abc"), digest.sha256.hexdigest()[:6]
        (3, 'ba7816')
    """

    def __init__(self, file: BinaryIO) -> None:
        self._file = file
        self.sha256, self.nbytes = hashlib.sha256(), 0
        self.error: OSError | None = None

    def write(self, data: bytes | memoryview) -> int:
        """Write and hash bytes; return how many."""
        if self.error is None:
            try:
                self._file.write(data)
            except OSError as error:
                self.error = error
            self.sha256.update(data)
            self.nbytes += len(data)
        return len(data)

    def flush(self) -> None:
        """Do nothing: `torch.save` calls this at the end, and the caller flushes the file itself."""


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
        versions: of stenograd and torch.
        files: one per rank, in rank order.
    """

    step: int
    set_id: str
    world_size: int
    method: str = ""
    versions: Mapping[str, str] = field(default_factory=dict)
    files: tuple[RankFile, ...]


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


def manifest_path(folder: Path, step: int) -> Path:
    """Return the path of the manifest of a step's checkpoint, such as `checkpoint-step4.json`."""
    return folder / f"checkpoint-step{step}.json"


def rank_path(folder: Path, step: int, set_id: str, rank: int) -> Path:
    """Return the path of a rank's file, such as `checkpoint-step4-9f3a-rank0.pt`."""
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
    """Write a rank's tensors and plain values.

    Raises:
        CheckpointError: it cannot be written, or `read_rank` could not read it; nothing of it is left.
    """
    path = rank_path(folder, step, set_id, rank)
    about = {"format": _FORMAT, "set_id": set_id, "rank": rank}
    digest = write_tensors(path, {**about, "content": dict(content)}, dict(content))
    return RankFile(name=path.name, nbytes=digest.nbytes, sha256=digest.sha256.hexdigest())


def write_tensors(path: Path, saved: Mapping[str, Any], content: Mapping[str, Any], mark: str = "") -> Digest:
    """Write tensors and plain values in one step; nothing is copied (see `Digest`).

    Args:
        path: of the file.
        saved: what to write.
        content: the part of it that an error may name parts of.
        mark: as for `replacing`.

    Raises:
        CheckpointError: it cannot be written, or not loaded again; nothing of it is left.
    """
    with _write_errors(path), replacing(path, mark) as file:
        digest = Digest(file)
        try:
            torch.save(saved, cast(IO[bytes], digest))
        except Exception as cause:  # an object's own pickling may raise anything
            raise _unsavable(content, cause) from cause
        if digest.error is not None:
            raise digest.error
        file.flush()  # it is read back by its name
        # Without this, a NumPy number in `extra` is found when the checkpoint is needed, and then in every
        # one that was kept. On the meta device no tensor's bytes are read: for 100 MB it takes 2 ms.
        try:
            torch.load(file.name, map_location="meta", weights_only=True)
        except Exception as cause:  # torch.load raises a dozen types for what it does not read
            raise _unsavable(content, cause) from cause
    return digest


def write_manifest(folder: Path, manifest: Manifest, rank: int = 0) -> None:
    """Write the manifest, which makes a checkpoint count; call it when every rank's file is on the disk.

    Raises:
        CheckpointError: it cannot be written; nothing of it is left.
    """
    text = json.dumps({"format": _FORMAT, **asdict(manifest)}, indent=1) + "\n"
    path = manifest_path(folder, manifest.step)
    with _write_errors(path), replacing(path, f".{manifest.set_id}.rank{rank}") as file:
        file.write(text.encode())


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
        said.pop("identity", None)  # earlier versions wrote it, always empty
        manifest = Manifest(**{**said, "files": tuple(RankFile(**file) for file in said["files"])})
    # RecursionError: brackets without end
    except (OSError, ValueError, KeyError, TypeError, RecursionError) as cause:
        raise _unreadable(path, cause) from cause
    if reason := _malformed(manifest, step):
        raise CheckpointError(f"{path}: cannot be read ({reason}): restore it from a copy")
    return manifest


def read_rank(folder: Path, manifest: Manifest, rank: int, *, mapped: bool = False) -> dict[str, Any]:
    """Read a rank's file after checking that it is the one that the manifest names.

    Only tensors and plain values are read; a file that would run code is refused.

    Args:
        folder: of the checkpoint.
        manifest: of the checkpoint.
        rank: whose file.
        mapped: for a file that `check_rank` has checked: only its length is compared, and its tensors are
            parts of the file that are read from the disk when they are used. Copy what you keep.

    Raises:
        CheckpointError: the file is missing, truncated, altered, of another save or another rank.
    """
    with _checked(folder, manifest, rank, whole=not mapped) as file:
        return _content(file, manifest, rank, mmap=mapped)


def check_rank(folder: Path, manifest: Manifest, rank: int, *, whole: bool = True) -> None:
    """Check a rank's file as `read_rank` does, in pieces of 1 MB, or if not `whole` its length only."""
    with _checked(folder, manifest, rank, whole=whole) as file:
        if whole:
            _content(file, manifest, rank, "meta")


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
    for key in {**here, **there}:
        a, b = there.get(key, "nothing"), here.get(key, "nothing")
        if a != b and key not in except_for:
            raise CheckpointError(
                f"{path}: {key} is {a} there and {b} now: give the run's own options, or another folder"
            )


def complete(folder: Path, step: int, rank: int) -> list[list[Any]]:
    """Return step and save of the checkpoints before a step that lack nothing a rank knows of, newest first.

    One with a file of another length does. Where other ranks' files are missing, they may be on other disks.
    """
    found = list[list[Any]]()
    for number in reversed(saved_steps(folder)):
        with contextlib.suppress(CheckpointError):  # a damaged one counts as none
            manifest = read_manifest(folder, number)
            if number < step and _complete(folder, manifest, rank):
                found.append([number, manifest.set_id])
    return found


def drop_others(folder: Path, kept: Sequence[Sequence[Any]], rank: int, world_size: int) -> None:
    """Delete all checkpoints but those that all ranks keep; what cannot be deleted is left for the next save.

    Each rank deletes its own files, and rank 0 also those of ranks that no longer exist.

    Args:
        folder: of the checkpoints.
        kept: step and save of each, as from `complete`.
        rank: this rank.
        world_size: number of ranks.
    """
    names = {manifest_path(folder, step).name for step, _ in kept}
    # Manifests first: one without its files would be refused with a warning.
    for name in sorted(os.listdir(folder), key=lambda name: not name.endswith(".json")):
        found = _RANK_FILE.fullmatch(name)
        stays = name in names if found is None else [int(found[1]), found[2]] in kept
        if not stays and _is_ours(name, rank, world_size):
            with contextlib.suppress(OSError):  # each for itself: a folder of such a name hides no other
                (folder / name).unlink(missing_ok=True)


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
    left = _LEFT.fullmatch(name)
    plain = left[1] if left is not None else name
    found = _RANK_FILE.fullmatch(plain)
    if found is None:
        # Every rank deletes old manifests: where ranks have disks of their own, each has one.
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
    # By type(), because isinstance would take JSON's true for a number.
    if not all(type(n) is int and n >= 0 for n in numbers) or not all(type(t) is str for t in texts):
        return "a number or a text in it is of another type"
    if not isinstance(manifest.versions, dict):
        return "its versions must be an object"
    count = len(manifest.files)
    if manifest.step != step or count != manifest.world_size or not count:
        return f"it names step {manifest.step} and {count} files of {manifest.world_size}"
    for rank, file in enumerate(manifest.files):
        name = rank_path(Path(), step, manifest.set_id, rank).name
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
            if nbytes != listed.nbytes:  # first: hashing a long file takes time
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
        # torch maps a file by its name only, not one that is open.
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
    return CheckpointError(f"{path}: cannot be read ({first_line(cause)[:120]}): restore it from a copy")


def _unsavable(content: Any, cause: Exception) -> CheckpointError:
    """Build the error for content that cannot be written or read again; it names the first such part."""
    found = next(_culprits(content, ""), None)
    if found is None:
        reason = first_line(cause)[:120]
        return CheckpointError(f"cannot be saved: the content could not be loaded again ({reason})")
    key, value = found
    module, kind = type(value).__module__, type(value).__qualname__
    kind = kind if module == "builtins" else f"{module}.{kind}"
    article = "an" if kind[0] in "aeiou" else "a"
    advice = "give tensors, numbers, texts, lists or dictionaries instead"
    if hasattr(value, "__array__"):
        advice = "give float(x), int(x) or x.tolist()"
    return CheckpointError(
        f"cannot be saved: {key} is {article} {kind}, which could not be loaded again: {advice}"
    )


def _culprits(value: Any, key: str) -> Iterator[tuple[str, Any]]:
    """Yield the parts that do not survive saving and loading, each with its path (`extra.left[1]`)."""
    kind = type(value)
    if kind in (dict, OrderedDict):
        for name, item in value.items():
            if not _survives(name):
                yield f"a key of {key or 'the content'}", name
            yield from _culprits(item, f"{key}.{name}" if key else str(name))
    elif kind in (list, tuple):
        for number, item in enumerate(value):
            yield from _culprits(item, f"{key}[{number}]")
    elif not _survives(value):
        yield key, value


def _survives(value: Any) -> bool:
    if type(value) in _PLAIN:
        return True
    buffer = io.BytesIO()
    try:
        torch.save(value, buffer)
        buffer.seek(0)
        torch.load(buffer, map_location="meta", weights_only=True)
    except Exception:  # an object's own pickling may raise anything
        return False
    return True


def _flattened(values: Mapping[str, Any], prefix: str = "") -> Iterator[tuple[str, Any]]:
    for key, value in values.items():
        if isinstance(value, Mapping):
            yield from _flattened(value, f"{prefix}{key}.")
        else:
            yield prefix + key, list(value) if isinstance(value, tuple) else value
