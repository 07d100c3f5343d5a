"""Every public name has a place in the reference, and every page is in the table of contents.

The build (`scripts/docs`) checks the first again, on what Sphinx made of the pages. These tests need no
Sphinx.
"""

import importlib
import re
from fnmatch import fnmatch
from pathlib import Path

import pytest

import stenograd

tomllib = pytest.importorskip("tomllib")  # in Python from 3.11 on

ROOT = Path(__file__).parents[2]
DOCS = ROOT / "docs"
REFERENCE = "".join(page.read_text() for page in sorted((DOCS / "reference").glob("*.md")))
DIRECTIVES = set(
    re.findall(r"^\.\. auto(?:class|function|exception|module):: (\S+)$", REFERENCE, re.MULTILINE)
)
ADAPTERS = {f"stenograd.{name}" for name in ("accelerate", "lightning", "transformers")}


def public_modules():
    """The folders above `adapters` in the contract of imports are public, but for the command's own tasks.

    Adapters are left out, because they cannot be imported without their frameworks.
    """
    (contract,) = tomllib.loads((ROOT / "pyproject.toml").read_text())["tool"]["importlinter"]["contracts"]
    layers = contract["layers"]
    row = layers[layers.index("adapters") - 1]
    return sorted(
        {*(name.strip() for name in row.split("|")), "topology"} - {"accelerate", "lightning", "tasks"}
    )


def test_every_name_of_the_package_has_a_directive():
    names = {f"stenograd.{name}" for name in stenograd.__all__}
    assert names - DIRECTIVES == set()


@pytest.mark.parametrize("module", public_modules())
def test_every_public_module_is_documented_whole(module):
    """`automodule` documents all of `__all__`, so that is what a public module must have."""
    assert f"stenograd.{module}" in DIRECTIVES
    assert importlib.import_module(f"stenograd.{module}").__all__


def test_every_directive_names_something_that_exists():
    for path in DIRECTIVES - ADAPTERS:
        module, _, name = path.rpartition(".")
        try:
            importlib.import_module(path)
        except ModuleNotFoundError:
            assert hasattr(importlib.import_module(module), name), path


def test_every_adapter_is_documented_whole():
    assert ADAPTERS <= DIRECTIVES


def test_compressors_and_schedules_are_taken_from_the_registry():
    assert {".. registered:: compressors", ".. registered:: schedules"} <= set(REFERENCE.splitlines())


def test_every_page_is_in_the_table_of_contents():
    entries = [line.strip() for line in (DOCS / "index.md").read_text().splitlines()]
    pages = {page.relative_to(DOCS).with_suffix("").as_posix() for page in DOCS.rglob("*.md")} - {"index"}
    assert not [page for page in pages if not any(fnmatch(page, entry) for entry in entries if entry)]


@pytest.mark.parametrize("name", ["README.md", "CHANGELOG.md", "CONTRIBUTING.md", "SECURITY.md"])
def test_links_of_the_pages_outside_docs_lead_to_files(name):
    links = re.findall(r"\]\(([^)#]+)", (ROOT / name).read_text())
    assert not [link for link in links if "://" not in link and not (ROOT / link).exists()]
