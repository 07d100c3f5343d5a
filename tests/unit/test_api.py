"""The public surface: explicit, sorted, documented; and what is refused before any connection."""

import ast
import inspect
import re
from pathlib import Path

import forked
import pytest
import torch
from torch import nn

import stenograd
from stenograd.errors import ConfigError, MethodError, TensorTypeError

ROOT = Path(__file__).parents[2]


def test_all_is_sorted_complete_and_documented():
    assert stenograd.__all__ == sorted(stenograd.__all__)
    for name in stenograd.__all__:
        member = getattr(stenograd, name)
        assert inspect.getdoc(member), f"{name} has no docstring"


def test_every_module_that_a_page_names_is_there_after_import_stenograd():
    """As `stenograd.testing.check(...)` in the documents; one that needs an extra says which."""
    pages = "".join(page.read_text() for page in [*ROOT.glob("*.md"), *(ROOT / "docs").rglob("*.md")])
    package = ROOT / "src" / "stenograd"
    named = set(re.findall(r"\bstenograd\.([a-z_]+)\b", pages))
    modules = {name for name in named if (package / name).is_dir() or (package / f"{name}.py").is_file()}
    assert {"testing", "lightning", "simulate", "singa"} <= modules
    code = f"""
import stenograd
for name in {sorted(modules)}:
    try:
        getattr(stenograd, name)
    except ImportError as error:
        assert "pip install stenograd[" in str(error), (name, error)
try:
    stenograd.no_such_name
except AttributeError:
    print("whole")
"""
    done = forked.python(["-c", code], ROOT)
    assert (done.stdout, done.returncode) == ("whole\n", 0), done.stderr


def test_a_misspelt_name_is_an_error_to_type_checkers_and_a_moved_one_says_where_it_is():
    tree = ast.parse((ROOT / "src" / "stenograd" / "__init__.py").read_text())
    assert "__getattr__" not in [node.name for node in tree.body if isinstance(node, ast.FunctionDef)]
    seen = {
        alias.asname or alias.name
        for block in tree.body
        if isinstance(block, ast.If) and ast.unparse(block.test) == "TYPE_CHECKING"
        for node in block.body
        for alias in node.names
    }
    assert set(stenograd.__all__) <= seen
    with pytest.raises(AttributeError, match=r"it is stenograd.errors.MismatchError"):
        stenograd.MismatchError  # noqa: B018
    with pytest.raises(AttributeError, match=r"no attribute 'distirbute'$"):
        stenograd.distirbute  # noqa: B018


def _sgd(*parameters):
    return torch.optim.SGD(list(parameters), lr=0.1)


def test_a_model_without_trainable_parameters():
    model = nn.Linear(2, 2).requires_grad_(False)
    with pytest.raises(ConfigError, match="trainable parameters, got none"):
        stenograd.distribute(model, _sgd(nn.Parameter(torch.ones(1))))


def test_an_optimizer_of_another_model():
    with pytest.raises(ConfigError, match="must hold the model's parameters, got 2 of 2"):
        stenograd.distribute(nn.Linear(2, 2), _sgd(*nn.Linear(2, 2).parameters()))


def test_complex_parameters():
    model = nn.Module()
    model.z = nn.Parameter(torch.ones(2, dtype=torch.complex64))
    with pytest.raises(TensorTypeError, match=r"z must be real, got torch.complex64"):
        stenograd.distribute(model, _sgd(model.z))


@pytest.mark.parametrize(
    ("options", "error", "says"),
    [
        ({"method": "tpk"}, MethodError, "did you mean 'topk'"),
        ({"bucket_bytes": 0}, ConfigError, "bucket_bytes must be at least 1"),
        ({"timeout_s": 0}, ConfigError, "timeout_s must be"),
    ],
)
def test_bad_options(options, error, says):
    model = nn.Linear(2, 2)
    with pytest.raises(error, match=says):
        stenograd.distribute(model, _sgd(*model.parameters()), **options)
