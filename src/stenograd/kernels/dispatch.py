"""The hot primitives: each call takes the fastest version that suits its tensors, and gives the same result.

All tensors are flat. float32 in the CPU's memory goes to numba, everything else to plain torch. Selected
magnitudes are compared by their bits, so NaN is larger than infinity and is sent first. Nothing here touches
a global random generator, and nothing depends on the number of threads.
"""

from __future__ import annotations

from stenograd.kernels.dense import (
    not_finite,
    qsgd_decode_mean,
    qsgd_encode_feedback,
    sign_decode_mean,
    sign_encode_feedback,
)
from stenograd.kernels.reference.indices import places_bytes
from stenograd.kernels.sparse import (
    pack_places,
    pack_values,
    scatter_mean,
    select,
    select_feedback,
    unpack_places,
    unpack_values,
)

__all__ = [
    "not_finite",
    "pack_places",
    "pack_values",
    "places_bytes",
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
