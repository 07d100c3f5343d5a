"""What every benchmark needs: ranks somewhere, turns in random order, and what it leaves behind."""

from __future__ import annotations

import argparse
import datetime
import importlib
import json
import os
import pickle
import platform
import random
import shlex
import statistics
import sys
import tempfile
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from importlib.metadata import version
from pathlib import Path
from typing import Any, TypeVar

import links

from stenograd.emulate.hosts import Hosts, HostsError, sent_bytes
from stenograd.testing.pool import RankPool
from stenograd.version import __version__

__all__ = [
    "MEASURED_LINKS",
    "RESULTS",
    "Place",
    "command_line",
    "document",
    "machine",
    "main",
    "number",
    "publish",
    "settled_bytes",
    "slowest",
    "table",
    "turns",
    "write",
]

HERE = Path(__file__).resolve().parent
RESULTS = HERE / "results"
_QUIET = {"TORCH_CPP_LOG_LEVEL": "ERROR"}  # else torch warns that a host on 10.77.0.x has no name
_SETTLE_S = 0.05  # until the last packets and acknowledgements of a turn are counted
_PLACES = ("out", "name", "date", "data")  # options that say where things are, and not what is measured
_T = TypeVar("_T")
MEASURED_LINKS: list[dict[str, Any]] = []  # what `links.gate` found before each run of this process on hosts


@dataclass(frozen=True)
class Place:
    """Where ranks run.

    Attributes:
        hosts: number of emulated hosts (as root, with iproute2); 0 for plain processes of this machine.
        ranks: on each host, or in all without hosts.
        rate: of each host's link, such as "100mbit".
        delay: of each packet, such as "5ms".
        cores_per_host: cores that a host has for itself; 0 where all share all.
        gated: whether the link must be as asked before anything runs; not where only bytes are counted.
    """

    hosts: int = 0
    ranks: int = 1
    rate: str = "none"
    delay: str = "none"
    cores_per_host: int = 0
    gated: bool = True

    def run(
        self,
        function: Callable[..., _T],
        *args: Any,
        timeout_s: float = 600.0,
        env: Mapping[str, str] | None = None,
    ) -> list[_T]:
        """Call `function(rank, *args)` on every rank, in a process group of all; return what each returned.

        What rank 0 prints is shown at once. Each rank is a fresh process that computes with one thread.

        Args:
            function: defined at the top of a module of this folder.
            args: of types that a module other than the function's defines.
            timeout_s: seconds after which all are ended.
            env: variables for ranks on hosts.

        Raises:
            HostsError: hosts cannot be emulated here, their link is not as asked, or a rank failed.
            RanksFailed: a rank of this machine failed.
        """
        if not self.hosts:
            with RankPool(self.ranks) as pool:
                return pool.run(self.ranks, function, *args, timeout_s=timeout_s)
        module = sys.modules[function.__module__].__file__
        hosts = Hosts(self.hosts, self.rate, delay=self.delay, cores_per_host=self.cores_per_host)
        with tempfile.TemporaryDirectory() as name, hosts:
            if self.gated:
                MEASURED_LINKS.append(links.gate(hosts))
            folder = Path(name)
            job = Path(module or "").stem, function.__name__, args
            (folder / "job").write_bytes(pickle.dumps(job))
            command = [sys.executable, __file__, name]
            hosts.run(command, self.ranks, env={**_QUIET, **(env or {})}, timeout_s=timeout_s, echo=True)
            told = [folder / str(rank) for rank in range(self.hosts * self.ranks)]
            return [pickle.loads(file.read_bytes()) for file in told]


def _be_a_rank(folder: Path) -> None:
    """Do what `Place.run` of another process asks for."""
    import torch

    import stenograd

    module, name, args = pickle.loads((folder / "job").read_bytes())
    torch.set_num_threads(1)
    rank = stenograd.init(timeout_s=120).rank
    found = getattr(importlib.import_module(module), name)(rank, *args)
    (folder / str(rank)).write_bytes(pickle.dumps(found))


def turns(names: Sequence[_T], rounds: int) -> Iterator[_T]:
    """Yield each name once a round, at random but always the same: nobody stays the same one's neighbour.

    Example:
        >>> order = list(turns("abc", 2))
        >>> sorted(order[:3]), sorted(order[3:])
        (['a', 'b', 'c'], ['a', 'b', 'c'])
    """
    generator = random.Random(0)  # all ranks must agree
    for _ in range(rounds):
        yield from generator.sample(list(names), len(names))


def slowest(value: float) -> float:
    """Return the largest of all ranks' values, on every rank."""
    import torch
    import torch.distributed as dist

    largest = torch.tensor(value, dtype=torch.float64)
    dist.all_reduce(largest, dist.ReduceOp.MAX)
    return largest.item()


def settled_bytes() -> int:
    """Wait until every rank is here and what they sent has arrived; return this host's counter of bytes.

    It is the kernel's, of the interface of an emulated host; elsewhere 0.
    """
    import torch.distributed as dist

    dist.barrier()
    if os.environ.get("GLOO_SOCKET_IFNAME") != "eth0":
        return 0
    time.sleep(_SETTLE_S)
    return sent_bytes()


def ratio(mine: Sequence[float], others: Sequence[float]) -> float:
    """Compare within each round: what slows the machine for a while slows both."""
    return float(statistics.median(a / b for a, b in zip(mine, others, strict=True)))


def command_line(doc: str | None, name: str = "") -> argparse.ArgumentParser:
    """Return a parser with the options that say what becomes of the results.

    Args:
        doc: the script's docstring.
        name: of the files in `RESULTS`; where it is empty nothing is written unless `--out` says where.
    """
    form = argparse.RawDescriptionHelpFormatter
    parser = argparse.ArgumentParser(description=doc, formatter_class=form)
    parser.add_argument("--out", type=Path, default=RESULTS if name else None, metavar="DIR")
    stem = name or Path(sys.argv[0]).stem
    parser.add_argument("--name", default=stem, help="name of the files, without an ending")
    parser.add_argument("--date", default=datetime.date.today().isoformat())
    return parser


def main(measure: Callable[[], None]) -> None:
    """Run a script, which ends with one line where hosts cannot be emulated or an option is wrong."""
    try:
        measure()
    except (HostsError, ValueError) as error:
        raise SystemExit(f"{Path(sys.argv[0]).stem}: {error}") from None


def publish(args: argparse.Namespace, title: str, results: Any, body: str) -> None:
    """Print tables, and write them and every measured value where the options say."""
    print(f"\n{body}\n")
    if args.out is None:
        return
    settings = {key: value for key, value in vars(args).items() if key not in _PLACES}
    write(args.out / args.name, args.date, settings, results, document(title, args.date, sys.argv, body))
    print(f"wrote {args.out / args.name}.json and .md")


def machine() -> dict[str, Any]:
    """Describe this machine and the software.

    Example:
        >>> sorted(machine())
        ['cores', 'cpu', 'linux', 'python', 'ram_gb', 'stenograd', 'torch']
    """
    lines = Path("/proc/cpuinfo").read_text().splitlines()
    models = [line.partition(":")[2].strip() for line in lines if line.startswith("model name")]
    return {
        "cpu": models[0] if models else platform.machine(),
        "cores": len(os.sched_getaffinity(0)),
        "ram_gb": round(os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES") / 1e9, 1),
        "linux": platform.release(),
        "python": platform.python_version(),
        "torch": version("torch"),
        "stenograd": __version__,
    }


def table(head: Sequence[str], lines: Sequence[Sequence[str]]) -> str:
    """Format a Markdown table, the first column to the left and the others to the right.

    Example:
        >>> print(table(["rival", "ms"], [["ddp", "1.5"]]))
        | rival | ms |
        |---|---:|
        | ddp | 1.5 |
    """
    rule = "|---|" + "---:|" * (len(head) - 1)
    first, *rest = [f"| {' | '.join(cells)} |" for cells in (head, *lines)]
    return "\n".join([first, rule, *rest])


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
    return f"# {title}\n\n{date}: {where}; {software}.\n\n```\n{_shown(argv)}\n```\n\n{body}\n"


def _shown(argv: Sequence[str]) -> str:
    """Return the command without the places of its files, which mean nothing elsewhere.

    Example:
        >>> _shown(["benchmarks/bench.py", "--quick", "--data", "/home/me/mnist", "--out", "/tmp"])
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
    """Write stem.json, with the measured links, and stem.md; the folder is made if there is none."""
    stem.parent.mkdir(parents=True, exist_ok=True)
    told = {"date": date, "machine": machine(), "settings": dict(settings), "results": results}
    if MEASURED_LINKS:
        told["links"] = MEASURED_LINKS
    stem.with_suffix(".json").write_text(json.dumps(told, indent=1, default=str) + "\n")
    stem.with_suffix(".md").write_text(text)


if __name__ == "__main__":
    _be_a_rank(Path(sys.argv[1]))
