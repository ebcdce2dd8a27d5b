"""Lay out the sources of the documentation site: `python -m tools.stage_docs FOLDER`.

The pages under docs/ are written for readers of the repository, so their links lead to files beside
and above them. Sphinx knows only what is inside its source folder. This copies docs/ to FOLDER and
everything else that the pages link to into FOLDER/project, as pages, and points the links there.
Tutorials lead to the pages that sphinx-gallery makes of them. Unchanged files are not written
again, so Sphinx reads only what changed.
"""

from __future__ import annotations

import os
import re
import sys
from functools import partial
from pathlib import Path, PurePosixPath

ROOT = Path(__file__).resolve().parent.parent
DOCS = PurePosixPath("docs")
TUTORIALS = PurePosixPath("tutorials")
OUTSIDE = PurePosixPath("project")  # in the site: everything that is not in docs/
IMAGES = {".png", ".svg", ".jpg"}
ALWAYS = ("ARCHITECTURE.md", "CHANGELOG.md", "CONTRIBUTING.md")
# Sphinx-gallery writes there itself.
GENERATED = ("tutorials", "sg_execution_times.rst", "sg_api_usage.rst")
LANGUAGES = {
    ".py": "python",
    ".cff": "yaml",
    ".md": "markdown",
    ".txt": "cmake",
    ".cu": "cuda",
    ".h": "c",
}
_FENCE = re.compile(r"^ *(`{3,}|~{3,})")
_CODE_OR_TARGET = re.compile(r"(?P<code>`[^`]*`)|\]\((?P<target>[^)\s]+)\)")
_EXTERNAL = re.compile(r"[a-z][a-z0-9+.-]*:|#", re.IGNORECASE)


class Site:
    """The files of the site's source folder, by path in it, and what is still to be laid out."""

    def __init__(self, root: Path) -> None:
        self.root = root
        self.files: dict[PurePosixPath, bytes] = {}
        self._waiting: list[PurePosixPath] = []

    def lay_out(self) -> None:
        """Add docs/, and all that its pages lead to.

        Raises:
            FileNotFoundError: a link leads nowhere.
        """
        for path in sorted((self.root / DOCS).rglob("*")):
            if path.is_file() and "__pycache__" not in path.parts:
                self._waiting.append(PurePosixPath(path.relative_to(self.root).as_posix()))
        self._waiting += [PurePosixPath(name) for name in ALWAYS]
        done: set[PurePosixPath] = set()
        while self._waiting:
            source = self._waiting.pop()
            if source not in done:
                done.add(source)
                self.files[place_of(source, self.root)] = self._convert(source)

    def write(self, folder: Path) -> None:
        """Write the files that changed, and remove those that are gone."""
        for place, content in self.files.items():
            target = folder / place
            if not target.is_file() or target.read_bytes() != content:
                target.parent.mkdir(parents=True, exist_ok=True)
                target.write_bytes(content)
        for path in sorted(folder.rglob("*")):
            place = PurePosixPath(path.relative_to(folder).as_posix())
            if path.is_file() and place not in self.files and place.parts[0] not in GENERATED:
                path.unlink()

    def _convert(self, source: PurePosixPath) -> bytes:
        path = self.root / source
        if source.suffix in IMAGES or (source.is_relative_to(DOCS) and source.suffix != ".md"):
            return path.read_bytes()
        if path.is_dir():
            text = self._show_folder(source)
        elif source.suffix != ".md":
            text = f"# `{source}`\n\n{show_code(path)}"
        else:
            text = self._redirect(path.read_text(encoding="utf-8"), source)
        if not source.is_relative_to(DOCS):
            text = f"---\norphan: true\n---\n{text}"
        return text.encode()

    def _show_folder(self, source: PurePosixPath) -> str:
        files = [path for path in sorted((self.root / source).iterdir()) if path.is_file()]
        parts = [f"## `{path.name}`\n\n{show_code(path)}" for path in files]
        return "\n".join([f"# `{source}`\n", *parts])

    def _redirect(self, text: str, source: PurePosixPath) -> str:
        """Return the text of a page, with its links as they are in the site."""
        redirect = partial(self._redirect_one, source=source)
        lines, fence = [], ""
        for line in text.splitlines(keepends=True):
            mark = _FENCE.match(line)
            is_fence = mark is not None and (not fence or mark[1].startswith(fence))
            if mark is not None and is_fence:
                fence = "" if fence else mark[1]
            is_prose = not fence and not is_fence
            lines.append(_CODE_OR_TARGET.sub(redirect, line) if is_prose else line)
        return "".join(lines)

    def _redirect_one(self, found: re.Match[str], source: PurePosixPath) -> str:
        target = found["target"]
        if target is None or _EXTERNAL.match(target):
            return found[0]
        name, mark, anchor = target.partition("#")
        wanted = PurePosixPath(os.path.normpath(source.parent / name))
        if not (self.root / wanted).exists():
            raise FileNotFoundError(f"{source} links to {target}, which does not exist")
        if (self.root / wanted / "README.md").is_file():
            wanted /= "README.md"
        if not wanted.is_relative_to(TUTORIALS):
            self._waiting.append(wanted)
        here = place_of(source, self.root).parent
        there = os.path.relpath(place_of(wanted, self.root), here)
        return f"]({there}{mark}{anchor})"


def place_of(source: PurePosixPath, root: Path) -> PurePosixPath:
    """Return where in the site a file or folder of the repository is."""
    if source == TUTORIALS:
        return TUTORIALS / "index.rst"
    if source.is_relative_to(TUTORIALS):
        return source.with_suffix(".rst")
    if source.is_relative_to(DOCS):
        return source.relative_to(DOCS)
    if (root / source).is_dir():
        return OUTSIDE / source / "index.md"
    is_page = source.suffix == ".md" or source.suffix in IMAGES
    return OUTSIDE / (source if is_page else source.with_name(f"{source.name}.md"))


def show_code(path: Path) -> str:
    """Return the text of a file as a block of code."""
    language = LANGUAGES.get(path.suffix, path.suffix.removeprefix("."))
    return f"````{language}\n{path.read_text(encoding='utf-8')}````\n"


def main(folder: str) -> None:
    """Lay out the site's sources in a folder."""
    site = Site(ROOT)
    site.lay_out()
    site.write(Path(folder))


if __name__ == "__main__":
    main(sys.argv[1])
