"""Prints the Python code of a page, so that it can be run.

python docs/extract.py docs/tutorials/slow-link.md
"""

from __future__ import annotations

import re
import sys
from pathlib import Path


def code(page: str, language: str = "python") -> str:
    r"""Return the blocks of one language, in order.

    Example:
        >>> code("text\n```python\nx = 1\n```\n```python\nprint(x)\n```")
        'x = 1\nprint(x)\n'
    """
    return "".join(re.findall(rf"^```{language}\n(.*?)^```$", page, re.DOTALL | re.MULTILINE))


if __name__ == "__main__":
    print(code(Path(sys.argv[1]).read_text(encoding="utf-8")), end="")
