"""Laconic's methods as a communication hook of DistributedDataParallel."""

from __future__ import annotations

from collections.abc import Mapping
from concurrent.futures import Future
from typing import Any

import torch
from torch import Tensor, nn

from laconic.attach import compare
from laconic.bucket import Bucket
from laconic.compressor import Compressor
from laconic.drive import Driver
from laconic.errors import LaconicError
from laconic.exchanger import Exchanger, Outcome
from laconic.parsing import Method, method
from laconic.traffic import Traffic
from laconic.version import __version__

__all__ = ["DDPHook", "register"]


def register(ddp_model: Any, how: str | Method | Compressor, *, timeout_s: float = 300.0) -> DDPHook:
    """Make a DistributedDataParallel model exchange gradients by a Laconic method.

    Call it once, right after wrapping the model. Averages are final when `backward()` returns, as with DDP
    alone; with "dense" they equal plain DDP's bit for bit.

    Args:
        ddp_model: the `DistributedDataParallel` model.
        how: the method, as text such as "powersgd:rank=4".
        timeout_s: seconds after which a silent peer is an error.

    Returns:
        The hook's state: `traffic`, `state_dict()`, `load_state_dict(...)`.

    Raises:
        MethodError: unknown method or key, or a value outside its range.
        TypeError: the model is not wrapped in DistributedDataParallel.
        LaconicError: it has a communication hook already.
        MismatchError: the ranks' methods or versions differ.

    Example:
        hook = laconic.ddp.register(ddp_model, "topk:ratio=0.01")
    """
    if not hasattr(ddp_model, "register_comm_hook"):
        raise TypeError(
            f"ddp_model must be a DistributedDataParallel model, got {type(ddp_model).__name__}: wrap it"
        )
    hook = DDPHook(ddp_model.module, method(how), ddp_model.process_group, timeout_s=timeout_s)
    try:
        # DDP compares annotations with its own classes; a lambda has none.
        ddp_model.register_comm_hook(hook, lambda state, bucket: state.on_bucket(bucket))
    except RuntimeError as reason:
        hook.close()
        raise LaconicError(
            "the model has a communication hook already, or cannot take one "
            f"({str(reason).splitlines()[0]}): "
            "register one only, right after wrapping the model"
        ) from reason
    return hook


class DDPHook:
    """State of the hook on one model; made by `register`.

    DDP calls it with its buckets in index order, and once, after the first step, makes other buckets of the
    same parameters. Since state is kept by parameter name, it carries over.
    """

    def __init__(self, module: nn.Module, how: Method, group: Any, *, timeout_s: float) -> None:
        self.method = how
        self._driver = Driver.own(group, timeout_s=timeout_s)
        described = {"laconic version": __version__, "method": how.text}
        compare(self._driver, described, next(module.parameters()).device)
        self._names = {id(p): name for name, p in module.named_parameters()}
        self._exchanger = Exchanger(how, self._driver)
        self._waiting: list[tuple[Tensor, torch.futures.Future[Tensor]]] = []

    @property
    def traffic(self) -> Traffic:
        """Bytes, collectives and seconds waited of this rank since registering."""
        return self._driver.traffic

    @property
    def skipped(self) -> int:
        """Number of exchanges that left the compressor's state alone because a gradient was not finite."""
        return self._exchanger.skipped

    def on_bucket(self, bucket: Any) -> torch.futures.Future[Tensor]:
        """Take one bucket from DDP; the future holds its average once the whole step is agreed on."""
        buffer: Tensor = bucket.buffer()
        parameters = bucket.parameters()
        index = len(self._waiting)
        names = tuple(self._names[id(p)] for p in parameters)
        shapes = tuple(p.shape for p in parameters)
        self._exchanger.place(index, Bucket(names, shapes, buffer.dtype, buffer.device))
        self._exchanger.flat(index).copy_(buffer)
        self._exchanger.submit(index)
        future: torch.futures.Future[Tensor] = torch.futures.Future(
            devices=[buffer.device] if buffer.device.type == "cuda" else None
        )
        self._waiting.append((buffer, future))
        if bucket.is_last():
            waiting, self._waiting = self._waiting, []
            self._exchanger.finish().add_done_callback(lambda done: _hand_out(done, waiting))
        return future

    def state_dict(self) -> dict[str, Any]:
        """Return all that decides this rank's next exchange, by parameter name; save it on every rank."""
        return self._exchanger.state_dict()

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Continue from a saved `state_dict()`.

        Raises:
            CheckpointError: it is of another format, method, rank, world size or model; nothing is changed.
        """
        self._exchanger.load_state_dict(state)

    def close(self) -> None:
        """Stop the exchanging thread; the model cannot be trained with this hook afterwards."""
        self._exchanger.close()


def _hand_out(done: Future[Outcome], waiting: list[tuple[Tensor, torch.futures.Future[Tensor]]]) -> None:
    """Give DDP its averages, in its own memory."""
    error = done.exception()
    for index, (buffer, future) in enumerate(waiting):
        if error is None:
            future.set_result(buffer.copy_(done.result().averages[index]))
        else:
            future.set_exception(error)  # type: ignore[arg-type]
