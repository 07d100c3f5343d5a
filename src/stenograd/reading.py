"""Open files and folders that somebody may have damaged or planted: kind, owner and length before content."""

from __future__ import annotations

import errno
import os
import stat
from pathlib import Path
from typing import BinaryIO

__all__ = ["open_regular", "private_folder", "read_regular"]

_JSON_BYTES = 1 << 26  # 64 MiB: the manifest of 100,000 ranks has 20
_FLAGS = getattr(os, "O_NONBLOCK", 0)  # opening a pipe would wait for a writer


def open_regular(path: Path, *, own: bool = False) -> BinaryIO:
    """Open a regular file; whatever else stands there is an error at once.

    A pipe may never send anything, and a device such as /dev/zero never ends.

    Args:
        path: a link is followed, and what it names must be a regular file.
        own: whether its content may run code, so that it must belong to this user and nobody else may write
            to it; on systems without users nothing is checked.

    Raises:
        OSError: it cannot be opened, is no regular file, or may be another user's work.

    Example:
        >>> open_regular(Path(os.devnull))
        Traceback (most recent call last):
        OSError: [Errno 22] no regular file: '/dev/null'
    """

    def opener(name: str, flags: int) -> int:
        number = os.open(name, flags | _FLAGS)
        # Of the open file: by its name, another one might be looked at than is read.
        status = os.fstat(number)
        why = "no regular file" if not stat.S_ISREG(status.st_mode) else _foreign(status) if own else ""
        if why:
            os.close(number)
            raise OSError(errno.EINVAL, why, name)
        return number

    try:
        return open(path, "rb", opener=opener)
    except ValueError as cause:  # a zero byte in the name
        raise OSError(errno.EINVAL, "no name of a file", str(path)) from cause


def read_regular(path: Path, most_bytes: int = _JSON_BYTES, *, own: bool = False) -> bytes:
    """Return the content of a regular file after a look at its length.

    Args:
        path: as in `open_regular`.
        most_bytes: a longer file is an error, so that a damaged one cannot fill the memory.
        own: as in `open_regular`.

    Raises:
        OSError: as in `open_regular`, or it is longer.
    """
    with open_regular(path, own=own) as file:
        nbytes = os.fstat(file.fileno()).st_size
        if nbytes > most_bytes:
            raise OSError(errno.EFBIG, f"{nbytes} bytes, at most {most_bytes} are expected", str(path))
        return file.read(nbytes)  # no more, should it grow meanwhile


def private_folder(path: Path) -> None:
    """Make a folder of mode 0700, or make an existing one so if only this user could write there until now.

    Raises:
        OSError: it cannot be made, is a link or no folder, is another user's, or others can write there.
    """
    path.mkdir(mode=0o700, parents=True, exist_ok=True)
    if not hasattr(os, "getuid"):
        return
    # By descriptor, and through no link: what is looked at is what is changed.
    number = os.open(path, os.O_RDONLY | os.O_DIRECTORY | os.O_NOFOLLOW | os.O_CLOEXEC)
    try:
        status = os.fstat(number)
        if why := _foreign(status):
            raise PermissionError(errno.EPERM, why, str(path))
        if stat.S_IMODE(status.st_mode) != 0o700:
            os.fchmod(number, 0o700)
    finally:
        os.close(number)


def _foreign(status: os.stat_result) -> str:
    """Return why others than this user may have written something, or nothing."""
    if not hasattr(os, "getuid"):
        return ""
    if status.st_uid != os.getuid():
        return f"it belongs to user {status.st_uid}"
    mode = stat.S_IMODE(status.st_mode)
    return f"others can write there (mode {mode:04o})" if mode & 0o022 else ""
