"""What a release promises: extras that exist, versions that are tried, workflows that can be run by hand."""

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


def _commands():
    """What the workflows run, by file."""
    workflows = sorted((ROOT / ".github" / "workflows").glob("*.yml"))
    return {
        path.name: re.findall(r"^ +(?:- )?run: (.*)$", path.read_text(), re.MULTILINE) for path in workflows
    }


def test_workflows_call_our_scripts_and_nothing_else():
    """Whoever has no such forge can do all that it does: by one command, which has no logic beside it."""
    commands = [command for found in _commands().values() for command in found]
    for command in commands:
        script = command.split()[0]
        assert (ROOT / script).stat().st_mode & 0o111, script
        assert not set("|&;$") & set(command), command
    assert {"scripts/check", "scripts/test", "scripts/docs", "scripts/package"} <= set(commands)
    gate = (ROOT / ".ci" / "run").read_text().split("\nscripts/")[1:]
    assert {line.split()[0] for line in gate} == {
        c.split()[0].removeprefix("scripts/") for c in _commands()["ci.yml"]
    }


def test_the_versions_that_are_promised_are_those_that_workflows_try():
    project = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]
    promised = re.findall(r"Python :: (3\.\d+)", "\n".join(project["classifiers"]))
    text = (ROOT / ".github" / "workflows" / "ci.yml").read_text()
    tried = {
        name: re.findall(r'"([^"]+)"', line) for name, line in re.findall(r"(python|torch): \[(.*)\]", text)
    }
    assert tried["python"] == promised
    (torch,) = [text for text in project["dependencies"] if text.startswith("torch")]
    assert f"torch>={tried['torch'][0].removesuffix('.*')},<3" == torch
    assert "Development Status :: 3 - Alpha" in project["classifiers"]


def test_hooks_before_a_commit_are_those_of_the_check():
    hooks = re.findall(r"entry: (.*)", (ROOT / ".pre-commit-config.yaml").read_text())
    check = (ROOT / "scripts" / "check").read_text()
    assert len(hooks) == 5
    for hook in hooks:
        assert hook.removesuffix(" --force-exclude") in check
