"""Extrapolates a plan to other numbers of workers and hosts: arithmetic on measured parts."""

from __future__ import annotations

import math
import re
from collections.abc import Sequence
from dataclasses import dataclass, replace

from stenograd.data.requests import Op
from stenograd.errors import bad_value, check_count
from stenograd.planning.advice import DENSE
from stenograd.planning.cluster import Cluster, cluster_of
from stenograd.planning.link import WAYS
from stenograd.planning.plan import Plan
from stenograd.planning.program import Collective, Program
from stenograd.planning.replay import replay
from stenograd.planning.units import LinkText, parse_link

__all__ = [
    "MERGED",
    "TWO_LEVELS",
    "Place",
    "Point",
    "at_size",
    "parse_place",
    "parse_site",
    "parse_slow",
    "scaled",
    "sizes_of",
]

MERGED, TWO_LEVELS = "dense, one bucket", "dense, two levels"
_MOST = 1 << 20


@dataclass(frozen=True, kw_only=True)
class Place:
    """Where workers are to run.

    Attributes:
        ranks_per_host: workers on each host.
        inside: the link between workers of a host; None for what is usual.
        between: the link between hosts; None for the plan's.
        slow: the probability that a worker is slow in a step, and by which factor.
        sites: places that the hosts are dealt out to, in equal parts.
        site: the link of each, which its hosts share.
    """

    ranks_per_host: int = 1
    inside: LinkText | None = None
    between: str | None = None
    slow: tuple[float, float] = (0.0, 1.0)
    sites: int = 1
    site: LinkText | None = None


@dataclass(frozen=True, slots=True)
class Point:
    """One number of workers.

    Args:
        workers: the number.
        seconds: of a step, by method.
        latency: share of a step under dense training that is latency.
    """

    workers: int
    seconds: dict[str, float]
    latency: float


def sizes_of(text: str) -> list[int]:
    """Return numbers of workers from `8`, `2,4,6` or `2..1024`, which doubles.

    Example:
        >>> sizes_of("2..16"), sizes_of("3,5")
        ([2, 4, 8, 16], [3, 5])
    """
    span = re.fullmatch(r"(\d+)\.\.(\d+)", text)
    advice = "write 2..1024, or 8,16"
    if span is None:
        if not re.fullmatch(r"\d+(,\d+)*", text):
            raise bad_value("--workers", "must be numbers, or a span", text, advice)
        found = [int(part) for part in text.split(",")]
    else:
        low, high = int(span[1]), int(span[2])
        if not 1 <= low <= high:
            raise bad_value("--workers", "must be a span from 1 upwards", text, advice)
        found = [low << i for i in range((high // low).bit_length())]
    for size in found:
        check_count("--workers", size, advice, most=_MOST)
    return found


def parse_slow(text: str) -> tuple[float, float]:
    """Return probability and factor of slow workers from text.

    Example:
        >>> parse_slow("1%:2x")
        (0.01, 2.0)
    """
    match = re.fullmatch(r"(\d+(?:\.\d+)?)%:(\d+(?:\.\d+)?)x", text)
    if match is None or float(match[1]) > 100 or float(match[2]) < 1:
        raise bad_value("--slow", "must be PERCENT%:FACTORx with a factor from 1", text, "write 1%:2x")
    return float(match[1]) / 100, float(match[2])


def at_size(program: Program, world_size: int) -> Program:
    """Return a program for another number of ranks.

    Collectives keep their bytes per rank. A gather after an all-to-all brings the sums that ranks own, a
    share of the whole each; of any other gather, decoding takes in proportion to the ranks. What a method
    does otherwise at another number of ranks, such as top-k, which shares the work from five ranks on, is
    not known.
    """
    times = world_size / program.world_size
    lanes = []
    for lane in program.lanes:
        events, owned, grows = [], 0, False
        for event in lane:
            about, codec = event.collective, event.codec_s
            if about is not None and about.size == program.world_size:
                about = replace(about, size=world_size)
                owned += about.op == Op.SCATTER.value
                if about.op == Op.GATHER.value:
                    grows = owned == 0
                    if owned:
                        owned -= 1
                        about = replace(about, nbytes=math.ceil(about.nbytes / times))
            if event.kind == "decoded" and grows:
                codec *= times
            events.append(replace(event, codec_s=codec, collective=about))
        lanes.append(tuple(events))
    return replace(program, world_size=world_size, lanes=tuple(lanes))


def scaled(
    plan: Plan, sizes: Sequence[int], place: Place, methods: Sequence[str] | None = None
) -> list[Point]:
    """Replay a plan's programs at other numbers of workers.

    Besides the plan's methods there are two ways to send dense gradients that wait until all are there: in
    one bucket, and in two levels, where hosts add up inside before they exchange a share of each worker.

    Args:
        plan: with a program for each method.
        sizes: numbers of workers.
        place: hosts and links.
        methods: of the plan; None for all.

    Raises:
        ConfigError: a size is no multiple of the workers per host, or a method is not in the plan.
    """
    texts = list(plan.programs) if methods is None else list(dict.fromkeys([DENSE, *methods]))
    for text in texts:
        if text not in plan.programs:
            known = ", ".join(plan.programs)
            raise bad_value("--methods", f"must be of the plan's: {known}", text, "plan with it first")
    return [_point(plan, size, place, texts) for size in sizes]


def _point(plan: Plan, size: int, place: Place, texts: Sequence[str]) -> Point:
    base = plan if place.between is None else plan.at(place.between)
    base = replace(base, world_size=size)
    cluster = _cluster(base, size, place)
    usual, share = base.slowness.at[1], 1 - (1 - place.slow[0]) ** size
    seconds = {}
    for text in texts:
        program = at_size(plan.programs[text], size)
        times = [replay(program, cluster, slower=usual * f).step_s for f in (1.0, place.slow[1])]
        seconds[text] = (1 - share) * times[0] + share * times[1]
    dense = at_size(plan.programs[DENSE], size)
    free = replay(dense, cluster.without_latency(), slower=usual).step_s
    latency = 1 - free / replay(dense, cluster, slower=usual).step_s
    compute = sum(e.compute_s + e.codec_s for e in dense.lanes[0]) * usual
    whole = sum(c.nbytes for c in dense.moved)
    seconds[MERGED] = compute + _alone(cluster, "all-reduce", whole, size)
    if cluster.hosts > 1 and cluster.ranks_per_host > 1:
        inside, hosts = replace(cluster, hosts=1, sites=1), replace(cluster, ranks_per_host=1)
        own = cluster.ranks_per_host  # all workers of a host exchange their shares at once, over one link
        seconds[TWO_LEVELS] = (
            compute
            + _alone(inside, "all-reduce", whole, own)
            + _alone(hosts, "all-reduce", whole, cluster.hosts)
        )
    return Point(size, seconds, latency)


def _cluster(plan: Plan, size: int, place: Place) -> Cluster:
    per_host = math.gcd(size, place.ranks_per_host)
    cluster = cluster_of(plan.link, size, ranks_per_host=per_host, cores=plan.cores)
    if place.site is not None:
        if cluster.hosts % place.sites:
            raise bad_value(
                "--site",
                f"must deal out the {cluster.hosts} hosts of {size} workers evenly",
                place.sites,
                "give --workers that fit",
            )
        rate = min(place.site.up_bps, place.site.down_bps)
        cluster = replace(
            cluster,
            sites=place.sites,
            site_bps=rate,
            site_hop_s=WAYS * place.site.latency_s if place.sites > 1 else 0.0,
        )
    if place.inside is None:
        return cluster
    rate = min(place.inside.up_bps, place.inside.down_bps)
    return replace(
        cluster, inside_bps=rate, inside_hop_s=cluster.inside_hop_s + WAYS * place.inside.latency_s
    )


def _alone(cluster: Cluster, op: str, nbytes: int, size: int) -> float:
    taken = cluster.transfer(Collective(op, nbytes, 4, 0, size))
    return taken.latency_s + taken.wire_s


def parse_site(text: str) -> tuple[int, LinkText]:
    """Return the number of sites, and the link of each, from text.

    Example:
        >>> parse_site("2:100mbit,20ms")[1].latency_s
        0.02
    """
    count, colon, link = text.partition(":")
    if not colon or not count.isdecimal() or int(count) < 1:
        raise bad_value("--site", "must be SITES:LINK", text, "write 2:100mbit,20ms")
    return int(count), parse_link(link)


def parse_place(
    hosts: str | None,
    inside: str | None,
    between: str | None,
    slow: str | None,
    site: str | None = None,
) -> tuple[int | None, Place]:
    """Return the most workers, if hosts are given as `128x8`, and the place.

    Example:
        >>> parse_place("128x8", None, None, None)[0]
        1024
    """
    match = re.fullmatch(r"(\d+)x(\d+)", hosts) if hosts is not None else None
    if hosts is not None and (match is None or not int(match[1]) or not int(match[2])):
        raise bad_value("--hosts", "must be HOSTSxWORKERS", hosts, "write 128x8")
    if between is not None:
        parse_link(between)
    sites, trunk = (1, None) if site is None else parse_site(site)
    place = Place(
        sites=sites,
        site=trunk,
        ranks_per_host=int(match[2]) if match else 1,
        inside=None if inside is None else parse_link(inside),
        between=between,
        slow=(0.0, 1.0) if slow is None else parse_slow(slow),
    )
    return (int(match[1]) * int(match[2]) if match else None), place
