"""Sparse vectors: select, scatter, and write in few bits."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from stenograd.errors import ConfigError
from stenograd.kernels.backend import check_out, matching, pick
from stenograd.kernels.reference import indices

__all__ = [
    "pack_places",
    "pack_values",
    "scatter_mean",
    "select",
    "select_feedback",
    "unpack_places",
    "unpack_values",
]


def select_feedback(x: Tensor, residual: Tensor, k: int) -> tuple[Tensor, Tensor]:
    """Take the k largest after correction: `v = x + r`, `S = top_k(|v|)`, `r' = v` outside S, else 0.

    A bound that slightly more than k elements reach is guessed from a regular sample. One pass adds, writes
    the residual and compacts what reaches the bound; only that is ranked, by counting. So the result is
    exact, and a wrong guess costs time only.

    Args:
        x: flat tensor (n,), any floating type; left alone.
        residual: flat tensor (n,), overwritten.
        k: 0 to n.

    Returns:
        Places (k,), ascending, int32 (int64 above 2**31 elements), and values (k,) in residual's type. Of
        equal magnitudes those at lower places are taken.

    Raises:
        ConfigError: k outside its range, or lengths that differ.
        TensorTypeError: a tensor is not flat and floating.

    Example:
        >>> residual = torch.tensor([0.0, 2.0, 0.0])
        >>> select_feedback(torch.tensor([1.0, 1.0, -4.0]), residual, k=2)
        (tensor([1, 2], dtype=torch.int32), tensor([ 3., -4.]))
        >>> residual
        tensor([1., 0., 0.])
    """
    x = matching(x, residual)
    _check_k(x, k)
    places, values = pick("select", "select_feedback", x, residual)(x, residual, k)
    return places, values


def select(x: Tensor, k: int) -> tuple[Tensor, Tensor]:
    """Return the k elements of largest magnitude and their places, like `select_feedback` without residual.

    Args:
        x: flat tensor (n,), any floating type; left alone.
        k: 0 to n.

    Raises:
        ConfigError: k outside its range.
        TensorTypeError: x is not flat and floating.

    Example:
        >>> select(torch.tensor([0.1, -0.9, 0.3, 0.2]), k=2)
        (tensor([1, 2], dtype=torch.int32), tensor([-0.9000,  0.3000]))
    """
    x = matching(x, None)
    _check_k(x, k)
    places, values = pick("select", "select", x)(x, k)
    return places, values


def scatter_mean(vectors: Sequence[tuple[Tensor, Tensor]], n: int, out: Tensor | None = None) -> Tensor:
    """Return the dense mean of sparse vectors: added in rank order into zeros, then divided by their number.

    Ascending places are fastest: then the result is finished piece by piece in the first-level cache.

    Args:
        vectors: per rank `(places, values)`, places int32 or int64, unique within a rank, in any order.
        n: length of the result.
        out: where to write it, (n,); new float32 memory otherwise, which costs several times more.

    Raises:
        ConfigError: there are no vectors, or out has another length.
        WireError: a place outside [0, n), or other than one value a place.

    Example:
        >>> a, b = (torch.tensor([0]), torch.tensor([2.0])), (torch.tensor([1]), torch.tensor([4.0]))
        >>> scatter_mean([a, b], n=3)
        tensor([1., 2., 0.])
    """
    kind = check_out(vectors, n, out)
    total: Tensor = pick("scatter", "scatter_mean", kind, numel=n)(vectors, n, out)
    return total


def pack_places(places: Tensor, n: int) -> Tensor:
    """Write ascending places: `l = floor(log2(n / k))` low bits of each as they are, the rest in unary.

    The unary part has one bit for each place and one for each of the `n / 2**l` values of the high bits: bit
    `(p_i >> l) + i` is set for the i-th place. So the size, `places_bytes(n, k)`, follows from n and k alone.

    Args:
        places: int32 or int64 tensor (k,), strictly ascending, in [0, n).
        n: number of places there are.

    Raises:
        ConfigError: places are not in order or outside the range.

    Example:
        >>> packed = pack_places(torch.tensor([3, 500, 999]), n=1000)
        >>> packed.numel(), unpack_places(packed, n=1000, k=3)
        (4, tensor([  3, 500, 999], dtype=torch.int32))

    Reference: Elias, "Efficient Storage and Retrieval by Content and Address of Static Files", 1974.
    """
    places = places.contiguous()
    packed: Tensor = pick("indices", "pack_places", places)(places, n)
    return packed


def unpack_places(packed: Tensor, n: int, k: int) -> Tensor:
    """Read back what `pack_places` wrote, as int32 (int64 above 2**31 places).

    Args:
        packed: uint8 tensor of `places_bytes(n, k)` bytes.
        n: number of places there are.
        k: number of places written.

    Raises:
        ConfigError: k outside [0, n].
        WireError: packed has another length, or does not hold k ascending places below n.

    Example:
        >>> unpack_places(pack_places(torch.arange(2), n=2), n=2, k=2)
        tensor([0, 1], dtype=torch.int32)
    """
    packed = packed.contiguous()
    narrow = indices.place_type(n) is torch.int32
    function = pick("indices", "unpack_places", packed) if narrow else indices.unpack_places
    places: Tensor = function(packed, n, k)
    return places


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
    packed: tuple[Tensor, ...] = pick("values", "pack_values", values)(values, kind)
    return packed


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
    values: Tensor = pick("values", "unpack_values", *packed)(packed, kind, count)
    return values


def _check_k(x: Tensor, k: int) -> None:
    if not 0 <= k <= x.numel():
        raise ConfigError(f"k must be 0 to {x.numel()}, got {k}")
