"""Steps that are given a closure: `optimizer.step(closure)` makes gradients after its pre-hooks have run."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any, TypeAlias

import torch

__all__ = ["Changed", "after_closure", "evaluated"]

# What a pre-hook returns to change a step's arguments.
Changed: TypeAlias = tuple[tuple[Any, ...], dict[str, Any]] | None


def evaluated(args: Sequence[Any], given: Mapping[str, Any]) -> Changed:
    """Evaluate a step's closure now, and let the step take that result; None where there is no closure.

    What looks at gradients when a step begins (skipping a step after a bad exchange, mixing by gossip) would
    otherwise see those of the step before. Later evaluations, as LBFGS makes, happen where it asks for them.

    Args:
        args: of the step, the optimizer first, as its pre-hooks get them.
        given: its arguments by name.

    Example:
        >>> said = []
        >>> _, changed = evaluated((None,), {"closure": lambda: said.append("evaluated") or 1.5})
        >>> said, changed["closure"](), said
        (['evaluated'], 1.5, ['evaluated'])
    """
    named = "closure" in given
    closure = given["closure"] if named else args[1] if len(args) > 1 else None
    if not callable(closure):  # an optimizer of one's own may take something else
        return None
    with torch.enable_grad():
        first = [closure()]
    again = lambda: first.pop() if first else closure()  # noqa: E731
    return (tuple(args), {**given, "closure": again}) if named else ((args[0], again, *args[2:]), dict(given))


def after_closure(act: Callable[[torch.optim.Optimizer], None]) -> Callable[..., Changed]:
    """Return a pre-hook of an optimizer's steps that acts once the step's gradients are there."""

    def before(optimizer: torch.optim.Optimizer, args: Any, given: Any) -> Changed:
        changed = evaluated(args, given)
        act(optimizer)
        return changed

    return before
