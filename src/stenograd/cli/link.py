"""`stenograd link`: what the network between the ranks gives."""

from __future__ import annotations

from stenograd.checkpoint.files import write_json
from stenograd.cli.folder import check_file
from stenograd.cli.options import LinkOptions
from stenograd.cli.setup import check_options, in_ranks
from stenograd.cli.table import Display, counted, megabytes, note, say, show, show_json
from stenograd.errors import bad_value
from stenograd.planning.link import Link, check_seconds, measure_link, rate_text, time_text
from stenograd.wire.agreement import agree
from stenograd.wire.driver import Driver

__all__ = ["run"]


def run(asked: LinkOptions) -> int:
    """Measure on all ranks, and let rank 0 print and write."""
    out = asked.out

    def prepare(world_size: int) -> int:
        check_options(asked)
        check_seconds(asked.seconds)
        if out is not None:
            check_file(out)
        if world_size < 2:
            raise bad_value(
                "--workers", "must be at least 2 to measure a link", world_size, "or start it under torchrun"
            )
        return world_size

    def body(_: int, driver: Driver) -> int:
        with Display(driver.rank).bar("measuring the link"):
            found = measure_link(Driver.own(timeout_s=asked.timeout_s), asked.seconds)
        if out is not None:
            agree(driver, lambda: write_json(out, found.as_json()) if driver.rank == 0 else None)
        if driver.rank == 0:
            show_json(found.as_json()) if asked.as_json else _show(found)
            if out is not None:
                note(f"wrote {out}", asked.as_json)
        return 0

    return in_ranks(asked, prepare, body)


def _show(link: Link) -> None:
    ranks, hosts = len(link.hosts), max(link.hosts) + 1
    rows = [
        (host, link.hosts.count(host), rate_text(alone), rate_text(together))
        for host, (alone, together) in enumerate(zip(link.alone_bps, link.together_bps, strict=True))
    ]
    title = f"Link of {ranks} workers on {counted(hosts, 'host')}, packet headers counted"
    show(("host", "workers", "sends alone", "while all send"), rows, title)
    say(f"latency: {time_text(link.latency_s)} one way, half a ping; {time_text(link.hop_s)} in a collective")
    say(f"measured in {link.seconds:.1f} s, {megabytes(link.sent_bytes)} sent by each worker")
