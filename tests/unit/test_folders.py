"""Who imports torch.distributed; who imports whom is in the contract on imports, in pyproject.toml."""

import ast
from pathlib import Path

import stenograd

PACKAGE = Path(stenograd.__file__).parent
ALLOWED = {
    "wire/driver.py",
    "wire/messages.py",
    "wire/groups.py",
    "lightning/trainer.py",
    "launch/membership.py",
    "launch/process_group.py",
    "launch/rendezvous.py",
    "sync/gradients.py",
}


def _imports(path):
    for node in ast.walk(ast.parse(path.read_text())):
        if isinstance(node, ast.Import):
            yield from (alias.name for alias in node.names)
        elif isinstance(node, ast.ImportFrom) and node.module:
            yield from (f"{node.module}.{alias.name}" for alias in node.names)
        elif isinstance(node, ast.Attribute) and node.attr == "distributed":
            yield ast.unparse(node)


def test_only_drivers_import_torch_distributed():
    users = {
        str(path.relative_to(PACKAGE))
        for path in PACKAGE.rglob("*.py")
        if any(name.startswith("torch.distributed") for name in _imports(path))
    }
    assert users == ALLOWED
