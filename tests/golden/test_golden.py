"""Every case recorded of the original gives the same here.

Where the original fails by accident, the case gives what is sensible. SWAPKIT_GOLDEN names another
file of cases in the same format.
"""

from __future__ import annotations

import copy
from collections import Counter

import pytest

from swapkit.config.mindformers.documents import (
    Document,
    RecomputeConfig,
    SwapConfig,
    read_document,
)
from swapkit.errors import WrongKey, WrongType
from tests.golden.accidents import check_accident, find_accident
from tests.golden.cases import Case, load, read_sections, run
from tests.golden.comparison import check_expected, list_unknown_fields
from tests.golden.failures import check_error, check_rules_error

GOLDEN = load()
TREES = GOLDEN["meta"]["trees"]
CASES: list[Case] = GOLDEN["cases"]


def check(case: Case) -> None:
    """Run a case and compare all that was recorded of it."""
    assert not list_unknown_fields(case), "recorded, but compared with nothing"
    if isinstance(case["recompute_config"], bool):  # no document can say so
        with pytest.raises(WrongType, match="The config 'recompute_config' must be a mapping"):
            read_document({"recompute_config": case["recompute_config"]})
        return
    outcome = run(case, TREES)
    check_rules_error(case, outcome)
    if "expected" in case:
        check_expected(case, outcome, TREES)
    elif find_accident(case):
        check_accident(case, outcome, TREES)
    else:
        check_error(case, outcome)


@pytest.mark.promise("B1")
@pytest.mark.promise("B2")
@pytest.mark.promise("B3")
@pytest.mark.promise("B4")
@pytest.mark.promise("B5")
@pytest.mark.promise("B7")
@pytest.mark.promise("B9")
@pytest.mark.promise("B10")
@pytest.mark.promise("B11")
@pytest.mark.promise("B14")
@pytest.mark.parametrize("case", CASES, ids=lambda case: case["name"])
def test_golden_case_when_run_then_as_recorded(case: Case) -> None:
    check(case)


def test_golden_names_when_counted_then_each_once() -> None:
    assert CASES
    assert set(Counter(case["name"] for case in CASES).values()) == {1}


@pytest.mark.parametrize("case", CASES, ids=lambda case: case["name"])
def test_golden_document_when_read_then_as_its_sections(case: Case) -> None:
    """The reader of documents gives what the sections give one by one; errors name the same."""
    sections = read_sections(case)
    try:
        wanted = Document(
            recompute=RecomputeConfig(**sections["recompute_config"]),
            swap=SwapConfig(**sections["swap_config"]),
        )
    except (TypeError, ValueError) as error:
        kind = WrongKey if "unexpected keyword" in str(error) else type(error)
        with pytest.raises(kind):
            read_document(sections)
    else:
        assert read_document(sections) == wanted


@pytest.mark.parametrize("where", ["case", "expected", "per_layer", "effective"])
def test_golden_field_when_unknown_then_noticed(where: str) -> None:
    case = copy.deepcopy(next(case for case in CASES if case["name"] == "doc_swap_1_default"))
    expected = case["expected"]
    places = {
        "case": case,
        "expected": expected,
        "per_layer": expected["per_layer"][0],
        "effective": expected["per_layer"][0]["effective"],
    }
    places[where]["bogus"] = 1
    assert list_unknown_fields(case) == {"bogus"}
