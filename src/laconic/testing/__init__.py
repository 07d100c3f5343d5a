"""Tools for testing compressors and multi-rank code, also outside this project."""

from __future__ import annotations

from laconic.testing.conformance import cases, check
from laconic.testing.pool import RankPool, RanksFailed

__all__ = ["RankPool", "RanksFailed", "cases", "check"]
