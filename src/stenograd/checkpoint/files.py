"""Files that are whole or absent, whenever the machine stops."""

from __future__ import annotations

import contextlib
import hashlib
import os
from collections.abc import Iterator
from pathlib import Path
from typing import BinaryIO

__all__ = ["Digest", "replacing", "write_atomically"]


def write_atomically(path: Path, content: bytes) -> None:
    """Write a file beside its place, force it to the disk, then put it in place in one step.

    Raises:
        OSError: it cannot be written; what was there is there still, and nothing else.
    """
    with replacing(path) as file:
        file.write(content)


@contextlib.contextmanager
def replacing(path: Path) -> Iterator[BinaryIO]:
    """Open a file that takes a path's place, whole and on the disk, if the block ends without an error.

    Raises:
        OSError: it cannot be written; what was there is there still, and nothing else.
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
    with contextlib.suppress(OSError):  # not every system lets a folder be opened
        folder = os.open(path.parent, os.O_RDONLY)
        try:
            os.fsync(folder)
        finally:
            os.close(folder)


class Digest:
    """Passes on to a file what `torch.save` writes, and digests it.

    `torch.save` writes from C++ and would turn an error raised here into one about positions in the file, so
    the first one waits in `error`.

    Args:
        file: what to write to.

    Attributes:
        nbytes: number of bytes so far.
        sha256: of these.
        error: the first that the file raised; nothing was written after it.

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
        """Write and digest; return the number of bytes taken."""
        if self.error is None:
            try:
                self._file.write(data)
            except OSError as error:
                self.error = error
            self.sha256.update(data)
            self.nbytes += len(data)
        return len(data)

    def flush(self) -> None:
        """Leave it to the file; `torch.save` asks for it at the end."""
