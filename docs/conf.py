"""Builds the documentation site: `scripts/docs`, or `sphinx-build -W docs build/docs`."""

from __future__ import annotations

import importlib
import re
import sys
from importlib.util import find_spec
from pathlib import Path
from typing import Any

from docutils import nodes
from docutils.parsers.rst import Directive
from docutils.statemachine import StringList
from sphinx.application import Sphinx
from sphinx.errors import ExtensionError
from sphinx.util import inspect, logging

ROOT = Path(__file__).parents[1]
sys.path.insert(0, str(ROOT / "src"))

import stenograd  # noqa: E402
from stenograd.catalog import registry  # noqa: E402

project = "Stenograd"
author = "The Stenograd developers"
project_copyright = author
release = version = stenograd.__version__

extensions = ["myst_parser", "sphinx.ext.autodoc", "sphinx.ext.napoleon"]
exclude_patterns = ["Thumbs.db"]
suppress_warnings = [
    "ref.python",  # docstrings name attributes without their class, and several classes have a `world_size`
    "myst.header",  # the benchmarks' files, which are included as they are, skip a level of headings
]

myst_enable_extensions = ["colon_fence"]
myst_heading_anchors = 3

# Docstrings write code between single backquotes; where that is a name of ours, it becomes a link.
default_role = "py:obj"
highlight_language = "none"  # a block without a language is a command or a list, not Python
autodoc_member_order = "bysource"
autodoc_default_options = {"members": True, "show-inheritance": True}
autodoc_typehints = "signature"
autodoc_inherit_docstrings = False  # torch's docstrings refer to pages of torch's site
python_use_unqualified_type_names = True
# The adapters' frameworks are no requirement of the site: where one is missing, its names are stand-ins.
autodoc_mock_imports = [
    name for name in ("accelerate", "lightning", "transformers") if find_spec(name) is None
]
python_maximum_signature_line_length = 120
napoleon_numpy_docstring = False
napoleon_use_ivar = True
napoleon_custom_sections = ["Reference"]

html_theme = "furo"
pygments_style = "default"  # all its colours have a contrast of 4.5 to their ground
pygments_dark_style = "monokai"
html_title = f"Stenograd {release}"
html_copy_source = False
html_static_path = ["_static"]
html_css_files = ["site.css"]

# Modules whose public names must all have a place in the reference.
PUBLIC = ("", ".ddp", ".heat", ".mlbench", ".simulate", ".singa", ".testing", ".topology")


class Registered(Directive):
    """Documents every registered class of a kind: `.. registered:: compressors`, or `schedules`.

    A new compressor is one file and no other edit, so its page cannot be a list kept by hand.
    """

    required_arguments = 1

    def run(self) -> list[nodes.Node]:
        """Return one autodoc entry per class, under a line that says which methods it makes."""
        lines: list[str] = []
        for cls, names in registered(self.arguments[0]):
            methods = ", ".join(f"``{name}``" for name in names)
            path = f"{cls.__module__}.{cls.__qualname__}"
            lines += [f"**Methods:** {methods}", "", f".. autoclass:: {path}", ""]
        node = nodes.container()
        self.state.nested_parse(StringList(lines, source="registry"), self.content_offset, node)
        return node.children


def registered(kind: str) -> list[tuple[type[Any], list[str]]]:
    """Return the classes of the registry, each with its method names, in the order of their modules."""
    if kind == "compressors":
        return [(cls, sorted(getattr(cls, "names", {}))) for cls in registry.compressors()]
    found: dict[type[Any], list[str]] = {}
    for name, (cls, _) in registry.schedules().items():
        found.setdefault(cls, []).append(name)
    return list(found.items())


def missing(documented: set[str]) -> list[str]:
    """Return the public names, compressors and schedules that are not among the documented ones."""
    wanted = {(f"stenograd{module}", name) for module in PUBLIC for name in _public(f"stenograd{module}")}
    plain = [f"{module}.{name}" for module, name in sorted(wanted) if f"{module}.{name}" not in documented]
    classes = [cls for kind in ("compressors", "schedules") for cls, _ in registered(kind)]
    paths = [f"{cls.__module__}.{cls.__qualname__}" for cls in classes]
    return plain + [path for path in paths if path not in documented]


def _public(module: str) -> list[str]:
    return list(importlib.import_module(module).__all__)


def _check(app: Sphinx, failure: Exception | None) -> None:
    if failure is None and app.builder.name == "html":
        absent = missing(set(app.env.domains.python_domain.objects))
        if absent:
            raise ExtensionError(f"public names without a place in the reference: {', '.join(absent)}")
        logging.getLogger(__name__).info("every public name has a place in the reference")


def _drop_empty_patterns(app: Sphinx, page: str, source: list[str]) -> None:
    """Leave patterns without a page out of the index: Sphinx warns of them, and the warning has no name."""
    if page == "index":
        lines = source[0].splitlines()
        kept = [line for line in lines if not line.endswith("*") or any(Path(app.srcdir).glob(f"{line}.md"))]
        source[0] = "\n".join(kept)


def _breakable(app: Sphinx, doctree: nodes.document, page: str) -> None:
    """Let long words of tables, such as a method with its keys, break in a narrow window."""
    for entry in doctree.findall(nodes.entry):
        for text in list(entry.findall(nodes.Text)):
            first, *others = re.split(r"(?<=\w[,:/(.])(?=[a-z]{3})", text, flags=re.IGNORECASE)
            parts: list[nodes.Node] = [nodes.Text(first)]
            for other in others:
                parts += [nodes.raw("", "<wbr>", format="html"), nodes.Text(other)]
            text.parent.replace(text, parts)


def _example_as_code(app: Sphinx, what: str, name: str, member: Any, options: Any, lines: list[str]) -> None:
    """Show an example without prompts as code: it needs a framework that doctests do not have."""
    at = next((i for i, line in enumerate(lines) if line.strip() == "Example:"), None)
    if at is None or at + 1 == len(lines) or lines[at + 1].lstrip().startswith(">>>"):
        return
    indent = lines[at].partition("Example:")[0]
    code = [f"    {line}" if line.strip() else line for line in lines[at + 1 :]]
    lines[at + 1 :] = [f"{indent}    .. code-block:: python", "", *code]


def _whole_sentence(app: Sphinx, what: str, name: str, member: Any, options: Any, lines: list[str]) -> None:
    """Put back what napoleon took for a type, the words before a colon; signatures have the types."""
    for field, first in ((":rtype:", ":returns:"), (":type:", "")):
        at = next((i for i, line in enumerate(lines) if line.startswith(field)), None)
        if at is not None:
            words = lines.pop(at).removeprefix(field).strip()
            to = next(i for i, line in enumerate(lines) if line.startswith(first))
            lines[to] = f"{first} {words}: {lines[to].removeprefix(first).strip()}".strip()


def _formulas(app: Sphinx, doctree: nodes.document) -> None:
    """Keep the lines of an indented paragraph of a docstring, which holds formulas."""
    for quote in list(doctree.findall(nodes.block_quote)):
        text = "\n\n".join(part.rawsource for part in quote.children).replace("`", "")
        quote.replace_self(nodes.literal_block(text, text, language="none"))


def _own_signature(
    app: Sphinx, what: str, name: str, cls: Any, options: Any, signature: str | None, returns: str | None
) -> tuple[str | None, str | None] | None:
    """Show what a class takes where its base, a stand-in or a protocol, takes anything.

    Defaults that are no expression, such as `<factory>`, become `...`: Sphinx shows such a signature unread.
    """
    signature = re.sub(r"= <[^>]+>", "= ...", signature or "")
    if what != "class" or not signature.startswith("(*args"):
        return (signature, returns) if signature else None
    if getattr(cls, "_is_protocol", False):
        return "", returns
    own = inspect.signature(cls.__init__, bound_method=True)
    return inspect.stringify_signature(own, show_return_annotation=False, unqualified_typehints=True), returns


def setup(app: Sphinx) -> None:
    """Register the directive and what acts on pages and on the finished site."""
    app.add_directive("registered", Registered)
    app.connect("source-read", _drop_empty_patterns)
    app.connect("autodoc-process-docstring", _example_as_code, priority=400)  # before napoleon
    app.connect("autodoc-process-docstring", _whole_sentence, priority=600)  # after napoleon
    app.connect("autodoc-process-signature", _own_signature)
    app.connect("doctree-read", _formulas)
    app.connect("doctree-resolved", _breakable)
    app.connect("build-finished", _check)
