"""The code of the tutorials and of the migration pages runs, each page in a fresh process with one rank."""

import os
import runpy
import subprocess
import sys
import warnings
from pathlib import Path

import pytest

from stenograd.testing.pool import start_context

DOCS = Path(__file__).parents[2] / "docs"
sys.path.insert(0, str(DOCS))
from extract import code  # noqa: E402

PAGES = sorted([*DOCS.glob("tutorials/*.md"), *DOCS.glob("migrate/*.md"), DOCS / "when-it-does-not-pay.md"])


def name(page):
    return page.stem


# What the README's diff takes for granted.
GIVEN = """import torch
from torch import nn
batches = [(torch.randn(8, 64), torch.randint(10, (8,))) for _ in range(3)]
"""


def run(text, folder):
    """Run a script in a process of its own, in which every warning is an error.

    It is a fork of one that has only torch imported, which takes a fresh interpreter most of a small page's time.
    """
    script = folder / "page.py"
    script.write_text(text)
    process = start_context().Process(target=be_main, args=(script, dict(os.environ)))
    process.start()
    process.join(300)
    process.kill()
    assert process.exitcode == 0, (folder / "output").read_text()


def be_main(script, environment):
    """Be the interpreter that was started with a script, and write to a file what it prints."""
    output = os.open(script.parent / "output", os.O_CREAT | os.O_WRONLY)
    for stream in (1, 2):
        os.dup2(output, stream)
    os.environ.clear()
    os.environ.update(environment, OMP_NUM_THREADS="1")
    os.chdir(script.parent)
    sys.argv = [str(script)]
    warnings.simplefilter("error")
    runpy.run_path(str(script), run_name="__main__")


@pytest.mark.parametrize("page", PAGES, ids=name)
def test_the_code_of_a_page_runs(page, tmp_path):
    text = code(page.read_text())
    assert text, f"{page.name} has no Python code"
    run(text, tmp_path)


def test_the_diff_of_the_readme_runs(tmp_path):
    diff = code((DOCS.parent / "README.md").read_text(), "diff")
    run(GIVEN + "".join(line[2:] or "\n" for line in diff.splitlines(keepends=True)), tmp_path)


@pytest.mark.parametrize("page", [p for p in PAGES if "```bash\n" in p.read_text()], ids=name)
def test_the_shell_code_of_a_page_parses(page):
    done = subprocess.run(
        ["bash", "-n"], input=code(page.read_text(), "bash"), capture_output=True, text=True
    )
    assert done.returncode == 0, done.stderr


def test_blocks_of_other_languages_are_left_out():
    assert code("```python\na\n```\n```diff\n+b\n```\n```\nc\n```\n```python\nd\n```\n") == "a\nd\n"
