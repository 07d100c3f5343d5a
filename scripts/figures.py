"""Derive every measured figure of README.md and docs from the records in `benchmarks/results`.

    scripts/figures            # rewrite what differs
    scripts/figures --check    # name what differs, or has no record, and fail

Tables in `results/NAME.md` are made from NAME.json by the script that measured it. On pages,
`docs/figures.txt` says which words hold figures, and from which value of a record each comes, in paragraphs:

    [docs/page.md]                               the page of what follows
    takes {step("mlp", "none", "ddp"):.0f} ms    words of the page; in braces an expression, its format
    ! timeout of 300 s                           words that only look measured; a table by its head

What looks measured and is in neither kind of paragraph has no record: numbers with a unit of time, bytes or
percent outside code, and cells of tables that are numbers.
"""

from __future__ import annotations

import argparse
import json
import re
import statistics
import sys
from collections.abc import Callable, Iterator, Mapping, Sequence
from functools import cache, partial
from pathlib import Path
from typing import Any

sys.path.append(str(Path(__file__).resolve().parents[1] / "benchmarks"))

import bench
import count_bytes
import daso
import evidence
import handed_over
import reproductions
import storm
import streaming
import unequal
import versions
from harness import RESULTS
from scenarios import EVIDENCE

__all__ = ["check", "derived", "tables", "unbacked"]

ROOT = Path(__file__).resolve().parents[1]
LIST = ROOT / "docs" / "figures.txt"
_PLACE = re.compile(r"\{([^{}]+):([^{}:]*)\}")
_UNIT = r"(?:ms|s|seconds|minutes|hours|kB|MB|GB|%|times|points|of a core)"
_NUMBER = r"[-+]?\d+(?:,\d{3})*(?:\.\d+)?"
_LOOKS = re.compile(rf"(?<![\w.{{-]){_NUMBER} {_UNIT}(?![\w/-])|(?<=\| ){_NUMBER}x?(?= \|)")
_CODE = re.compile(r"^(`{3,}|:{3,}).*?^\1\s*?$|`[^`\n]+`", re.MULTILINE | re.DOTALL)


@cache
def record(name: str) -> Any:
    """Return a record as it is committed."""
    return json.loads((RESULTS / f"{name}.json").read_text(encoding="utf-8"))


def step(model: str, rate: str, rival: str, key: str = "ms", name: str = "steps") -> float:
    """Return a rival's milliseconds per step, or another value of its row, of `bench.py`."""
    (run,) = (run for run in record(name)["results"] if (run["model"], run["rate"]) == (model, rate))
    (value,) = (row[key] for row in run["rows"] if row["rival"] == rival)
    return float(value)


def cells(rival: str) -> str:
    """Return a rival's milliseconds of two models on three links, as cells of a table."""
    places = [(model, rate) for model in ("mlp", "gpt-small") for rate in ("none", "1gbit", "100mbit")]
    return " | ".join(f"{step(*place, rival):,.0f}" for place in places)


def target(work: str) -> float:
    """Return the accuracy that a workload of `evidence.py` is trained to."""
    found = EVIDENCE[work].target
    if found is None:
        raise ValueError(f"{work} has no accuracy to reach: take one that has")
    return found


def _file(cell: str) -> str:
    """Return the name of a cell's record."""
    return f"evidence/{cell.replace(':', '_')}"


def standing(cell: str, rival: str) -> str:
    """Return what a rival took to the target of a cell, and in all, as cells of a table."""
    work, hosts, _ = cell.split(":")
    told = standings(_file(cell), work, int(hosts))[rival]
    missed, of = told["to"].count(None), len(told["to"])
    to = f"not in {missed} of {of} seeds" if missed else f"{statistics.median(told['to']):,.0f}"
    first = f"{to} | " + ("" if None in told["faster"] else f"{min(told['faster']):.1f}x")
    seconds, score, sent = (statistics.median(told[key]) for key in ("seconds", "scores", "megabytes"))
    end = f"{100 * score:.2f}" if EVIDENCE[work].target else f"{score:.3f}"
    return f"{first} | {seconds:,.0f} | {end} | {sent:,.{0 if sent >= 10 else 1}f}"


def aim(cell: str) -> float:
    """Return the loss that the rivals of a cell run for: that at which the worst seed of DDP ends."""
    work = cell.split(":")[0]
    return evidence.target(record(_file(cell))["results"], work)


def ended(name: str, rival: str, key: str = "seconds", per: float = 1.0) -> float:
    """Return what a rival had spent, or its score, at the end of a training, divided by something."""
    return float(record(name)["results"][rival][-1][key]) / per


def ratio(model: int, rival: int) -> str:
    """Return a row of `streaming.py`: its mean against no exchange."""
    return streaming.rows(record("streaming")["results"][model]["ranks"])[rival][2]


def kernel(name: str, key: str = "ratio") -> float:
    """Return a row of `kernels.py`."""
    return next(float(row[key]) for row in record("kernels")["rows"] if row["kernel"] == name)


def on_gpu(part: str, name: str) -> float:
    """Return a row of the battery for GPUs."""
    (value,) = (r["value"] for r in record("gpu/h200")["rows"] if (r["part"], r["name"]) == (part, name))
    return float(value)


def rows_of_gpu(*parts: str, ok: bool = True) -> int:
    """Return how many rows of the battery's parts were right, or wrong."""
    return sum(r["ok"] is ok for r in record("gpu/h200")["rows"] if r["part"] in parts)


def memory(rival: str) -> float:
    """Return the bytes per parameter that a rival takes at its peak, above training alone."""
    return versions.above(record("memory")["results"], rival, 0)[0]


def weather(key: str, run: str = "storm") -> float:
    """Return a number of a run of `storm.py`."""
    return float(record("storm")["results"][run][key])


def loss(key: str, what: str = "loss") -> float:
    """Return the last loss, or another value, of a run of `reproductions.py`."""
    return float(record("reproductions")["results"][key][what])


def text2(method: str, what: str = "loss") -> float:
    """Return the same for a text on two ranks."""
    return loss(f"text ranks=2 {method} seed=0 epochs=5", what)


def text4(method: str, what: str = "loss") -> float:
    """Return the same for a text on four ranks and 600 steps."""
    return loss(f"text ranks=4 {method} seed=0 epochs=6 steps=100", what)


def below(base: str, key: str) -> float:
    """Return by how many points of accuracy a run is below another, means over three seeds."""
    seeds = [f"seed={seed}" for seed in range(3)]
    means = [statistics.mean(loss(k.replace("seed=0", s), "accuracy") for s in seeds) for k in (base, key)]
    return 100 * (means[0] - means[1])


def ef21(lr: str) -> float:
    """Return by how much EF21-SGDM is below error feedback."""
    base = "digits ranks=4 topk:ratio=0.01,values=float32"
    rest = f"seed=0 lr={lr} momentum=0 by_class=True"
    return below(f"{base} {rest}", f"{base},feedback=ef21-sgdm {rest}")


def handed(method: str) -> float:
    """Return the bytes per step that a rank sent in `handed_over.py`."""
    return float(record("handed_over")["results"][method][1])


def of_cell(cell: str, rival: str, key: str) -> list[float]:
    """Return what the seeds say of a rival in a cell of `evidence.py`, see its `standings`.

    Raises:
        ValueError: in a seed it did not reach what it ran for.
    """
    work, hosts, _ = cell.split(":")
    found: list[float] = standings(_file(cell), work, int(hosts))[rival][key]
    if None in found:
        raise ValueError(f"{key} of {rival} in {cell} is no figure: a seed missed the target, say so there")
    return found


@cache
def standings(name: str, work: str, hosts: int) -> dict[str, dict[str, Any]]:
    """Return the standings of a cell."""
    return evidence.standings(record(name)["results"], work, hosts)


def cycling(rival: str, phase: str = "cycling") -> tuple[list[float], list[float]]:
    """Return seconds and megabytes of the epochs of a phase of `daso.py`."""
    return daso.cycling(record("daso")["results"][rival], phase)


def plan(*keys: str) -> Any:
    """Return a part of the record of `plan_validation.py`."""
    told = record("plan_validation")
    for key in keys:
        told = told[key]
    return told


def regret(key: str) -> list[float]:
    """Return how much slower the values were that a plan chose for a key than the best of a grid."""
    chosen = plan("summary", "chosen keys, beyond the best of the grid")
    return [value for text, value in chosen.items() if f"{key}=" in text]


def counted(hosts: int, kind: str) -> str:
    """Return kB per step and host of every method of `count_bytes.py`, as cells of a table."""
    (ranks,) = (run["ranks"] for run in record("count_bytes")["results"] if run["hosts"] == hosts)
    sums = [sum(rank[method][kind] for rank in ranks) for method in ranks[0]]
    return " | ".join(f"{total / len(ranks) / count_bytes.STEPS / 1e3:,.1f}" for total in sums)


def off() -> float:
    """Return by how many percent the bytes of `count_bytes.py` differ from an interface's, at most."""
    ranks = [rank for run in record("count_bytes")["results"] for rank in run["ranks"]]
    pairs = [(one["counted"] + one["headers"], one["interface"]) for rank in ranks for one in rank.values()]
    return 100 * max(abs(counted / seen - 1) for counted, seen in pairs)


def uneven(way: str) -> tuple[float, float]:
    """Return rounds an hour, and the mean loss over the seeds, of `unequal.py`."""
    hourly, _, losses = unequal.middle(record("unequal")["results"], way)
    return hourly, statistics.fmean(losses)


FEW_BITS = "diloco:every=10/lowbit:format=e3m0"
SPARSE = (
    "diloco:every=30,outer_lr=1,momentum=0/"
    "topk:ratio=0.015625,chunk=4096,values=int2,feedback_decay=0.95,divide=senders"
)
COMPRESSED = ("topk:ratio=0.01", "sign", "qsgd:bits=4", "powersgd:rank=4")
_NAMES = {name: value for name, value in globals().items() if not name.startswith("_")}
_NAMES |= {"daso": cycling, "median": statistics.median}


def tables() -> dict[str, str]:
    """Return, for every file of tables beside a record, the tables that follow from the record."""
    made = {}
    for file in sorted(RESULTS.rglob("*.md")):
        name = file.relative_to(RESULTS).with_suffix("").as_posix()
        made[name] = _maker(name)(record(name))
    return made


def _maker(name: str) -> Callable[[Mapping[str, Any]], str]:
    if name.startswith("evidence/"):
        return evidence.body
    if name.startswith("steps"):
        return lambda told: bench.step_tables(told["results"])
    makers: dict[str, Callable[[Mapping[str, Any]], str]] = {
        "count_bytes": lambda told: count_bytes.summary(told["results"]),
        "daso": lambda told: daso.summary(told["results"]),
        "memory": lambda told: versions.memory_table(told["results"]),
        "handed_over": lambda told: handed_over.summary(told["results"]),
        "reproductions": lambda told: reproductions.told(told["results"]),
        "streaming": lambda told: streaming.summary(told["results"], told["settings"]["rate"]),
        "storm": lambda told: storm.tell(told["results"]),
        "unequal": lambda told: unequal.summary(told["results"]),
    }
    return makers[name]


def entries(text: str) -> Iterator[tuple[str, str]]:
    r"""Yield (page, paragraph) of the list.

    Example:
        >>> list(entries("[a.md]\nfirst\nline\n\n! 300 s\n"))
        [('a.md', 'first line'), ('a.md', '! 300 s')]
    """
    page = ""
    for paragraph in re.split(r"\n\s*\n", text):
        lines = [line for line in paragraph.strip().splitlines() if not line.startswith("#")]
        if lines and (head := re.fullmatch(r"\[(.+)\]", lines[0])):
            page, lines = head[1], lines[1:]
        if lines:
            yield page, " ".join(lines)


def derived(page: str, words: str, names: Mapping[str, Any] = _NAMES) -> str:
    r"""Return a page with the figures of one paragraph of the list as the records have them.

    Raises:
        ValueError: the page does not have these words once.

    Example:
        >>> derived("It takes 3\nms.", "takes {1 + 1:.1f} ms", {})
        'It takes 2.0\nms.'
    """
    (found,) = _found(page, words)
    made, at = [], found.start()
    for number, place in enumerate(_PLACE.finditer(words), 1):
        value = format(eval(place[1], dict(names)), place[2])
        made += [page[at : found.start(number)], value]
        at = found.end(number)
    return page[: found.start()] + "".join(made) + page[at:]


def _found(page: str, words: str) -> list[re.Match[str]]:
    parts = _PLACE.split(words)
    literal = [r"\s+".join(map(re.escape, re.split(r"\s+", part))) for part in parts[::3]]
    places = [r"(.{1,120})" if kind == "s" else f"({_NUMBER})" for kind in parts[2::3]]
    pattern = "".join(text for pair in zip(literal, [*places, ""], strict=True) for text in pair)
    found = list(re.finditer(pattern, page))
    if len(found) != 1:
        raise ValueError(f"these words are there {len(found)} times, and must be once: {words[:90]}")
    return found


def unbacked(page: str, words: Sequence[str]) -> list[str]:
    """Return what looks measured on a page and is in none of the paragraphs of the list.

    Example:
        >>> unbacked("It takes 3 ms, at most 5 ms, in `7 ms`.", ["! at most 5 ms"])
        ['line 1: 3 ms']
    """
    covered = [match.span() for text in words for match in _found(page, text.removeprefix("! "))]
    for start, end in list(covered):
        table = re.compile(r"[^\n]*\|\n(?:\|[^\n]*\n?)+").match(page, start)
        if page[start] == "|" and table and "|" in page[start:end]:
            covered.append(table.span() if page[start:end].count("\n") == 0 else (start, end))
    covered += [match.span() for match in _CODE.finditer(page)]
    return [
        f"line {page.count(chr(10), 0, match.start()) + 1}: {match[0]}"
        for match in _LOOKS.finditer(page)
        if not any(start <= match.start() < end for start, end in covered)
    ]


def check(root: Path, rewrite: bool) -> list[str]:
    """Compare every page and file of tables with the records, and return the differences.

    Args:
        root: of the checkout; the records are always those beside this file.
        rewrite: write what follows from the records.
    """
    faults = []
    for name, made in tables().items():
        path = root / "benchmarks" / "results" / f"{name}.md"
        faults += _compare(path, root, partial(_put, made=made), rewrite)
    listed: dict[str, list[str]] = {}
    for page, words in entries((root / "docs" / "figures.txt").read_text(encoding="utf-8")):
        listed.setdefault(page, []).append(words)
    for path in [root / "README.md", *sorted((root / "docs").rglob("*.md"))]:
        own = listed.pop(str(path.relative_to(root)), [])
        try:
            for words in own:
                if not words.startswith("! "):
                    faults += _compare(path, root, partial(derived, words=words), rewrite)
            missing = unbacked(path.read_text(encoding="utf-8"), own)
            faults += [
                f"{path.relative_to(root)}: {one}: no record, see scripts/figures.py" for one in missing
            ]
        except ValueError as error:
            faults.append(f"{path.relative_to(root)}: {error}")
    return faults + [f"docs/figures.txt: there is no page {page}" for page in listed]


def _put(old: str, made: str) -> str:
    """Replace what follows the command in a file of tables."""
    return "```\n".join([*old.split("```\n", 2)[:2], f"\n{made.strip()}\n"])


def _compare(path: Path, root: Path, make: Callable[[str], str], rewrite: bool) -> list[str]:
    old = path.read_text(encoding="utf-8")
    new = make(old)
    if new == old:
        return []
    if rewrite:
        path.write_text(new, encoding="utf-8")
    pairs = zip(old.splitlines(), new.splitlines(), strict=False)
    first = next(((a, b) for a, b in pairs if a != b), ("", "more or fewer lines"))
    return [f"{path.relative_to(root)}: has\n  {first[0]}\nand the record says\n  {first[1]}"]


def figures() -> int:
    """Rewrite, or compare."""
    parser = argparse.ArgumentParser(description="Derive every figure of README and docs from its record.")
    parser.add_argument("--check", action="store_true", help="write nothing; fail if anything differs")
    args = parser.parse_args()
    faults = check(ROOT, not args.check)
    print("\n".join(faults) or "every figure is that of its record")
    return int(args.check and bool(faults))


if __name__ == "__main__":
    sys.exit(figures())
