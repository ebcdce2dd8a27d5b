"""The page is whole, loads nothing, says what is missing, and shows names as they are."""

from __future__ import annotations

import base64
import hashlib
import json
import re
from dataclasses import replace
from html.parser import HTMLParser
from importlib.resources import files
from typing import TYPE_CHECKING, Any

import pytest

from swapkit.ir.traces import Phase
from swapkit.reporting.html.page import MOST_HOLDERS, MOST_ROWS, render_page, why_no_plan
from swapkit.reporting.steps import COPY_IN, COPY_OUT, RECOMPUTE, WAITING
from swapkit.simulation.occupancy import Layer, find_peak, measure_occupancy
from swapkit.simulation.timeline import simulate
from tests.support.run_records import make_large, make_record, rename

if TYPE_CHECKING:
    from swapkit.reporting.run_records import RunRecord

RECORD = make_record()
BARE = replace(RECORD, trace=None, plan=None, trade_offs=(), plan_text="")
FIGURES = {"memory", "lanes", "budgets", "times", "peaks", "rescues"}
HOSTILE = "</script></noscript><script>alert(1)</script><b a='\"&amp; {{data}} \u2028 \U0001f40d 层"
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
        if tag not in {"meta", "input"}:
            self._open.append(tag)

    def handle_endtag(self, tag: str) -> None:
        assert self._open.pop() == tag

    def handle_data(self, data: str) -> None:
        self.texts.setdefault(self._open[-1] if self._open else "", []).append(data)

    def values(self, name: str) -> list[str]:
        return [value for _, each, value in self.attributes if each == name]

    def record(self) -> dict[str, Any]:
        found: dict[str, Any] = json.loads(self.texts["script"][0])
        return found


@pytest.fixture(scope="module")
def page() -> Page:
    return Page(render_page(RECORD))


def test_page_when_parsed_then_it_refers_to_nothing_and_allows_its_own_script_only(
    page: Page,
) -> None:
    assert not {"src", "href", "srcset"} & {name for _, name, _ in page.attributes}
    (style,) = page.texts["style"]
    assert "url(" not in style
    assert "@import" not in style
    (policy,) = [each for each in page.values("content") if each.startswith("default-src 'none'")]
    digest = base64.b64encode(hashlib.sha256(page.texts["script"][1].encode()).digest()).decode()
    assert f"script-src 'sha256-{digest}'" in policy
    assert {f"figure-{name}" for name in FIGURES} <= set(page.values("id"))
    assert len(page.texts["figcaption"]) == len(FIGURES)


def test_page_when_read_without_scripts_then_it_tells_plan_and_budgets(page: Page) -> None:
    (words,) = page.texts["pre"]
    for text in ("predicted: step", "measured: step", "its copies cost no compute time",
                 "model.layers.0", "effect of other budgets"):  # fmt: skip
        assert text in words
    assert "There is no plan: no step was recorded yet" in Page(render_page(BARE)).texts["pre"][0]


def test_page_when_names_are_hostile_then_shown_as_text(page: Page) -> None:
    hostile = Page(render_page(rename(RECORD, HOSTILE)))
    assert [tag for tag, _, _ in hostile.attributes] == [tag for tag, _, _ in page.attributes]
    assert len(hostile.texts["script"]) == 2
    assert hostile.record()["hardware"] == HOSTILE
    assert HOSTILE in hostile.record()["step"]["texts"]
    assert "".join(hostile.texts["h1"]).startswith("</script></noscript>")


def test_script_when_it_names_kinds_of_work_and_data_then_all_of_them() -> None:
    script = files("swapkit.reporting.html").joinpath("page.js").read_text(encoding="utf-8")
    kinds = {each.value for each in Phase if each is not Phase.IDLE}
    for name in (*kinds, RECOMPUTE, COPY_IN, COPY_OUT, WAITING, *(each.value for each in Layer)):
        assert f'"{name}": ' in script, name


def test_values_when_there_is_a_plan_then_the_record_and_its_simulated_step(page: Page) -> None:
    values = page.record()
    assert RECORD.trace is not None
    assert RECORD.plan is not None
    assert RECORD.plan.prediction is not None
    assert values["stats"]["peak_bytes"] == RECORD.stats.peak_bytes
    assert len(values["steps"]["rows"]) == len(RECORD.steps)
    assert values["notes"][-1].startswith("links: ")
    step = values["step"]
    assert step["end"] == pytest.approx(RECORD.plan.prediction.seconds)
    assert len({len(step["times"]), *map(len, step["layers"].values())}) == 1
    in_use = [step["layers"][each.value] for each in (Layer.SAVED, Layer.STATE)]
    assert max(map(sum, zip(*in_use, strict=True))) <= RECORD.stats.budget_bytes
    actions = [step["texts"][row[2]] for row in step["decisions"]]
    assert actions == sorted(actions, key=("swap", "recompute", "keep").index)
    assert len(actions) >= len(RECORD.plan.decisions) == len(actions) - actions.count("keep")
    assert step["texts"][step["decisions"][0][0]].startswith("model.layers.")
    assert (step["saved"], step["states"]) == (len(actions), 0)
    places = {step["texts"][row[4]] for row in step["works"] if step["texts"][row[0]] == "backward"}
    assert places <= {each.module for each in RECORD.trace.operators if each.module}
    kinds = {step["texts"][row[0]] for row in step["works"]}
    assert kinds >= {"forward", "backward", "optimizer", COPY_OUT, COPY_IN}


def test_peak_when_its_holders_are_listed_then_at_most_ten_the_largest_first(page: Page) -> None:
    sizes = [nbytes for _, nbytes, _ in page.record()["step"]["peak"]]
    assert sizes == sorted(sizes, reverse=True)
    assert 0 < len(sizes) <= MOST_HOLDERS
    assert RECORD.trace is not None
    assert RECORD.plan is not None
    assert RECORD.machine is not None
    machine = replace(RECORD.machine, budget_bytes=RECORD.plan.budget_bytes)
    schedule = simulate(RECORD.trace, RECORD.plan, machine)
    there = find_peak(RECORD.trace, RECORD.plan, schedule)
    in_use = measure_occupancy(RECORD.trace, RECORD.plan, schedule).in_use()
    assert sum(each.nbytes for each in there) == max(in_use)


def test_plan_when_there_is_none_then_why() -> None:
    assert why_no_plan(BARE) == "no step was recorded yet (30 steps, stage 'stable')"
    assert "policy='rescue'" in why_no_plan(replace(BARE, policy="rescue"))
    assert why_no_plan(replace(BARE, why_no_plan="nothing fits")) == "nothing fits"
    tried = why_no_plan(replace(RECORD, plan=None, stage="search"))
    assert tried == "the session is in stage 'search' after 30 steps, and tries plans"


def test_page_when_the_run_is_large_then_small_enough_with_every_step_and_storage() -> None:
    record: RunRecord = make_large(1050, steps=10_000)
    text = render_page(record)
    assert len(text.encode()) <= MOST_BYTES
    values = Page(re.sub(r"<noscript>.*</noscript>", "", text, flags=re.DOTALL)).record()
    assert len(values["steps"]["rows"]) == 10_000
    step = values["step"]
    assert len(step["decisions"]) > 9000
    assert len(step["times"]) <= MOST_ROWS < step["instants"]
