"""The page is whole, loads nothing, says what is missing, and shows names as they are."""

from __future__ import annotations

import json
import re
from dataclasses import replace
from html.parser import HTMLParser
from typing import TYPE_CHECKING

import pytest

from swapkit.reporting.html.decisions import count_rows, list_rows
from swapkit.reporting.html.page import render_page
from swapkit.reporting.html.views import view_step
from tests.support.run_records import make_large, make_record, rename

if TYPE_CHECKING:
    from swapkit.reporting.run_records import RunRecord

RECORD = make_record()
FIGURES = ("memory", "lanes", "budgets", "times", "peaks", "rescues")
HOSTILE = "</script><script>alert(1)</script><b a='\"&amp; \u2028 \U0001f40d 层"
MOST_BYTES = 5_000_000


class Page(HTMLParser):
    """What a browser would make of a page, as far as these tests ask."""

    def __init__(self, text: str) -> None:
        super().__init__()
        self.attributes: list[tuple[str, str, str]] = []  # tag, name, value
        self.texts: dict[str, list[str]] = {}  # by tag
        self._open: list[str] = []
        self.feed(text)
        self.close()

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        self.attributes += [(tag, name, value or "") for name, value in attrs]
        if tag not in {"meta", "input", "i", "link"}:
            self._open.append(tag)

    def handle_endtag(self, tag: str) -> None:
        if tag != "i":
            assert self._open.pop() == tag

    def handle_data(self, data: str) -> None:
        self.texts.setdefault(self._open[-1] if self._open else "", []).append(data)

    def values(self, name: str) -> list[str]:
        return [value for _, each, value in self.attributes if each == name]

    def plots(self) -> dict[str, object]:
        (text,) = [
            each for each in self.texts["script"] if each.startswith(('{"documents"', "null"))
        ]
        found: dict[str, object] = json.loads(text)
        return found


@pytest.fixture(scope="module")
def page() -> Page:
    return Page(render_page(RECORD))


def test_page_when_parsed_then_every_figure_has_its_words(page: Page) -> None:
    for name in FIGURES:
        assert f"plot-{name}" in page.values("id")
    assert len(page.texts["figcaption"]) == len(FIGURES)
    labels = [value for tag, name, value in page.attributes if (tag, name) == ("div", "aria-label")]
    assert len([each for each in labels if len(each) > 20]) >= len(FIGURES)


def test_page_when_parsed_then_it_refers_to_nothing_outside(page: Page) -> None:
    assert not page.values("src")
    assert not page.values("href")
    assert not page.values("srcset")
    assert "link" not in {tag for tag, _, _ in page.attributes}
    (style,) = page.texts["style"]
    assert "url(" not in style
    assert "@import" not in style
    assert any(value.startswith("default-src 'none'") for value in page.values("content"))


def test_page_when_read_without_scripts_then_the_table_is_there(page: Page) -> None:
    assert RECORD.plan is not None
    swapped = [each for each in page.texts["span"] if each in {"swap", "recompute", "keep"}]
    assert len(swapped) >= len(RECORD.plan.decisions)
    assert any("layers.0." in each for each in page.texts["th"])
    assert "it fits in the budget" in page.texts["td"]


def test_page_when_names_are_hostile_then_shown_as_text() -> None:
    text = render_page(rename(RECORD, HOSTILE))
    page = Page(text)
    assert {tag for tag, _, _ in page.attributes} == {
        tag for tag, _, _ in Page(render_page(RECORD)).attributes
    }
    assert len(page.texts["script"]) == 3
    assert any(each.startswith(HOSTILE) for each in page.texts["th"])
    assert f"{HOSTILE} in" in page.texts["h1"][0]
    assert HOSTILE in json.dumps(page.plots(), ensure_ascii=False).replace('\\"', '"')


@pytest.mark.parametrize(
    ("record", "missing", "shown"),
    [
        (replace(RECORD, trace=None, plan=None, trade_offs=(), plan_text="", policy="rescue"),
         3, ("times", "peaks", "rescues")),
        (replace(RECORD, plan=None, trade_offs=(), plan_text="", why_no_plan="nothing fits"),
         2, ("memory", "lanes", "times", "peaks", "rescues")),
        (replace(RECORD, machine=None, trade_offs=()),
         2, ("memory", "lanes", "times", "peaks", "rescues")),
        (replace(RECORD, trace=None, plan=None, trade_offs=(), plan_text="", steps=(),
                 stats=replace(RECORD.stats, steps=0, step_seconds=None)), 4, ()),
    ],
)  # fmt: skip
def test_page_when_something_is_missing_then_it_says_why(
    record: RunRecord, missing: int, shown: tuple[str, ...]
) -> None:
    page = Page(render_page(record))
    found = re.findall(r'<p class="missing">([^<]*)</p>', render_page(record))
    assert len(found) == missing
    assert all(": " in each for each in found)
    assert {each for each in page.values("id") if each.startswith("plot-")} == {
        f"plot-{name}" for name in shown
    }


def test_page_when_the_session_has_ended_then_said() -> None:
    assert "<span>ended</span>" in render_page(replace(RECORD, is_ended=True))


@pytest.mark.parametrize("layers", [555, 1050])  # just below the most rows, and above
def test_page_when_the_run_is_large_then_small_enough_and_it_says_what_is_left_out(
    layers: int,
) -> None:
    record = make_large(layers, steps=10_000)
    assert record.trace is not None
    assert len(record.trace.operators) > 19 * layers
    text = render_page(record)
    assert ("storages are joined to" in text) == (layers == 1050)
    assert len(text.encode()) <= MOST_BYTES
    assert "10,000 steps are drawn as" in text
    assert "The session keeps its latest 10,000 steps." in text
    assert "Memory changes at" in text
    assert "are drawn as one block" in text


@pytest.mark.parametrize(("factor", "kind"), [(1.05, "lead"), (1.32, "warning"), (0.8, "warning")])
def test_page_when_read_then_the_measured_step_comes_first_and_warns_if_it_is_far_off(
    factor: float, kind: str
) -> None:
    predicted = RECORD.stats.predicted_step_seconds
    assert predicted is not None
    stats = replace(RECORD.stats, step_seconds=factor * predicted)
    text = render_page(replace(RECORD, stats=stats))
    summary = text[text.index('<section id="summary">') :]
    first = re.match(r'<section id="summary"><p class="(\w+)">Measured: [^,]+, (\S+) from', summary)
    assert first is not None
    assert first.groups() == (kind, f"{factor - 1:+.1%}")


def test_page_when_read_then_it_says_who_holds_the_peak_and_which_storages_have_no_row() -> None:
    text = render_page(RECORD)
    assert text.index("Who holds the peak") < text.index('<table id="peak">')
    assert RECORD.trace is not None
    view = view_step(RECORD)
    assert view is not None
    rows = list_rows(RECORD.trace, view.reasons, RECORD.pace)
    assert count_rows(RECORD.trace, rows) == ""  # all have one
    assert count_rows(RECORD.trace, rows[2:]) == (
        f"Autograd saves {len(rows)} storages in this step, {len(rows) - 2} of which a plan can "
        "move: these have a row. The other 2 stay on the device."
    )
