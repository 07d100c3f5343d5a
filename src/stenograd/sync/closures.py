"""Steps that are given a closure: `optimizer.step(closure)` makes gradients after its pre-hooks have run."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any, Protocol, TypeAlias

import torch

__all__ = ["Act", "Changed", "after_closure"]

# What a pre-hook returns to change a step's arguments.
Changed: TypeAlias = tuple[tuple[Any, ...], dict[str, Any]] | None


class Act(Protocol):
    """What looks at a step's gradients once they are there."""

    def __call__(self, optimizer: torch.optim.Optimizer, *, zeros: bool = False, again: bool = False) -> None:
        """Look at the gradients of an optimizer's parameters, before the step applies them.

        Args:
            optimizer: whose step it is.
            zeros: whether bad gradients must become zeros, not None: the step computes with them already.
            again: whether the step has made gradients a second time.
        """


def after_closure(act: Act, exchanges: Callable[[], int]) -> Callable[..., Changed]:
    """Return a pre-hook of an optimizer's steps that acts once the step's gradients are there.

    torch's optimizers begin with their closure, so what looks at gradients (skipping a step after a bad
    exchange, mixing by gossip) waits for its first evaluation. Others, such as SAM, first move by the
    gradients of a backward pass before the step, and evaluate the closure where that leads to: then it looks
    at both. The closure itself is evaluated when the optimizer asks for it, and as often.

    Args:
        act: what to do.
        exchanges: returns how many exchanges have been made; where there is a new one, gradients are there.

    Example:
        >>> said = []
        >>> before = after_closure(lambda optimizer, **_: said.append("looked"), lambda: 0)
        >>> _, changed = before(None, (None,), {"closure": lambda: said.append("evaluated") or 1.5})
        >>> said, changed["closure"](), said
        (['evaluated', 'looked'], 1.5, ['evaluated', 'looked'])
    """
    seen = exchanges()

    def before(optimizer: torch.optim.Optimizer, args: Any, given: Any) -> Changed:
        nonlocal seen
        closure = _closure(args, given)
        has_gradients, seen = exchanges() != seen, exchanges()
        if closure is None:
            act(optimizer)
            return None
        zeros = has_gradients and not type(optimizer).__module__.startswith("torch.optim")
        if has_gradients:
            act(optimizer, zeros=zeros)
        evaluations = 0

        def watched() -> Any:
            nonlocal seen, evaluations
            result = closure()
            evaluations, seen = evaluations + 1, exchanges()
            if evaluations == 1:
                act(optimizer, zeros=zeros, again=has_gradients)
            return result

        if "closure" in given:
            return tuple(args), {**given, "closure": watched}
        return (args[0], watched, *args[2:]), dict(given)

    return before


def _closure(args: Sequence[Any], given: Mapping[str, Any]) -> Callable[[], Any] | None:
    """Return the closure among a step's arguments, the optimizer first; its own may take something else."""
    closure = given["closure"] if "closure" in given else args[1] if len(args) > 1 else None
    return closure if callable(closure) else None
