"""The folder of one run: run.json, metrics.jsonl, steps.json, result.json and the checkpoints."""

from __future__ import annotations

import json
import platform
import tempfile
import warnings
from collections.abc import Mapping, Sequence
from dataclasses import asdict
from pathlib import Path
from typing import Any

import torch

import stenograd
from stenograd.checkpoint.api import Loaded, load_checkpoint, save_checkpoint
from stenograd.checkpoint.files import (
    check_identity,
    manifest_path,
    read_json,
    saved_steps,
    strict_json,
    write_atomically,
    write_json,
)
from stenograd.cli.loop import Row, Trainer
from stenograd.errors import CheckpointError, ConfigError

__all__ = ["RunFolder", "check_file", "make_folder", "saved_options", "versions"]


class RunFolder:
    """Reads and writes the files of a run.

    Args:
        path: the folder; need not exist yet.
        identity: what must be equal for the run to be continued, JSON-able; all but the number of workers.
    """

    def __init__(self, path: Path, identity: Mapping[str, Any]) -> None:
        self.path = path
        self.identity = json.loads(json.dumps(identity))  # as it is read back: a tuple is a list then

    def check(self, resume: bool) -> None:
        """Refuse to write over a run, or to continue another one; changes nothing.

        Raises:
            ConfigError: the path is no folder, or it holds a run and resume is False.
            CheckpointError: it holds another run, or its run.json is damaged.
        """
        if self.path.exists() and not self.path.is_dir():
            raise ConfigError(f"--out must be a folder, got the file {self.path}: give another name")
        if not resume:
            used = [*self.path.glob("checkpoint-step*"), *map(self._file, ("run", "result"))]
            taken = next((file for file in [*used, self.path / "metrics.jsonl"] if file.exists()), None)
            if taken is not None:
                raise ConfigError(
                    f"--out must not hold a run, got {taken}: --resume continues it, or give another folder"
                )
        elif self._file("run").exists():
            self._check(self._file("run"), _read_run(self._file("run"))["identity"])

    def holds_run(self) -> bool:
        """Return whether a run began here."""
        return self._file("run").exists() or bool(saved_steps(self.path))

    def begin(self, rows: Sequence[Mapping[str, Any]], about: Mapping[str, Any]) -> None:
        """Write run.json, and metrics.jsonl with the epochs that a checkpoint holds; on rank 0."""
        write_json(self._file("run"), {"identity": self.identity, **about, "versions": versions()})
        lines = "".join(_line(row) for row in rows)  # later epochs are trained again
        write_atomically(self.path / "metrics.jsonl", lines.encode())

    def rows(self) -> list[Row]:
        """Return the epochs in metrics.jsonl, which another process may have added to."""
        path = self.path / "metrics.jsonl"
        lines = path.read_text().splitlines() if path.exists() else []
        # A line without its end is one that another process is writing at this moment.
        return [Row(**json.loads(line)) for line in lines if line.endswith("}")]

    def append(self, row: Row) -> None:
        """Add an epoch to metrics.jsonl, at once; on a full disk no part of its line stays."""
        with (self.path / "metrics.jsonl").open("ab", buffering=0) as file:
            before, line = file.tell(), _line(asdict(row)).encode()
            try:
                while line:
                    line = line[file.write(line) :]  # without a buffer one write may take a part only
            except OSError:
                file.truncate(before)
                raise

    def finish(self, result: Mapping[str, Any], steps: Mapping[str, Any]) -> None:
        """Write result.json, and steps.json unless a finished run was resumed, which took none."""
        if any(rank["steps"] for rank in steps["ranks"]) or not self._file("steps").exists():
            write_json(self._file("steps"), steps)
        write_json(self._file("result"), result)

    def save(self, trainer: Trainer, rows: Sequence[Row]) -> None:
        """Write all ranks' checkpoints after the steps taken so far, and delete all but the last two."""
        extra = {"identity": self.identity, "rows": [asdict(row) for row in rows], **trainer.position()}
        save_checkpoint(self.path, step=trainer.taken, extra=extra, keep=2, **trainer.parts())

    def load(self, trainer: Trainer) -> Loaded | None:
        """Continue from the newest whole checkpoint; None where there is none.

        Raises:
            CheckpointError: none is whole, or it is of another run.
        """
        with warnings.catch_warnings():
            warnings.filterwarnings("ignore", "continuing from step")  # the caller prints why
            loaded = load_checkpoint(self.path, **trainer.parts())
        if loaded is None:
            return None
        path = manifest_path(self.path, loaded.step)
        if not isinstance(loaded.extra, Mapping) or "identity" not in loaded.extra:
            raise CheckpointError(f"{path}: not of a `stenograd train` run: give the folder of one")
        self._check(path, loaded.extra["identity"])
        trainer.go_on(loaded)
        return loaded

    def _check(self, path: Path, saved: Mapping[str, Any]) -> None:
        check_identity(path, saved, self.identity, except_for=("world_size",))

    def _file(self, name: str) -> Path:
        return self.path / f"{name}.json"


def saved_options(path: Path) -> Mapping[str, Any]:
    """Return the options that the run in a folder was started with; none where it is older than they are.

    Raises:
        ConfigError: there is no run.
        CheckpointError: its run.json is damaged.
    """
    if not (path / "run.json").exists():
        if any(path.glob("checkpoint-step*")):  # another host's disk has run.json, or the run is an old one
            return {}
        advice = "look at its spelling, or leave out --resume to begin a run there"
        raise ConfigError(f"--resume needs a run in --out, and {path} holds none: {advice}")
    options: Mapping[str, Any] = _read_run(path / "run.json").get("options", {})
    return options


def _read_run(path: Path) -> Mapping[str, Any]:
    def checked(received: dict[str, Any]) -> Mapping[str, Any]:
        if not isinstance(received["identity"], dict) or not isinstance(received.get("options", {}), dict):
            raise TypeError("identity and options must be objects")
        return received

    return read_json(path, checked, CheckpointError, "cannot be read", "remove it, or restore it from a copy")


def make_folder(path: Path) -> None:
    """Make a folder for results, with its parents.

    Raises:
        ConfigError: that is not possible, or nothing can be written there.
    """
    try:
        path.mkdir(parents=True, exist_ok=True)
    except OSError as cause:
        raise ConfigError(
            f"--out must be a folder that can be made, got {path} ({cause.strerror}): give another"
        ) from cause
    _check_written("folder", path, path)


def check_file(path: Path) -> None:
    """Refuse a file that cannot be written, before the work whose result it is to hold.

    Raises:
        ConfigError: that is so.
    """
    if path.is_dir():
        raise ConfigError(f"--out must be a file, got the folder {path}: give a name in it")
    if path.exists() and not path.is_file():
        raise ConfigError(f"--out must be a regular file, got {path}: give another")
    _check_written("file", path, path.parent)


def _check_written(kind: str, path: Path, folder: Path) -> None:
    try:
        with tempfile.TemporaryFile(dir=folder):
            pass
    except OSError as cause:
        raise ConfigError(
            f"--out must be a {kind} that can be written, got {path} ({cause.strerror}): give another"
        ) from cause


def versions() -> dict[str, str]:
    """Return the versions that decide a run's numbers."""
    return {
        "stenograd": stenograd.__version__,
        "torch": torch.__version__,
        "python": platform.python_version(),
    }


def _line(row: Mapping[str, Any]) -> str:
    return strict_json(row, indent=None) + "\n"
