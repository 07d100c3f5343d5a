"""What every compressor must do; a new one is found and tested without any edit.

In a project of your own: `check(MyCompressor(...))`, or as a table over everything that is installed,
`@pytest.mark.parametrize(("name", "compressor"), cases())`.
"""

from __future__ import annotations

import random
from collections.abc import Iterator

import torch

from stenograd.catalog.registry import compressors
from stenograd.compression.contract import Compressor, Feedback
from stenograd.compression.feedback import ErrorFeedback
from stenograd.testing.checks import expect, same
from stenograd.testing.rules import RULES

__all__ = ["cases", "check"]


def cases() -> Iterator[tuple[str, Compressor]]:
    """Yield (id, compressor) for every example of every compressor, lossy ones also under error feedback.

    Example:
        >>> next(name for name, _ in cases() if "Identity" in name)
        'Identity()'
    """
    for cls in compressors():
        for compressor in cls.examples():
            yield repr(compressor), compressor
            if compressor.feedback not in (Feedback.NEVER, Feedback.OWN, Feedback.EXACT):
                fed = ErrorFeedback(inner=compressor)
                yield repr(fed), fed


def check(compressor: Compressor) -> None:
    """Run every rule on one configuration, on 1 to 8 simulated ranks.

    Args:
        compressor: what to test.

    Raises:
        AssertionError: names the broken rule and the values.

    Example:
        >>> from stenograd.compressors.identity import Identity
        >>> check(Identity())
    """
    for rule in RULES:
        before = torch.random.get_rng_state(), random.getstate()
        rule(compressor)
        after = torch.random.get_rng_state(), random.getstate()
        untouched = same(before[0], after[0]) and before[1] == after[1]
        expect(untouched, "the global random state is left alone", during=rule.__name__)
