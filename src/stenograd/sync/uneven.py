"""Uneven inputs: ranks that have run out shadow the exchanges of the others (torch's `Join`)."""

from __future__ import annotations

from abc import abstractmethod
from collections.abc import Sequence
from contextlib import AbstractContextManager, nullcontext
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.algorithms.join import Join, Joinable, JoinHook

from stenograd.comm.drivers import AnyDriver
from stenograd.comm.groups import as_group
from stenograd.data.requests import gather
from stenograd.sync.handshake import broadcast_model
from stenograd.sync.optimizer_states import take_states
from stenograd.sync.steps import Passes

__all__ = ["Uneven"]


class Uneven(Joinable):
    """What `torch.distributed.algorithms.join.Join` asks of something that averages gradients.

    A rank that has no more batches takes part in the others' exchanges with zeros. Averages are still divided
    by the number of all ranks, as DistributedDataParallel does by default. When the last rank has run out,
    all take its parameters, buffers and optimizer state, its learning rates and other settings, and the state
    of its schedulers and of its GradScaler, so that they go on equal.
    """

    _join_config: Any
    _driver: AnyDriver
    _model: nn.Module
    _optimizers: Sequence[torch.optim.Optimizer]
    _group: Any
    _passes: Passes

    def __init__(self) -> None:
        super().__init__()
        self._notice: Any = None

    def join(
        self, *, enable: bool = True, throw_on_early_termination: bool = False
    ) -> AbstractContextManager[Any]:
        """Let ranks have different numbers of batches: train inside `with sync.join():`.

        Each batch is one backward pass with an exchange. With several engines use
        `Join([first, second])`, in the order in which their backward passes come.

        Args:
            enable: False does nothing, for inputs that are known to be even.
            throw_on_early_termination: raise on all ranks as soon as one has run out.
        """
        if self._driver.world_size == 1:
            return nullcontext()
        return Join([self], enable, throw_on_early_termination)

    @property
    def join_device(self) -> torch.device:
        """Where the parameters live."""
        return next(self._model.parameters()).device

    @property
    def join_process_group(self) -> Any:
        """The group that was given when attaching, on which `Join` counts who is left."""
        return as_group(self._group) if self._group is not None else dist.group.WORLD

    def join_hook(self, **kwargs: Any) -> JoinHook:
        """Return what a rank does that has run out."""
        return _Shadow(self)

    @abstractmethod
    def shadow(self) -> None:
        """Take part in one exchange of the others with zeros."""

    def take_from_last(self, last: bool) -> None:
        """Make all ranks equal to the lowest of those that ran out last; `last` tells if this is one."""
        Joinable.__init__(self)  # later passes are no part of the `with` block any more
        told = self._driver.run(gather(torch.tensor([int(last)], device="cpu")))
        lasts = [rank for rank, (theirs,) in enumerate(told) if bool(theirs)]
        if len(lasts) == len(told) or not lasts:
            return  # even inputs, so nothing differs
        broadcast_model(self._driver, self._model, lasts[0])
        for optimizer in self._optimizers:
            held: list[Tensor] = [p for group in optimizer.param_groups for p in group["params"]]
            take_states(self._driver, held, [optimizer.state] * len(held), lasts[0])
        self._passes.settings.share(self._driver, lasts[0])

    def _notify_join(self) -> None:
        """Tell `Join` that this rank takes part in one more exchange."""
        if self._join_config.enable:
            self._notice = Join.notify_join_context(self)

    def _await_join(self) -> None:
        notice, self._notice = self._notice, None
        if notice is not None:
            notice.wait()


class _Shadow(JoinHook):
    def __init__(self, sync: Uneven) -> None:
        self._sync = sync

    def main_hook(self) -> None:
        self._sync.shadow()

    def post_hook(self, is_last_joiner: bool) -> None:
        self._sync.take_from_last(is_last_joiner)
