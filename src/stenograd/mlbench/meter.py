"""A running average."""

from __future__ import annotations

from dataclasses import dataclass

__all__ = ["AverageMeter"]


@dataclass(slots=True)
class AverageMeter:
    """A running average: `avg = sum of val * n / sum of n`.

    Example:
        >>> meter = AverageMeter()
        >>> meter.update(1.0, n=3)
        >>> meter.update(5.0)
        >>> meter.val, meter.avg, meter.count
        (5.0, 2.0, 4)
    """

    val: float = 0.0
    sum: float = 0.0
    count: float = 0

    @property
    def avg(self) -> float:
        """The average so far; 0 before the first value."""
        return self.sum / self.count if self.count else 0.0

    def update(self, val: float, n: float = 1) -> None:
        """Add a value that stands for n samples."""
        self.val = float(val)
        self.sum += self.val * n
        self.count += n
