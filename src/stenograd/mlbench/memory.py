"""Gradients through a compressor with error feedback, remembered by parameter name."""

from __future__ import annotations

from abc import abstractmethod
from collections.abc import Mapping
from typing import Any

import torch
from torch import Tensor, nn

from stenograd.comm.saved_state import check_state
from stenograd.compression.contract import Compressor, Site, State
from stenograd.errors import ConfigError, bad_value
from stenograd.mlbench.aggregation import AVG_WORLD, Aggregation, Denominator
from stenograd.mlbench.exchange import Part, exchange, flat_gradient, put_gradient, trainable

__all__ = ["RememberingAggregation"]

_FORMAT = 1  # of state_dict(); a reader refuses others


class RememberingAggregation(Aggregation):
    """Gradients through a compressor with error feedback; what it remembers is kept by parameter name.

    A step whose gradients are not finite on some rank changes nothing on any: `skipped` counts these.
    """

    def __init__(self, model: nn.Module, use_cuda: bool, world_size: int | None) -> None:
        super().__init__(use_cuda, world_size)
        self.step = 0
        self.skipped = 0
        self.memory: dict[str, State] = {}
        for key, (name, p) in enumerate(model.named_parameters()):
            if p.requires_grad:
                self._remember(name, p, key)

    def state_dict(self) -> dict[str, Any]:
        """Return copies of all that decides this rank's next exchange."""
        memory = {name: {k: t.clone() for k, t in state.items()} for name, state in self.memory.items()}
        return {**self._identity(), "step": self.step, "skipped": self.skipped, "parameters": memory}

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Take a saved state.

        Raises:
            CheckpointError: it is of another rank, world size, method or model; nothing is changed.
        """
        check_state(state, self._identity(), self.memory)
        self.step, self.skipped = int(state["step"]), int(state["skipped"])
        self.memory = {name: {k: t.clone() for k, t in s.items()} for name, s in state["parameters"].items()}

    @abstractmethod
    def _compressor(self, numel: int) -> Compressor:
        """Return how a tensor of so many elements travels."""

    @abstractmethod
    def _method(self) -> str:
        """Return what must be equal for a saved state to fit."""

    def _identity(self) -> dict[str, Any]:
        place = {"rank": self.driver.rank, "world_size": self.world_size}
        return {"format": _FORMAT, "method": self._method(), **place}

    def _agg_gradients(
        self, model: nn.Module, op: str, denom: Denominator = None, *, by_layer: bool = False
    ) -> bool:
        if op != AVG_WORLD or denom is not None:
            got = op if denom is None else f"denom {float(denom)}"
            raise bad_value("op", f"must be {AVG_WORLD!r}, without denom", got, "use AllReduceAggregation")
        named = trainable(model)
        keys = {name: key for key, (name, _) in enumerate(model.named_parameters())}
        parts = [self._part(name, p, keys[name]) for name, p in named.items()]
        settled = exchange(parts, self.driver, by_layer=by_layer, guarded=True)
        if not settled.applied:
            self.skipped += 1
            return False
        self.step += 1
        for (name, p), done, used in zip(named.items(), settled.exchanges, settled.used, strict=True):
            self.memory[name] = done.state
            if used:
                put_gradient(p, done.average)
        return True

    def _agg_weights(
        self, model: nn.Module, op: str, denom: Denominator = None, *, by_layer: bool = False
    ) -> bool:
        kind = type(self).__name__
        raise ConfigError(f"{kind} averages gradients, got weights: use AllReduceAggregation for weights")

    def _part(self, name: str, p: Tensor, key: int) -> Part:
        state = self.memory.get(name) or self._remember(name, p, key)
        state = {k: t.to(p.device) for k, t in state.items()}
        return Part(
            self._compressor(p.numel()), flat_gradient(p), state, self._site(p, key), p.grad is not None
        )

    def _remember(self, name: str, p: Tensor, key: int) -> State:
        like = torch.zeros(p.numel(), dtype=p.dtype, device=p.device)
        self.memory[name] = self._compressor(p.numel()).init(like, self._site(p, key))
        return self.memory[name]

    def _site(self, p: Tensor, key: int) -> Site:
        rank, size = self.driver.rank, self.world_size
        return Site(shapes=(p.shape,), rank=rank, world_size=size, step=self.step, key=key)
