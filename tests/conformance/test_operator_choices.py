"""Programs give the same bits whatever is chosen for their operators.

Every operator outside of modules is recomputed or swapped; a budget may evict what recipes keep.
"""

from __future__ import annotations

import gc
from contextlib import contextmanager
from typing import TYPE_CHECKING

import pytest

import swapkit
from swapkit._runtime.process.runtime import get_runtime
from swapkit._runtime.user_choices.operator_choices import ChosenOperators, mark_operators
from tests.conformance.modes import EVERYTHING, frozen_objects, settle
from tests.programs import ILLEGAL, PROGRAMS, Entry, Evict, assert_same_bits, run
from tests.programs.registry import results_of_plain_training
from tests.support.operators import HOW, rows_of
from tests.support.place import install

if TYPE_CHECKING:
    from collections.abc import Iterator

under_all = pytest.mark.parametrize("how", HOW)


@pytest.fixture(autouse=True, scope="module")
def few_objects() -> Iterator[None]:
    with frozen_objects():
        yield


@contextmanager
def marked(how: str) -> Iterator[Evict]:
    """Let the choices hold for all operators outside of modules."""
    install()
    tracker = get_runtime().tracker
    tracker.start("test")
    try:
        with mark_operators(ChosenOperators(rows_of(HOW[how]))):
            yield settle
    finally:
        tracker.stop("test")


@under_all
@pytest.mark.parametrize("entry", PROGRAMS, ids=lambda entry: entry.name)
@pytest.mark.promise("A3")
def test_results_when_all_operators_are_chosen_then_same_bits_and_no_mark_is_left(
    entry: Entry, how: str
) -> None:
    expected = results_of_plain_training(entry)
    with marked(how) as evict:
        results = run(entry.body, evict)
    assert_same_bits(results, expected)
    del results
    gc.collect()
    settle()  # a copy under way has the storage that it reads
    assert get_runtime().shim.marks_count() == 0


@under_all
@pytest.mark.parametrize("entry", ILLEGAL, ids=lambda entry: entry.name)
def test_illegal_program_when_all_operators_are_chosen_then_still_refused(
    entry: Entry, how: str
) -> None:
    with marked(how) as evict, pytest.raises(RuntimeError):
        run(entry.body, evict)


@pytest.mark.parametrize("entry", PROGRAMS[::5], ids=lambda entry: entry.name)
def test_results_when_a_budget_evicts_operands_of_recipes_then_same_bits(entry: Entry) -> None:
    expected = results_of_plain_training(entry)
    install()
    with swapkit.budget("512MiB") as session, marked("recomputed"):
        results = run(entry.body, lambda: session.rescue(EVERYTHING))
    assert_same_bits(results, expected)
