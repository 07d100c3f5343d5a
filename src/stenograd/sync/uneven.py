"""Uneven inputs: ranks that have run out shadow the exchanges of the others (torch's `Join`)."""

from __future__ import annotations

import json
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
from stenograd.errors import StenogradError
from stenograd.sync.handshake import broadcast_model, broadcast_tensors

__all__ = ["Uneven"]


class Uneven(Joinable):
    """What `torch.distributed.algorithms.join.Join` asks of something that averages gradients.

    A rank that has no more batches takes part in the others' exchanges with zeros. Averages are still divided
    by the number of all ranks, as DistributedDataParallel does by default. When the last rank has run out,
    all take its parameters, buffers and optimizer state, so that they go on equal.
    """

    _join_config: Any
    _driver: AnyDriver
    _model: nn.Module
    _optimizers: Sequence[torch.optim.Optimizer]
    _group: Any

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
        told = self._driver.run(gather(torch.tensor([int(last)], device=self.join_device)))
        lasts = [rank for rank, (theirs,) in enumerate(told) if bool(theirs)]
        if len(lasts) == len(told) or not lasts:
            return  # even inputs, so nothing differs
        broadcast_model(self._driver, self._model, lasts[0])
        for optimizer in self._optimizers:
            _broadcast_state(self._driver, optimizer, lasts[0], self.join_device)

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


@torch.no_grad()
def _broadcast_state(
    driver: AnyDriver, optimizer: torch.optim.Optimizer, source: int, device: torch.device
) -> None:
    """Give every rank the optimizer state of one; it may have entries that the others lack."""
    params: list[Tensor] = [p for group in optimizer.param_groups for p in group["params"]]
    mine = driver.rank == source
    form = [_form(optimizer.state.get(p, {})) for p in params] if mine else []
    try:
        said = json.dumps(form).encode()
    except TypeError as cause:
        raise StenogradError(
            f"the state of {type(optimizer).__name__} must be tensors and plain values to be shared after "
            f"uneven inputs ({cause}): keep other things elsewhere"
        ) from cause
    form = json.loads(driver.gather_bytes(said, device)[source])
    tensors: list[Tensor] = []
    for p, entries in zip(params, form, strict=True):
        state = optimizer.state[p] if entries else {}
        for key, (kind, value, where) in entries.items():
            if kind == "value":
                state[key] = value
                continue
            if not mine:
                dtype, place = getattr(torch, kind), p.device if where == "parameter" else torch.device("cpu")
                state[key] = torch.empty(value, dtype=dtype, device=place)
            tensors.append(state[key])
    broadcast_tensors(driver, tensors, source, device)


def _form(state: dict[str, Any]) -> dict[str, tuple[str, Any, str]]:
    """Describe one parameter's state: of tensors the type, shape and place."""
    form: dict[str, tuple[str, Any, str]] = {}
    for key, value in state.items():
        if isinstance(value, Tensor):
            place = "cpu" if value.device.type == "cpu" else "parameter"
            form[key] = (str(value.dtype).removeprefix("torch."), list(value.shape), place)
        else:
            form[key] = ("value", value, "")
    return form
