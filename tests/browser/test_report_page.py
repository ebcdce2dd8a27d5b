"""The report in a real browser without a network: drawn, without an error, and it reacts."""

from __future__ import annotations

import json
from dataclasses import replace
from typing import TYPE_CHECKING, Any

import pytest

from swapkit.reporting.html.page import render_page
from tests.support.chromium import open_browser, open_page
from tests.support.run_records import make_record, rename

if TYPE_CHECKING:
    from collections.abc import Iterator
    from pathlib import Path

pytestmark = pytest.mark.chromium

FIGURES = ("memory", "lanes", "budgets", "times", "peaks", "rescues")
HOSTILE = "</script><script>window.hacked = 1</script><img src=x onerror='window.hacked = 1'>"
# The share of pixels of a figure that are not its background.
INKED = """
const canvas = arguments[0].querySelector("canvas");
const pixels = canvas.getContext("2d").getImageData(0, 0, canvas.width, canvas.height).data;
let inked = 0;
for (let at = 3; at < pixels.length; at += 4) inked += pixels[at] > 0;
return inked / (pixels.length / 4);
"""
INKS = "return [...new Set(charts.map((each) => each.theme.ink))]"


@pytest.fixture(scope="module")
def browser(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Any]:
    with open_browser(tmp_path_factory.mktemp("profile")) as driver:
        yield driver


@pytest.fixture(scope="module")
def page(tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = tmp_path_factory.mktemp("page") / "run.html"
    path.write_text(render_page(make_record()), encoding="utf-8")
    return path


def problems(driver: Any) -> list[str]:
    return [each["message"] for each in driver.get_log("browser") if each["level"] != "INFO"]


def requests(driver: Any) -> list[str]:
    """Return the addresses that pages asked for since the last call; the browser's own aside."""
    messages = [json.loads(each["message"])["message"] for each in driver.get_log("performance")]
    urls = [
        each["params"]["request"]["url"]
        for each in messages
        if each["method"] == "Network.requestWillBeSent"
    ]
    return [url for url in urls if not url.startswith(("data:", "chrome"))]


def too_wide(driver: Any) -> list[str]:
    """Return what has to be scrolled sideways: the page, or the table."""
    script = (
        "return [document.documentElement, document.querySelector('.scroll')]"
        ".filter((each) => each.scrollWidth > each.clientWidth).map((each) => each.tagName)"
    )
    found: list[str] = driver.execute_script(script)
    return found


def visible_rows(driver: Any) -> list[str]:
    script = (
        "return Array.from(document.querySelectorAll('#decisions tbody tr'))"
        ".map((row) => row.cells[0].textContent)"
    )
    found: list[str] = driver.execute_script(script)
    return found


def column(driver: Any, number: int) -> list[float]:
    script = (
        "return Array.from(document.querySelectorAll('#decisions tbody tr'))"
        ".map((row) => Number(row.cells[arguments[0]].dataset.v))"
    )
    found: list[float] = driver.execute_script(script, number)
    return found


@pytest.mark.parametrize("scheme", ["light", "dark"])
def test_page_when_opened_then_every_figure_is_drawn_without_an_error_or_a_request(
    browser: Any, page: Path, scheme: str, record_property: Any
) -> None:
    requests(browser)
    problems(browser)
    milliseconds = open_page(browser, page, scheme=scheme)
    record_property("milliseconds", milliseconds)
    assert problems(browser) == []
    assert requests(browser) == [page.as_uri()]
    for name in FIGURES:
        plot = browser.find_element("id", f"plot-{name}")
        assert browser.execute_script(INKED, plot) > 0.01, name
    assert too_wide(browser) == []


def test_page_when_the_scheme_changes_then_colours_follow_and_the_button_overrules(
    browser: Any, page: Path
) -> None:
    open_page(browser, page, scheme="light")
    background = "return getComputedStyle(document.body).backgroundColor"
    assert browser.execute_script(background) == "rgb(255, 255, 255)"
    assert browser.execute_script(INKS) == ["#1f2933"]
    browser.find_element("id", "theme").click()
    assert browser.execute_script(background) == "rgb(20, 25, 31)"
    assert browser.execute_script(INKS) == ["#e4e7eb"]
    browser.find_element("id", "theme").click()
    assert browser.execute_script(INKS) == ["#1f2933"]
    open_page(browser, page, scheme="dark")
    assert browser.execute_script(background) == "rgb(20, 25, 31)"
    assert browser.execute_script(INKS) == ["#e4e7eb"]
    assert problems(browser) == []


def test_table_when_searched_then_only_rows_with_all_the_words(browser: Any, page: Path) -> None:
    open_page(browser, page)
    whole = visible_rows(browser)
    search = browser.find_element("id", "filter")
    search.send_keys("LAYERS.1 mlp")
    found = visible_rows(browser)
    assert 0 < len(found) < len(whole)
    assert all("layers.1.mlp" in each for each in found)
    shown = browser.find_element("id", "count").text
    assert shown == f"{len(found)} of {len(whole)} rows"
    search.clear()
    search.send_keys("no such module")
    assert visible_rows(browser) == []
    search.clear()
    search.send_keys(" ")
    assert visible_rows(browser) == whole


def test_table_when_a_heading_is_clicked_then_sorted_by_it_and_then_the_other_way(
    browser: Any, page: Path
) -> None:
    open_page(browser, page)
    heads = browser.find_elements("css selector", "#decisions thead button")
    size = [each.text for each in heads].index("size")
    heads[size].click()
    assert column(browser, size) == sorted(column(browser, size), reverse=True)
    head = browser.find_elements("css selector", "#decisions thead th")[size]
    assert head.get_attribute("aria-sort") == "descending"
    heads[size].click()
    assert column(browser, size) == sorted(column(browser, size))
    assert len(set(column(browser, size))) > 1
    heads[0].click()
    names = visible_rows(browser)
    assert names[0] < names[-1]
    assert head.get_attribute("aria-sort") is None


def test_figures_when_one_is_zoomed_then_the_other_follows_until_all_is_shown_again(
    browser: Any, page: Path
) -> None:
    open_page(browser, page)
    canvas = browser.find_element("css selector", "#plot-memory canvas")
    ranges = "return charts.slice(0, 2).map((each) => [each.x.from / each.x.high, each.x.to])"
    from selenium.webdriver import ActionChains

    drag = ActionChains(browser).move_to_element(canvas)
    drag.click_and_hold().move_by_offset(200, 0).release().perform()
    (left, right), (lanes_left, lanes_right) = browser.execute_script(ranges)
    assert (left, right) == (lanes_left, lanes_right)
    assert 0.3 < left < 0.6
    assert "in use: " in browser.find_element("css selector", "#plot-memory .tip").text
    assert browser.execute_script("return charts[2].x.from === charts[2].x.low")
    browser.find_element("css selector", "#plot-lanes button").click()
    assert browser.execute_script(ranges)[0][0] == 0
    assert problems(browser) == []


def test_lanes_when_parts_of_the_model_have_room_then_they_are_named(
    browser: Any, page: Path
) -> None:
    open_page(browser, page)
    written = browser.execute_script("""
    const written = [];
    const write = CanvasRenderingContext2D.prototype.fillText;
    CanvasRenderingContext2D.prototype.fillText = function (text, ...place) {
      written.push(text);
      write.call(this, text, ...place);
    };
    charts[1].redraw();
    CanvasRenderingContext2D.prototype.fillText = write;
    return written;
    """)
    assert {"model.layers.0", "model.layers.1", "compute", "copy in"} <= set(written)


@pytest.mark.parametrize(("factor", "kind"), [(1.05, "lead"), (1.32, "warning"), (0.8, "warning")])
def test_head_when_read_then_the_measured_step_comes_first_and_warns_if_it_is_far_off(
    browser: Any, tmp_path: Path, factor: float, kind: str
) -> None:
    record = make_record()
    predicted = record.stats.predicted_step_seconds
    assert predicted is not None
    stats = replace(record.stats, step_seconds=factor * predicted)
    path = tmp_path / "run.html"
    path.write_text(render_page(replace(record, stats=stats)), encoding="utf-8")
    open_page(browser, path)
    first = browser.find_element("css selector", "#summary > *")
    assert first.get_attribute("class") == kind
    assert first.text.startswith("Measured: ")
    assert f"{factor - 1:+.1%} from the prediction" in first.text


def test_page_when_parts_are_missing_then_it_says_why(browser: Any, tmp_path: Path) -> None:
    bare = replace(make_record(), trace=None, plan=None, machine=None, trade_offs=(), plan_text="")
    given = replace(make_record(), machine=None, trade_offs=())
    found = []
    for number, record in enumerate((bare, replace(bare, steps=()), given)):
        path = tmp_path / f"{number}.html"
        path.write_text(render_page(record), encoding="utf-8")
        problems(browser)
        open_page(browser, path)
        assert problems(browser) == []
        found.append([each.text for each in browser.find_elements("class name", "missing")])
    assert [len(each) for each in found] == [3, 4, 2]
    assert all("is missing: no step was recorded yet" in each for each in found[0])
    assert found[1][-1] == "This figure is missing: no step has ended."
    assert "did not measure the speed of the links" in found[2][0]


def test_page_when_printed_then_as_wide_as_on_the_screen_with_few_rows(
    browser: Any, page: Path
) -> None:
    open_page(browser, page)
    printed = browser.execute_cdp_cmd(
        "Page.printToPDF", {"preferCSSPageSize": True, "printBackground": True}
    )
    assert len(printed["data"]) > 50_000
    browser.execute_cdp_cmd("Emulation.setEmulatedMedia", {"media": "print"})
    shown = browser.execute_script(
        "return Array.from(document.querySelectorAll('#decisions tbody tr'))"
        ".filter((row) => row.offsetHeight > 0).length"
    )
    assert shown <= 60
    assert not browser.find_element("id", "filter").is_displayed()
    browser.execute_cdp_cmd("Emulation.setEmulatedMedia", {"media": ""})


def test_page_when_names_are_hostile_then_nothing_of_them_runs(
    browser: Any, tmp_path: Path
) -> None:
    path = tmp_path / "hostile.html"
    path.write_text(render_page(rename(make_record(), HOSTILE)), encoding="utf-8")
    problems(browser)
    open_page(browser, path)
    assert too_wide(browser) == []
    assert browser.execute_script("return window.hacked") is None
    assert problems(browser) == []
    assert any(each.startswith(HOSTILE) for each in visible_rows(browser))
