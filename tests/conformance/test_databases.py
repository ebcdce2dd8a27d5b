"""Every operator and module of torch's databases does the same in every mode.

Compared are results, gradients, all arguments and the whole state afterwards, and random numbers.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any
from unittest import mock

import pytest
import torch

import swapkit
from swapkit.api import budgets as contexts
from tests.conformance.database import (
    Case,
    differences,
    module_cases,
    modules,
    operator_cases,
    operators,
    run_case,
    runs_plainly,
)
from tests.conformance.modes import BUDGET, find_mode, hold_everything
from tests.conformance.test_operator_choices import marked
from tests.support.operators import Calls
from tests.support.stateful import RecomputeAll

if TYPE_CHECKING:
    from collections.abc import Iterator, Sequence
    from contextlib import AbstractContextManager

    from tests.programs import Evict

pytestmark = pytest.mark.filterwarnings("ignore")

SHARDS, PLANNED_SHARDS = 4, 16
MOVED = ("swap_everything", "rescue_everything", "hold_everything")
STEPS = 4  # of a session: recorded twice, a candidate, and one more
LEAST = 40  # cases that were compared, of a shard

# Under any dispatch mode torch takes another formula of this gradient, with other strides: see
# `areAnyTensorSubclassLike` in its `householder_product_backward`.
KNOWN: dict[str, dict[str, list[int]]] = {
    "recomputed": {"ormqr float32 0": [1]},
    "mixed": {"ormqr float32 0": [1]},
    "planned": {"ormqr float32 0": [1 + 8]},  # in the second step, which is recorded
}
# Likewise with class weights and smoothed labels: the first run of a region is in such a mode. And
# `lstsq` reads memory that nobody has written.
OTHER_BITS = ("nn_LinearCrossEntropyLoss", "linalg_lstsq")

# All modes of all operators take minutes. Recomputation is what could repeat an effect: half of the
# operators are recomputed, the other half are regions.
SLOW = pytest.mark.slow
MODES = ("recomputed", *MOVED, "mixed")
in_modes = pytest.mark.parametrize(
    ("shard", "mode"),
    [
        pytest.param(shard, mode, marks=() if mode == "recomputed" and shard % 2 else SLOW)
        for shard in range(SHARDS)
        for mode in MODES
    ],
)


def scope(mode: str) -> AbstractContextManager[Evict]:
    """Enter a mode: saved tensors move, or all operators are chosen."""
    if mode == "hold_everything":
        return hold_everything(min_bytes=1)
    return find_mode(mode).open() if mode in MOVED else marked(mode)


def expectations(cases: Iterator[Case]) -> Iterator[tuple[Case, list[torch.Tensor]]]:
    """Yield what torch itself makes of each case that it can run here, always to the same bits."""
    for case in cases:
        if runs_plainly(case):
            expected = run_case(case, lambda: None)
            if not differences(run_case(case, lambda: None), expected):
                yield case, expected


def check(cases: Iterator[Case], mode: str) -> int:
    """Compare cases in a mode with plain torch; return how many were compared."""
    wanted = list(expectations(cases))
    wrong = {}
    known = KNOWN.get(mode, {})
    with scope(mode) as evict:
        for case, expected in wanted:
            found = differences(run_case(case, evict), expected)
            if found:
                wrong[case.name] = found
    assert {name: found for name, found in wrong.items() if found != known.get(name)} == {}
    return len(wanted)


@in_modes
def test_operators_when_in_a_mode_then_they_do_the_same(shard: int, mode: str) -> None:
    entries = operators()[shard::SHARDS]
    assert check(operator_cases(entries, dtypes=(torch.float32,), samples=1), mode) >= LEAST


@pytest.mark.parametrize(
    "mode", ["recomputed", *(pytest.param(mode, marks=SLOW) for mode in MODES[1:])]
)
def test_modules_when_in_a_mode_then_they_do_the_same(mode: str) -> None:
    assert check(module_cases(modules(), samples=1), mode) >= LEAST


def check_regions(cases: Iterator[Case]) -> int:
    """Compare each case as a recomputed region, which is checked first and captured then."""
    wrong, compared = {}, 0
    for case, expected in expectations(cases):
        compared += 1
        for run in ("first", "captured"):
            region = swapkit.checkpoint(case.make())
            found = differences(run_case(case, lambda: None, region), expected)
            if found and not case.name.startswith(OTHER_BITS):
                wrong[case.name] = (run, found)
    assert wrong == {}
    return compared


# Each sample calls another kernel, so all of them are compared where there is time.
@pytest.mark.parametrize(
    ("shard", "samples"),
    [
        pytest.param(shard, samples, marks=SLOW if samples is None or shard % 2 else ())
        for shard in range(SHARDS)
        for samples in (1, None)
    ],
)
def test_operators_when_they_are_regions_then_they_do_the_same(
    shard: int, samples: int | None
) -> None:
    entries = operators()[shard::SHARDS]
    cases = operator_cases(entries, dtypes=(torch.float32,), samples=samples)
    assert check_regions(cases) >= LEAST


@pytest.mark.parametrize("samples", [1, pytest.param(None, marks=SLOW)])
def test_modules_when_they_are_regions_then_they_do_the_same(samples: int | None) -> None:
    assert check_regions(module_cases(modules(), samples=samples)) >= LEAST


def run_steps(case: Case, function: Any, session: Any = None) -> list[torch.Tensor]:
    """Run a case several times, as steps of a session if there is one."""
    results: list[torch.Tensor] = []
    for _ in range(STEPS):
        results += run_case(case, lambda: None, function)
        if session is not None:
            session.mark_step()
    return results


def check_planned(cases: Iterator[Case]) -> int:
    """Compare cases whose steps follow a plan that recomputes all that it may."""
    wrong: dict[str, Sequence[int]] = {}
    recomputed = 0
    for case, _ in expectations(cases):
        function = case.make()
        plain = function if isinstance(function, torch.nn.Module) else Calls(function)
        expected = run_steps(case, plain)
        function = case.make()
        model = function if isinstance(function, torch.nn.Module) else Calls(function)
        policy = RecomputeAll()
        terms: dict[str, Any] = {"policy": policy, "search_steps": 1, "min_swap_bytes": 1}
        # The samples are smaller than what users may ask for.
        with (
            mock.patch.object(contexts, "MIN_SWAP_BYTES", 1),
            swapkit.budget(BUDGET, model, **terms) as session,
        ):
            found = differences(run_steps(case, model, session), expected)
            recomputed += session.stats.recomputed_regions
        if found and found != KNOWN["planned"].get(case.name):
            wrong[case.name] = found
    assert not wrong
    return recomputed


@SLOW
@pytest.mark.parametrize("shard", range(PLANNED_SHARDS))
def test_operators_when_a_plan_recomputes_all_that_it_may_then_they_do_the_same(shard: int) -> None:
    entries = operators()[shard::PLANNED_SHARDS]
    check_planned(operator_cases(entries, dtypes=(torch.float32,), samples=1))


@SLOW
def test_modules_when_a_plan_recomputes_all_that_it_may_then_they_do_the_same() -> None:
    assert check_planned(module_cases(modules(), samples=1)) > 0
