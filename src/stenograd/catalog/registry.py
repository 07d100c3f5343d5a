"""Finds compressors and schedules by walking their packages: a new one is a new file and no other edit."""

from __future__ import annotations

import importlib
import inspect
import pkgutil
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from types import ModuleType
from typing import Any, TypeVar

import stenograd.compressors
import stenograd.schedules
from stenograd.compression.contract import Compressor
from stenograd.errors import ConfigError
from stenograd.schedules.schedule import Schedule

__all__ = ["Entry", "compressors", "entries", "schedules"]

T = TypeVar("T")


@dataclass(frozen=True, slots=True)
class Entry:
    """One method name: the compressor behind it and the field values that the name stands for."""

    name: str
    compressor: type[Compressor]
    preset: Mapping[str, Any]


def compressors() -> list[type[Compressor]]:
    """Return every public compressor class of the package, sorted by module and name."""
    return _walk(stenograd.compressors, Compressor)  # type: ignore[type-abstract]


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


def _walk(package: ModuleType, base: type[T]) -> list[type[T]]:
    found: list[type[T]] = []
    for module_info in sorted(pkgutil.iter_modules(package.__path__), key=lambda m: m.name):
        module = importlib.import_module(f"{package.__name__}.{module_info.name}")
        for name, member in sorted(vars(module).items()):
            mine = inspect.isclass(member) and member.__module__ == module.__name__
            if mine and issubclass(member, base) and not inspect.isabstract(member) and name[0] != "_":
                found.append(member)
    return found


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
