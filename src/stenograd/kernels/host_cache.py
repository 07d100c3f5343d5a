"""Compiled kernels on disk: where they lie, and how one process of a host compiles them for all others.

Loading a kernel runs what is in its file. So a file counts only if nobody else could have written it and its
SHA-256 is right; everything else is compiled anew.
"""

from __future__ import annotations

import hashlib
import os
import pickle
import sys
import tempfile
import threading
import time
import warnings
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager, suppress
from functools import cache
from pathlib import Path
from typing import Any

from stenograd.reading import private_folder, read_regular
from stenograd.version import __version__

try:
    import fcntl
except ImportError:  # Windows: every process compiles for itself
    fcntl = None  # type: ignore[assignment]

__all__ = ["compiling", "folder", "once_per_host"]

_PATIENCE_S = 1.0  # a user waits that long without asking what is going on
# For a process that compiles and was stopped, say. All kernels of a method take 2 to 10 s, and on a loaded
# machine ten times that; who waits no longer compiles for itself.
_LOCK_S = 120.0
_POLL_S = 0.02
_KERNEL_BYTES = 1 << 26  # of one kernel, at most; the largest has 0.3 MB
_DIGEST_BYTES = 32  # of SHA-256


@cache
def folder(base: str, versions: Sequence[str]) -> Path | None:
    """Return the folder for this host's compiled kernels, or None where there can be none.

    Its name holds a hash of all kernel sources. numba by itself notices a change of the file that a kernel is
    in, but not of one from which a function was inlined; ranks with caches of different ages then computed
    different bits. The hash covers Python, the compiler's versions and the CPU too.

    Whoever can write there could run code as this user. So it has mode 0700, and one that is another user's,
    or that others can write to, is left alone; a warning says so where no other is left.

    Args:
        base: where the user wants it (NUMBA_CACHE_DIR); empty for beside the source, or if that cannot be
            written and holds nothing, in the user's cache folder.
        versions: of all that decides the machine code, besides Python and the sources.

    Example:
        >>> with tempfile.TemporaryDirectory() as base:
        ...     folder(base, ("0.60",)).name[:10]
        'stenograd-'
    """
    here = Path(__file__).parent
    known = hashlib.sha256(repr((str(here), __version__, sys.version, versions)).encode())
    for source in sorted(here.rglob("*.py")):
        known.update(source.name.encode() + b"\0" + source.read_bytes())
    # Not `Path.home`, which raises where a user has no name, as in a container. The path is relative then.
    user = Path(os.environ.get("XDG_CACHE_HOME") or os.path.expanduser("~/.cache"))
    refused: list[str] = []
    for parent in [Path(base)] if base else [here / "__pycache__", *[user] * user.is_absolute()]:
        place = parent / f"stenograd-{known.hexdigest()[:16]}"
        try:
            private_folder(place)
        except OSError as cause:
            if os.path.lexists(place):
                refused.append(f"{place}: {cause.strerror}")
            continue
        # Only a try tells whether a file system is read-only or full; what is there already can be loaded.
        with suppress(OSError):
            tempfile.TemporaryFile(dir=place).close()
            return place
        if any(place.glob("*.kernel")):
            return place
    if refused:
        warnings.warn(
            "every process compiles its kernels for itself, because a folder is not to be trusted "
            f"({refused[0]}): remove it, or let NUMBA_CACHE_DIR name a folder of your own",
            RuntimeWarning,
            stacklevel=2,
        )
    return None


@contextmanager
def compiling(what: str) -> Iterator[None]:
    """Keep the host's lock, once a kernel had to be compiled in the `with` block, until its end.

    So one process compiles all that the block needs; the others wait at their first kernel and then load
    every one. Each says what it does if that takes more than a second. Nothing is locked if all kernels are
    on disk.

    Args:
        what: whose kernels these are, for the line on stderr.

    Example:
        >>> with compiling("topk"):
        ...     pass
    """
    with _turn.mutex:
        before, _turn.what = _turn.what, what
        _turn.depth += 1
        try:
            yield
        finally:
            _turn.depth -= 1
            _turn.what = before
            if not _turn.depth:
                _turn.give_back()


def once_per_host(dispatcher: Any, place: Path) -> None:
    """Let one process of the host compile a kernel, for each kind of arguments, and the others load that.

    Where a kernel is on disk, nobody takes the lock.

    Args:
        dispatcher: numba's, made with cache=True.
        place: from `folder`.
    """
    compile_or_load: Callable[[Any], Any] = dispatcher.compile
    kept = dispatcher._cache
    # numba's own file would be unpickled as it is, and an index that cannot be read ends every later start.
    kept._cache_file = _Sealed(place, kept._cache_file)
    save = kept.save_overload

    def compile_once(signature: Any) -> Any:
        with compiling(_turn.what):  # numba's own lock comes after this one, in every thread
            return compile_or_load(signature)

    def save_if_possible(signature: Any, compiled: Any) -> None:
        with suppress(OSError):  # a full disk: this process has compiled it, and needs no file
            save(signature, compiled)

    dispatcher.compile, kept.save_overload = compile_once, save_if_possible


class _Sealed:
    """A kernel's files, one for each kind of arguments: a SHA-256, then what numba wants to keep.

    Args:
        place: the folder.
        numbas: numba's own index of this kernel, which is not used; it knows the kernel's name and source.
    """

    def __init__(self, place: Path, numbas: Any) -> None:
        self._place, self._numbas = place, numbas
        self._what = numbas._index_name, numbas._source_stamp

    def load(self, key: Any) -> Any:
        """Return what was saved; None where the caller has to compile, alone on this host."""
        path = self._path(key)
        found = self._read(path)
        if found is None:
            _turn.take(self._place)
            found = self._read(path)
            if found is not None:
                _turn.give_back()  # it was compiled meanwhile: others need not wait while this one loads
        return found

    def save(self, key: Any, data: Any) -> None:
        """Keep what was compiled; an OSError leaves nothing."""
        raw = self._numbas._dump(data)
        # numba writes to another name and renames it, so no other process reads half a file.
        with self._numbas._open_for_write(str(self._path(key))) as file:
            os.chmod(file.name, 0o600)  # before there is anything in it
            file.write(hashlib.sha256(raw).digest() + raw)

    def _path(self, key: Any) -> Path:
        name = hashlib.sha256(repr((self._what, key)).encode()).hexdigest()[:24]
        return self._place / f"{name}.kernel"

    def _read(self, path: Path) -> Any:
        try:
            sealed = read_regular(path, _KERNEL_BYTES, own=True)
        except OSError:
            return None
        # Compared before it is unpickled, which runs what is in it.
        digest, raw = sealed[:_DIGEST_BYTES], sealed[_DIGEST_BYTES:]
        return pickle.loads(raw) if hashlib.sha256(raw).digest() == digest else None


class _Turn:
    """A lock on a file, held by one process of the host at a time; a process that dies gives it back.

    Attributes:
        mutex: for this process's threads.
        depth: of the `compiling` blocks that are open.
        what: whose kernels they compile.
    """

    def __init__(self) -> None:
        self.mutex = threading.RLock()
        self.depth = 0
        self.what = "this step"
        self._file: int | None = None
        self._line: threading.Timer | None = None
        self._said: set[str] = set()

    def take(self, place: Path) -> None:
        """Wait for the lock, unless this process has it; where there is none to be had, just go on."""
        # Set from here to `give_back`, also where no lock was to be had: one try for each block is enough.
        if self._line is not None:
            return
        if fcntl is not None:
            with suppress(OSError):  # a full disk, a folder of that name, a file system without locks
                self._file = os.open(place / "lock", os.O_RDWR | os.O_CREAT | os.O_NONBLOCK, 0o600)
                self._lock(self._file)
        self._say(f"stenograd: compiling kernels for {self.what} (first use on this machine) ...")

    def _lock(self, file: int) -> None:
        end = time.monotonic() + _LOCK_S
        while time.monotonic() < end:
            try:
                return fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)  # without NB it has no limit
            except BlockingIOError:
                if self._line is None:
                    self._say(
                        f"stenograd: waiting for a process that is compiling kernels for {self.what} ..."
                    )
            time.sleep(_POLL_S)
        return None

    def give_back(self) -> None:
        """Let the next process have the lock."""
        self._say(None)
        if self._file is not None:
            os.close(self._file)
        self._file = None

    def _say(self, line: str | None) -> None:
        """Print a line once if this goes on for a second; None, or another line, takes it back."""
        if self._line is not None:
            self._line.cancel()
            self._line = None
        if line is not None:
            self._line = threading.Timer(_PATIENCE_S, self._tell, [line])
            self._line.daemon = True
            self._line.start()

    def _tell(self, line: str) -> None:
        if line not in self._said:
            print(line, file=sys.stderr, flush=True)
        self._said.add(line)


_turn = _Turn()
