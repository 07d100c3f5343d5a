"""Damage to files in all the ways that disks, other programs and people do, and readers that must stand it.

A checkpoint must then be the newest whole one or a `CheckpointError`, and a kernel must compute the same.
"""

from __future__ import annotations

import json
import os
import random
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch

from stenograd.checkpoint.api import read_set, write_set
from stenograd.errors import CheckpointError
from stenograd.wire.driver import Driver


class Wrong(AssertionError):
    """A decoder did what it must not do."""


def _cut(path: Path, draw: random.Random) -> None:
    os.truncate(path, draw.randrange(path.stat().st_size))


def _flip(path: Path, draw: random.Random) -> None:
    raw = bytearray(path.read_bytes())
    for _ in range(draw.randrange(1, 9)):
        raw[draw.randrange(len(raw))] ^= 1 << draw.randrange(8)
    path.write_bytes(raw)


def _grow(path: Path, draw: random.Random) -> None:
    if draw.randrange(2):
        path.write_bytes(path.read_bytes() + draw.randbytes(draw.randrange(1, 99)))
    else:
        os.truncate(path, 1 << draw.randrange(28, 42))  # of holes, which take no room


def _replace(path: Path, draw: random.Random) -> None:
    path.write_bytes(draw.randbytes(draw.randrange(200)))


def _empty(path: Path, draw: random.Random) -> None:
    os.truncate(path, 0)


def _swap(path: Path, draw: random.Random) -> None:
    """Swap it with another file of the folder, most likely one of the same kind."""
    files = [other for other in sorted(path.parent.iterdir()) if other.is_file() and other != path]
    alike = [other for other in files if other.suffix == path.suffix]
    other = draw.choice(alike or files or [path])
    mine, theirs = path.read_bytes(), other.read_bytes()
    path.write_bytes(theirs)
    other.write_bytes(mine)


def _no_file(make: Callable[[Path], Any]) -> Callable[[Path, random.Random], None]:
    def instead(path: Path, draw: random.Random) -> None:
        path.unlink()
        make(path)

    return instead


DAMAGES: dict[str, Callable[[Path, random.Random], None]] = {
    "nothing": lambda path, draw: None,
    "truncated": _cut,
    "bits flipped": _flip,
    "grown": _grow,
    "random bytes": _replace,
    "empty": _empty,
    "swapped": _swap,
    "gone": _no_file(lambda path: None),
    "a pipe": _no_file(os.mkfifo),
    "a link to /dev/zero": _no_file(lambda path: path.symlink_to("/dev/zero")),
    "a link to itself": _no_file(lambda path: path.symlink_to(path)),
    "a folder": _no_file(Path.mkdir),
}


def _json(change: Callable[[dict[str, Any], random.Random], Any]) -> Callable[[Path, random.Random], None]:
    def rewritten(path: Path, draw: random.Random) -> None:
        said = json.loads(path.read_bytes())
        other = change(said, draw)
        path.write_text(json.dumps(said if other is None else other))

    return rewritten


_VALUES = [None, True, -1, 0, 1e400, 1 << 70, "", "../x", "a\0b", [], [1], {}, {"a": 1}, "9" * 5000]


def _other_type(said: dict[str, Any], draw: random.Random) -> None:
    said[draw.choice(sorted(said))] = draw.choice(_VALUES)


def _other_entry(said: dict[str, Any], draw: random.Random) -> None:
    entry = draw.choice(said["files"])
    entry[draw.choice(sorted(entry))] = draw.choice(_VALUES)


def _other_name(said: dict[str, Any], draw: random.Random) -> None:
    entry, name = draw.choice(said["files"]), said["files"][0]["name"]
    names = ["/dev/zero", "../x", "..", ".", f"./{name}", f"../{name}", f"/tmp/{name}", "x/../" + name, name]
    entry["name"] = draw.choice(names) + "\0" * (draw.randrange(5) == 0)


def _huge_length(said: dict[str, Any], draw: random.Random) -> None:
    draw.choice(said["files"])["nbytes"] = 1 << draw.randrange(30, 64)


def _other_json(said: dict[str, Any], draw: random.Random) -> Any:
    return draw.choice([[], 3, "x", None, {}, [said], {**said, "more": 1}, {**said, "files": said}])


def _deep(path: Path, draw: random.Random) -> None:
    path.write_text(draw.choice(["[", '{"a":']) * 100_000)


MANIFEST_DAMAGES: dict[str, Callable[[Path, random.Random], None]] = {
    "a value of another type": _json(_other_type),
    "an entry of another type": _json(_other_entry),
    "names elsewhere": _json(_other_name),
    "a huge length": _json(_huge_length),
    "other JSON": _json(_other_json),
    "deep JSON": _deep,
}


def damage(path: Path, draw: random.Random, how: str = "") -> str:
    """Damage a file in the way that is named, or in one that fits it; return which."""
    known = DAMAGES | (MANIFEST_DAMAGES if path.suffix == ".json" else {})
    how = how or draw.choice(sorted(known))
    known[how](path, draw)
    return how


class Checkpoints:
    """Two checkpoints of one rank in an empty folder, whose files are then damaged."""

    def __init__(self, folder: Path) -> None:
        self._whole, self._damaged = folder / "whole", folder / "damaged"
        self._whole.mkdir()
        for step in (1, 2):
            write_set(Driver(), self._whole, step, {"x": torch.arange(9.0) * step, "l": [1, {"a": None}]})

    def __call__(self, draw: random.Random, how: str = "") -> str:
        """Damage and read; return "answer" or the error's name.

        Raises:
            Wrong: anything else came than the newest whole checkpoint or a `CheckpointError`.
        """
        folder = self._damaged
        shutil.rmtree(folder, ignore_errors=True)
        shutil.copytree(self._whole, folder)
        steps = draw.choice([[2], [2], [1, 2]])
        did = []
        for step in steps:
            kinds = [folder / f"checkpoint-step{step}.json", *folder.glob(f"checkpoint-step{step}-*.pt")]
            path = kinds[0] if how in MANIFEST_DAMAGES else draw.choice(kinds)
            did.append(f"{path.name}: {damage(path, draw, how)}" if path.is_file() else "")
        try:
            found = read_set(Driver(), folder)
        except CheckpointError:
            if len(steps) == 1 and not any("swapped" in one for one in did):
                raise Wrong(f"the older checkpoint is whole, but was refused ({did})") from None
            return "CheckpointError"
        except Exception as error:
            raise Wrong(f"{type(error).__name__}: {str(error)[:200]} ({did})") from error
        if found is None:
            if (folder / "checkpoint-step1.json").is_file():
                raise Wrong(f"no checkpoint was found ({did})")
            return "answer"
        if not torch.equal(found.content["x"], torch.arange(9.0) * found.manifest.step):
            raise Wrong(f"read {found.content} ({did})")
        return "answer"


class Kernel:
    """A compiled kernel in an empty folder, of which the file or the lock is damaged.

    Attributes:
        place: where kernels are.
    """

    def __init__(self, folder: Path) -> None:
        self._folder = folder
        self._calls()
        (self.place,) = folder.glob("stenograd-*")
        self._whole = folder / "whole"
        shutil.copytree(self.place, self._whole)

    def __call__(self, draw: random.Random, how: str = "") -> str:
        """Damage and compute; always returns "answer".

        Raises:
            Wrong: it raised, or computed something else.
        """
        shutil.rmtree(self.place)
        shutil.copytree(self._whole, self.place)
        lock, (file,) = self.place / "lock", self.place.glob("*.kernel")
        did = damage(file, draw, how)
        if draw.randrange(3) == 0:
            lock.write_bytes(b"x")  # some damages need a byte
            did += f", lock: {damage(lock, draw)}"
        try:
            self._calls()
        except Exception as error:
            raise Wrong(f"{type(error).__name__}: {str(error)[:200]} ({did})") from error
        return "answer"

    def _calls(self) -> None:
        import numba

        from stenograd.kernels.cpu.jit import kernel

        config: Any = numba.config
        before, config.CACHE_DIR = config.CACHE_DIR, str(self._folder)
        try:
            if (got := kernel(_triple)(14)) != 42:
                raise Wrong(f"it computed {got}")
        finally:
            config.CACHE_DIR = before


def _triple(a: int) -> int:
    return 3 * a
