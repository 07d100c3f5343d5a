"""Who imports whom: few arrows between folders, no circle, and few modules on torch.distributed."""

import ast
from graphlib import TopologicalSorter
from pathlib import Path

import stenograd

PACKAGE = Path(stenograd.__file__).parent
ALLOWED = {
    "comm/driver.py",
    "comm/messages.py",
    "comm/groups.py",
    "lightning/trainer.py",
    "launch/process_group.py",
    "launch/stores.py",
    "launch/subgroups.py",
    "sync/uneven.py",
}
MOST_ARROWS = 120


def _imports(path):
    for node in ast.walk(ast.parse(path.read_text())):
        if isinstance(node, ast.Import):
            yield from (alias.name for alias in node.names)
        elif isinstance(node, ast.ImportFrom) and node.module:
            yield from (f"{node.module}.{alias.name}" for alias in node.names)
        elif isinstance(node, ast.Attribute) and node.attr == "distributed":
            yield ast.unparse(node)


def _room(parts):
    """A folder of the package, or a file that lies in none."""
    return parts[0].removesuffix(".py")


def _arrows():
    """Folder by folder, the other folders that it imports; imports for type checkers count, too."""
    arrows = {}
    for path in PACKAGE.rglob("*.py"):
        mine = arrows.setdefault(_room(path.relative_to(PACKAGE).parts), set())
        for name in _imports(path):
            first, *parts = name.split(".")
            if first == "stenograd":
                at = PACKAGE / parts[0] if parts else PACKAGE / "__init__"
                known = at.is_dir() or at.with_suffix(".py").is_file()
                mine.add(at.name if known else "__init__")
    return {room: others - {room} for room, others in arrows.items()}


def test_only_drivers_import_torch_distributed():
    users = {
        str(path.relative_to(PACKAGE))
        for path in PACKAGE.rglob("*.py")
        if any(name.startswith("torch.distributed") for name in _imports(path))
    }
    assert users == ALLOWED


def test_arrows_between_folders_are_few_and_never_make_a_circle():
    """An arrow is one folder that imports another; `TopologicalSorter` raises CycleError for a circle."""
    arrows = _arrows()
    assert len(list(TopologicalSorter(arrows).static_order())) == len(arrows)
    assert 0 < sum(map(len, arrows.values())) <= MOST_ARROWS
