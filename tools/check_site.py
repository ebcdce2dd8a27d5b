"""Check a built site: `python -m tools.check_site FOLDER`.

Every link inside the site leads to a file and an element that exist, and no page loads a font, a
style, a script or a picture from elsewhere. Links that leave the site are `make docs-links`' part.
"""

from __future__ import annotations

import re
import sys
from html.parser import HTMLParser
from pathlib import Path
from urllib.parse import unquote, urlsplit

# Elements that load what they name; the others only lead there.
LOADING = {"audio", "embed", "iframe", "img", "link", "script", "source", "video"}
# Links that a browser does not load: the page's own address and its neighbours.
LEADING = {"author", "canonical", "help", "index", "next", "prev", "search", "up"}
_IMPORT = re.compile(r"""(?:@import\s+|url\()\s*["']?\s*((?:https?:)?//[^"')\s]+)""")


class SitePage(HTMLParser):
    """What a page names: its own elements, where it leads, and what it loads."""

    def __init__(self) -> None:
        super().__init__()
        self.anchors: set[str] = {"", "top"}
        self.targets: list[str] = []
        self.loaded: list[str] = []

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        """Note the element's names and links."""
        given = dict(attrs)
        self.anchors |= {name for key in ("id", "name") if (name := given.get(key))}
        target = given.get("href") or given.get("src")
        if target is None:
            return
        is_loaded = tag in LOADING and given.get("rel") not in LEADING
        (self.loaded if is_loaded else self.targets).append(target)


def read_pages(site: Path) -> dict[Path, SitePage]:
    """Return all pages of a site, by their files."""
    pages = {}
    for file in sorted(site.rglob("*.html")):
        page = pages[file.resolve()] = SitePage()
        page.feed(file.read_text(encoding="utf-8"))
    return pages


def find_complaints(site: Path) -> list[str]:
    """Return a line for each link that leads nowhere, and for each thing loaded from elsewhere."""
    site = site.resolve()
    pages = read_pages(site)
    complaints = []
    for file, page in pages.items():
        name = file.relative_to(site)
        complaints += [
            f"{name} links to {target}, which does not exist"
            for target in (*page.targets, *page.loaded)
            if not is_there(target, file, pages)
        ]
        complaints += [f"{name} loads {each}" for each in page.loaded if is_remote(each)]
    for sheet in sorted(site.rglob("*.css")):
        remote = _IMPORT.findall(sheet.read_text(encoding="utf-8"))
        complaints += [f"{sheet.relative_to(site)} loads {each}" for each in remote]
    return complaints


def is_remote(target: str) -> bool:
    """Return whether a browser would fetch the target from another host."""
    return bool(urlsplit(target).netloc)


def is_there(target: str, file: Path, pages: dict[Path, SitePage]) -> bool:
    """Return whether a target exists; one outside of the site counts as existing."""
    parts = urlsplit(target)
    if parts.scheme or parts.netloc:
        return True
    path = (file.parent / unquote(parts.path)).resolve() if parts.path else file
    if path.is_dir():
        path /= "index.html"
    page = pages.get(path)
    return path.is_file() if page is None else unquote(parts.fragment) in page.anchors


def main(folder: str) -> int:
    """Print the complaints; return the exit status."""
    site = Path(folder)
    complaints = find_complaints(site)
    print(*complaints, sep="\n", end="\n" if complaints else "")
    pages = len(list(site.rglob("*.html")))
    print(f"{folder}: {pages} pages, {len(complaints)} broken links or foreign resources")
    return 1 if complaints or not pages else 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1]))
