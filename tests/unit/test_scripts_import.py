"""Benchmarks and examples name nothing in the package that is not there."""

import ast
import importlib
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]
SCRIPTS = sorted(
    path
    for folder in ("benchmarks", "examples", "docs")
    for path in (ROOT / folder).rglob("*.py")
    if "_build" not in path.parts
)


def _names(path):
    """(module, name) pairs that a file imports from this package."""
    for node in ast.walk(ast.parse(path.read_text())):
        if isinstance(node, ast.ImportFrom) and node.module and node.module.split(".")[0] == "stenograd":
            yield from ((node.module, alias.name) for alias in node.names)
        elif isinstance(node, ast.Import):
            yield from ((a.name, None) for a in node.names if a.name.split(".")[0] == "stenograd")


@pytest.mark.parametrize("path", SCRIPTS, ids=lambda path: str(path.relative_to(ROOT)))
def test_names_of_the_package_that_a_script_imports_exist(path):
    for module, name in set(_names(path)):
        try:
            found = importlib.import_module(module)
        except ImportError as error:
            if "stenograd[" not in str(error):  # else a framework that is not installed here
                raise
            continue
        if name is not None and not hasattr(found, name):
            assert hasattr(found, "__path__"), f"{module} has no {name}"
            importlib.import_module(f"{module}.{name}")
