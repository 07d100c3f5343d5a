"""The drivers alone may talk to torch.distributed; import-linter checks the floors themselves."""

import ast
from pathlib import Path

import laconic

ALLOWED = {"drive.py", "groups.py", "subgroups.py", "uneven.py"}


def _imports(tree):
    for node in ast.walk(tree):
        if isinstance(node, ast.Import):
            yield from (alias.name for alias in node.names)
        elif isinstance(node, ast.ImportFrom) and node.module:
            yield from (f"{node.module}.{alias.name}" for alias in node.names)
        elif isinstance(node, ast.Attribute) and node.attr == "distributed":
            yield ast.unparse(node)


def test_only_drivers_import_torch_distributed():
    package = Path(laconic.__file__).parent
    users = {
        str(path.relative_to(package))
        for path in package.rglob("*.py")
        if any(name.startswith("torch.distributed") for name in _imports(ast.parse(path.read_text())))
    }
    assert users == ALLOWED
