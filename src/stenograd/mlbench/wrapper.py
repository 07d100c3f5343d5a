"""What MLBench's optimizers share: being one around another, and what they require of their arguments."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import contextmanager
from typing import Any, Protocol

import torch
from torch import Tensor, nn

from stenograd.arguments import number
from stenograd.errors import CheckpointError, ConfigError, bad_value
from stenograd.mlbench.aggregation import AVG_CUSTOM, AVG_WORLD, Aggregation, Denominator, trainable
from stenograd.sync.step_settings import learning_rates
from stenograd.wire.traffic import Traffic

__all__ = [
    "Closure",
    "Marks",
    "Wrapper",
    "averaging_mode",
    "check_denominator",
    "check_lr",
    "checked_clip",
    "checked_model",
    "evaluate",
    "kept_attributes",
    "refuse_scaler",
    "step_settings",
    "whole_or_not_at_all",
]

Closure = Callable[[], Any]


class Marks(Protocol):
    """What an optimizer tells a `Tracker`."""

    def record_batch_agg(self) -> Any:
        """Aggregation has ended."""

    def record_batch_opt_step(self) -> Any:
        """The parameters have moved."""


class Wrapper(torch.optim.Optimizer):
    """Shares groups and state with the optimizer inside; all who use it see one optimizer.

    A subclass, or its user, sets `self.optimizer` before the first step. Unknown attributes are looked up
    inside.

    Args:
        params: the parameters, until `optimizer` is set.
    """

    aggregation: Aggregation
    world_size: int

    def __init__(self, params: Iterable[Tensor]) -> None:
        # Before super, whose `self.state = ...` comes to the setter below and asks for it.
        self._inner: torch.optim.Optimizer | None = None
        super().__init__(list(params), {})

    @property
    def optimizer(self) -> torch.optim.Optimizer:
        """The optimizer inside.

        Raises:
            ConfigError: it was not set; or it is set to something else, or to an LBFGS.
        """
        if self._inner is None:
            kind = type(self).__name__
            raise ConfigError(f"{kind} has no optimizer inside yet: set its optimizer attribute")
        return self._inner

    @optimizer.setter
    def optimizer(self, inner: torch.optim.Optimizer) -> None:
        if not isinstance(inner, torch.optim.Optimizer):
            raise bad_value("optimizer", "must be a torch.optim.Optimizer", inner, "pass one, such as SGD")
        if isinstance(inner, torch.optim.LBFGS):
            raise ConfigError("optimizer must use gradients once per step, got LBFGS: use SGD, Adam, ...")
        self._check_inner(inner)
        self._inner = inner
        self.defaults = inner.defaults

    @property
    def traffic(self) -> Traffic:
        """This rank's bytes."""
        return self.aggregation.traffic

    @property
    def _step_supports_amp_scaling(self) -> bool:
        return refuse_scaler(self.world_size)

    @property
    def param_groups(self) -> list[dict[str, Any]]:
        """The groups of the optimizer inside."""
        return self.__dict__["param_groups"] if self._inner is None else self._inner.param_groups

    @param_groups.setter
    def param_groups(self, groups: list[dict[str, Any]]) -> None:
        self._share("param_groups", groups)

    @property
    def state(self) -> defaultdict[Tensor, Any]:
        """The state of the optimizer inside."""
        return self.__dict__["state"] if self._inner is None else self._inner.state

    @state.setter
    def state(self, state: defaultdict[Tensor, Any]) -> None:
        self._share("state", state)

    def add_param_group(self, param_group: dict[str, Any]) -> None:
        """Add a group to the optimizer inside."""
        if self._inner is None:
            super().add_param_group(param_group)
        else:
            with whole_or_not_at_all(self._inner):
                self._inner.add_param_group(param_group)
                self._check_inner(self._inner)

    def state_dict(self) -> dict[str, Any]:
        """Return the state of the optimizer inside, and under keys of their own what else decides a step."""
        return {**self.optimizer.state_dict(), **self._extra_state()}

    def load_state_dict(self, state_dict: Mapping[str, Any]) -> None:
        """Take a saved `state_dict()`.

        Raises:
            CheckpointError: it is of another rank, world size, method or model.
        """
        own = self._extra_state().keys()
        missing = [key for key in own if key not in state_dict]
        if missing:
            got = f"{missing[0]!r}, got {sorted(state_dict)}"
            raise CheckpointError(f"state_dict must have {got}: save it from here")
        # First, because it refuses states of other ranks and models, which torch's optimizers would take.
        self._load_extra_state({key: state_dict[key] for key in own})
        try:
            self.optimizer.load_state_dict({k: v for k, v in state_dict.items() if k not in own})
        except (KeyError, ValueError) as cause:
            raise CheckpointError(f"the state does not fit ({cause}): load it into the same model") from cause

    def _check_inner(self, inner: torch.optim.Optimizer) -> None:
        """Check that the optimizer inside holds what it may hold."""

    def _extra_state(self) -> dict[str, Any]:
        return {}

    def _load_extra_state(self, state: Mapping[str, Any]) -> None:
        pass

    def _share(self, name: str, value: Any) -> None:
        if self._inner is None:
            self.__dict__[name] = value
        else:
            setattr(self._inner, name, value)

    def __getstate__(self) -> dict[str, Any]:
        return kept_attributes(self)

    def __getattr__(self, name: str) -> Any:
        inner = self.__dict__.get("_inner")  # absent while a copy is being made
        if inner is None or name.startswith("__"):
            raise AttributeError(f"{type(self).__name__} has no attribute {name!r}")
        return getattr(inner, name)


@contextmanager
def whole_or_not_at_all(optimizer: torch.optim.Optimizer) -> Iterator[None]:
    """Take a group that was added out again, with its state, if what is done after that refuses it."""
    count = len(optimizer.param_groups)
    try:
        yield
    except BaseException:
        for group in optimizer.param_groups[count:]:
            for p in group["params"]:
                optimizer.state.pop(p, None)
        del optimizer.param_groups[count:]
        raise


def kept_attributes(optimizer: torch.optim.Optimizer) -> dict[str, Any]:
    """Return what a copy of an optimizer keeps: not hooks, nor the `step` that a scheduler put in place."""
    # torch's `__setstate__` gives the copy empty hooks, and its class has the `step`.
    items = optimizer.__dict__.items()
    return {k: v for k, v in items if k != "step" and not (k.startswith("_optimizer_") and "hooks" in k)}


def evaluate(closure: Closure | None) -> Any:
    """Call a closure with gradients enabled and return its loss; None for no closure."""
    if closure is None:
        return None
    with torch.enable_grad():
        return closure()


def refuse_scaler(world_size: int) -> bool:
    """Return False, with which a GradScaler unscales by itself: a fused optimizer inside would not look here.

    Raises:
        ConfigError: there are several ranks, of which one alone would skip a step that all others wait for.
    """
    if world_size > 1:
        raise ConfigError(
            "a GradScaler lets one rank alone skip a step, and the others wait for it: use FP16Optimizer, or "
            "stenograd.distribute, with which all ranks skip"
        )
    return False


def check_lr(lr: float | None) -> float:
    """Return a learning rate that was given, and is finite and not negative."""
    advice = "try 0.1 with SGD, 0.001 with Adam"
    if lr is None:
        raise bad_value("lr", "must be given, finite and at least 0", lr, advice)
    return number("lr", lr, advice, least=0)


def checked_model(model: nn.Module | None) -> nn.Module:
    """Return a module that has trainable parameters."""
    if not isinstance(model, nn.Module):
        raise bad_value("model", "must be a torch.nn.Module", model, "pass the model to train")
    trainable(model)
    return model


def averaging_mode(average_world: bool, average_custom: bool) -> str:
    """Return the aggregation's op; exactly one of the two must be chosen."""
    if bool(average_world) == bool(average_custom):
        got = (average_world, average_custom)
        raise bad_value("average_world, average_custom", "must be one True, one False", got, "choose one")
    return AVG_WORLD if average_world else AVG_CUSTOM


def check_denominator(mode: str, denom: Denominator) -> None:
    """Raise where denom is given to an average that does not use it, or missing where it is used."""
    if mode == AVG_WORLD and denom is not None:
        raise bad_value("denom", "needs average_custom=True", denom, "leave it out")
    if mode == AVG_CUSTOM and denom is None:
        raise ConfigError("denom must be given with average_custom, got None: pass step(denom=...)")


def step_settings(optimizer: torch.optim.Optimizer | None, denom: Denominator) -> dict[str, Any]:
    """Return what ranks must have alike for one average, and for steps of an optimizer by it."""
    settings: dict[str, Any] = {}
    if optimizer is not None:
        settings["learning rates"] = learning_rates([optimizer])
    if denom is not None:
        settings["denom"] = denom.tolist() if isinstance(denom, Tensor) else float(denom)
    return settings


def checked_clip(grad_clip: float) -> float:
    """Return a norm that is above 0; infinity is no clipping."""
    return number("grad_clip", grad_clip, "leave it out for none", above=0, finite=False)
