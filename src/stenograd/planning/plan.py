"""What a training's steps will take under each method, why, and which method to use."""

from __future__ import annotations

import hashlib
import json
import os
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import Any

import numpy as np
import torch

from stenograd.catalog.method import for_any_optimizer, method
from stenograd.catalog.registry import schedules
from stenograd.comm.agreement import everyone
from stenograd.comm.drivers import AnyDriver
from stenograd.comm.tensor_exchange import DEFAULT_BUCKET_BYTES
from stenograd.errors import DataError, StenogradError, first_line
from stenograd.planning.advice import (
    DENSE,
    LEVELS,
    Prediction,
    Slowness,
    accuracy_of,
    advised,
    check_accuracy,
    predict,
)
from stenograd.planning.cluster import Cluster, cluster_of
from stenograd.planning.link import WAYS, Link, assumed, from_json
from stenograd.planning.program import Program
from stenograd.planning.rehearsal import Profile, Rehearsed, rehearse, together
from stenograd.planning.replay import Timeline, replay
from stenograd.planning.trial import Trial
from stenograd.planning.units import parse_link, rate_text
from stenograd.version import __version__

__all__ = ["VALIDATED", "Plan", "default_methods", "load_plan", "plan", "predicted", "with_ranks"]

_FORMAT = 2
VALIDATED = 8  # workers, see docs/planning.md


@dataclass(frozen=True, kw_only=True)
class Plan:
    """Everything that a prediction needs, and the predictions; made by `stenograd.plan`.

    Attributes:
        made: versions and machine.
        work: the training: name, parameters, bucket size.
        profile: of a step without an exchange.
        programs: what each method does, by text.
        left_out: why methods are missing.
        link: the network.
        world_size: number of workers.
        ranks_per_host, cores: workers on a host, and cores that each has.
        accuracy: the least that a recommended method must be: "exact", "rounded" or "lossy".
        predictions: by the order of methods.
        method: the recommended one.
        reason: why.
        notes: what was assumed, and what to beware of.
    """

    made: Mapping[str, Any]
    work: Mapping[str, Any]
    profile: Profile
    programs: Mapping[str, Program]
    left_out: Mapping[str, str]
    link: Link
    world_size: int
    ranks_per_host: int
    cores: float
    accuracy: str
    predictions: tuple[Prediction, ...] = ()
    method: str = DENSE
    reason: str = ""
    notes: tuple[str, ...] = ()

    @property
    def cluster(self) -> Cluster:
        """Where the training is to run."""
        return cluster_of(self.link, self.world_size, ranks_per_host=self.ranks_per_host, cores=self.cores)

    @property
    def slowness(self) -> Slowness:
        """How much longer than recorded the slowest worker computes.

        A step waits for the slowest of N workers. Where they were measured together that is known; else it is
        as if chance made them differ, `P(all below t) = P(one below t)^N`. In the middle
        stands the mean, since many steps take as many means. What a step took by the clock beyond
        its processor time is what else ran on the machine. Where a worker has less than a
        core, the replay slows it by that, so it is taken out here as far as it was in what was measured.
        """
        step_s, cpu_s = np.array(self.profile.step_s), np.array(self.profile.cpu_s)
        usual = float(np.median(step_s) / np.median(cpu_s))
        alone = max(usual * min(self.cores, 1.0), min(usual, 1.0))
        # Workers that share cores slow each other down, but those that wait for the slowest leave it theirs.
        spread = step_s / np.median(step_s) if self.cores >= 1 else cpu_s / np.median(cpu_s)
        workers = self.world_size
        if self.profile.together_s:
            spread, workers = np.array(self.profile.together_s) / np.median(step_s), 1
        low, high = (float(np.quantile(spread, q ** (1 / workers))) for q in LEVELS)
        below = (np.arange(len(spread) + 1) / len(spread)) ** workers
        middle = float(np.sort(spread) @ np.diff(below))
        return Slowness((alone * low, alone * middle, alone * max(high, middle)), alone)

    def timeline(self, text: str, cluster: Cluster | None = None, *, spans: bool = False) -> Timeline:
        """Replay a method's median step."""
        where = self.cluster if cluster is None else cluster
        return replay(self.programs[text], where, slower=self.slowness.at[1], spans=spans)

    def at(self, link: str | Link) -> Plan:
        """Return the plan for the same workers on another link; nothing is measured again.

        Of a link that is described, only the rate and the latency differ from the one that was measured.
        """
        if isinstance(link, Link):
            return predicted(replace(self, link=link))
        other = assumed(link, _hosts(self.world_size, self.ranks_per_host))
        if self.link.measured:
            more_s, times = WAYS * parse_link(link).latency_s, other.bps / self.link.bps
            costs = {
                op: replace(
                    c,
                    hop_s=c.hop_s + more_s,
                    busy_hop_s=c.busy_hop_s + more_s,
                    bytes_per_s=c.bytes_per_s * times,
                )
                for op, c in self.link.costs.items()
            }
            other = replace(other, costs=costs)
        return predicted(replace(self, link=other))

    def as_json(self) -> dict[str, Any]:
        """Return it as JSON-able values with a digest, for `load_plan`."""
        told = {"format": _FORMAT, **asdict(self)}
        told["link"] = self.link.as_json()
        told["programs"] = {text: program.as_json() for text, program in self.programs.items()}
        return {**told, "digest": _digest(told)}

    def save(self, path: str | os.PathLike[str]) -> None:
        """Write it as a JSON file."""
        Path(path).write_text(json.dumps(self.as_json(), indent=1) + "\n")


def default_methods() -> list[str]:
    """Return the names of all methods and schedules that any optimizer can use.

    Example:
        >>> {"dense", "topk", "local", "diloco"} <= set(default_methods())
        True
    """
    return [DENSE, *(name for name in (*for_any_optimizer(), *sorted(schedules())) if name != DENSE)]


def plan(
    trial: Trial,
    *,
    workers: int,
    link: str | Link,
    methods: Sequence[str] | None = None,
    accuracy: str = "lossy",
    ranks_per_host: int = 1,
    cores: float | None = None,
    seconds: float = 20.0,
    bucket_bytes: int = DEFAULT_BUCKET_BYTES,
    name: str = "",
) -> Plan:
    """Predict what a training's steps take under each method, and recommend one.

    Args:
        trial: stays as it is; a copy is trained for some steps.
        workers: number of ranks.
        link: what connects hosts, such as "1gbit,0.2ms", or one that was measured.
        methods: as for `distribute`; None for all that go with any optimizer. Dense is always among them.
        accuracy: what a recommended method may do to gradients: "exact" averages, "rounded" to 16 bits, or
            "lossy" for any.
        ranks_per_host: workers on each host.
        cores: that each worker has; None for those of this process.
        seconds: about how long to rehearse.
        bucket_bytes: as for `distribute`.
        name: of the training, for titles.

    Raises:
        ConfigError: an argument breaks its rule, or the trial cannot be copied.
        StenogradError: even dense training could not be rehearsed.

    Example:
        >>> model = torch.nn.Linear(64, 64)
        >>> optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
        >>> trial = Trial(model, optimizer, [torch.ones(8, 64)], lambda model, x: model(x).mean())
        >>> found = plan(trial, workers=2, link="1mbit", methods=["fp16"], seconds=0.2)
        >>> found.method, found.predictions[0].method
        ('fp16', 'dense')
    """
    check_accuracy(accuracy)
    texts = [method(text).text for text in (methods or default_methods())]
    texts = list(dict.fromkeys([DENSE, *texts]))
    chosen = assumed(link, _hosts(workers, ranks_per_host)) if isinstance(link, str) else link
    own = cores if cores is not None else max(default_cores() / ranks_per_host, 0.1)
    cluster_of(chosen, workers, ranks_per_host=ranks_per_host, cores=own)  # complain before measuring
    rehearsed = rehearse(trial, texts, workers, seconds=seconds, bucket_bytes=bucket_bytes)
    about = {"name": name, "bucket_bytes": bucket_bytes, "parameters": rehearsed.profile.parameters}
    return predicted(_unpredicted(rehearsed, about, chosen, workers, ranks_per_host, own, accuracy))


def default_cores() -> int:
    """Return the number of cores that this process may use."""
    return len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1


def _unpredicted(
    rehearsed: Rehearsed,
    work: Mapping[str, Any],
    link: Link,
    world_size: int,
    ranks_per_host: int,
    cores: float,
    accuracy: str,
) -> Plan:
    if DENSE not in rehearsed.programs:
        raise StenogradError(f"dense training could not be rehearsed: {rehearsed.left_out[DENSE]}")
    made = {"stenograd": __version__, "torch": torch.__version__, "threads": torch.get_num_threads()}
    return Plan(
        made=made,
        work=work,
        profile=rehearsed.profile,
        programs=rehearsed.programs,
        left_out=rehearsed.left_out,
        link=link,
        world_size=world_size,
        ranks_per_host=ranks_per_host,
        cores=cores,
        accuracy=accuracy,
    )


def predicted(bare: Plan) -> Plan:
    """Return a plan with its predictions and advice, by replaying its programs."""
    found = predict(bare.programs, bare.cluster, bare.slowness)
    best, reason = advised(found, bare.accuracy)
    return replace(bare, predictions=found, method=best, reason=reason, notes=_notes(bare, found, best))


def _notes(bare: Plan, found: Sequence[Prediction], best: str) -> tuple[str, ...]:
    notes = []
    if not bare.link.measured:
        notes.append(f"the link of {rate_text(bare.link.bps)} is assumed, not measured: see stenograd link")
    if bare.world_size > VALIDATED:
        notes.append(f"predictions were compared with real runs up to {VALIDATED} workers only")
    by_method = {p.method: p for p in found}
    for text in dict.fromkeys((DENSE, best)):
        p = by_method[text]
        if p.saved_s["latency"] > 0.3 * p.seconds[1]:
            share = p.saved_s["latency"] / p.seconds[1]
            notes.append(
                f"{text}: {share:.0%} of a step is latency; larger buckets or rarer rounds save most"
            )
    notes.append(
        "in real runs the median error of times was 7 % on a quiet machine, 7 to 49 % on a busy one "
        "(docs/planning.md): try the method for some steps, and compare by --check"
    )
    if accuracy_of(best) == "lossy":
        notes.append("what a lossy method does to accuracy is not predicted: see stenograd compare")
    notes += [f"{text} is left out: {why}" for text, why in bare.left_out.items()]
    return tuple(notes)


def with_ranks(found: Plan, trial: Trial, driver: AnyDriver, seconds: float) -> Plan:
    """Return a plan in which computing takes as long as on the slowest of some ranks; all of them call it.

    Args:
        found: this rank's plan.
        trial: what it is for; stays as it is.
        driver: the way to the other ranks.
        seconds: about how long ranks may train together to see how far they are apart.
    """
    step_s = [float(text) for text in everyone(driver, repr(found.profile.floor_s))]
    slow = max(step_s) / step_s[driver.rank]
    profile = replace(
        found.profile,
        step_s=tuple(slow * s for s in found.profile.step_s),
        together_s=together(trial, driver, seconds),
    )
    return predicted(replace(found, profile=profile))


def _hosts(world_size: int, ranks_per_host: int) -> list[int]:
    return [rank // ranks_per_host for rank in range(max(world_size, 1))]


def _digest(told: Mapping[str, Any]) -> str:
    return hashlib.sha256(json.dumps(told, sort_keys=True).encode()).hexdigest()


def load_plan(path: str | os.PathLike[str]) -> Plan:
    """Read what `Plan.save` or `stenograd plan --out` wrote.

    Raises:
        DataError: there is no such file, or it was changed, or it is of another kind.
    """
    try:
        told = json.loads(Path(path).read_text())
        digest = told.pop("digest")
        if told["format"] != _FORMAT or digest != _digest(told):
            raise ValueError("it was changed, or is of another version")
        del told["format"]
        told["link"] = from_json(told["link"])
        told["programs"] = {text: Program.from_json(p) for text, p in told["programs"].items()}
        profile = told["profile"]
        seconds = {key: tuple(profile[key]) for key in ("step_s", "cpu_s", "together_s")}
        told["profile"] = Profile(parameters=profile["parameters"], **seconds)
        told["predictions"] = tuple(
            Prediction(**{**p, "seconds": tuple(p["seconds"]), "pays": tuple(p["pays"])})
            for p in told["predictions"]
        )
        return Plan(**{**told, "notes": tuple(told["notes"])})
    except (OSError, ValueError, KeyError, TypeError) as cause:
        raise DataError(
            f"{path}: cannot be read as a plan ({first_line(cause)}): give a file of stenograd plan --out"
        ) from cause
