"""SINGA's `DistOpt`: an optimizer that trains on the gradients of all ranks."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from typing import Any

import torch
from torch import Tensor

from stenograd.comm.driver import Driver
from stenograd.errors import CheckpointError, ConfigError, bad_value
from stenograd.singa.arguments import named_members
from stenograd.singa.base import File, Optimizer, Setting
from stenograd.singa.inner import inner
from stenograd.singa.launch import join
from stenograd.singa.training import Training

__all__ = ["DistOpt"]

_FORMAT = 1  # of get_states(); a reader refuses others


class DistOpt(Training):
    """Wraps an optimizer for data-parallel training: each `backward_and_...` call is one step.

    Gradients travel in groups, while backward goes on: a tensor of more than `threshold` elements travels
    alone, the others together as soon as they hold more than `threshold`. Then each parameter is updated with
    its averaged gradient, in backward order. If gradients are not finite on some rank, the step changes no
    parameter on any rank, and `skipped` counts it.

    Args:
        opt: an optimizer of `stenograd.singa` or of `torch.optim`; None makes a new `SGD()`.
        nccl_id: the `NcclIdHolder` that the parent process made; None under mpiexec, torchrun, srun or alone.
        local_rank: with nccl_id, this process's number among the parent's children, in [0, world_size).
        world_size: with nccl_id, the number of children, at least 1.
        buffSize: accepted for compatibility and ignored: buffers are as large as what is sent.
        timeout_s: seconds after which a silent peer is an error, above 0.
        gpu_num: older name of local_rank.
        gpu_per_node: with nccl_id, older name of world_size; without, the number of ranks on this host.
        num_gpus: older name of world_size.

    Attributes:
        world_size, local_rank, global_rank: number of ranks, and this process's rank on its host and in all
            (older: `rank_in_local`, `rank_in_global`).
        traffic: bytes, collectives and seconds waited of this rank.
        partial: number of the partition that `backward_and_partial_update` averaged last; 0 after a cycle.
        skipped: number of steps that changed nothing because gradients were not finite.

    Raises:
        ConfigError: a rank, a size or buffSize is out of range, or contradicts the launcher.
        LaunchError: the ranks did not find each other.
        TypeError: opt is not an optimizer, or nccl_id is not an `NcclIdHolder`.

    Example:
        >>> from stenograd.singa import SGD
        >>> w = torch.tensor([1.0, 2.0], requires_grad=True)
        >>> optimizer = DistOpt(SGD(lr=0.5))  # alone: a world of one
        >>> optimizer((w * w).sum() / 2)
        >>> w.tolist()
        [0.5, 1.0]
    """

    def __init__(
        self,
        opt: Any = None,
        nccl_id: Any = None,
        local_rank: int | None = None,
        world_size: int | None = None,
        buffSize: int = 4194304,
        *,
        timeout_s: float = 300.0,
        gpu_num: int | None = None,
        gpu_per_node: int | None = None,
        num_gpus: int | None = None,
    ) -> None:
        chosen = inner(opt)  # None makes a new SGD(); SINGA's default argument is one SGD() for all instances
        if not isinstance(buffSize, int) or buffSize < 1:
            raise bad_value("buffSize", "must be a whole number of at least 1", buffSize, "leave it out")
        rank = _one("local_rank", local_rank, gpu_num)
        children = None if nccl_id is None else gpu_per_node  # a token means one node
        size = _one("world_size", world_size, num_gpus, children)
        world = join(nccl_id, rank, size, timeout_s, per_node=gpu_per_node)
        super().__init__(chosen, Driver.own(timeout_s=timeout_s), world)
        self.opt = chosen if opt is None else opt
        self.buffSize = buffSize

    @property
    def lr(self) -> float:
        """The learning rate of the next step; with a PyTorch optimizer, that of its first parameter group."""
        return self._inner.lr_value

    @property
    def sparsInit(self) -> bool:
        """Whether any step has accumulated what it did not send."""
        return self._gradients.corrected

    @property
    def gradAccumulation(self) -> list[Tensor]:
        """Copies of the accumulations, flat, one per group in the order of the last corrected step."""
        return self._gradients.accumulations()

    def register(
        self, param_group: Tensor | Iterable[Tensor | tuple[str, Tensor]], config: Mapping[str, Setting]
    ) -> None:
        """Give parameters names (`register(model.named_parameters(), {})`) and settings of their own.

        Args:
            param_group: as in `Optimizer.register`.
            config: settings that differ; must be empty for a PyTorch optimizer, which has groups for that.
        """
        members = [param_group] if isinstance(param_group, Tensor) else list(param_group)
        if isinstance(self.opt, Optimizer):
            self.opt.register(members, config)
        elif config:
            raise bad_value(
                "config", "must be empty with a PyTorch optimizer", dict(config), "use its groups"
            )
        self._gradients.register(named_members(members))

    def get_states(self) -> dict[str, Any]:
        """Return copies of all that decides this rank's next steps; save them on every rank."""
        counters = {"partial": self.partial, "skipped": self.skipped}
        states = {"optimizer": self._inner.get_states(), **self._gradients.state()}
        return {**self._identity(), **counters, **states}

    def set_states(self, states: Mapping[str, Any]) -> None:
        """Continue from what `get_states` returned, also in a new process, before or after its first step.

        Raises:
            CheckpointError: the states are of another format, rank, world size or model.
            ConfigError: they come from another kind of optimizer.
        """
        for key, wanted in self._identity().items():
            if states.get(key) != wanted:
                raise CheckpointError(
                    f"the state's {key} must be {wanted!r}, got {states.get(key)!r}: "
                    "load it where it was saved"
                )
        self._gradients.check(states)
        self._inner.set_states(states["optimizer"])
        self._gradients.load(states)
        self.partial, self.skipped = int(states["partial"]), int(states["skipped"])

    def save(self, file: File) -> None:
        """Write `get_states()` to a path or a binary file; each rank writes its own."""
        torch.save(self.get_states(), file)

    def load(self, file: File) -> None:
        """Load what `save` wrote.

        Raises:
            CheckpointError: the file is missing, damaged, or of another run.
        """
        try:
            self.set_states(torch.load(file, map_location="cpu", weights_only=True))
        except Exception as cause:  # torch.load raises a dozen types for what is not a checkpoint
            raise CheckpointError(
                f"{file}: cannot be loaded ({cause}): give a file that save() wrote"
            ) from cause

    def close(self) -> None:
        """Stop the thread that communicates; a second call does nothing."""
        self._gradients.close()

    def _identity(self) -> dict[str, Any]:
        return {"format": _FORMAT, "rank": self.global_rank, "world_size": self.world_size}


def _one(name: str, *given: int | None) -> int | None:
    """Return the value given under any of an argument's names; values given under several must be equal."""
    values = [value for value in given if value is not None]
    if any(value != values[0] for value in values):
        raise ConfigError(f"{name} and its older name must be equal, got {values}: give one of them")
    return values[0] if values else None
