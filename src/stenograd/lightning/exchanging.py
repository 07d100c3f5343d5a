"""What both strategies do with a model: attach the method, and save and load its state beside checkpoints."""

from __future__ import annotations

import importlib
import os
import shutil
import warnings
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

from stenograd.adapters import Attached
from stenograd.catalog.method import MethodLike, methods
from stenograd.catalog.method import method as parse
from stenograd.checkpoint.api import steps_of
from stenograd.errors import CheckpointError, ConfigError

__all__ = ["Exchanging", "copied", "drop_others", "fabric", "folder_of", "pytorch", "register_names"]

_MARK = "stenograd"  # the key in Lightning's checkpoint under which the names of our folders stand
# Refused: they register a hook, and a DDP model has one, which is the method's.
_OTHERS_HOOKS = ("ddp_comm_hook", "ddp_comm_state", "ddp_comm_wrapper", "model_averaging_period")


def _find() -> tuple[Any, Any]:
    """Return the package with the Trainer and the one with Fabric, from the one distribution of both.

    Raises:
        ImportError: neither is installed; it says what to install.
    """
    for trainer, loop in (
        ("lightning.pytorch", "lightning.fabric"),
        ("pytorch_lightning", "lightning_fabric"),
    ):
        if find_spec(trainer.split(".")[0]) is not None:
            return importlib.import_module(trainer), importlib.import_module(loop)
    raise ImportError("stenograd.lightning needs Lightning: pip install stenograd[lightning]")


pytorch, fabric = _find()
_DDPStrategy: Any = object  # the Trainer's or Fabric's, which stands behind this class where both are bases


class Exchanging(_DDPStrategy):
    """Makes a `DDPStrategy` exchange by a Stenograd method; the arguments are those of both strategies."""

    def __init__(
        self,
        method: MethodLike | None = None,
        *,
        timeout_s: float = 300.0,
        check_every: int = 0,
        repair: bool = False,
        check_buffers: bool = False,
        skip_bad_steps: bool = True,
        **ddp_options: Any,
    ) -> None:
        if method is None:
            warnings.warn(
                "no method was given, so gradients travel densely: write "
                'StenogradStrategy("topk:ratio=0.01"), or "dense" if that is meant',
                UserWarning,
                stacklevel=3,
            )
        self._method = parse("dense" if method is None else method)
        self._options = {
            "timeout_s": timeout_s,
            "check_every": check_every,
            "repair": repair,
            "check_buffers": check_buffers,
            "skip_bad_steps": skip_bad_steps,
        }
        self._attached: list[Attached] = []
        if given := [name for name in _OTHERS_HOOKS if ddp_options.get(name) is not None]:
            raise ConfigError(
                f"{given[0]} cannot stand beside a method: a DDP model takes one communication hook, which "
                f"is {self._method}; leave it out, or use Lightning's DDPStrategy"
            )
        super().__init__(**ddp_options)  # which gathers the options of DDP
        if self._in_rounds and self._ddp_kwargs:
            raise ConfigError(
                f"options of DistributedDataParallel have no effect with {self._method}, which trains the "
                f"model unwrapped, got {', '.join(sorted(self._ddp_kwargs))}: leave them out"
            )

    def teardown(self) -> None:
        """Leave the process groups, and take threads and hooks away; what was attached still tells."""
        try:
            super().teardown()
        # Exchanges end even where Lightning's own teardown fails: others' processes wait for them.
        finally:
            self._close()

    @property
    def _in_rounds(self) -> bool:
        """Whether ranks train by themselves between exchanges, so that DDP cannot carry the method."""
        return not self._method.averages_gradients

    def _close(self) -> None:
        for one in self._attached:
            one.close()

    def _attach_ddp(self, ddp: Any) -> None:
        """Register the method as the hook of a DDP model."""
        self._warn_if_dense(ddp.module)
        self._attached.append(Attached.by_hook(ddp, self._method, self._options))

    def _warn_if_dense(self, module: nn.Module) -> None:
        """Warn of a method that would compress nothing of this model."""
        below = self._method.dense_below
        largest = max((p.numel() for p in module.parameters() if p.requires_grad), default=0)
        if largest < below:
            warnings.warn(
                f"{self._method} compresses nothing here: the largest tensor has {largest} elements, and "
                f"those with fewer than dense_below={below} travel densely; lower it",
                UserWarning,
                stacklevel=2,
            )

    def _attach(self, module: nn.Module, optimizers: Sequence[torch.optim.Optimizer]) -> None:
        """Let a plain model train in rounds."""
        self._attached.append(Attached.by_optimizers(module, optimizers, self._method, self._options))

    @contextmanager
    def _saved_beside(self, path: Any, complete: bool) -> Iterator[dict[str, Any]]:
        """Save what each rank keeps beside a checkpoint that a `with` block writes.

        Args:
            path: of the checkpoint.
            complete: whether it is to be continued from; one that holds only weights has nothing beside it.

        Yields:
            What to add to the checkpoint: the names of the states, one for each model. They hold the step: a
            state written for a checkpoint that then cannot be written takes the place of no other.
        """
        names = [f"step{steps_of(one.sync)}-{i}" for i, one in enumerate(self._attached if complete else ())]
        for one, name in zip(self._attached, names, strict=False):
            one.save(folder_of(path), name)
        yield {_MARK: names} if names else {}
        if names:
            self.barrier()  # until rank 0 has written it, the state of the one before is needed
            # One rank per host, because hosts may save to disks that they do not share.
            if self.local_rank == 0:
                drop_others(path, names)

    def _load_beside(self, path: Any, checkpoint: dict[str, Any]) -> None:
        """Continue from what was saved beside a checkpoint, after model and optimizers; all ranks call it.

        A checkpoint that was saved without Stenograd may be continued, with a warning.

        Raises:
            CheckpointError: on every rank: the folder is missing or not whole, or of another method or model.
        """
        names = checkpoint.pop(_MARK, None)
        if names is None:
            warnings.warn(
                f"{path} was saved without a state of {self._method}, whose residuals and rounds start anew",
                UserWarning,
                stacklevel=2,
            )
            for one in self._attached:
                one.begin_anew()
            return
        if len(names) != len(self._attached):
            raise CheckpointError(
                f"{path} holds the states of {len(names)} models, but {len(self._attached)} are set up: set "
                "up the same"
            )
        folder = folder_of(path)
        for one, name in zip(self._attached, names, strict=True):
            try:
                one.load(folder, name)
            except CheckpointError as cause:
                raise CheckpointError(f"{cause}; {folder} belongs to {path}: copy both") from cause


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
    # Lightning may make "last.ckpt" a link (ModelCheckpoint(save_last="link")), beside which lies no folder.
    return Path(f"{os.path.realpath(path) if os.path.islink(path) else path}.stenograd")


def drop_others(path: Any, names: Sequence[str]) -> None:
    """Remove states of earlier checkpoints under the same path; no names to remove all."""
    folder = folder_of(path)
    for old in folder.glob("*") if names else ():
        if old.name not in names:
            shutil.rmtree(old, ignore_errors=True)
    if not names:
        shutil.rmtree(folder, ignore_errors=True)


def register_names(register: Callable[..., Any], strategy: type) -> None:
    """Give a strategy's methods names for `strategy="..."`, such as "stenograd_topk", with their defaults.

    Args:
        register: of Lightning's registry.
        strategy: the class.
    """
    register("stenograd", strategy, description="Stenograd without a method: dense, with a warning")
    for name in methods():
        register(f"stenograd_{name}", strategy, description=f"Stenograd by {name}", method=name)
