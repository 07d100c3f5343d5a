"""What a benchmark leaves behind: the machine described, JSON, a Markdown table, pictures."""

from __future__ import annotations

import json
import os
import platform
import shlex
import statistics
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass
from importlib.metadata import version
from pathlib import Path
from typing import Any

from stenograd.version import __version__

__all__ = ["Row", "document", "machine", "rows", "step_tables", "table", "write"]


@dataclass(frozen=True)
class Row:
    """One rival on one link.

    Attributes:
        rival: its name.
        ms: median over the turns of the milliseconds of a step.
        ddp_ratio: median over the rounds of its time divided by DDP's in the same round.
        floor_ratio: the same for training without communication.
        counted_bytes: bytes that a rank sent a step, by Stenograd's count.
        interface_bytes: bytes that the host's interface sent a step.
        refused: why there is nothing else.
    """

    rival: str
    ms: float | None = None
    ddp_ratio: float | None = None
    floor_ratio: float | None = None
    counted_bytes: float | None = None
    interface_bytes: float | None = None
    refused: str | None = None


def rows(told: Mapping[str, Any], names: Sequence[str], base: str = "ddp", floor: str = "none") -> list[Row]:
    """Summarise what turns.py wrote about one model on one link, in the order of the names."""
    logs, refused = told["rivals"], told["refused"]
    made = []
    for name in names:
        if name in refused:
            made.append(Row(name, refused=refused[name]))
            continue
        counted = [value for value in logs[name]["counted_bytes"] if value is not None]
        made.append(
            Row(
                rival=name,
                ms=statistics.median(logs[name]["turns_ms"]),
                ddp_ratio=_ratio(logs, name, base),
                floor_ratio=_ratio(logs, name, floor),
                counted_bytes=statistics.median(counted) if counted else None,
                interface_bytes=statistics.median(logs[name]["interface_bytes"]),
            )
        )
    return made


def _ratio(logs: Mapping[str, Any], name: str, base: str) -> float | None:
    """Compare within each round: what slows the machine for a while slows both."""
    if base not in logs:
        return None
    pairs = zip(logs[name]["turns_ms"], logs[base]["turns_ms"], strict=True)
    return float(statistics.median(own / other for own, other in pairs))


def machine() -> dict[str, Any]:
    """Describe this machine and the software.

    Example:
        >>> sorted(machine())
        ['cores', 'cpu', 'linux', 'python', 'ram_gb', 'stenograd', 'torch']
    """
    return {
        "cpu": _cpu(),
        "cores": len(os.sched_getaffinity(0)),
        "ram_gb": round(os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES") / 1e9, 1),
        "linux": platform.release(),
        "python": platform.python_version(),
        "torch": version("torch"),
        "stenograd": __version__,
    }


def _cpu() -> str:
    lines = Path("/proc/cpuinfo").read_text().splitlines()
    models = [line.partition(":")[2].strip() for line in lines if line.startswith("model name")]
    return models[0] if models else platform.machine()


def table(head: Sequence[str], lines: Sequence[Sequence[str]]) -> str:
    """Format a Markdown table, the first column to the left and the others to the right.

    Example:
        >>> print(table(["rival", "ms"], [["ddp", "1.5"]]))
        | rival | ms |
        |---|---:|
        | ddp | 1.5 |
    """
    rule = "|---|" + "---:|" * (len(head) - 1)
    return "\n".join([_line(head), rule, *map(_line, lines)])


def _line(cells: Sequence[str]) -> str:
    return f"| {' | '.join(cells)} |"


def step_tables(runs: Sequence[Mapping[str, Any]]) -> str:
    """Format one table a model: a line a rival, and for every link ms, ratio to DDP, ratio to the floor."""
    parts = []
    for model in dict.fromkeys(run["model"] for run in runs):
        mine = [run for run in runs if run["model"] == model]
        heads = [f"{run['rate']}: {what}" for run in mine for what in ("ms", "x DDP", "x floor")]
        by_run = [{row.rival: row for row in run["rows"]} for run in mine]
        lines = [_cells([rows[name] for rows in by_run]) for name in by_run[0]]
        cores = mine[0].get("cores_per_host", 0)
        own = f" of {cores} core{'s' * (cores > 1)}" if cores else ""
        title = f"### {model}, {mine[0]['parameters'] / 1e6:.2f} M parameters, {mine[0]['hosts']} hosts{own}"
        head = ["rival", *heads, "kB/step counted", "kB/step interface"]
        parts += [title, table(head, lines)]
        parts += [f"{row.rival}: {row.refused}" for row in mine[0]["rows"] if row.refused]
    return "\n\n".join(parts)


def _cells(rows: Sequence[Row]) -> list[str]:
    """Format one rival on all links.

    Of its bytes the largest are told: an unshaped link takes bundles of packets, which count as one header.
    """
    cells = [rows[0].rival]
    for row in rows:
        if row.refused:
            cells += ["not supported", "", ""]
        else:
            cells += [number(row.ms), number(row.ddp_ratio, 3), number(row.floor_ratio, 3)]
    counted = [row.counted_bytes for row in rows if row.counted_bytes is not None]
    interface = [row.interface_bytes for row in rows if row.interface_bytes is not None]
    return [*cells, *(number(max(0.0, *seen) / 1e3) if seen else "" for seen in (counted, interface))]


def number(value: float | None, digits: int = 1) -> str:
    """Format a number, or nothing where there is none.

    Example:
        >>> number(1234.56), number(0.98765, 3), number(None)
        ('1,234.6', '0.988', '')
    """
    return "" if value is None else f"{value:,.{digits}f}"


def document(title: str, date: str, argv: Sequence[str], body: str) -> str:
    """Put a head that says what was measured where, and by which command, in front of the tables."""
    about = machine()
    where = f"{about['cpu']}, {about['cores']} cores, {about['ram_gb']} GB; Linux {about['linux']}"
    software = f"Python {about['python']}, PyTorch {about['torch']}, Stenograd {about['stenograd']}"
    return f"# {title}\n\n{date}: {where}; {software}.\n\n```\n{shown_command(argv)}\n```\n\n{body}\n"


def shown_command(argv: Sequence[str]) -> str:
    """Return the command without the places of its files, which mean nothing elsewhere.

    Example:
        >>> shown_command(["benchmarks/bench.py", "--quick", "--data", "/home/me/mnist", "--out", "/tmp"])
        'python benchmarks/bench.py --quick --data DIR'
    """
    words = ["python", f"benchmarks/{Path(argv[0]).name}"]
    rest = iter(argv[1:])
    for word in rest:
        if word in ("--out", "--name", "--date"):
            next(rest, None)
        elif word == "--data":
            next(rest, None)
            words += ["--data", "DIR"]
        else:
            words.append(word)
    return shlex.join(words)


def write(stem: Path, date: str, settings: Mapping[str, Any], results: Any, text: str) -> None:
    """Write stem.json and stem.md; the folder is made if there is none."""
    stem.parent.mkdir(parents=True, exist_ok=True)
    told = {"date": date, "machine": machine(), "settings": dict(settings), "results": results}
    stem.with_suffix(".json").write_text(json.dumps(told, indent=1, default=_plain) + "\n")
    stem.with_suffix(".md").write_text(text)


def _plain(value: Any) -> Any:
    return asdict(value) if isinstance(value, Row) else str(value)
