"""What a reader of the source meets: lines, files that only one other file needs, circles, a gradient's way.

    python benchmarks/structure.py [--list]

Prints, for the checkout that it lies in:
- lines under src, tests and benchmarks, and the share of comment lines in src;
- satellites: files of the library that exactly one other file imports, which is not the `__init__` of a
  package that offers it to users;
- circles of imports between files, also inside a folder, imports inside of functions included;
- the modules whose functions run while one gradient is averaged by top-k on two simulated ranks: the second
  step of training, from `backward()` to the end of `optimizer.step()`.
"""

from __future__ import annotations

import argparse
import ast
import io
import subprocess
import sys
import threading
import tokenize
from collections import defaultdict
from pathlib import Path
from types import FrameType
from typing import Any

ROOT = Path(__file__).resolve().parents[1]
PACKAGE = "stenograd"


def files_under(*folders: str) -> list[Path]:
    """Return the Python files that git keeps."""
    told = subprocess.run(
        ["git", "ls-files", *(f"{folder}/*.py" for folder in folders)],
        cwd=ROOT,
        capture_output=True,
        text=True,
    )
    return [ROOT / name for name in told.stdout.split()]


def lines_of(files: list[Path]) -> int:
    """Return how many lines they have together."""
    return sum(len(file.read_text().splitlines()) for file in files)


def comments_of(files: list[Path]) -> int:
    """Return how many lines have a comment."""
    rows = 0
    for file in files:
        tokens = tokenize.generate_tokens(io.StringIO(file.read_text()).readline)
        rows += len({token.start[0] for token in tokens if token.type == tokenize.COMMENT})
    return rows


def modules() -> dict[str, Path]:
    """Return the library's modules by name."""
    named = {}
    for file in files_under("src"):
        parts = file.relative_to(ROOT / "src").with_suffix("").parts
        named[".".join(parts[:-1] if parts[-1] == "__init__" else parts)] = file
    return named


def imports_of(file: Path, known: dict[str, Path]) -> set[str]:
    """Return the modules of the library that a file imports, but those for type checkers only."""
    tree, found = ast.parse(file.read_text()), set()
    typed = {
        id(node)
        for block in ast.walk(tree)
        if isinstance(block, ast.If) and ast.unparse(block.test) == "TYPE_CHECKING"
        for inside in block.body
        for node in ast.walk(inside)
    }
    for node in ast.walk(tree):
        if id(node) in typed:
            continue
        if isinstance(node, ast.Import):
            found |= {alias.name for alias in node.names}
        elif isinstance(node, ast.ImportFrom) and node.module:
            found |= {f"{node.module}.{alias.name}" for alias in node.names} | {node.module}
    real = {name for name in found if name in known}
    # `from a.b import c` names a.b too, which counts only where c is no module.
    packages = {name.rpartition(".")[0] for name in real}
    return {name for name in real if not (name in packages and known[name].name == "__init__.py")}


def circles(graph: dict[str, set[str]]) -> list[list[str]]:
    """Return the groups of modules that reach each other (Tarjan's strongly connected components)."""
    index: dict[str, int] = {}
    low: dict[str, int] = {}
    stack: list[str] = []
    found: list[list[str]] = []

    def visit(node: str) -> None:
        index[node] = low[node] = len(index)
        stack.append(node)
        for other in graph[node]:
            if other not in index:
                visit(other)
            if other in stack:
                low[node] = min(low[node], low[other])
        if low[node] == index[node]:
            group: list[str] = []
            while not group or group[-1] != node:
                group.append(stack.pop())
            if len(group) > 1:
                found.append(sorted(group))

    for node in graph:
        if node not in index:
            visit(node)
    return found


def crossed() -> set[str]:
    """Return the modules whose functions run in the second step of a training by top-k."""
    import torch

    import stenograd
    from stenograd.simulate import ranks

    seen: set[str] = set()
    running = threading.Event()

    def note(frame: FrameType, event: str, _: Any) -> None:
        if event == "call" and running.is_set():
            name = frame.f_globals.get("__name__", "")
            if name.startswith(f"{PACKAGE}."):
                seen.add(name)

    def train(driver: Any) -> None:
        model = torch.nn.Linear(64, 64)
        optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
        with stenograd.distribute(model, optimizer, "topk:ratio=0.1", group=driver):
            for step in range(2):
                if step:
                    running.set()
                model(torch.ones(8, 64)).sum().backward()
                optimizer.step()
                running.clear()

    threading.setprofile(note)  # of the threads of ranks, and of those that they start
    ranks(2, train)
    threading.setprofile(None)
    return seen


def main() -> None:
    """Count and print."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--list", action="store_true", help="print the names, not only how many")
    listed = parser.parse_args().list
    source = files_under("src")
    print(f"lines: src {lines_of(source)}, tests {lines_of(files_under('tests'))}, ", end="")
    print(f"benchmarks {lines_of(files_under('benchmarks'))}")
    print(f"comment lines in src: {100 * comments_of(source) / lines_of(source):.1f} %")
    known = modules()
    graph = {name: imports_of(file, known) - {name} for name, file in known.items()}
    users = defaultdict(list)
    for name, imported in graph.items():
        for other in imported:
            users[other].append(name)
    satellites = {
        name: users[name][0]
        for name, file in known.items()
        if len(users[name]) == 1 and "__init__.py" not in (file.name, known[users[name][0]].name)
    }
    way = crossed()
    for title, names in (
        ("satellites", [f"{name} <- {user}" for name, user in sorted(satellites.items())]),
        ("circles of imports", [" ".join(group) for group in circles(graph)]),
        ("modules that a top-k gradient crosses", sorted(way)),
    ):
        print(f"{title}: {len(names)}")
        for name in names if listed else ():
            print(f"  {name}")


if __name__ == "__main__":
    sys.setrecursionlimit(10_000)
    main()
