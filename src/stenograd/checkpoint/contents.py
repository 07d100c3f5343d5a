"""Refuse to write a checkpoint that `torch.load(weights_only=True)` could not read."""

from __future__ import annotations

import io
from collections import OrderedDict
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

from stenograd.errors import CheckpointError

__all__ = ["check_readable", "unsavable"]

_PLAIN = (type(None), bool, int, float, complex, str, bytes, Tensor, nn.Parameter)


def check_readable(path: Path, content: Any) -> None:
    """Read back a file that was just written, all but the numbers in its tensors.

    Without this, a NumPy number in `extra` is found when the checkpoint is needed, and then in every one that
    was kept. Tensors go to the meta device, so their bytes are not read: for 100 MB this takes 2 ms and no
    memory (writing them takes 0.2 s).

    Args:
        path: the file.
        content: what was written there, to name the part at fault.

    Raises:
        CheckpointError: `weights_only=True` would refuse a part of it.
    """
    try:
        torch.load(path, map_location="meta", weights_only=True)
    except Exception as cause:  # torch.load raises a dozen types for what it does not read
        raise unsavable(content, cause) from cause


def unsavable(content: Any, cause: Exception) -> CheckpointError:
    """Build the error for content that cannot be saved or read again; it names the first such part.

    Args:
        content: of the checkpoint.
        cause: what writing or reading it raised.

    Example:
        >>> print(unsavable({"extra": {"left": [1, range(2)]}}, ValueError("no ranges")))
        cannot be saved: extra.left[1] is a range, which could not be loaded again: give tensors, ...
    """
    found = next(_culprits(content, ""), None)
    if found is None:
        reason = (str(cause).strip() or type(cause).__name__).splitlines()[0][:120]
        return CheckpointError(f"cannot be saved: the content could not be loaded again ({reason})")
    key, value = found
    module, kind = type(value).__module__, type(value).__qualname__
    kind = kind if module == "builtins" else f"{module}.{kind}"
    article = "an" if kind[0] in "aeiou" else "a"
    advice = "give tensors, numbers, texts, lists or dictionaries instead"
    if hasattr(value, "__array__"):
        advice = "give float(x), int(x) or x.tolist()"
    return CheckpointError(
        f"cannot be saved: {key} is {article} {kind}, which could not be loaded again: {advice}"
    )


def _culprits(value: Any, key: str) -> Iterator[tuple[str, Any]]:
    """Yield the parts that do not survive saving and loading, each with its path (`extra.left[1]`)."""
    kind = type(value)
    if kind in (dict, OrderedDict):
        for name, item in value.items():
            if not _survives(name):
                yield f"a key of {key or 'the content'}", name
            yield from _culprits(item, f"{key}.{name}" if key else str(name))
    elif kind in (list, tuple):
        for number, item in enumerate(value):
            yield from _culprits(item, f"{key}[{number}]")
    elif not _survives(value):
        yield key, value


def _survives(value: Any) -> bool:
    if type(value) in _PLAIN:
        return True
    buffer = io.BytesIO()
    try:
        torch.save(value, buffer)
        buffer.seek(0)
        torch.load(buffer, map_location="meta", weights_only=True)
    except Exception:  # an object's own pickling may raise anything
        return False
    return True
