"""Every extra that a message or a page names is one that `pip install` finds."""

import re
from pathlib import Path

import pytest

tomllib = pytest.importorskip("tomllib")  # in Python from 3.11 on

ROOT = Path(__file__).parents[2]


def test_every_extra_that_is_named_exists():
    project = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]
    pages = [ROOT / "README.md", *(ROOT / "docs").glob("*.md"), *(ROOT / "src").rglob("*.py")]
    named = {
        (found.group(1), extra.strip(), page.name)
        for page in pages
        for found in re.finditer(r"\b(\w+)\[([a-z, ]+)\](?=[`'\" :,.]|$)", page.read_text())
        if "install" in page.read_text()[max(0, found.start() - 40) : found.start()]
        for extra in found.group(2).split(",")
    }
    assert {(name, extra) for name, extra, _ in named} >= {("stenograd", "examples"), ("stenograd", "plots")}
    wrong = [
        one for one in named if one[0] != project["name"] or one[1] not in project["optional-dependencies"]
    ]
    assert not wrong
