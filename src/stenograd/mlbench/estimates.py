"""How much of the newest iterate goes into a weighted average of all."""

from __future__ import annotations

from stenograd.errors import bad_value

__all__ = ["share_of_newest"]


def share_of_newest(iteration: int, size: int, sparse_size: int) -> float:
    """Return `rho = (t + tau)^2 / sum_{i=0..t} (i + tau)^2` in closed form, with `tau = size / sparse_size`.

    So `mean <- (1 - rho) mean + rho p` is the average with weights `(i + tau)^2`; `rho = 1` at t = 0.

    Args:
        iteration: t, at least 0.
        size: number of elements, at least 0.
        sparse_size: number of elements sent a step, at least 1.

    Raises:
        ConfigError: iteration or sparse_size is out of range.

    Example:
        >>> share_of_newest(0, 4, 2), share_of_newest(1, 4, 2)
        (1.0, 0.6923076923076923)

    Reference: Stich et al., "Sparsified SGD with Memory", NeurIPS 2018, theorem 2.4.
    """
    if iteration < 0:
        raise bad_value("iteration", "must be at least 0", iteration, "count from 0")
    if sparse_size < 1:
        raise bad_value("sparse_vector_size", "must be at least 1", sparse_size, "pass sparse_grad_size")
    t, tau = iteration, size / sparse_size
    total = (1 + t) * (6 * tau * tau + t + 6 * tau * t + 2 * t * t) / 6
    return (t + tau) ** 2 / total if total else 1.0
