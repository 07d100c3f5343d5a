"""Loss scale and learning rates: what ranks' steps must have in common, told in a few bits."""

from __future__ import annotations

import gc
import json
import math
import sys
import weakref
import zlib
from collections.abc import Iterable, Mapping, Sequence
from numbers import Real
from typing import Any

import torch
from torch import Tensor
from torch.amp import GradScaler
from torch.optim import Optimizer
from torch.optim.lr_scheduler import LRScheduler

from stenograd.catalog.method import Method
from stenograd.errors import MethodError, MismatchError
from stenograd.wire.drivers import AnyDriver
from stenograd.wire.requests import gather

__all__ = [
    "BITS",
    "StepSettings",
    "directed",
    "hashed",
    "learning_rates",
    "refuse",
    "step_together",
    "tell",
    "unequal",
]

BITS = 4  # of a pass's number, and of the settings' hash: other ones each time, so 8 exchanges tell all
_TURNS = 32 // BITS  # of a CRC's 32 bits
_GROUPS = 8  # whose learning rates are looked at, for each optimizer: a group a layer may mean thousands
_DEEPEST = 30  # frames from a step's pre-hook up to `GradScaler.step`, with the hooks and wrappers between


class StepSettings:
    """The loss's scale and the learning rates of this rank.

    Gradients are averaged as they are, in units of the loss's scale, and each rank divides by its own. So
    with two scales the ranks take other steps. A `GradScaler` is known once it has stepped an optimizer.

    Args:
        optimizers: whose learning rates to look at.

    Example:
        >>> import torch
        >>> from stenograd.catalog.method import method
        >>> layer = torch.nn.Linear(1, 1)
        >>> sgd = torch.optim.SGD(layer.parameters(), lr=0.5)
        >>> settings = StepSettings([sgd])
        >>> settings.look(method("dense"), sgd)
        >>> settings.read()
        {'loss scale': 1.0, 'learning rates': [0.5]}
    """

    def __init__(self, optimizers: Iterable[Optimizer] = ()) -> None:
        self._optimizers = list(optimizers)
        self._scalers: list[weakref.ref[GradScaler]] = []
        self._looked = False
        self._hashed: tuple[dict[str, Any], list[list[bool]]] = {}, []

    def look(self, how: Method, optimizer: Optimizer) -> None:
        """Find the GradScaler that steps, if one does; called in the step's pre-hook.

        Optimizers are not told of it, and neither is the backward pass, so its frame is looked for.

        Raises:
            MethodError: it divides by its scale what the method delivers without one.
        """
        self._looked = True
        frame: Any = sys._getframe(1)
        for _ in range(_DEEPEST):
            if frame is None:
                return
            if frame.f_code is GradScaler.step.__code__:
                self.add(frame.f_locals["self"])
                _refuse_division(how, optimizer, frame.f_locals["self"])
                return
            frame = frame.f_back

    def add(self, scaler: GradScaler) -> None:
        """Take a scaler that steps one of the optimizers."""
        if all(known() is not scaler for known in self._scalers):
            self._scalers.append(weakref.ref(scaler))

    def read(self) -> dict[str, Any]:
        """Return the scale (of several scalers the product) and the learning rates, by what they are."""
        if not self._looked:
            return {}
        return {
            "loss scale": math.prod((scaler.get_scale() for scaler in self._known()), start=1.0),
            "learning rates": learning_rates(self._optimizers),
        }

    def flags(self, number: int) -> list[bool]:
        """Return flags that tell them in the exchange of this number; none are set before the first step.

        A rank that has not stepped, for want of inputs, does not know its scaler yet.
        """
        if not self._looked:
            return [False] * (2 * BITS)
        settings = self.read()
        if settings != self._hashed[0]:  # they rarely change, and hashing takes longer than comparing
            self._hashed = settings, [tell(hashed(settings, at), BITS) for at in range(_TURNS)]
        return self._hashed[1][number % _TURNS]

    def share(self, driver: AnyDriver, source: int) -> None:
        """Take one rank's settings: parameter groups without parameters, schedulers, and scalers."""
        own = json.dumps(self._all()).encode() if driver.rank == source else b"null"
        received = json.loads(driver.gather_bytes(own)[source])
        if driver.rank == source:
            return
        groups = [group for optimizer in self._optimizers for group in optimizer.param_groups]
        for group, other in zip(groups, received["groups"], strict=True):
            _take(group, other)
        left = self._schedulers()
        if sorted(kind for kind, _ in left) == sorted(kind for kind, _ in received["schedulers"]):
            for kind, other in received["schedulers"]:
                # Of several of a kind the likest: what they were made with stays as it is.
                fitting = [at for at, (own_kind, _) in enumerate(left) if own_kind == kind]
                _, scheduler = left.pop(max(fitting, key=lambda at: _alike(vars(left[at][1]), other)))
                _take(vars(scheduler), other)
        # Not strict: a rank that has never stepped knows no scaler yet.
        for scaler, other in zip(self._known(), received["scalers"], strict=False):
            scaler.load_state_dict(other)

    def _all(self) -> dict[str, Any]:
        return {
            "groups": [_plain(group) for o in self._optimizers for group in o.param_groups],
            "schedulers": [(kind, _plain(vars(scheduler))) for kind, scheduler in self._schedulers()],
            "scalers": [scaler.state_dict() for scaler in self._known()],
        }

    def _known(self) -> list[GradScaler]:
        found = (known() for known in self._scalers)
        return [scaler for scaler in found if scaler is not None and scaler.is_enabled()]

    def _schedulers(self) -> list[tuple[list[Any], LRScheduler]]:
        """Return the optimizers' schedulers, each with its kind: its optimizer's number, and its type.

        No optimizer knows its own, and the order in which they are found may differ between ranks. Looking
        through all objects takes some 0.1 s, once where inputs were uneven.
        """
        ids = {id(optimizer): number for number, optimizer in enumerate(self._optimizers)}
        # Not `isinstance`, which reads `__class__` of every object there is: a proxy of a dead one raises.
        found = [o for o in gc.get_objects() if issubclass(type(o), LRScheduler)]
        numbers = [ids.get(id(getattr(scheduler, "optimizer", None))) for scheduler in found]
        return [([n, type(o).__name__], o) for n, o in zip(numbers, found, strict=True) if n is not None]


def _refuse_division(how: Method, optimizer: Optimizer, scaler: GradScaler) -> None:
    """Refuse a scaler that would make steps along a direction too short by the factor of its scale."""
    held = (p for group in optimizer.param_groups for p in group["params"])
    if scaler.is_enabled() and directed(how, held):
        raise MethodError(
            f"{how} delivers a direction, which GradScaler divides by its scale, {scaler.get_scale():g}, so "
            "that steps change next to nothing: train in bfloat16, which needs no GradScaler"
        )


def directed(how: Method, parameters: Iterable[Tensor]) -> bool:
    """Return whether a method delivers a direction for one of them, whose length is not a gradient's.

    Example:
        >>> import torch
        >>> from stenograd.catalog.method import method
        >>> [directed(method(name), [torch.ones(64, 64)]) for name in ("demo", "dgc")]
        [True, False]
    """
    if not how.own_momentum:  # the usual case, without a look at every parameter
        return False
    return how.directs(*(p.shape for p in parameters if p.numel() >= how.dense_below))


def learning_rates(optimizers: Iterable[Optimizer]) -> list[float]:
    """Return the learning rates of each optimizer's first groups, but for those on a device."""
    rates = (group.get("lr") for o in optimizers for group in o.param_groups[:_GROUPS])
    on_host = (rate for rate in rates if not isinstance(rate, Tensor) or (rate.is_cpu and rate.numel() == 1))
    return [float(rate) for rate in on_host if isinstance(rate, (Real, Tensor))]


def hashed(settings: Mapping[str, Any], number: int) -> int:
    """Return 4 bits of a hash of settings, other ones for each exchange number."""
    return zlib.crc32(repr(settings).encode()) >> BITS * (number % _TURNS) & (1 << BITS) - 1


def tell(number: int, bits: int) -> list[bool]:
    """Return flags for an exchange that tell a number: each bit as itself and as its opposite.

    Example:
        >>> tell(2, bits=2)
        [False, True, True, False]
    """
    ones = [bool(number >> bit & 1) for bit in range(bits)]
    return [*ones, *(not one for one in ones)]


def unequal(any_flags: Sequence[bool]) -> list[bool]:
    """Return in which bits the numbers differ that ranks have told, from which flags any of them has set."""
    half = len(any_flags) // 2
    return [one and other for one, other in zip(any_flags[:half], any_flags[half:], strict=True)]


def refuse(driver: AnyDriver, settings: Mapping[str, Any]) -> None:
    """Say how the ranks' settings differ; all ranks call it, because bits of some differ.

    Raises:
        MismatchError: naming the first that differs, unless all are equal.
    """
    own = json.dumps(settings).encode()
    received = [json.loads(text) for text in driver.gather_bytes(own)]
    known = [rank for rank, other in enumerate(received) if other]
    for rank in known:
        for what, value in received[rank].items():
            if (first := received[known[0]][what]) != value:
                raise MismatchError(
                    f"ranks differ in their {what}: rank {known[0]} has {first}, rank {rank} has {value}, so "
                    "equal gradients would make unequal steps: load and step scalers and schedulers alike on "
                    "all ranks (by an averaged loss, not this rank's), and go back to a checkpoint"
                )


def step_together(scaler: Any, optimizer: Optimizer, driver: AnyDriver, stand_in: object = None) -> bool:
    """Unscale, agree over the ranks on whether a gradient overflowed, step or skip, update the scale.

    Costs one all-gather of 16 bytes per rank. Skips decided by each rank alone, as in Heat, let ranks
    diverge. A rank without gradients steps nothing, and updates its scale like the others.

    Args:
        scaler: a `torch.amp.GradScaler`; it may have unscaled the gradients already.
        optimizer: the optimizer whose gradients it scaled.
        driver: the way to the other ranks.
        stand_in: what has the optimizer's groups and may have been given to `scaler.unscale_` in its place.

    Returns:
        Whether the optimizer stepped; with a disabled scaler it may, and did not yet.

    Raises:
        MismatchError: on all ranks: their scales differ.
    """
    found = _found(scaler, optimizer, stand_in) if scaler.is_enabled() else {}
    local = float(any(bool(flag.item()) for flag in found.values()))
    own = [local, scaler.get_scale()]
    message = torch.tensor(own, dtype=torch.float64, device="cpu")
    received = driver.run(gather(message))
    if any(scale != received[0][0][1] for ((_, scale),) in received):
        refuse(driver, {"loss scale": scaler.get_scale()})
    if not scaler.is_enabled():
        return True
    # Torch's own sharded scalers agree at the same point, in the record of what unscale_ found.
    overflowed = any(bool(other) for ((other, _),) in received)
    for flag in found.values():
        flag.fill_(float(overflowed))
    scaler.step(optimizer)
    scaler.update()
    return not overflowed


def _found(scaler: Any, optimizer: Optimizer, stand_in: object) -> dict[torch.device, Tensor]:
    """Unscale, and return the record of what overflowed, by device."""
    device = optimizer.param_groups[0]["params"][0].device
    if scaler._scale is None:  # this rank has scaled no loss yet
        scaler._lazy_init_scale_growth_tracker(device)
    records = scaler._per_optimizer_states
    if id(stand_in) in records:  # the same gradients, which must not be divided twice
        records[id(optimizer)] = records.pop(id(stand_in))
    record = records[id(optimizer)]
    if record["stage"].name == "READY":
        scaler.unscale_(optimizer)
    found: dict[torch.device, Tensor] = record["found_inf_per_device"]
    found.setdefault(device, torch.zeros((), dtype=torch.float32, device=device))  # torch needs one to step
    return found


def _plain(settings: Mapping[str, Any]) -> dict[str, Any]:
    """Return those settings that are numbers, or a few, tensors of one element included."""
    found: dict[str, Any] = {}
    for key, value in settings.items():
        if isinstance(value, Tensor) and value.numel() == 1:
            found[key] = value.item()
        elif key != "params" and all(isinstance(v, (bool, int, float)) for v in _row(value)):
            found[key] = value
    return found


def _alike(settings: Mapping[str, Any], other: Mapping[str, Any]) -> int:
    """Return how many settings another rank's, as they were received, have the same."""
    own = json.loads(json.dumps(_plain(settings)))
    return sum(own.get(key) == value for key, value in other.items())


def _take(settings: Any, other: Mapping[str, Any]) -> None:
    """Overwrite settings by another rank's, tensors in place: compiled steps hold them."""
    for key, value in other.items():
        own = settings.get(key)
        if isinstance(own, Tensor):
            own.fill_(value)
        elif isinstance(value, list):
            settings[key] = tuple(value) if isinstance(own, tuple) else value
        else:
            settings[key] = value


def _row(value: Any) -> Sequence[Any]:
    return value if isinstance(value, (tuple, list)) else [value]
