"""How long a turn is, who goes when, and how long all that takes."""

from __future__ import annotations

import random
from collections.abc import Iterator

from stenograd.emulate.hosts import parse_rate

__all__ = ["WARM_UP_STEPS", "expected_s", "rounds_order", "turn_steps"]

WARM_UP_STEPS = 4  # DDP settles its buckets after one, its PowerSGD hook sends all for two

# Rough values for the forecast alone: nothing that is measured depends on them.
_PARAMETERS = {"cnn": 0.43e6, "mlp": 10.0e6, "mlp-64": 10.0e6, "gpt-small": 0.80e6, "gpt": 10.7e6}
_STEP_S = {"cnn": 0.05, "mlp": 0.1, "mlp-64": 0.07, "gpt-small": 0.1, "gpt": 0.8}
_BYTES_PER_PARAMETER = {"ddp": 4, "dense": 4, "ddp-fp16": 2, "ddp-bf16": 0, "fp16": 2, "bf16": 2, "none": 0}
_OTHER_BYTES_PER_PARAMETER = 0.5
_START_S = 6.0


def turn_steps(step_s: float, turn_s: float, max_steps: int) -> int:
    """Return how many steps of a turn are timed: what fills it, at least one.

    Example:
        >>> turn_steps(0.03, 1.5, 40), turn_steps(0.1, 1.5, 40), turn_steps(3.6, 1.5, 40)
        (40, 15, 1)
    """
    return max(1, min(max_steps, round(turn_s / step_s)))


def rounds_order(rivals: int, rounds: int) -> Iterator[list[int]]:
    """Yield the order of each round, at random but always the same: no rival stays the same one's neighbour.

    Example:
        >>> [sorted(order) for order in rounds_order(3, 2)]
        [[0, 1, 2], [0, 1, 2]]
    """
    generator = random.Random(0)  # all ranks must agree
    for _ in range(rounds):
        yield generator.sample(range(rivals), rivals)


def expected_s(
    model: str, rate: str, rivals: list[str], hosts: int, rounds: int, turn_s: float, max_steps: int
) -> float:
    """Estimate the seconds that one model on one link takes, to within a factor of two or so."""
    bits_per_s = parse_rate(rate)
    total_s = _START_S
    for rival in rivals:
        share = _BYTES_PER_PARAMETER.get(rival, _OTHER_BYTES_PER_PARAMETER)
        sent_bytes = 2 * (hosts - 1) / hosts * share * _PARAMETERS[model]
        step_s = _STEP_S[model] + (8 * sent_bytes / bits_per_s if bits_per_s else 0)
        total_s += step_s * (WARM_UP_STEPS + rounds * (1 + turn_steps(step_s, turn_s, max_steps)))
    return total_s
