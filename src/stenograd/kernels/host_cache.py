"""Compiled kernels on disk: where they lie, and how one process of a host compiles them for all others."""

from __future__ import annotations

import hashlib
import os
import sys
import tempfile
import threading
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from functools import cache
from pathlib import Path
from typing import IO, Any

from stenograd.version import __version__

try:
    import fcntl
except ImportError:  # Windows: every process compiles for itself
    fcntl = None  # type: ignore[assignment]

__all__ = ["compiling", "folder", "once_per_host"]

_PATIENCE_S = 1.0  # a user waits that long without asking what is going on


@cache
def folder(base: str, versions: Sequence[str]) -> Path | None:
    """Return the folder for this host's compiled kernels, or None where nothing can be written.

    Its name holds a hash of all kernel sources. numba by itself notices a change of the file that a kernel is
    in, but not of one from which a function was inlined; ranks with caches of different ages then computed
    different bits. The hash covers Python, the compiler's versions and the CPU too.

    Args:
        base: where the user wants it (NUMBA_CACHE_DIR); empty for beside the source, or if that cannot be
            written, in the user's cache folder.
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
    user = Path(os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache")
    for parent in [Path(base)] if base else [here / "__pycache__", user]:
        place = parent / f"stenograd-{known.hexdigest()[:16]}"
        try:
            place.mkdir(parents=True, exist_ok=True)
            tempfile.TemporaryFile(dir=place).close()
        except OSError:
            continue
        return place
    return None


@contextmanager
def compiling(what: str) -> Iterator[None]:
    """Keep the host's lock, once a kernel had to be compiled in the `with` block, until its end.

    So one process compiles all that the block needs, and says so if it takes more than a second; the others
    wait at their first kernel and then load every one. Nothing is locked if all kernels are on disk.

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

    A file in `place` says what is compiled; where it is there, nobody takes the lock.

    Args:
        dispatcher: numba's, whose `compile` is replaced.
        place: from `folder`, where numba keeps this kernel's code.
    """
    function = dispatcher.py_func
    compile_or_load: Callable[[Any], Any] = dispatcher.compile

    def compile_once(signature: Any) -> Any:
        name = f"{function.__module__}.{function.__qualname__} {signature}"
        mark = place / hashlib.sha256(name.encode()).hexdigest()[:24]
        # numba's own lock comes after this one, in every thread
        with compiling(_turn.what):
            if not mark.exists():
                _turn.take(place)
                if mark.exists():
                    _turn.give_back()  # it was compiled meanwhile: others need not wait while this one loads
            compiled = compile_or_load(signature)
            mark.touch()
            return compiled

    dispatcher.compile = compile_once


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
        self._file: IO[bytes] | None = None
        self._line: threading.Timer | None = None
        self._told: set[str] = set()

    def take(self, place: Path) -> None:
        """Wait for the lock, unless this process has it; where there are no file locks, just go on."""
        if self._file is not None:
            return
        self._file = (place / "lock").open("wb")
        if fcntl is not None:
            fcntl.flock(self._file, fcntl.LOCK_EX)
        self._line = threading.Timer(_PATIENCE_S, self._tell, [self.what])
        self._line.daemon = True
        self._line.start()

    def give_back(self) -> None:
        """Let the next process have the lock."""
        if self._line is not None:
            self._line.cancel()
        if self._file is not None:
            self._file.close()
        self._file = self._line = None

    def _tell(self, what: str) -> None:
        if what not in self._told:
            line = f"stenograd: compiling kernels for {what} (first use on this machine) ..."
            print(line, file=sys.stderr, flush=True)
        self._told.add(what)


_turn = _Turn()
