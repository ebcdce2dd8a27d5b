"""Which plans are legal: what may be moved, what can be made again, and when."""

from __future__ import annotations

import math
from dataclasses import replace
from typing import Any

import pytest

from swapkit.ir.machines import Machine
from swapkit.ir.plans import Action, Decision, Plan, Prediction, Tier
from swapkit.ir.traces import BEFORE, Kind, Trace
from swapkit.simulation.validator import find_violations
from tests.unit.simulation.steps import B, F, I, O, Row, make_step, with_operator

MACHINE = Machine(budget_bytes=10_000, out_bytes_per_second=100.0, in_bytes_per_second=100.0)
# The input 0 becomes 1, that 2, that 3; backward reads them in turn.
CHAIN: list[Row] = [
    (F, (0,), (1,)), (F, (1,), (2,)), (F, (2,), (3,)),
    (B, (3,), ()), (B, (2,), ()), (B, (1, 0), ()),
]  # fmt: skip
SIZES = {0: 10, 1: 100, 2: 100, 3: 100}
STEP = make_step(CHAIN, SIZES, saved=(1, 2, 3))
# 1 is not saved, and gone after operator 2.
SHORT_LIVED = make_step([*CHAIN[:5], (B, (0,), ())], SIZES, saved=(2,), changes={1: {"death": 3}})


def decide(*storages: int, action: Action = Action.SWAP, **fields: Any) -> Plan:
    decisions = tuple(Decision(storage=each, action=action, **fields) for each in storages)
    return Plan(decisions=decisions, budget_bytes=MACHINE.budget_bytes)


def again(*storages: int) -> Plan:
    return decide(*storages, action=Action.RECOMPUTE)


def assert_found(trace: Trace, plan: Plan, expected: str, machine: Machine = MACHINE) -> None:
    violations = find_violations(trace, plan, machine)
    assert any(expected in each for each in violations), violations


@pytest.mark.parametrize(
    "plan",
    [
        decide(),
        decide(0, action=Action.KEEP),
        decide(1),
        decide(1, release=2, prefetch=5),
        decide(1, release=5, prefetch=5),
        decide(1, 2),
        again(1),
        again(2),
        again(1, 2, 3),
    ],
)
def test_plan_when_legal_then_nothing_is_found(plan: Plan) -> None:
    assert find_violations(STEP, plan, MACHINE) == []


def test_storage_when_next_read_follows_the_last_forward_one_then_it_has_a_gap() -> None:
    assert find_violations(STEP, decide(3, release=3, prefetch=3), MACHINE) == []


@pytest.mark.parametrize(
    ("rows", "changes", "why"),
    [
        (CHAIN, {2: {"is_saved": False}}, "nobody saved it"),
        ([*CHAIN[:4], (B, (0,), ()), CHAIN[5]], {}, "nothing reads it after forward"),
        ([*CHAIN[:3], (B, (3,), (2,)), *CHAIN[4:]], {}, "backward writes it before reading it"),
        ([*CHAIN[:3], (I, (2,), ()), *CHAIN[4:]], {}, "something else reads it first"),
        ([*CHAIN[:4], (O, (2,), ()), CHAIN[5]], {}, "the optimizer reads it, but it is no state"),
        (
            [(B, (0,), (1,)), (B, (1,), (2,)), (F, (1,), (3,)), *CHAIN[3:]],
            {},
            "forward does not touch it",
        ),
    ],
)
def test_storage_when_not_idle_then_it_cannot_be_planned(
    rows: list[Row], changes: dict[int, dict[str, Any]], why: str
) -> None:
    trace = make_step(rows, SIZES, saved=(1, 2, 3), changes=changes)
    for action in (Action.SWAP, Action.RECOMPUTE):
        violations = find_violations(trace, decide(2, action=action), MACHINE)
        assert violations, why
        assert "storage 2: cannot be planned" in violations[0]
    assert find_violations(trace, decide(2, action=Action.KEEP), MACHINE) == []


def test_storage_when_read_in_forward_again_then_its_gap_begins_there() -> None:
    rows: list[Row] = [*CHAIN[:4], (F, (1,), (4,)), *CHAIN[4:]]
    trace = make_step(rows, SIZES | {4: 1}, saved=(1,))
    assert find_violations(trace, decide(1, release=5), MACHINE) == []
    assert_found(
        trace, decide(1, release=4), "its release is operator 4, but it is idle from operator 5"
    )


def test_release_when_the_first_storage_is_a_weight_then_those_of_others_are_still_checked() -> (
    None
):
    """A weight may leave behind its last use, for the next step; a saved tensor may not."""
    weight = {"kind": Kind.STATE, "continues": 0, "death": 6}
    trace = make_step([*CHAIN[:5], (B, (1,), ())], SIZES, saved=(1, 2, 3), changes={0: weight})
    plan = decide(2, release=5)
    plan = replace(plan, decisions=(*decide(0).decisions, *plan.decisions))
    assert_found(trace, plan, "storage 2: its release is operator 5, but it is idle")


@pytest.mark.parametrize(
    ("plan", "expected"),
    [
        (decide(1, release=1), "its release is operator 1, but it is idle from operator 2 on"),
        (decide(2, release=5), "its release is operator 5, but it is idle from operator 3 on, and"),
        (decide(1, prefetch=1), "its prefetch is operator 1"),
        (decide(2, prefetch=5), "its prefetch is operator 5"),
        (decide(1, release=4, prefetch=3), "prefetch: expected an operator of at least 4"),
        (decide(1, tier=Tier.DISK), "storage 1: goes to disk, but the machine has no disk"),
        (decide(1, 1), "one decision for each storage"),
        (decide(7), "a storage below 4"),
        (replace(decide(), prediction=Prediction(seconds=1.0, peak_bytes=1)), "the operators, 6"),
        (
            replace(decide(), prediction=Prediction(seconds=6.0, peak_bytes=1), bound_seconds=6.1),
            "below the bound of all plans",
        ),
        (
            replace(decide(1), prediction=Prediction(seconds=6.0, peak_bytes=1, swapped_bytes=99)),
            "the plan swaps 100 bytes, but predicts 99",
        ),
    ],
)  # fmt: skip
def test_plan_when_a_decision_is_wrong_then_found(plan: Plan, expected: str) -> None:
    assert_found(STEP, plan, expected)


def test_plan_when_its_prediction_fits_then_nothing_is_found() -> None:
    prediction = Prediction(seconds=6.0, peak_bytes=1, swapped_bytes=100)
    plan = replace(decide(1), prediction=prediction, bound_seconds=6.0)
    assert find_violations(STEP, plan, MACHINE) == []


def test_disk_when_there_is_one_then_legal() -> None:
    machine = replace(
        MACHINE, disk_bytes=1, disk_write_bytes_per_second=9.0, disk_read_bytes_per_second=9.0
    )
    assert find_violations(STEP, decide(1, tier=Tier.DISK), machine) == []


def test_swapped_input_when_needed_for_recomputing_then_by_then() -> None:
    swap, rerun = decide(1, prefetch=4).decisions, again(2).decisions
    plan = Plan(decisions=swap + rerun, budget_bytes=1)
    assert find_violations(STEP, plan, MACHINE) == []
    late = Plan(decisions=decide(1, prefetch=5).decisions + rerun, budget_bytes=1)
    assert_found(
        STEP,
        late,
        "its prefetch is operator 5, but it is idle from operator 2 on, and operator 4 needs it",
    )


def test_recomputed_when_input_is_recomputed_too_then_both_are_needed_by_then() -> None:
    # 3 is made again before operator 3, so 2 and 1 are there by then.
    swap = decide(1, prefetch=4).decisions
    plan = Plan(decisions=swap + again(2, 3).decisions, budget_bytes=1)
    assert_found(
        STEP, plan, "storage 1: its prefetch is operator 4, but it is idle from operator 2 on"
    )


@pytest.mark.parametrize(
    ("trace", "storage", "expected"),
    [
        (with_operator(STEP, 1, is_repeatable=False), 2, "operator 1 (op1) is not repeatable"),
        (
            make_step(CHAIN, SIZES, saved=(1, 2), changes={1: {"birth": BEFORE}}),
            1,
            "no operator of the",
        ),
        (
            make_step([*CHAIN[:5], (B, (1,), ())], SIZES, saved=(1,)),
            1,
            "reads storage 0, which is gone by then",
        ),
        (
            make_step([*CHAIN[:2], (F, (2,), (3, 0)), *CHAIN[3:]], SIZES, saved=(1,)),
            1,
            "reads storage 0, which was written in between",
        ),
        (
            make_step([(F, (0,), (1, 0)), *CHAIN[1:]], SIZES, saved=(1,)),
            1,
            "operator 0, when rerun, changes storage 0",
        ),
        (
            make_step([CHAIN[0], (F, (1,), (2, 1)), *CHAIN[2:]], SIZES, saved=(1,)),
            1,
            "its writers are [0, 1]",
        ),
        (
            make_step(
                [(F, (0, 1), (1,)), *CHAIN[1:]], SIZES, saved=(1,), changes={1: {"birth": 0}}
            ),
            1,
            "reads storage 1, which was written in between",
        ),
        (
            make_step([(F, (0,), ()), *CHAIN[1:]], SIZES, saved=(1,), changes={1: {"birth": 0}}),
            1,
            "its writers are none",
        ),
        (
            with_operator(SHORT_LIVED, 0, is_repeatable=False),
            2,
            "operator 0 (op0) is not repeatable",
        ),
    ],
)
def test_storage_when_it_cannot_be_made_again_then_found(
    trace: Trace, storage: int, expected: str
) -> None:
    assert_found(trace, again(storage), expected)
    assert find_violations(trace, decide(storage), MACHINE) == []


def test_chain_when_through_what_nobody_saved_then_legal() -> None:
    assert find_violations(SHORT_LIVED, again(2), MACHINE) == []


@pytest.mark.parametrize(("last", "is_legal"), [(3, False), (4, True), (5, True)])
def test_input_when_autograd_has_not_saved_it_so_long_then_nothing_is_made_from_it(
    last: int, is_legal: bool
) -> None:
    reads = {3: (3,), 4: (2,), 5: ()}
    backward: list[Row] = [(B, (*reads[n], 0) if n == last else reads[n], ()) for n in reads]
    changes = {0: {"death": 6}, 1: {"death": 3}}
    trace = make_step([*CHAIN[:3], *backward], SIZES, saved=(2,), changes=changes)
    if is_legal:
        assert find_violations(trace, again(2), MACHINE) == []
    else:
        assert_found(trace, again(2), "which the training loop may have changed by then")


def test_operand_when_nobody_was_seen_to_make_it_then_autograd_has_to_have_saved_it() -> None:
    """Such as the result of a kernel that torch does not see, which appears where it is read."""
    steps: list[Row] = [(F, (0,), (1,)), (F, (1,), (2,)), (B, (1,), ()), (B, (), ())]
    sizes = {0: 10, 1: 100, 2: 100}
    changes = {0: {"kind": Kind.ACTIVATION, "birth": 0, "death": 4}}
    trace = make_step(steps, sizes, saved=(1,), changes=changes)
    assert_found(trace, again(1), "storage 0: rerunning operator 0 does not make it")
    saves: list[Row] = [*steps[:3], (B, (0,), ())]
    trace = make_step(saves, sizes, saved=(1,), changes=changes)
    assert find_violations(trace, again(1), MACHINE) == []


@pytest.mark.parametrize("is_saved", [False, True])
def test_operand_when_a_module_remembers_it_then_it_is_made_again_unless_saved(
    is_saved: bool,
) -> None:
    """It may overwrite that, unseen; what autograd has saved nobody may overwrite."""
    last = (B, (1,), ()) if is_saved else (B, (), ())
    steps: list[Row] = [(F, (0,), (1,)), (F, (1,), (2,)), (B, (2,), ()), (B, (0,), ()), last]
    trace = make_step(steps, {0: 10, 1: 100, 2: 100}, saved=(2,), changes={1: {"death": 5}})
    assert find_violations(trace, again(2), MACHINE) == []
    random = with_operator(trace, 0, is_repeatable=False)
    if is_saved:
        assert find_violations(random, again(2), MACHINE) == []
    else:
        assert_found(random, again(2), "operator 0 (op0) is not repeatable")


def test_chain_when_a_write_follows_the_need_then_legal() -> None:
    trace = make_step([*CHAIN, (O, (0,), (0, 1))], SIZES, saved=(1,))
    assert find_violations(trace, again(1), MACHINE) == []


STATE_ROWS: list[Row] = [(F, (0,), (1,)), (B, (1,), (2,)), (O, (2, 3), (0, 3))]
STATE_SIZES = {0: 10, 1: 10, 2: 10, 3: 100}


def state_step(rows: list[Row]) -> Trace:
    about = {"kind": Kind.OPTIMIZER_STATE, "birth": BEFORE}
    return make_step(rows, STATE_SIZES, changes={3: about})


def test_optimizer_state_when_swapped_then_its_gap_begins_with_the_step() -> None:
    trace = state_step(STATE_ROWS)
    assert find_violations(trace, decide(3, release=0, prefetch=2), MACHINE) == []
    assert_found(trace, again(3), "storage 3: no operator of the step makes it")


@pytest.mark.parametrize(
    "rows",
    [
        [(F, (0, 3), (1,)), *STATE_ROWS[1:]],
        [*STATE_ROWS[:2], (O, (2,), (0, 3))],
        [STATE_ROWS[0], (B, (1,), (2, 3)), STATE_ROWS[2]],
    ],
)
def test_optimizer_state_when_touched_otherwise_then_it_cannot_be_planned(rows: list[Row]) -> None:
    assert_found(state_step(rows), decide(3), "storage 3: cannot be planned")


def test_values_when_unsound_then_the_check_says_so() -> None:
    assert_found(with_operator(STEP, 0, seconds=math.nan), decide(), "operators[0].seconds")
    assert_found(STEP, decide(), "duplex", replace(MACHINE, duplex=3.0))


@pytest.mark.parametrize(("death", "is_legal"), [(4, False), (5, True)])
def test_input_when_it_dies_where_it_is_needed_then_it_is_not_there(
    death: int, is_legal: bool
) -> None:
    changes = {1: {"death": death, "is_saved": True}}
    trace = make_step([*CHAIN[:5], (B, (0,), ())], SIZES, saved=(2,), changes=changes)
    trace = with_operator(trace, 0, is_repeatable=False)
    assert (find_violations(trace, again(2), MACHINE) == []) == is_legal
