"""The hot primitives: each call takes the fastest version that suits its tensors, and gives the same result.

All tensors are flat. float32 in the CPU's memory goes to numba, everything else to plain torch. Selected
magnitudes are compared by their bits, so NaN is larger than infinity and is sent first. Nothing here touches
a global random generator, and nothing depends on the number of threads.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from stenograd.errors import ConfigError
from stenograd.kernels.backend import check_out, matching, pick, present
from stenograd.kernels.reference import indices
from stenograd.kernels.reference.indices import places_bytes

__all__ = [
    "pack_places",
    "pack_values",
    "places_bytes",
    "put",
    "qsgd_decode_mean",
    "qsgd_encode_feedback",
    "scatter_mean",
    "select",
    "select_feedback",
    "sign_decode_mean",
    "sign_encode_feedback",
    "unpack_places",
    "unpack_values",
]


def sign_encode_feedback(
    x: Tensor | None, residual: Tensor | None, block: int, numels: Sequence[int]
) -> tuple[Tensor, Tensor]:
    """Send signs and mean magnitudes: `v = x + r`, `scale = mean|v|` of a block, `r' = v - scale sign(v)`.

    `sign(0) = +1` and `sign(NaN) = -1`. The mean is added in float64 in a fixed order, so it is the same on
    every machine.

    Args:
        x: flat tensor (n,); left alone. None where all that is to send is in residual.
        residual: flat tensor (n,), overwritten; None for none.
        block: elements a scale; blocks never span tensors, so a tensor's last may be shorter.
        numels: lengths of the tensors that lie one after another in x.

    Returns:
        Bits, uint8 (ceil(n / 8),), lowest first, set for `v >= 0`; scales, float32, one a block.

    Raises:
        ConfigError: block below 1, lengths that do not fit, or neither x nor residual.
        TensorTypeError: a tensor is not flat and floating.

    Example:
        >>> sign_encode_feedback(torch.tensor([3.0, -1.0, 0.5]), None, block=2, numels=[3])
        (tensor([5], dtype=torch.uint8), tensor([2.0000, 0.5000]))
    """
    x = matching(x, residual) if x is not None else None
    function = pick("sign", "sign_encode_feedback", *present(x, residual))
    bits, scales = function(x, residual, block, numels)
    return bits, scales


def sign_decode_mean(
    payloads: Sequence[tuple[Tensor, Tensor]], block: int, numels: Sequence[int], out: Tensor | None = None
) -> Tensor:
    """Return the mean over ranks of what `sign_encode_feedback` sent, added in rank order.

    Args:
        payloads: per rank `(bits, scales)`.
        block: as in encoding.
        numels: as in encoding; they add up to n.
        out: where to write it, (n,); new float32 memory otherwise.

    Raises:
        ConfigError: there are no payloads, block below 1, or out has another length.
        WireError: a payload has another length.

    Example:
        >>> payload = sign_encode_feedback(torch.tensor([3.0, -1.0, 0.5]), None, block=2, numels=[3])
        >>> sign_decode_mean([payload], block=2, numels=[3])
        tensor([ 2.0000, -2.0000,  0.5000])
    """
    n = sum(numels)
    kind, wide = check_out(payloads, n, out)
    total: Tensor = pick("sign", "sign_decode_mean", kind, numel=n)(payloads, block, numels, wide)
    return total if out is None or out is wide else out.copy_(total)


def qsgd_encode_feedback(
    x: Tensor | None, residual: Tensor | None, bits: int, block: int, numels: Sequence[int], seed: int
) -> tuple[Tensor, Tensor]:
    """Send integers: `code = floor(s v / m + u) + s`, `v = x + r`, `m = max|v|` of a block.

    There are `s = 2^(bits-1) - 1` levels on each side of zero. u is a hash of seed and place, uniform in
    [0, 1), so the rounding is unbiased and needs no generator; `r' = v - m / s (code - s)`. A block with an
    infinite or NaN element has such a scale.

    Args:
        x: flat tensor (n,); left alone. None where all that is to send is in residual.
        residual: flat tensor (n,), overwritten; None for none.
        bits: bits an element, 2 to 8.
        block: elements a scale; blocks never span tensors.
        numels: lengths of the tensors that lie one after another in x.
        seed: any integer; another one for each rank and step.

    Returns:
        Codes, uint8 (ceil(n bits / 8),), lowest bit first; scales m, float32, one a block.

    Raises:
        ConfigError: bits or block outside its range, lengths that do not fit, or neither x nor residual.
        TensorTypeError: a tensor is not flat and floating.

    Example:
        >>> qsgd_encode_feedback(torch.tensor([1.0, -1.0, 0.0]), None, bits=2, block=4, numels=[3], seed=0)
        (tensor([18], dtype=torch.uint8), tensor([1.]))
    """
    x = matching(x, residual) if x is not None else None
    function = pick("quantize", "qsgd_encode_feedback", *present(x, residual))
    codes, scales = function(x, residual, bits, block, numels, seed)
    return codes, scales


def qsgd_decode_mean(
    payloads: Sequence[tuple[Tensor, Tensor]],
    bits: int,
    block: int,
    numels: Sequence[int],
    out: Tensor | None = None,
) -> Tensor:
    """Return the mean over ranks of what `qsgd_encode_feedback` sent, added in rank order.

    Args:
        payloads: per rank `(codes, scales)`.
        bits: as in encoding.
        block: as in encoding.
        numels: as in encoding; they add up to n.
        out: where to write it, (n,); new float32 memory otherwise.

    Raises:
        ConfigError: there are no payloads, bits or block outside its range, or out has another length.
        WireError: a payload has another length.

    Example:
        >>> payload = torch.tensor([18], dtype=torch.uint8), torch.tensor([1.0])
        >>> qsgd_decode_mean([payload], bits=2, block=4, numels=[3])
        tensor([ 1., -1.,  0.])
    """
    n = sum(numels)
    kind, wide = check_out(payloads, n, out)
    total: Tensor = pick("quantize", "qsgd_decode_mean", kind, numel=n)(payloads, bits, block, numels, wide)
    return total if out is None or out is wide else out.copy_(total)


def select_feedback(x: Tensor, residual: Tensor, k: int, *, halves: bool = False) -> tuple[Tensor, Tensor]:
    """Take the k largest after correction: `v = x + r`, `S = top_k(|v|)`, `r' = v` outside S, else 0.

    A bound that slightly more than k elements reach is guessed from a regular sample. One pass adds, writes
    the residual and compacts what reaches the bound; only that is ranked, by counting. So the result is
    exact, and a wrong guess costs time only.

    Args:
        x: flat tensor (n,), any floating type; left alone.
        residual: flat tensor (n,), overwritten.
        k: 0 to n.
        halves: whether values will travel as bfloat16, so that on S `r' = v - bfloat16(v)`.

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
    places, values = pick("select", "select_feedback", x, residual)(x, residual, k, halves)
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
    kind, wide = check_out(vectors, n, out)
    total: Tensor = pick("scatter", "scatter_mean", kind, numel=n)(vectors, n, wide)
    return total if out is None or out is wide else out.copy_(total)


def put(x: Tensor, places: Tensor, values: Tensor) -> None:
    """Write `x[places] = values` in place.

    Args:
        x: flat tensor (n,), overwritten.
        places: int32 or int64 tensor (k,), in [0, n), which is not checked, unique.
        values: (k,), of x's type.

    Example:
        >>> x = torch.zeros(3)
        >>> put(x, torch.tensor([0, 2]), torch.tensor([1.0, 3.0]))
        >>> x
        tensor([1., 0., 3.])
    """
    pick("scatter", "put", x, places, values)(x, places, values)


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
