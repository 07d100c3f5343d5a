"""Refuse names in the source that the project has given up for the field's own words.

A name is what a program binds: a variable, an argument, a function, a class or an attribute.
"""

import ast
import sys
from collections.abc import Iterator
from pathlib import Path

INSTEAD = {
    "mine": "own",
    "places": "indices",
    "presence": "detector",
    "settle": "commit, or what is done",
    "theirs": "received, or other",
    "told": "received",
}


def names(tree: ast.AST) -> Iterator[tuple[int, str]]:
    """Yield (line, name) of all names in a module."""
    for node in ast.walk(tree):
        for field in ("id", "arg", "attr", "name"):
            name = getattr(node, field, None)
            if isinstance(name, str):
                yield getattr(node, "lineno", 0), name


def main() -> int:
    """Print where retired words are used, and return how many there are."""
    found = 0
    for path in sorted(Path("src").rglob("*.py")):
        for line, name in names(ast.parse(path.read_text(encoding="utf-8"))):
            if name.strip("_") in INSTEAD:
                found += 1
                print(f"{path}:{line}: {name}: say {INSTEAD[name.strip('_')]}")
    return found


if __name__ == "__main__":
    sys.exit(main() > 0)
