"""What an optimizer keeps about each parameter: its state tensors and its own hyper-parameters."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping, MutableMapping
from dataclasses import dataclass, field

import torch
from torch import Tensor
from torch.utils.weak import WeakTensorKeyDictionary

from stenograd.errors import ConfigError
from stenograd.singa.schedules import DecayScheduler

__all__ = ["Key", "Slot", "Slots"]

Key = str | int  # a parameter's name, or its number among the nameless ones in the order first seen


@dataclass
class Slot:
    """One parameter's part of an optimizer.

    Args:
        key: under which its state is saved.
        state: its state tensors by name ("moments", ...).
        overrides: its own hyper-parameters; None before it is registered.
        values: their values at the current step.
    """

    key: Key
    state: dict[str, Tensor]
    overrides: dict[str, DecayScheduler] | None = None
    values: dict[str, float] = field(default_factory=dict)

    def buffer(self, name: str, like: Tensor) -> Tensor:
        """Return a state tensor, zeros at first, on the device and in the type of `like`.

        Raises:
            ConfigError: the tensor held is of another shape, so it belongs to another parameter.
        """
        held = self.state.get(name)
        if held is None:
            held = torch.zeros_like(like)
        elif held.shape != like.shape:
            raise ConfigError(
                f"state {name!r} of parameter {self.key!r} must have the parameter's shape "
                f"{tuple(like.shape)}, got {tuple(held.shape)}: it was saved for another parameter; give "
                "parameters names with register(model.named_parameters(), {})"
            )
        self.state[name] = held = held.to(like)
        return held


class Slots:
    """Slots by parameter, held weakly: a parameter that is gone takes its slot along, unless it has a name.

    State that was loaded waits under its key until the parameter is seen.

    Example:
        >>> slots, w = Slots(), torch.zeros(2)
        >>> slots.find(w).key, slots.find(w, "fc.weight").key, slots.find(w).key
        (0, 'fc.weight', 'fc.weight')
    """

    def __init__(self) -> None:
        self._by_tensor: MutableMapping[Tensor, Slot] = WeakTensorKeyDictionary()
        self._by_name: dict[str, Slot] = {}
        self._waiting: dict[Key, dict[str, Tensor]] = {}
        self._seen = 0

    def __iter__(self) -> Iterator[Slot]:
        """Go through all slots, each once."""
        yield from {id(slot): slot for slot in (*self._by_name.values(), *self._by_tensor.values())}.values()

    def name_of(self, parameter: Tensor) -> str | None:
        """Return the parameter's name, None if it was never given one."""
        slot = self._by_tensor.get(parameter)
        return slot.key if slot is not None and isinstance(slot.key, str) else None

    def find(self, parameter: Tensor, name: str | None = None) -> Slot:
        """Return the slot of a name, or else of a tensor, and make it when new.

        A nameless parameter that is now given a name keeps its state. A name finds its slot from any tensor.
        """
        by_name = self._by_name.get(name) if name is not None else None
        slot = by_name or self._by_tensor.get(parameter)
        if slot is None:
            key: Key = self._seen if name is None else name
            self._seen += name is None
            slot = Slot(key, self._waiting.pop(key, {}))
        elif name is not None and slot.key != name:
            slot.key, slot.state = name, self._waiting.pop(name, slot.state)
        elif by_name is None:
            return slot
        self._by_tensor[parameter] = slot
        if name is not None:
            self._by_name[name] = slot
        return slot

    def register(self, parameter: Tensor, name: str | None, overrides: Mapping[str, DecayScheduler]) -> None:
        """Give a parameter hyper-parameters, and a name, of its own.

        Raises:
            ConfigError: it, or another parameter of its name, is registered already.
        """
        slot = self.find(parameter, name)
        if slot.overrides is not None:
            raise ConfigError(
                f"parameter {slot.key!r} of shape {tuple(parameter.shape)} must be registered once, got it "
                "twice: put all its settings into one config"
            )
        slot.overrides = dict(overrides)

    def export(self, names: Iterable[str]) -> dict[str, dict[Key, Tensor]]:
        """Return copies of all state tensors, by state name and then by the parameter's key."""
        states = {**self._waiting, **{slot.key: slot.state for slot in self}}
        return {
            name: {key: state[name].clone() for key, state in states.items() if name in state}
            for name in names
        }

    def restore(self, states: Mapping[str, Mapping[Key, Tensor]]) -> None:
        """Replace all state tensors by copies of what `export` returned."""
        by_key: dict[Key, dict[str, Tensor]] = {}
        for name, tensors in states.items():
            for key, tensor in tensors.items():
                by_key.setdefault(key, {})[name] = tensor.detach().clone()
        for slot in self:
            slot.state = by_key.pop(slot.key, {})
        self._waiting = by_key
