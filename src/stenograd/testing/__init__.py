"""Tools for testing compressors and multi-rank code, also outside this project."""

from __future__ import annotations

from stenograd.testing.conformance import cases, check
from stenograd.testing.pool import RankPool, RanksFailed

__all__ = ["RankPool", "RanksFailed", "cases", "check"]
