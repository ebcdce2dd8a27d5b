"""Plans and schedules: from a run and back, judged by the validator that shares nothing with it."""

from __future__ import annotations

from dataclasses import replace
from typing import TYPE_CHECKING

import numpy as np
import pytest

from swapkit.errors import InfeasibleBudget, PlanMismatch
from swapkit.ir.checks import check_plan, check_trace
from swapkit.ir.machines import Machine
from swapkit.ir.passes import divide_weights
from swapkit.ir.plans import Action, Decision, Plan, Tier
from swapkit.simulation.lowering import lower
from swapkit.simulation.timeline import (
    KEEP,
    RECOMPUTE,
    SWAP,
    SWAP_TO_DISK,
    as_plan,
    predict,
    run,
    simulate,
)
from swapkit.simulation.validator import find_violations
from tests.support.problems import layered_trace, machine_for, random_actions
from tests.unit.simulation.steps import B, F, Row, make_step, with_operator

if TYPE_CHECKING:
    from swapkit.ir.traces import Trace
    from swapkit.simulation.problems import Problem


def draw(seed: int) -> tuple[Trace, Problem, Machine, np.ndarray]:
    rng = np.random.default_rng(seed)
    trace = layered_trace(
        int(rng.integers(1, 5)),
        seed=seed,
        numbered=bool(rng.integers(2)),
        optimizer=bool(rng.integers(2)),
    )
    fewer = (
        replace(each, is_saved=each.is_saved and rng.random() < 0.5) for each in trace.storages
    )
    if seed % 2:  # then slots have several operators
        trace = replace(trace, storages=tuple(fewer), events=())
    if seed % 3 == 0:
        trace = divide_weights(trace)
    problem = lower(trace, optimizer_states=bool(rng.integers(2)))
    machine = replace(
        machine_for(problem, float(rng.uniform(0.5, 1.1)), float(rng.uniform(1e9, 2e10))),
        duplex=float(rng.choice([1.0, 1.5, 2.0])),
        interference=float(rng.choice([0.0, 0.1])),
        out_latency_seconds=float(rng.choice([0.0, 1e-5])),
        host_bytes=None if rng.integers(2) else 120 << 20,
        disk_bytes=1 << 30,
        disk_write_bytes_per_second=5e9,
        disk_read_bytes_per_second=3e9,
    )
    return trace, problem, machine, random_actions(problem, seed, disk=bool(rng.integers(2)))


@pytest.mark.parametrize("seed", range(60))
def test_simulate_when_plan_is_of_a_run_then_the_same_and_nothing_to_object(seed: int) -> None:
    trace, problem, machine, actions = draw(seed)
    check_trace(trace)
    result = run(problem, machine, actions)
    while result.stuck_slot >= 0:
        machine = replace(machine, budget_bytes=machine.budget_bytes * 11 // 10, host_bytes=None)
        result = run(problem, machine, actions)
    plan = as_plan(trace, problem, machine, actions, result, policy="test")
    check_plan(plan, trace)
    schedule = simulate(trace, plan, machine)
    assert schedule.prediction == plan.prediction == predict(result)
    assert find_violations(trace, plan, machine, schedule) == []


def test_as_plan_when_items_are_moved_then_decisions_by_storage_and_operator() -> None:
    trace = layered_trace(3)
    problem = lower(trace)
    machine = replace(
        machine_for(problem, 0.8, 1e10),
        disk_bytes=1 << 40,
        disk_write_bytes_per_second=1e10,
        disk_read_bytes_per_second=1e10,
    )
    actions = np.zeros(len(problem.item_bytes), np.int8)
    actions[problem.births < 12] = SWAP
    actions[3] = SWAP_TO_DISK
    recomputed = int(np.flatnonzero(problem.can_recompute)[-1])
    actions[recomputed] = RECOMPUTE
    result = run(problem, machine, actions)
    assert result.stuck_slot < 0
    plan = as_plan(trace, problem, machine, actions, result, policy="mine")
    assert (plan.policy, plan.signature) == ("mine", trace.signature)
    assert plan.budget_bytes == machine.budget_bytes
    decisions = {decision.storage: decision for decision in plan.decisions}
    assert len(decisions) == (actions != KEEP).sum()
    for item, storage in enumerate(problem.item_storages.tolist()):
        if actions[item] == KEEP:
            assert storage not in decisions
            continue
        decision = decisions[storage]
        assert decision.action is (Action.RECOMPUTE if item == recomputed else Action.SWAP)
        assert decision.tier is (Tier.DISK if item == 3 else Tier.HOST)
        for slot, number in (
            (result.release_slots[item], decision.release),
            (result.prefetch_slots[item], decision.prefetch),
        ):
            assert number == (None if slot < 0 else problem.slot_operators[slot])
    assert any(decision.release is not None for decision in plan.decisions)


def test_simulate_when_slots_have_several_operators_then_each_has_its_share() -> None:
    whole = layered_trace(3)
    some = (replace(each, is_saved="layers.1.mlp" in each.module) for each in whole.storages)
    trace = replace(whole, storages=tuple(some))
    problem = lower(trace)
    machine = replace(machine_for(problem, 2.0), interference=0.5)
    schedule = simulate(trace, Plan(decisions=(), budget_bytes=1 << 40), machine)
    assert max(np.diff(problem.slot_operators)) > 5
    starts = np.cumsum([0.0, *(operator.seconds for operator in trace.operators)])
    np.testing.assert_allclose(schedule.starts, starts[:-1], atol=1e-12)
    np.testing.assert_allclose(schedule.ends, starts[1:], atol=1e-12)
    assert (schedule.transfers, schedule.recomputations, schedule.stalls) == ((), (), ())


def test_simulate_when_prefetch_is_not_said_then_copied_back_on_demand() -> None:
    trace = layered_trace(2)
    problem = lower(trace)
    machine = machine_for(problem, 2.0, 1e10)
    storage = int(problem.item_storages[1])
    plan = Plan(decisions=(Decision(storage=storage, action=Action.SWAP),), budget_bytes=1 << 40)
    schedule = simulate(trace, plan, machine)
    (stall,) = schedule.stalls
    assert stall.storage == storage
    assert stall.operator == problem.slot_operators[problem.uses[1]]
    assert stall.seconds == pytest.approx(problem.item_bytes[1] / 1e10)


def test_simulate_when_prefetch_is_between_what_happens_to_items_then_from_there_on() -> None:
    whole = layered_trace(3)
    some = (replace(each, is_saved="layers.0.mlp" in each.module) for each in whole.storages)
    trace = replace(whole, storages=tuple(some))
    problem = lower(trace)
    storage = int(problem.item_storages[0])
    machine = machine_for(problem, 2.0, 1e12)
    slot = int(np.argmax(np.diff(problem.slot_operators)))
    first = int(problem.slot_operators[slot])
    for operator in (first, first + 1, first + 4):
        decision = Decision(storage=storage, action=Action.SWAP, prefetch=operator)
        plan = Plan(decisions=(decision,), budget_bytes=1 << 40)
        (transfer,) = simulate(trace, plan, machine).transfers
        assert transfer.in_start == simulate(trace, plan, machine).starts[operator]


def test_simulate_when_plan_moves_something_small_then_it_is_an_item() -> None:
    operators = layered_trace(2)
    small = min(
        (number for number, each in enumerate(operators.storages) if each.is_saved),
        key=lambda number: operators.storages[number].nbytes,
    )
    storages = list(operators.storages)
    storages[small] = replace(storages[small], nbytes=100)
    trace = replace(operators, storages=tuple(storages))
    assert small not in lower(trace).item_storages
    plan = Plan(decisions=(Decision(storage=small, action=Action.SWAP),), budget_bytes=1 << 40)
    machine = machine_for(lower(trace), 2.0)
    schedule = simulate(trace, plan, machine)
    assert [transfer.storage for transfer in schedule.transfers] == [small]
    assert schedule.prediction.swapped_bytes == 100


def test_simulate_when_it_gets_stuck_then_operator_and_least_budget() -> None:
    trace, problem, machine, actions = draw(7)
    machine = replace(machine, host_bytes=None, budget_bytes=1 << 40)
    result = run(problem, machine, actions)
    plan = as_plan(trace, problem, machine, actions, result, policy="test")
    little = replace(machine, budget_bytes=int(problem.slot_bytes.max()) + 1)
    with pytest.raises(InfeasibleBudget, match=r"operator \d+ \(.*cannot start") as caught:
        simulate(trace, plan, little)
    least = caught.value.least_bytes
    assert caught.value.operators[0] in {operator.name for operator in trace.operators}
    simulate(trace, plan, replace(machine, budget_bytes=least))
    with pytest.raises(InfeasibleBudget):
        simulate(trace, plan, replace(machine, budget_bytes=least - 1))


def test_simulate_when_host_has_no_room_then_said() -> None:
    trace = layered_trace(1)
    storage = int(lower(trace).item_storages[0])
    plan = Plan(decisions=(Decision(storage=storage, action=Action.SWAP),), budget_bytes=1 << 40)
    machine = replace(machine_for(lower(trace), 2.0), host_bytes=10)
    with pytest.raises(InfeasibleBudget, match="swaps more than fits in host memory"):
        simulate(trace, plan, machine)


@pytest.mark.parametrize(
    ("storage", "action", "message"),
    [
        (10_000, Action.SWAP, "not in the trace"),
        (0, Action.SWAP, "never idle"),
        (5, Action.RECOMPUTE, "cannot be recomputed"),  # an anchor: what the first layer gets
    ],
)
def test_simulate_when_plan_is_of_another_trace_then_plan_mismatch(
    storage: int, action: Action, message: str
) -> None:
    trace = layered_trace(4)
    plan = Plan(decisions=(Decision(storage=storage, action=action),), budget_bytes=1 << 40)
    with pytest.raises(PlanMismatch, match=message):
        simulate(trace, plan, machine_for(lower(trace), 2.0))


def test_chain_when_a_later_operator_needs_more_then_its_memory_is_gone_by_then() -> None:
    rows: list[Row] = [
        (F, (0,), (1,)), (F, (1,), (2,)), (F, (2,), (3,)),
        (B, (3,), ()), (B, (2,), ()), (B, (), ()), (B, (2, 0), ()),
    ]  # fmt: skip
    # 1 is not saved, so it is made again on the way to 2, and gone when operator 5 runs.
    trace = make_step(rows, {0: 10, 1: 100, 2: 20, 3: 10}, saved=(2,), changes={1: {"death": 2}})
    trace = with_operator(trace, 5, workspace_bytes=95)
    machine = Machine(budget_bytes=130, out_bytes_per_second=1.0, in_bytes_per_second=1.0)
    decision = Decision(storage=2, action=Action.RECOMPUTE)
    plan = Plan(decisions=(decision,), budget_bytes=machine.budget_bytes)
    schedule = simulate(trace, plan, machine)
    assert schedule.prediction.peak_bytes == 130
    assert find_violations(trace, plan, machine, schedule) == []
