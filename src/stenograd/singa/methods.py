"""The method that stands for each of SINGA's modes."""

from __future__ import annotations

import math

from stenograd.catalog.method import Method
from stenograd.compression.error_feedback import ErrorFeedback
from stenograd.compressors.cast import Cast
from stenograd.compressors.identity import Identity
from stenograd.compressors.threshold import Threshold
from stenograd.compressors.topk import TopK
from stenograd.errors import bad_value

__all__ = ["plain", "rounded", "sparse"]


def plain() -> Method:
    """Return the method of `backward_and_update`: every element in its own precision."""
    return Method(compressor=Identity())


def rounded(clip: float | None = None) -> Method:
    """Return the method of `backward_and_update_half`: every element in float16.

    Values are clamped to [-clip, clip], unless clip is None, and divided by the world size before they are
    summed; SINGA sums first, which overflows beyond 65,504.

    Raises:
        ConfigError: clip is not positive and finite.
    """
    if clip is not None and not (clip > 0 and math.isfinite(clip)):
        raise bad_value("clip_Value", "must be positive and finite", clip, "use 100, or clipping=False")
    return Method(compressor=Cast(dtype="float16"), clip_value=None if clip is None else float(clip))


def sparse(spars: float, topK: bool, corr: bool) -> Method:
    """Return the method of `backward_and_sparse_update`: few elements, with error feedback if corr.

    With topK it sends the share `spars` of the largest elements, otherwise those of at least `spars`.

    Raises:
        ConfigError: spars is outside (0, 1] for top-k, or not positive and finite for a threshold.

    Example:
        >>> sparse(0.05, topK=False, corr=False).compressor
        Threshold(value=0.05)
    """
    if topK and not 0 < spars <= 1:
        raise bad_value("spars", "must be in (0, 1] with topK=True", spars, "use 0.01 to send 1 %")
    if not (spars > 0 and math.isfinite(spars)):
        advice = "give a typical gradient magnitude, such as 0.001"
        raise bad_value("spars", "must be positive and finite", spars, advice)
    # float30 is exact: 38.6 bits per element at 1 %, index included, where SINGA sends 64. And one all-gather
    # sends each rank's own top elements on any number of ranks, as SINGA does.
    codec = (
        TopK(ratio=float(spars), values="float30", reduce="gather") if topK else Threshold(value=float(spars))
    )
    return Method(compressor=ErrorFeedback(inner=codec) if corr else codec)
