"""What both strategies do with a model: attach the method, show the consensus, save and load its state."""

from __future__ import annotations

import shutil
import warnings
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

from stenograd.catalog.method import Method, MethodLike, method, methods
from stenograd.checkpoint.api import load_state, save_state
from stenograd.data.carried import in_memory
from stenograd.errors import CheckpointError, ConfigError, StenogradError
from stenograd.sync.ddp import register
from stenograd.sync.distribute import distribute

__all__ = [
    "MARK",
    "Attachment",
    "Choice",
    "copied",
    "drop_others",
    "folder_of",
    "load_all",
    "register_names",
    "save_all",
]

MARK = "stenograd"  # the key in Lightning's checkpoint under which the names of our folders stand


@dataclass(frozen=True)
class Choice:
    """The method and what else a strategy was given for it.

    Args:
        method: how and when the ranks exchange.
        options: for `stenograd.ddp.register` and `stenograd.distribute` alike.
    """

    method: Method
    options: Mapping[str, Any]

    @classmethod
    def of(cls, how: MethodLike | None, **options: Any) -> Choice:
        """Take a strategy's arguments; without a method gradients travel densely, with a warning.

        Raises:
            MethodError: unknown method or key, or a value outside its range.
        """
        if how is None:
            warnings.warn(
                "no method was given, so gradients travel densely: write "
                'StenogradStrategy("topk:ratio=0.01"), or "dense" if that is meant',
                UserWarning,
                stacklevel=4,
            )
        return cls(method("dense" if how is None else how), options)

    @property
    def in_rounds(self) -> bool:
        """Whether ranks train by themselves between exchanges, so that DDP cannot carry the method."""
        return not self.method.averages_gradients

    def refuse(self, options: Mapping[str, Any]) -> None:
        """Refuse options of DistributedDataParallel where the model is not wrapped in it.

        Raises:
            ConfigError: names them.
        """
        if self.in_rounds and options:
            raise ConfigError(
                f"options of DistributedDataParallel have no effect with {self.method}, which trains the "
                f"model unwrapped, got {', '.join(sorted(options))}: leave them out"
            )

    def on_ddp(self, ddp: Any) -> Attachment:
        """Register the method as the hook of a DDP model."""
        self._warn_if_dense(ddp.module)
        return Attachment(register(ddp, self.method, **self.options), ddp.module, [])

    def on_module(self, module: nn.Module, optimizers: Sequence[torch.optim.Optimizer]) -> Attachment:
        """Let a plain model train in rounds."""
        sync = distribute(module, optimizers, self.method, **self.options)
        return Attachment(sync, module, list(optimizers))

    def _warn_if_dense(self, module: nn.Module) -> None:
        """Warn of a method that would compress nothing of this model."""
        below = self.method.dense_below
        largest = max((p.numel() for p in module.parameters() if p.requires_grad), default=0)
        if largest < below:
            warnings.warn(
                f"{self.method} compresses nothing here: the largest tensor has {largest} elements, and "
                f"those with fewer than dense_below={below} travel densely; lower it",
                UserWarning,
                stacklevel=2,
            )


@dataclass
class Attachment:
    """A model and what runs its exchanges.

    Args:
        sync: from `stenograd.ddp.register` or `stenograd.distribute`.
        module: the plain model.
        optimizers: those that hold its parameters; empty where the sync does not need them.
    """

    sync: Any
    module: nn.Module
    optimizers: list[torch.optim.Optimizer]
    _own: list[Tensor] | None = field(default=None, init=False)
    _closed: bool = field(default=False, init=False)

    @property
    def in_rounds(self) -> bool:
        """Whether the ranks' parameters differ between exchanges."""
        return not self.sync.method.averages_gradients

    def show(self) -> None:
        """Put the consensus of all ranks in place, until `hide()`; all ranks call it."""
        if not self.in_rounds or self._own is not None:
            return
        try:
            # Copied out of the block, since `hide()` comes in a later call.
            with self.sync.consensus():
                shown = self._values()
        except StenogradError as cause:
            if not self._closed:
                raise
            raise StenogradError(
                f"training by {self.sync.method} ended with an error, and ranks cannot find any more what "
                "they have in common: save in a callback's on_exception, or go back to a checkpoint"
            ) from cause
        self._own = self._values()
        self._put(shown)

    def hide(self) -> None:
        """Put this rank's own parameters back, if the consensus is in place."""
        own, self._own = self._own, None
        if own is not None:
            self._put(own)

    @contextmanager
    def shown(self) -> Iterator[None]:
        """Put the consensus in place for a `with` block, unless it is already."""
        before = self._own
        self.show()
        try:
            yield
        finally:
            if before is None:
                self.hide()

    def save(self, folder: Path, name: str) -> None:
        """Save what this rank keeps for itself; all ranks call it."""
        consensus = None if self._own is None else self._values()
        # A rank saves its own parameters, which evaluation has replaced by the consensus for a while.
        if self._own is not None:
            self._put(self._own)
        try:
            save_state(folder, self.sync, name=name, **self._parts())
        finally:
            if consensus is not None:
                self._put(consensus)

    def load(self, folder: Path, name: str) -> None:
        """Continue from what `save` wrote; all ranks call it, after Lightning has loaded its own part."""
        load_state(folder, self.sync, name=name, **self._parts())

    def close(self) -> None:
        """Detach from the model, in which the consensus stays if it is in place."""
        self._closed = True
        self.sync.close()

    def _parts(self) -> dict[str, Any]:
        return {"model": self.module, "optimizer": self.optimizers} if self.in_rounds else {}

    def _tensors(self) -> list[Tensor]:
        return [in_memory(t.detach()) for t in (*self.module.parameters(), *self.module.buffers())]

    def _values(self) -> list[Tensor]:
        return [t.clone() for t in self._tensors()]

    def _put(self, values: Iterable[Tensor]) -> None:
        for target, value in zip(self._tensors(), values, strict=True):
            target.copy_(value)


def copied(state: dict[str, Any]) -> dict[str, Any]:
    """Let a model's state keep its values when the model changes; the same dictionary, with its metadata."""
    for name, value in state.items():
        if isinstance(value, Tensor):
            state[name] = value.clone()
    return state


def folder_of(path: Any) -> Path:
    """Return the folder beside a checkpoint that holds what each rank keeps for itself.

    Raises:
        CheckpointError: the checkpoint is not on a disk.

    Example:
        >>> folder_of("runs/last.ckpt").as_posix()
        'runs/last.ckpt.stenograd'
    """
    if "://" in str(path):
        raise CheckpointError(
            f"{path}: every rank keeps a state of its own beside the checkpoint, which must be on a disk: "
            "save to a local or shared folder and copy both"
        )
    return Path(f"{path}.stenograd")


def save_all(attachments: Sequence[Attachment], path: Any) -> list[str]:
    """Save all models' states beside a checkpoint; return the names to keep in it, for `load_all`.

    The names hold the step: a state written for a checkpoint that then cannot be written takes the place of
    no other.
    """
    names = [f"step{one.sync.step}-{i}" for i, one in enumerate(attachments)]
    for one, name in zip(attachments, names, strict=True):
        one.save(folder_of(path), name)
    return names


def drop_others(path: Any, names: Sequence[str]) -> None:
    """Remove states of earlier checkpoints under the same path; no names to remove all."""
    folder = folder_of(path)
    for old in folder.glob("*") if names else ():
        if old.name not in names:
            shutil.rmtree(old, ignore_errors=True)
    if not names:
        shutil.rmtree(folder, ignore_errors=True)


def load_all(attachments: Sequence[Attachment], path: Any, names: Sequence[str] | None) -> None:
    """Continue from what `save_all` wrote, after model and optimizers were loaded; all ranks call it.

    A checkpoint that was saved without Stenograd may be continued, with a warning.

    Raises:
        CheckpointError: on every rank: the folder is missing or not whole, or of another method or model.
    """
    if names is None:
        warnings.warn(
            f"{path} was saved without a state of {attachments[0].sync.method}, whose residuals and rounds "
            "start anew",
            UserWarning,
            stacklevel=2,
        )
        return
    if len(names) != len(attachments):
        raise CheckpointError(
            f"{path} holds the states of {len(names)} models, but {len(attachments)} are set up: set up "
            "the same"
        )
    folder = folder_of(path)
    for one, name in zip(attachments, names, strict=True):
        try:
            one.load(folder, name)
        except CheckpointError as cause:
            raise CheckpointError(f"{cause}; {folder} belongs to {path}: copy both") from cause


def register_names(register: Callable[..., Any], strategy: type) -> None:
    """Give a strategy's methods names for `strategy="..."`, such as "stenograd_topk", with their defaults.

    Args:
        register: of Lightning's registry.
        strategy: the class.
    """
    register("stenograd", strategy, description="Stenograd without a method: dense, with a warning")
    for name in methods():
        register(f"stenograd_{name}", strategy, description=f"Stenograd by {name}", method=name)
