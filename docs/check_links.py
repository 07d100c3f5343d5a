"""Checks a built site: every link inside it leads to a page, and to a place on it, that exist.

python docs/check_links.py build/docs
"""

from __future__ import annotations

import sys
from html.parser import HTMLParser
from pathlib import Path
from urllib.parse import unquote, urlsplit


class Page(HTMLParser):
    """The links of a page, and the places that links may lead to."""

    def __init__(self, text: str) -> None:
        super().__init__()
        self.links: set[str] = set()
        self.places: set[str] = {""}
        self.feed(text)

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        """Collect what one element links to, and its name."""
        found = dict(attrs)
        if identity := found.get("id"):
            self.places.add(identity)
        if link := found.get("href" if tag in ("a", "link") else "src"):
            self.links.add(link)


def broken(site: Path) -> list[str]:
    """Return one line per link of the site that leads nowhere; links to other sites are not followed."""
    pages = {path.resolve(): Page(path.read_text(encoding="utf-8")) for path in site.rglob("*.html")}
    wrong = []
    for path, page in sorted(pages.items()):
        for link in sorted(page.links):
            parts = urlsplit(link)
            if parts.scheme or parts.netloc:
                continue
            target = (path.parent / unquote(parts.path)).resolve() if parts.path else path
            known = target not in pages or unquote(parts.fragment) in pages[target].places
            if not target.exists() or not known:
                wrong.append(f"{path.relative_to(site.resolve())}: {link}")
    return wrong


def main() -> int:
    """Print what is broken; the exit status is 1 if anything is."""
    site = Path(sys.argv[1])
    wrong = broken(site) if (site / "index.html").exists() else [f"{site}: holds no site"]
    print("\n".join(wrong) or "every link inside the site leads to a place that exists")
    return 1 if wrong else 0


if __name__ == "__main__":
    sys.exit(main())
