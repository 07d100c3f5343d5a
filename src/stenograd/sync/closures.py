"""Steps that are given a closure: `optimizer.step(closure)` makes gradients after its pre-hooks have run."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any, Protocol, TypeAlias
from weakref import WeakKeyDictionary

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


def after_closure(
    act: Act, exchanges: Callable[[], int], mean: Callable[[float], float] | None = None
) -> Callable[..., Changed]:
    """Return a pre-hook of an optimizer's steps that acts once the step's gradients are there.

    torch's optimizers begin with their closure, so what looks at gradients (skipping a step after a bad
    exchange, mixing by gossip) waits for its first evaluation. Others, such as SAM, first move by the
    gradients of a backward pass before the step, and evaluate the closure where that leads to: then it looks
    at both. The closure itself is evaluated when the optimizer asks for it, and as often.

    Args:
        act: what to do.
        exchanges: returns how many exchanges have been made. Where one was made outside of closures since an
            optimizer stepped last, its gradients are there.
        mean: averages a number over the ranks; None leaves losses as they are. LBFGS gets means, because it
            decides by the loss how often it evaluates the closure, with or without a line search.

    Example:
        >>> said = []
        >>> before = after_closure(lambda optimizer, **_: said.append("looked"), lambda: 0)
        >>> sgd = torch.optim.SGD([torch.zeros(1)])
        >>> _, changed = before(sgd, (sgd,), {"closure": lambda: said.append("evaluated") or 1.5})
        >>> said, changed["closure"](), said
        (['evaluated', 'looked'], 1.5, ['evaluated', 'looked'])
    """
    first, inside = exchanges(), 0  # exchanges in all, and those that closures made
    seen: WeakKeyDictionary[torch.optim.Optimizer, int] = WeakKeyDictionary()  # outside, at the last step

    def before(optimizer: torch.optim.Optimizer, args: Any, given: Any) -> Changed:
        closure, outside = _closure(args, given), exchanges() - inside
        has_gradients, seen[optimizer] = outside != seen.get(optimizer, first), outside
        if closure is None:
            act(optimizer)
            return None
        zeros = has_gradients and not type(optimizer).__module__.startswith("torch.optim")
        if has_gradients:
            act(optimizer, zeros=zeros)
        evaluations = 0

        def watched() -> Any:
            nonlocal inside, evaluations
            before = exchanges()
            result = closure()
            inside, evaluations = inside + exchanges() - before, evaluations + 1
            if evaluations == 1:
                act(optimizer, zeros=zeros, again=has_gradients)
            if mean is not None and isinstance(optimizer, torch.optim.LBFGS) and result is not None:
                loss = mean(float(result))
                return torch.full_like(result, loss) if isinstance(result, torch.Tensor) else loss
            return result

        if "closure" in given:
            return tuple(args), {**given, "closure": watched}
        return (args[0], watched, *args[2:]), dict(given)

    return before


def _closure(args: Sequence[Any], given: Mapping[str, Any]) -> Callable[[], Any] | None:
    """Return the closure among a step's arguments, the optimizer first; its own may take something else."""
    closure = given["closure"] if "closure" in given else args[1] if len(args) > 1 else None
    return closure if callable(closure) else None
