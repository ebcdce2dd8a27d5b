"""The documentation site: links of its sources lead on, and a broken page is complained about."""

from __future__ import annotations

import pydoc
import re
from pathlib import PurePosixPath
from typing import TYPE_CHECKING, Any, cast

import pytest

from tests.meta.sources import ROOT
from tools.check_site import find_complaints
from tools.docs_site import mark_code
from tools.stage_docs import Site, place_of

if TYPE_CHECKING:
    from pathlib import Path

PAGE = '<html><body><h1 id="one">One</h1>{}</body></html>'


@pytest.fixture
def repository(tmp_path: Path) -> Path:
    """A repository with one page under docs/, and the files that it links to."""
    files = {
        "docs/page.md": "[a](../ARCHITECTURE.md#one) [b](other.md) [c](../tutorials/first.py)\n"
        "[d](../examples) `[e](nowhere.md)` [f](https://example.org)\n```\n[g](nowhere.md)\n```\n",
        "docs/other.md": "# Other\n",
        "tutorials/first.py": "",
        "examples/make.py": "print(1)\n",
        **dict.fromkeys(("ARCHITECTURE.md", "CHANGELOG.md", "CONTRIBUTING.md"), "# One\n"),
    }
    for name, text in files.items():
        path = tmp_path / name
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(text)
    return tmp_path


def test_page_when_laid_out_then_its_links_lead_to_pages_of_the_site(repository: Path) -> None:
    site = Site(repository)
    site.lay_out()
    assert site.files[PurePosixPath("page.md")].decode() == (
        "[a](project/ARCHITECTURE.md#one) [b](other.md) [c](tutorials/first.rst)\n"
        "[d](project/examples/index.md) `[e](nowhere.md)` [f](https://example.org)\n"
        "```\n[g](nowhere.md)\n```\n"
    )
    folder = site.files[PurePosixPath("project/examples/index.md")].decode()
    assert "## `make.py`\n\n````python\nprint(1)\n````" in folder


def test_page_when_a_link_leads_nowhere_then_refused(repository: Path) -> None:
    (repository / "docs/other.md").write_text("[x](missing.md)\n")
    with pytest.raises(FileNotFoundError, match=r"docs/other\.md links to missing\.md"):
        Site(repository).lay_out()


def test_site_when_written_again_then_old_files_go_and_unchanged_ones_stay(
    repository: Path, tmp_path: Path
) -> None:
    target = tmp_path / "site"
    for _ in range(2):
        site = Site(repository)
        site.lay_out()
        site.write(target)
        (target / "stale.md").write_text("# Old\n")
        written = (target / "other.md").stat().st_mtime_ns
    site.write(target)
    assert not (target / "stale.md").exists()
    assert (target / "other.md").stat().st_mtime_ns == written


def test_places_when_asked_then_each_file_of_the_project_has_its_own() -> None:
    names = ("docs/cuda.md", "README.md", "tutorials", "tutorials/ascend.py", "examples/operators")
    places = [place_of(PurePosixPath(name), ROOT).as_posix() for name in names]
    assert places == [
        "cuda.md",
        "project/README.md",
        "tutorials/index.rst",
        "tutorials/ascend.rst",
        "project/examples/operators/index.md",
    ]


@pytest.mark.parametrize(
    ("body", "complaint"),
    [
        ('<a href="#one">x</a><a href="https://example.org">y</a>', ""),
        ('<a href="#two">x</a>', "links to #two"),
        ('<a href="gone.html">x</a>', "links to gone.html"),
        ('<script src="https://example.org/x.js"></script>', "loads https://example.org/x.js"),
        ('<link rel="stylesheet" href="//fonts.example/x.css">', "loads //fonts.example/x.css"),
        ('<img src="missing.png">', "links to missing.png"),
    ],
)
def test_site_when_checked_then_broken_links_and_foreign_resources_are_named(
    tmp_path: Path, body: str, complaint: str
) -> None:
    (tmp_path / "index.html").write_text(PAGE.format(body))
    found = find_complaints(tmp_path)
    assert bool(found) == bool(complaint)
    assert complaint in "".join(found)


def test_style_when_it_loads_a_font_from_elsewhere_then_named(tmp_path: Path) -> None:
    (tmp_path / "index.html").write_text(PAGE.format(""))
    (tmp_path / "site.css").write_text("@import 'https://fonts.example/a.css';")
    assert find_complaints(tmp_path) == ["site.css loads https://fonts.example/a.css"]


def test_docstring_when_marked_then_code_and_returns_are_as_sphinx_reads_them() -> None:
    lines = ["Use `x=1` and ``y``.", "", "Returns:", "    The target: `x`.", ""]
    mark_code(cast("Any", None), "function", "name", None, None, lines)
    assert "\n".join(lines).strip() == (
        "Use ``x=1`` and ``y``.\n\n:returns:\n    The target: ``x``."
    )


def test_reference_when_read_then_each_of_its_names_exists() -> None:
    text = (ROOT / "docs/api.md").read_text(encoding="utf-8")
    names = re.findall(r"^\.\. auto\w+:: ([\w.]+)", text, re.MULTILINE)
    assert len(names) > 40
    assert [name for name in names if pydoc.locate(name) is None] == []
