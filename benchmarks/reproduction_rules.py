"""How a reproduction is judged: runs that differ in their seed, their figures, and claims about them."""

from __future__ import annotations

import statistics
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

from harness import number, table
from reproduction_runs import Run

__all__ = ["Claim", "Family", "Figures", "Group"]

_MOST_SEEDS = 3


@dataclass(frozen=True)
class Family:
    """Runs that differ in their seed.

    Attributes:
        run: the first of them.
        seeds: how many.
    """

    run: Run
    seeds: int = 3

    @property
    def runs(self) -> list[Run]:
        """Every run."""
        return [replace(self.run, seed=seed) for seed in range(self.seeds)]


class Figures:
    """What a reproduction's families came to, by label, from the results of their runs.

    Args:
        families: by label.
        results: by a run's key.
        labels: if there are any, only seeds that all of these families have been run with count.
    """

    def __init__(
        self,
        families: Mapping[str, Family],
        results: Mapping[str, Mapping[str, Any]],
        labels: Sequence[str] = (),
    ) -> None:
        found = {label: self._found(family, results) for label, family in families.items()}
        self.seeds = set(range(_MOST_SEEDS)).intersection(*(found[label] for label in labels))
        self._found_by = {
            label: [one for seed, one in by_seed.items() if seed in self.seeds]
            for label, by_seed in found.items()
        }

    @staticmethod
    def _found(family: Family, results: Mapping[str, Mapping[str, Any]]) -> dict[int, Mapping[str, Any]]:
        return {run.seed: results[run.key] for run in family.runs if run.key in results}

    def of(self, label: str) -> list[Mapping[str, Any]]:
        """Return the results of a family's runs, those that are there."""
        return self._found_by[label]

    def points(self, label: str) -> float:
        """Return the mean accuracy over the seeds in percent."""
        return 100 * statistics.mean(one["accuracy"] for one in self.of(label))

    def spread(self, label: str) -> float:
        """Return how far the seeds' accuracies lie apart, in points."""
        found = [100 * one["accuracy"] for one in self.of(label)]
        return max(found) - min(found)

    def loss(self, label: str) -> float:
        """Return the mean validation loss over the seeds at the end."""
        return statistics.mean(one["loss"] for one in self.of(label))

    def mean(self, label: str, name: str) -> float:
        """Return the mean over the seeds of another figure."""
        return statistics.mean(one[name] for one in self.of(label))

    def sent(self, label: str) -> float:
        """Return the bytes that a rank sent per step."""
        return self.mean(label, "moved_bytes") / self.mean(label, "steps")


@dataclass(frozen=True)
class Claim:
    """What a reproduction must show.

    Attributes:
        text: the claim.
        labels: families that it needs.
        judge: returns what was measured, and whether the claim holds.
    """

    text: str
    labels: tuple[str, ...]
    judge: Callable[[Figures], tuple[str, bool]]

    def told(self, families: Mapping[str, Family], results: Mapping[str, Mapping[str, Any]]) -> str:
        """Return a line with claim, measurement and verdict."""
        figures = Figures(families, results, self.labels)
        if not figures.seeds:
            return f"- **not run**: {self.text}"
        failed = [one["failed"] for label in self.labels for one in figures.of(label) if "failed" in one]
        if failed:
            return f"- **fails**: {self.text} ({failed[0]})"
        measured, holds = self.judge(figures)
        seeds = f"{len(figures.seeds)} seed{'s' if len(figures.seeds) > 1 else ''}"
        return f"- **{'holds' if holds else 'does not hold'}**: {self.text} ({measured}; {seeds})"


@dataclass(frozen=True)
class Group:
    """One reproduction.

    Attributes:
        title: what it is about, with the setting.
        families: by label.
        claims: what must be seen.
        losses: whether losses count, and not accuracies.
    """

    title: str
    families: Mapping[str, Family]
    claims: Sequence[Claim] = ()
    losses: bool = False

    def told(self, name: str, results: Mapping[str, Mapping[str, Any]]) -> str:
        """Return this reproduction's part of the document."""
        figures = Figures(self.families, results)
        head = ["", "validation loss" if self.losses else "accuracy by seed, %", "mean"]
        lines = [self._line(label, figures) for label in self.families if figures.of(label)]
        claims = "\n".join(claim.told(self.families, results) for claim in self.claims)
        return (
            f"## {name}: {self.title}\n\n{table([*head, 'bytes sent per step'], lines)}\n\n{claims}".rstrip()
        )

    def _line(self, label: str, figures: Figures) -> list[str]:
        found = figures.of(label)
        bad = [one["failed"] for one in found if "failed" in one]
        if bad:
            return [f"`{label}`", bad[0][:60], "", ""]
        if self.losses:
            told = ", ".join(f"{one['loss']:.3f}" for one in found)
            mean = figures.loss(label)
        else:
            told = ", ".join(f"{100 * one['accuracy']:.2f}" for one in found)
            mean = figures.points(label)
        sent = "" if "moved_bytes" not in found[0] else number(figures.sent(label), 0)
        return [f"`{label}`", told, number(mean, 3 if self.losses else 2), sent]
