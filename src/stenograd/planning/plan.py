"""What a training's steps will take under each method, why, and which method to use."""

from __future__ import annotations

import math
import os
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import asdict, dataclass, field, replace
from pathlib import Path
from typing import Any

import numpy as np
import torch

from stenograd.catalog.method import MethodLike, for_any_optimizer, method
from stenograd.catalog.registry import schedules
from stenograd.checkpoint.files import finite, read_json, write_json
from stenograd.compressors.randomk import RandomK
from stenograd.errors import ConfigError, DataError, StenogradError, bad_value
from stenograd.exchange.buckets import DEFAULT_BUCKET_BYTES
from stenograd.launch.local_workers import usable_cores
from stenograd.planning.advice import (
    ACCURACIES,
    DENSE,
    FRAGMENTS,
    Prediction,
    accuracy_of,
    advised,
    best_keys,
    open_keys,
    predict,
    variants,
    with_keys,
)
from stenograd.planning.formula import Network, network_of
from stenograd.planning.link import Link, assumed, from_json, rate_text
from stenograd.planning.program import Program, at_size
from stenograd.planning.rehearsal import Profile, rehearse, together
from stenograd.planning.trial import Trial
from stenograd.version import __version__
from stenograd.wire.agreement import everyone
from stenograd.wire.drivers import AnyDriver

__all__ = ["RECORDED", "VALIDATED", "Plan", "default_methods", "load_plan", "plan", "predicted", "with_ranks"]

_FORMAT = 3  # of as_json(); a reader refuses others
VALIDATED = 8  # workers, see docs/planning.md
RECORDED = 64  # workers: a gather among them takes their messages' memory; beyond it is arithmetic
_TWO_LEVELS = "two levels cannot be worked out on paper: plan for that number of workers, up to 64"
_FIRST = 0.8  # of the time: methods as they were asked for; the rest is for the values that were chosen


@dataclass(frozen=True, kw_only=True)
class Plan:
    """Everything that a prediction needs, and the predictions; made by `stenograd.plan`.

    Attributes:
        made: versions and machine.
        work: the training: name, parameters, bucket size.
        profile: of a step without an exchange.
        programs: what each method does, by text.
        families: for each method with keys that were not written, these keys, and which programs were
            recorded for it.
        left_out: why methods are missing.
        link: the network.
        world_size: number of workers.
        ranks_per_host, cores: workers on a host, and cores that each has.
        accuracy: the least that a recommended method must be: "exact", "rounded" or "lossy".
        predictions: by the order of methods.
        chosen: by method, the same with the values of its open keys that suit the link.
        method: the recommended one.
        reason: why.
        notes: what was assumed, and what to beware of.
    """

    made: Mapping[str, Any]
    work: Mapping[str, Any]
    profile: Profile
    programs: Mapping[str, Program]
    families: Mapping[str, tuple[Sequence[str], Sequence[str]]]
    left_out: Mapping[str, str]
    link: Link
    world_size: int
    ranks_per_host: int
    cores: float
    accuracy: str
    predictions: tuple[Prediction, ...] = ()
    chosen: Mapping[str, str] = field(default_factory=dict)
    method: str = DENSE
    reason: str = ""
    notes: tuple[str, ...] = ()

    @property
    def network(self) -> Network:
        """Where the training is to run."""
        return network_of(self.link, self.world_size, ranks_per_host=self.ranks_per_host, cores=self.cores)

    @property
    def slower(self) -> float:
        """How many times as long as its processor time the slowest worker computes, in the mean.

        A step waits for the slowest of N workers. Where they were measured together that is known; else it is
        as if chance made them differ, `P(all below t) = P(one below t)^N`. What a step took by the clock
        beyond its processor time is what else ran on the machine.
        """
        usual = self.profile.floor_s / self.profile.floor_cpu_s
        spread, workers = np.array(self.profile.step_s) / self.profile.floor_s, self.world_size
        if self.profile.together_s:
            spread, workers = np.array(self.profile.together_s) / self.profile.floor_s, 1
        below = (np.arange(len(spread) + 1) / len(spread)) ** workers
        # The product is the slowest's mean: each step, times the chance that the slowest takes as long.
        return max(usual, 1 / min(self.cores, 1.0)) * float(np.sort(spread) @ np.diff(below))

    def at(self, link: str | Link) -> Plan:
        """Return the plan for the same workers on another link; nothing is measured again."""
        if isinstance(link, str):
            link = assumed(link, _hosts(self.world_size, self.ranks_per_host))
        return predicted(replace(self, link=link))

    def sized(self, workers: int) -> Plan:
        """Return the plan for another number of workers, on paper: by the same formula, nothing is measured.

        Raises:
            ConfigError: it is no multiple of the workers on a host, or this plan is for a single worker.
        """
        if workers == self.world_size:
            return self
        if self.world_size == 1:
            rule = "must be 1 as in this plan, since a single worker sends nothing"
            raise bad_value("workers", rule, workers, "plan for 2 or more")
        if workers % self.ranks_per_host:
            raise ConfigError(
                f"workers must be a multiple of the {self.ranks_per_host} on each host, got {workers}: "
                f"use {workers // self.ranks_per_host * self.ranks_per_host or self.ranks_per_host}"
            )
        # Whether a group is that of a node, or grows with the ranks, is not recorded.
        two = [text for text in self.programs if getattr(method(text).schedule, "inside", "")]
        programs = {t: at_size(program, workers) for t, program in self.programs.items() if t not in two}
        profile = replace(self.profile, together_s=())  # of how many others a step waits for was not measured
        return predicted(
            replace(
                self,
                world_size=workers,
                programs=programs,
                families={text: family for text, family in self.families.items() if text in programs},
                left_out={**self.left_out, **dict.fromkeys(two, _TWO_LEVELS)},
                profile=profile,
            )
        )

    def as_json(self) -> dict[str, Any]:
        """Return it as JSON-able values, for `load_plan`; what is not finite becomes None."""
        received = {"format": _FORMAT, **asdict(self)}
        received["link"] = self.link.as_json()
        return dict(finite(received))

    def save(self, path: str | os.PathLike[str]) -> None:
        """Write it as a JSON file, which is whole or absent whenever the machine stops."""
        write_json(Path(path), self.as_json())


def default_methods() -> list[str]:
    """Return the names of all methods and schedules that any optimizer can use, as it is.

    Random sparsification wants another learning rate (docs/methods.md), so it is advised to nobody unasked.

    Example:
        >>> found = default_methods()
        >>> {"dense", "topk", "local", "diloco"} <= {*found}, "randomk" in found
        (True, False)
    """
    named = {name: method(name).compressor for name in for_any_optimizer() if name != DENSE}
    fit = [name for name, of in named.items() if not isinstance(getattr(of, "inner", of), RandomK)]
    return [DENSE, *fit, *sorted(schedules())]


def plan(
    trial: Trial,
    *,
    workers: int,
    link: str | Link,
    methods: Sequence[MethodLike] | None = None,
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
        workers: number of ranks; beyond 64, methods are rehearsed with 64 and the rest is arithmetic.
        link: what connects hosts, such as "1gbit,0.2ms", or one that was measured.
        methods: as for `distribute`; None for all that go with any optimizer. Dense is always among them.
            Values of `every` and `ratio` (and of `fragments`, with a delay) that are not written are chosen
            for the link: those that send most among those that are about as fast as the fastest.
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
    if accuracy not in ACCURACIES:
        raise bad_value("accuracy", f"must be one of {', '.join(ACCURACIES)}", accuracy, "use lossy")
    families: dict[str, tuple[list[str], list[str]]] = {}
    for one in methods or default_methods():
        # An object says all its values; only a text leaves some open.
        families[method(one).text] = (open_keys(one), _recorded(one)) if isinstance(one, str) else ([], [])
    texts = dict.fromkeys([DENSE, *families, *(t for _, more in families.values() for t in more)])
    chosen = assumed(link, _hosts(workers, ranks_per_host)) if isinstance(link, str) else link
    own = cores if cores is not None else max(usable_cores() / ranks_per_host, 0.1)
    network_of(chosen, workers, ranks_per_host=ranks_per_host, cores=own)  # complain before measuring
    size = min(workers, max(RECORDED // ranks_per_host, 1) * ranks_per_host)
    found = rehearse(trial, [*texts], size, seconds=_FIRST * seconds, bucket_bytes=bucket_bytes)
    if DENSE not in found.programs:
        raise StenogradError(f"dense training could not be rehearsed: {found.left_out[DENSE]}")
    bare = Plan(
        made={"stenograd": __version__, "torch": torch.__version__, "threads": torch.get_num_threads()},
        work={"name": name, "bucket_bytes": bucket_bytes, "parameters": found.profile.parameters},
        profile=found.profile,
        programs=found.programs,
        families={text: family for text, family in families.items() if text in found.programs},
        left_out=found.left_out,
        link=chosen,
        world_size=size,
        ranks_per_host=ranks_per_host,
        cores=own,
        accuracy=accuracy,
    )
    first = predicted(bare).sized(workers)
    ratios = [t for old, t in first.chosen.items() if t not in bare.programs and "ratio" in families[old][0]]
    if not ratios:
        return first
    # The bytes of another ratio are known to rounding only until it was recorded.
    again = rehearse(trial, ratios, size, seconds=(1 - _FIRST) * seconds, bucket_bytes=bucket_bytes)
    # The machine's speed may have drifted since: these are brought to the first rehearsal's.
    times = found.profile.floor_cpu_s / again.profile.floor_cpu_s
    more = {text: program.scaled(times) for text, program in again.programs.items()}
    return predicted(replace(bare, programs={**found.programs, **more})).sized(workers)


def _recorded(text: str) -> list[str]:
    """Return what is recorded besides a method: numbers of fragments, of which arithmetic does not tell."""
    if "fragments" not in open_keys(text):
        return []
    how: Any = method(text)
    every, delay, found = how.schedule.every, how.schedule.delay, []
    for count in FRAGMENTS:
        least = -(-max(every, count * (delay + 1)) // count) * count
        if least == every or "every" in open_keys(text):
            found.append(with_keys(how, every=least, fragments=count).text)
    return found


def predicted(bare: Plan) -> Plan:
    """Return a plan with the values that its open keys get on its link, predictions and advice."""
    network, floor_s, slower = bare.network, bare.profile.floor_cpu_s, bare.slower
    shown, chosen = {DENSE: bare.programs[DENSE]}, {}
    for text, (keys, more) in bare.families.items():
        shown[text] = bare.programs[text]
        recorded = [bare.programs[t] for t in dict.fromkeys([text, *more]) if t in bare.programs]
        best = best_keys([v for p in recorded for v in variants(p, keys)], network, floor_s, slower)
        if best.method != text:
            chosen[text] = best.method
            shown[best.method] = bare.programs.get(best.method, best)
    found = predict(shown, network, floor_s, slower)
    # Where values were chosen for a method, its defaults are shown, but not recommended.
    answer, reason = advised([p for p in found if p.method not in chosen], bare.accuracy)
    notes = _notes(bare, found, answer, answer in chosen.values())
    return replace(bare, predictions=tuple(found), chosen=chosen, method=answer, reason=reason, notes=notes)


def _notes(bare: Plan, found: Iterable[Prediction], best: str, chosen: bool) -> tuple[str, ...]:
    notes = []
    if chosen:
        notes.append(
            f"{best}: values that you did not write are those that send most among those within 3 % of the "
            "fastest on this link"
        )
    if not bare.link.measured:
        notes.append(f"the link of {rate_text(bare.link.bps)} is assumed, not measured: see stenograd link")
    if bare.world_size > VALIDATED:
        notes.append(f"predictions were compared with real runs up to {VALIDATED} workers only")
    by_method = {p.method: p for p in found}
    for text in dict.fromkeys((DENSE, best)):
        share = by_method[text].parts_s["latency"] / by_method[text].seconds[1]
        if share > 0.3:
            notes.append(
                f"{text}: {share:.0%} of a step is latency; larger buckets or rarer rounds save most"
            )
    notes.append(
        "ranges are by the errors of such predictions on a quiet machine, and a busy one is worse "
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


def load_plan(path: str | os.PathLike[str]) -> Plan:
    """Read what `Plan.save` or `stenograd plan --out` wrote.

    Raises:
        DataError: there is no such file, or it is of another kind.
    """
    return read_json(
        Path(path), _from_json, DataError, "cannot be read as a plan", "give a file of stenograd plan --out"
    )


def _from_json(received: dict[str, Any]) -> Plan:
    if received.pop("format") != _FORMAT:
        raise ValueError("it is of another version")
    received["link"] = from_json(received["link"])
    received["programs"] = {text: Program.from_json(p) for text, p in received["programs"].items()}
    profile = received["profile"]
    seconds = {key: tuple(profile[key]) for key in ("step_s", "cpu_s", "together_s")}
    received["profile"] = Profile(parameters=profile["parameters"], **seconds)
    received["predictions"] = tuple(_prediction(p) for p in received["predictions"])
    return Plan(**{**received, "notes": tuple(received["notes"])})


def _prediction(received: Mapping[str, Any]) -> Prediction:
    below = math.inf if received["pays_below_bps"] is None else received["pays_below_bps"]
    return Prediction(**{**received, "seconds": tuple(received["seconds"]), "pays_below_bps": below})
