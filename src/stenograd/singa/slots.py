"""An optimizer's state tensors and overriding hyper-parameters for each parameter."""

from __future__ import annotations

import copy
from collections.abc import Iterable, Iterator, Mapping, MutableMapping
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor
from torch.utils.weak import WeakTensorKeyDictionary

from stenograd.errors import CheckpointError, ConfigError
from stenograd.singa.schedules import DecayScheduler

__all__ = ["AS_SAVED", "Key", "Slot", "Slots", "named_members", "some"]

Key = str | int  # a parameter's name, or its number among the nameless ones in the order first seen
AS_SAVED = "give parameters the names that they had when it was saved (register), or none if they had none"


@dataclass
class Slot:
    """What an optimizer keeps for one parameter.

    Args:
        key: the key under which its state is saved.
        state: its state tensors by name ("moments", ...).
        overrides: its own hyper-parameters; None before it is registered.
        values: their values at the present step.
    """

    key: Key
    state: dict[str, Tensor]
    overrides: dict[str, DecayScheduler] | None = None
    values: dict[str, float] = field(default_factory=dict)

    def buffer(self, name: str, like: Tensor) -> Tensor:
        """Return a state tensor, zeros at first, on the device and in the type of `like`.

        Raises:
            ConfigError: the stored tensor has another shape, so it belongs to another parameter.
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
    """The slots of all parameters; a nameless parameter's slot is dropped when the parameter is collected.

    Loaded state is kept under its key until the parameter is seen.

    Example:
        >>> slots, w = Slots(), torch.zeros(2)
        >>> slots.find(w).key, slots.find(w, "fc.weight").key, slots.find(w).key
        (0, 'fc.weight', 'fc.weight')
    """

    def __init__(self) -> None:
        self._by_tensor: MutableMapping[Tensor, Slot] = WeakTensorKeyDictionary()
        self._by_name: dict[str, Slot] = {}
        self._waiting: dict[Key, dict[str, Tensor]] = {}
        self._saved: set[Key] = set()
        self._seen = 0

    def __deepcopy__(self, memo: dict[int, Any]) -> Slots:
        """Copy, for parameters that were copied before (as a model in one call) or the same ones."""
        memo[id(self)] = new = Slots()
        kept = self._by_name, self._waiting, self._saved, self._seen
        new._by_name, new._waiting, new._saved, new._seen = copy.deepcopy(kept, memo)
        for parameter, slot in self._by_tensor.items():
            new._by_tensor[memo.get(id(parameter), parameter)] = copy.deepcopy(slot, memo)
        return new

    def __iter__(self) -> Iterator[Slot]:
        """Yield every slot once."""
        # By id, because a named slot is in both maps.
        yield from {id(slot): slot for slot in (*self._by_name.values(), *self._by_tensor.values())}.values()

    def name_of(self, parameter: Tensor) -> str | None:
        """Return the parameter's name, or None if it was never given one."""
        slot = self._by_tensor.get(parameter)
        return slot.key if slot is not None and isinstance(slot.key, str) else None

    def find(self, parameter: Tensor, name: str | None = None) -> Slot:
        """Return the slot of a name, or of a tensor where no slot has that name; a new parameter gets one.

        A nameless parameter that is now given a name keeps its state. A name finds its slot with any tensor.
        """
        by_name = self._by_name.get(name) if name is not None else None
        slot = by_name or self._by_tensor.get(parameter)
        if slot is None:
            key: Key = self._seen if name is None else name
            self._seen += name is None
            slot = Slot(key, self._waiting.pop(key, {}))
        elif name is not None and slot.key != name:
            # State that was loaded under this name replaces what the nameless parameter has gathered.
            slot.key, slot.state = name, self._waiting.pop(name, slot.state)
        elif by_name is None:
            return slot
        self._by_tensor[parameter] = slot
        if name is not None:
            self._by_name[name] = slot
        return slot

    def to_update(self, parameter: Tensor, name: str | None = None) -> Slot:
        """Return the slot of a parameter that is now updated; see `find`.

        Raises:
            CheckpointError: loaded state waits under other keys, so this parameter would start from zeros.
        """
        slot = self.find(parameter, name)
        if self._waiting and slot.key not in self._saved:
            raise CheckpointError(
                f"state was saved for parameters {some(self._saved)}, got {slot.key!r}: {AS_SAVED}"
            )
        return slot

    def register(self, parameter: Tensor, name: str | None, overrides: Mapping[str, DecayScheduler]) -> None:
        """Give a parameter hyper-parameters of its own, and a name unless that is None.

        Raises:
            ConfigError: this parameter, or another of its name, is already registered.
        """
        slot = self.find(parameter, name)
        if slot.overrides is not None:
            raise ConfigError(
                f"parameter {slot.key!r} of shape {tuple(parameter.shape)} must be registered once, got it "
                "twice: put all its settings into one config"
            )
        slot.overrides = dict(overrides)

    def export(self, names: Iterable[str]) -> dict[str, dict[Key, Tensor]]:
        """Return copies of all state tensors, by state name and parameter's key."""
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
        self._saved = set(by_key)
        for slot in self:
            slot.state = by_key.pop(slot.key, {})
        self._waiting = by_key


def some(keys: Iterable[Key]) -> str:
    """Return the first few of the keys as text.

    Example:
        >>> some(["b", 0, "a", "c", "d"])
        "'a', 'b', 'c', ... (5)"
    """
    texts = sorted(map(repr, keys))
    return ", ".join(texts) if len(texts) < 5 else ", ".join([*texts[:3], f"... ({len(texts)})"])


def named_members(group: Tensor | Iterable[Tensor | tuple[str, Tensor]]) -> list[tuple[str | None, Tensor]]:
    """Return the parameters of a group, each with its name or None.

    Raises:
        TypeError: a member is neither a tensor nor a (name, tensor) pair.

    Example:
        >>> import torch
        >>> named_members(torch.nn.Linear(1, 1).named_parameters())[1][0]
        'bias'
    """
    pairs: list[tuple[str | None, Tensor]] = []
    for member in [group] if isinstance(group, Tensor) else group:
        name, tensor = member if isinstance(member, tuple) and len(member) == 2 else (None, member)
        if not isinstance(tensor, Tensor) or not isinstance(name, str | None):
            raise TypeError(
                f"param_group must hold tensors or (name, tensor) pairs, got {type(member).__name__}: "
                "pass model.parameters() or model.named_parameters()"
            )
        pairs.append((name, tensor))
    return pairs
