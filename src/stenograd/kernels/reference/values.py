"""Numbers in fewer bits, in plain torch."""

from __future__ import annotations

import torch
from torch import Tensor

from stenograd.errors import ConfigError, WireError
from stenograd.kernels.reference.bits import block_views

__all__ = [
    "VALUE_BLOCK",
    "check_values",
    "pack_values",
    "unpack_values",
]

VALUE_BLOCK = 256  # int8 values that share a scale: 32 / 256 bits more a value
_KINDS = {"float32": torch.float32, "bfloat16": torch.bfloat16, "int8": torch.int8}


def pack_values(values: Tensor, kind: str) -> tuple[Tensor, ...]:
    """Write float32 numbers as float32, bfloat16 or int8 with scales."""
    if kind not in _KINDS:
        raise ConfigError(f"kind must be one of {list(_KINDS)}, got {kind!r}: choose one")
    if kind != "int8":
        return (values.to(_KINDS[kind]),)
    codes, scales = torch.empty_like(values), [values.new_zeros(0)]
    both = (block_views(t, VALUE_BLOCK, [values.numel()]) for t in (values, codes))
    for rows, y in zip(*both, strict=True):
        scale = rows.abs().amax(1, keepdim=True)
        y.copy_(rows / torch.where(scale == 0, 1.0, scale) * 127).round_()
        scales.append(scale.view(-1))
    return torch.where(codes == codes, codes, 0.0).to(torch.int8), torch.cat(scales)


def unpack_values(packed: tuple[Tensor, ...], kind: str, count: int) -> Tensor:
    """Read back what `pack_values` wrote, as float32."""
    check_values(packed, kind, count)
    y = packed[0].to(torch.float32)
    if kind == "int8":
        start = 0
        for rows in block_views(y, VALUE_BLOCK, [count]):
            rows.mul_(packed[1][start : start + len(rows), None] / 127)
            start += len(rows)
    return y


def check_values(packed: tuple[Tensor, ...], kind: str, count: int) -> None:
    """Refuse packed values of another form.

    Raises:
        ConfigError: there is no such kind.
        WireError: the number of tensors, their lengths or types are others.

    Example:
        >>> check_values((torch.zeros(3),), "float32", 3)
    """
    if kind not in _KINDS:
        raise ConfigError(f"kind must be one of {list(_KINDS)}, got {kind!r}: choose one")
    needed = [(_KINDS[kind], count)]
    if kind == "int8":
        needed.append((torch.float32, -(-count // VALUE_BLOCK)))
    if [(t.dtype, t.numel()) for t in packed] != needed:
        got = [f"{t.numel()} {t.dtype}" for t in packed]
        raise WireError(f"{count} values as {kind} are {[f'{m} {t}' for t, m in needed]}, got {got}")
