"""Finds compressors and schedules: a new one is a new file in their packages and no other edit.

Other packages add theirs by entry points, each a class, in the groups `stenograd.compressors` and
`stenograd.schedules`:

    [project.entry-points."stenograd.compressors"]
    mine = "my_package.compressors:Mine"
"""

from __future__ import annotations

import importlib
import inspect
import pkgutil
import warnings
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, fields
from functools import cache
from importlib.metadata import entry_points
from types import ModuleType
from typing import Any, TypeVar

import stenograd.compressors
import stenograd.schedules
from stenograd.compression.contract import Compressor, StateKind
from stenograd.errors import ConfigError, first_line
from stenograd.schedules.schedule import Schedule

__all__ = ["Entry", "compressors", "entries", "entry_of", "name_of", "schedules", "state_kinds"]

T = TypeVar("T")


@dataclass(frozen=True, slots=True)
class Entry:
    """One method name: the compressor behind it and the field values that the name stands for."""

    name: str
    compressor: type[Compressor]
    preset: Mapping[str, Any]


def compressors() -> list[type[Compressor]]:
    """Return every public compressor class, sorted by module and name; last those of other packages."""
    # mypy takes abstract classes for no type[T], since they cannot be called; here none is.
    return _walk(stenograd.compressors, Compressor)  # type: ignore[type-abstract]


def state_kinds() -> dict[str, StateKind]:
    """Return what becomes of each kind of state on another number of ranks, whatever compressor has it.

    Besides those that `compressors` finds, all that are imported count: wrappers, and those of programs.

    Raises:
        ConfigError: two classes say different things of one key.

    Example:
        >>> state_kinds()["residual"]
        <Kind.SUM: 'sum'>
    """
    known: dict[str, StateKind] = {}
    below: list[type[Compressor]] = [*compressors(), Compressor]  # type: ignore[type-abstract]
    while below:
        cls = below.pop()
        below += cls.__subclasses__()
        for key, kind in cls.state_kinds.items():
            if known.setdefault(key, kind) != kind:
                raise ConfigError(
                    f"{cls.__qualname__} says {kind} of the state {key!r}, another compressor {known[key]}: "
                    "rename one"
                )
    return known


def entries() -> dict[str, Entry]:
    """Return all method names with what they stand for.

    Raises:
        ConfigError: two compressors claim one name.

    Example:
        >>> entries()["fp16"].preset["dtype"]
        'float16'
    """
    named = _named(compressors())
    return {name: Entry(name, cls, preset) for name, (cls, preset) in named.items()}


def schedules() -> dict[str, tuple[type[Schedule], Mapping[str, Any]]]:
    """Return all schedule names, each with its class and the field values that the name stands for.

    Example:
        >>> schedules()["local"]
        (<class 'stenograd.schedules.local.Local'>, {})
    """
    return _named(_walk(stenograd.schedules, Schedule))


def entry_of(compressor: Compressor) -> Entry | None:
    """Return the method name that makes a compressor, with some keys; None where none does.

    Example:
        >>> from stenograd.compressors.cast import Cast
        >>> entry_of(Cast(dtype="bfloat16")).name
        'bf16'
    """
    table = entries()
    found = name_of(compressor, {name: (entry.compressor, entry.preset) for name, entry in table.items()})
    return None if found is None else table[found[0]]


def name_of(
    made: Compressor | Schedule, table: Mapping[str, tuple[type, Mapping[str, Any]]]
) -> tuple[str, dict[str, Any]] | None:
    """Return the name in a table that makes a dataclass's instance, and the fields that it leaves open."""
    for name, (cls, preset) in table.items():
        if cls is type(made) and all(getattr(made, key) == value for key, value in preset.items()):
            return name, {f.name: getattr(made, f.name) for f in fields(made) if f.name not in preset}
    return None


def _walk(package: ModuleType, base: type[T]) -> list[type[T]]:
    found: list[type[T]] = []
    for module_info in sorted(pkgutil.iter_modules(package.__path__), key=lambda m: m.name):
        module = importlib.import_module(f"{package.__name__}.{module_info.name}")
        for name, member in sorted(vars(module).items()):
            # Modules import each other's classes; each class counts where it is defined.
            own = inspect.isclass(member) and member.__module__ == module.__name__
            if own and issubclass(member, base) and not inspect.isabstract(member) and name[0] != "_":
                found.append(member)
    return found + [cls for cls in _plugged_in(package.__name__) if issubclass(cls, base)]


@cache  # looking through what is installed takes milliseconds
def _plugged_in(group: str) -> tuple[type, ...]:
    found = []
    for point in sorted(entry_points(group=group), key=lambda point: point.name):
        try:
            cls = point.load()
        except Exception as reason:  # whatever a stranger's module raises
            warnings.warn(
                f"{point.value} of the entry points {group!r} cannot be imported ({first_line(reason)}): "
                "install or remove its package",
                stacklevel=2,
            )
            continue
        if not inspect.isclass(cls) or inspect.isabstract(cls):
            raise ConfigError(f"the entry points {group!r} must be classes, got {point.value}: {cls!r}")
        found.append(cls)
    return tuple(found)


def _named(classes: Sequence[type[T]]) -> dict[str, tuple[type[T], Mapping[str, Any]]]:
    table: dict[str, tuple[type[T], Mapping[str, Any]]] = {}
    for cls in classes:
        for name, preset in getattr(cls, "names", {}).items():
            if name in table:
                other = table[name][0].__qualname__
                raise ConfigError(
                    f"both {other} and {cls.__qualname__} claim the method name {name!r}: rename one"
                )
            table[name] = (cls, preset)
    return table
