"""Write files that are whole or absent, whenever the machine stops, and read JSON that may be damaged."""

from __future__ import annotations

import contextlib
import hashlib
import json
import math
import os
from collections.abc import Callable, Iterator, Mapping
from pathlib import Path
from typing import Any, BinaryIO, TypeVar

from stenograd.errors import StenogradError, first_line
from stenograd.reading import read_regular

__all__ = ["Digest", "finite", "read_json", "replacing", "strict_json", "write_atomically", "write_json"]

T = TypeVar("T")


def write_atomically(path: Path, content: bytes) -> None:
    """Write a file under another name, force it to the disk, then rename it in one step.

    Raises:
        OSError: it cannot be written; an earlier file of that name is unchanged, and nothing else is left.
    """
    with replacing(path) as file:
        file.write(content)


@contextlib.contextmanager
def replacing(path: Path) -> Iterator[BinaryIO]:
    """Open a file that replaces the one at a path once it is on the disk, unless the block raises.

    Raises:
        OSError: it cannot be written; an earlier file of that name is unchanged, and nothing else is left.
    """
    temporary = path.with_name(f".{path.name}.part")
    try:
        with temporary.open("wb") as file:
            yield file
            file.flush()
            os.fsync(file.fileno())
        temporary.replace(path)
    except BaseException:
        with contextlib.suppress(OSError):
            temporary.unlink(missing_ok=True)
        raise
    # The new name is on the disk only when its folder is. Not every system lets a folder be opened.
    with contextlib.suppress(OSError):
        folder = os.open(path.parent, os.O_RDONLY)
        try:
            os.fsync(folder)
        finally:
            os.close(folder)


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
        >>> import io
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
    """Return a JSON-able value with None for NaN and infinities.

    Example:
        >>> finite({"seconds": [1.0, float("inf")]})
        {'seconds': [1.0, None]}
    """
    if isinstance(value, Mapping):
        return {key: finite(item) for key, item in value.items()}
    if isinstance(value, (list, tuple)):
        return [finite(item) for item in value]
    return None if isinstance(value, float) and not math.isfinite(value) else value
