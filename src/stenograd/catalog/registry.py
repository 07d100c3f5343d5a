"""Finds every compressor by walking `stenograd.compressors`: a new one is a new file and no other edit."""

from __future__ import annotations

import importlib
import inspect
import pkgutil
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import stenograd.compressors
from stenograd.compression.contract import Compressor
from stenograd.errors import ConfigError

__all__ = ["Entry", "compressors", "entries"]


@dataclass(frozen=True, slots=True)
class Entry:
    """One method name: the compressor behind it and the field values that the name stands for."""

    name: str
    compressor: type[Compressor]
    preset: Mapping[str, Any]


def compressors() -> list[type[Compressor]]:
    """Return every public compressor class of the package, sorted by module and name."""
    found: list[type[Compressor]] = []
    for module_info in sorted(pkgutil.iter_modules(stenograd.compressors.__path__), key=lambda m: m.name):
        module = importlib.import_module(f"stenograd.compressors.{module_info.name}")
        for name, member in sorted(vars(module).items()):
            mine = inspect.isclass(member) and member.__module__ == module.__name__
            if mine and issubclass(member, Compressor) and not inspect.isabstract(member) and name[0] != "_":
                found.append(member)
    return found


def entries() -> dict[str, Entry]:
    """Return all method names with what they stand for.

    Raises:
        ConfigError: two compressors claim one name.

    Example:
        >>> entries()["fp16"].preset["dtype"]
        'float16'
    """
    table: dict[str, Entry] = {}
    for cls in compressors():
        for name, preset in cls.names.items():
            if name in table:
                other = table[name].compressor.__qualname__
                raise ConfigError(
                    f"both {other} and {cls.__qualname__} claim the method name {name!r}: rename one"
                )
            table[name] = Entry(name, cls, preset)
    return table
