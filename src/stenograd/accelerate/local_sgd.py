"""Local SGD with the arguments of `accelerate.LocalSGD`."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager, nullcontext
from typing import Any

from accelerate import Accelerator
from torch import nn

from stenograd.accelerate.attachment import optimizers_of, refuse_sharding
from stenograd.catalog.method import Method
from stenograd.catalog.method import method as parse
from stenograd.errors import ConfigError, check_count
from stenograd.sync.distribute import distribute
from stenograd.sync.handshake import unwrapped

__all__ = ["LocalSGD"]


class LocalSGD:
    """Let ranks train by themselves for some steps, then average parameters: as `accelerate.LocalSGD`.

    Takes what `accelerate.LocalSGD` takes, and the same loop. Here a round is one exchange of all parameters
    together, which may be compressed, and steps inside `accelerator.accumulate` count once per optimizer step
    (there once per call of `step`). On leaving the block all ranks take the mean of their parameters.

    Args:
        accelerator: the Accelerator.
        model: as `accelerator.prepare` returned it; its optimizers must be prepared, too.
        local_sgd_steps: number of optimizer steps from one average to the next, at least 1.
        enabled: False leaves training as it is. In one process there is nothing to average.
        method: how parameters travel, as text such as "bf16" or "topk:ratio=0.05", without a schedule.

    Attributes:
        sync: what `stenograd.distribute` returned, while the block runs; None where nothing is averaged.

    Raises:
        MethodError: unknown method, or one that cannot send differences of parameters.
        ConfigError: local_sgd_steps is out of range, the model's optimizer is not prepared or trains another
            model, too, or `use` was called for the Accelerator.

    Example:
        >>> import torch
        >>> accelerator, model = Accelerator(cpu=True), nn.Linear(4, 2)
        >>> model, optimizer = accelerator.prepare(model, torch.optim.SGD(model.parameters(), lr=0.1))
        >>> with LocalSGD(accelerator=accelerator, model=model, local_sgd_steps=8) as local_sgd:
        ...     accelerator.backward(model(torch.ones(8, 4)).sum())
        ...     optimizer.step()
        ...     local_sgd.step()

    Reference: Stich, "Local SGD Converges Fast and Communicates Little", ICLR 2019.
    """

    def __init__(
        self,
        accelerator: Accelerator,
        model: nn.Module,
        local_sgd_steps: int,
        enabled: bool = True,
        method: str | Method = "dense",
    ) -> None:
        check_count("local_sgd_steps", local_sgd_steps, "use 8")
        codec = parse(method)
        codec.require_every_step("LocalSGD, whose local_sgd_steps is the schedule,")
        self._method = parse(f"local:every={local_sgd_steps}/{codec.text}")
        refuse_sharding(accelerator)
        self.accelerator, self.model = accelerator, model
        self.enabled = enabled and accelerator.use_distributed
        self.sync: Any = None

    def step(self) -> None:
        """Do nothing: rounds count backward passes. It is here so that a loop needs no change."""

    def __enter__(self) -> LocalSGD:
        if not self.enabled:
            return self
        if (before := getattr(self.accelerator, "stenograd", None)) is not None:
            raise ConfigError(
                f"LocalSGD averages parameters where use averages gradients, got both, with {before.method}: "
                f"leave one out; use(accelerator, 'local:every=8/topk') does what both would"
            )
        bare, *others = (
            self.accelerator.unwrap_model(model, keep_torch_compile=False)
            for model in (self.model, *self.accelerator._models)
        )
        held = optimizers_of(self.accelerator, bare)
        if not held:
            raise ConfigError(
                "LocalSGD needs the model's optimizer: call accelerator.prepare(model, optimizer)"
            )
        shared = [o for m in others if m is not bare for o in optimizers_of(self.accelerator, m)]
        if any(one in shared for one in held):
            raise ConfigError(
                "LocalSGD averages one model, got one whose optimizer trains another model, too: give each "
                f"an optimizer of its own, or call use(accelerator, '{self._method}') for both, without it"
            )
        ddp_model: Any = unwrapped(self.model)
        self._alone = ddp_model.no_sync()  # keeps DDP from averaging gradients
        self.sync = distribute(bare, held, self._method)
        self._alone.__enter__()  # after distribute, which may refuse: DDP would stay silenced
        plain = self.accelerator.no_sync

        @contextmanager
        def accumulating(model: Any) -> Iterator[None]:
            with plain(model), self.sync.no_sync() if model is self.model else nullcontext():
                yield

        self.accelerator.no_sync = accumulating
        return self

    def __exit__(self, kind: Any, *_: object) -> None:
        if not self.enabled:
            return
        del self.accelerator.no_sync  # what __enter__ has set hides the class's own
        self._alone.__exit__(None, None, None)
        try:
            if kind is None:  # after an error the other ranks may not come
                self.sync.refresh()  # ends the round that has begun
        finally:
            self.sync.close()
