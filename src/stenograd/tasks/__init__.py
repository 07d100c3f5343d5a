"""Tasks that the command line can train: a data set, a model and a recipe that suits them."""

from __future__ import annotations

from pathlib import Path

from stenograd.errors import ConfigError, bad_value
from stenograd.tasks.base import Recipe, Task
from stenograd.tasks.images import Digits, Glyphs, Mnist
from stenograd.tasks.shards import batches, eval_batches, shard, steps_per_epoch
from stenograd.tasks.text import Text

__all__ = [
    "Digits",
    "Glyphs",
    "Mnist",
    "Recipe",
    "Task",
    "Text",
    "batches",
    "eval_batches",
    "load",
    "names",
    "shard",
    "steps_per_epoch",
]


def names() -> tuple[str, ...]:
    """Return the names of the tasks that `load` accepts.

    Example:
        >>> names()
        ('digits', 'glyphs', 'mnist', 'text')
    """
    return (Digits.name, Glyphs.name, Mnist.name, Text.name)


def load(name: str, data: str | Path | None = None) -> Task:
    """Load a task's data.

    Args:
        name: "digits", "glyphs", "mnist" or "text".
        data: the folder with MNIST's four files, or a UTF-8 text file; None for the task's own data.

    Raises:
        ConfigError: if the name is unknown, or the task takes no data and some was given.
        DataError: if the data is missing, unreadable or not what it should be.
        StenogradError: if scikit-learn, which holds the digits, is not installed.

    Example:
        >>> task = load("digits")
        >>> task.train_size, task.eval_size
        (1437, 360)
    """
    if name == Mnist.name:
        return Mnist(data)
    if name == Text.name:
        return Text(data)
    if name not in (Digits.name, Glyphs.name):
        raise ConfigError(f"unknown task {name!r}: use one of {', '.join(names())}")
    if data is not None:
        advice = "leave data out, or use the mnist or the text task"
        raise bad_value("data", f"must be None for the {name} task", str(data), advice)
    return Digits() if name == Digits.name else Glyphs()
