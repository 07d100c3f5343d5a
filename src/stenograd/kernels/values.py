"""Numbers in fewer bits."""

from __future__ import annotations

import torch
from torch import Tensor

from stenograd.errors import ConfigError, WireError
from stenograd.kernels.backend import pick
from stenograd.kernels.bits import block_views, scale_blocks

__all__ = ["VALUE_BLOCK", "check_values", "pack_values", "unpack_values"]

VALUE_BLOCK = 256  # int8 values that share a scale: 32 / 256 bits more a value
_KINDS = {"float32": torch.float32, "bfloat16": torch.bfloat16, "int8": torch.int8}


def pack_values(values: Tensor, kind: str) -> tuple[Tensor, ...]:
    """Write numbers as float32, as bfloat16 (rounded to nearest even), or as int8 with a scale for each 256.

    Args:
        values: float32 tensor (k,).
        kind: "float32", "bfloat16" or "int8".

    Returns:
        One tensor (k,), for int8 followed by the scales: `value = code * scale / 127`, scale the largest
        magnitude of the 256. A scale that is infinite or NaN makes its values so.

    Raises:
        ConfigError: there is no such kind.

    Example:
        >>> pack_values(torch.tensor([1.0, -2.0]), "int8")
        (tensor([  64, -127], dtype=torch.int8), tensor([2.]))
    """
    values = values.contiguous()
    fast = pick(pack_values, values)
    # torch casts as fast as memory allows
    if fast is not None and kind == "int8":
        return fast(values, kind)
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
    return torch.where(codes == codes, codes, 0.0).to(torch.int8), torch.cat(scales)  # NaN: its scale tells


def unpack_values(packed: tuple[Tensor, ...], kind: str, count: int) -> Tensor:
    """Read back what `pack_values` wrote, as float32.

    Args:
        packed: what `pack_values` returned.
        kind: as in packing.
        count: number of values.

    Raises:
        ConfigError: there is no such kind.
        WireError: packed has other types or lengths.

    Example:
        >>> unpack_values(pack_values(torch.tensor([1.0, 3.14159]), "bfloat16"), "bfloat16", count=2)
        tensor([1.0000, 3.1406])
    """
    packed = tuple(t.contiguous() for t in packed)
    fast = pick(unpack_values, *packed)
    check_values(packed, kind, count)
    if fast is not None and kind == "int8":
        return fast(packed, kind, count)
    y = packed[0].to(torch.float32)
    return scale_blocks(y, packed[1] / 127, VALUE_BLOCK, [count]) if kind == "int8" else y


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
