"""Plans for traces: legal, within the budget, by the policy that was asked for."""

from __future__ import annotations

from dataclasses import dataclass, replace
from functools import cache

import numpy as np
import pytest

import swapkit
from swapkit.errors import InfeasibleBudget, InvalidArgument, InvalidType
from swapkit.ir.machines import Machine
from swapkit.ir.passes import divide_weights
from swapkit.ir.plans import Action, Decision, Plan
from swapkit.ir.traces import BEFORE, Kind, Trace
from swapkit.planning import planner
from swapkit.planning.bounds.bound import lower_bound
from swapkit.planning.planner import (
    POLICIES,
    find_floor,
    make_candidates,
    make_plan,
    trade_offs,
)
from swapkit.planning.reasons import Why, explain_decisions
from swapkit.planning.search.feasibility import find_least
from swapkit.simulation.lowering import lower
from swapkit.simulation.timeline import simulate
from swapkit.simulation.validator import find_violations
from tests.support.layers import layered_trace
from tests.support.problems import MIB, kept_peak
from tests.support.random_traces import random_trace

LINK = 4e9


@cache
def trace() -> Trace:
    return layered_trace(6)


def machine_with(share: float, of: Trace | None = None) -> Machine:
    """Return a machine with a share of what keeping everything takes."""
    peak = kept_peak(lower(of or trace()))
    return Machine(
        budget_bytes=int(share * peak), out_bytes_per_second=LINK, in_bytes_per_second=LINK
    )


def actions_of(plan: Plan) -> set[Action]:
    return {decision.action for decision in plan.decisions}


@dataclass
class Fixed:
    """A user's policy: it always has the same plan."""

    result: Plan

    def plan(self, _trace: Trace, _machine: Machine) -> Plan:
        return self.result


class Greedy:
    """No policy: its plan() takes something else."""

    def plan(self) -> None:
        raise AssertionError


@pytest.mark.promise("A1")
@pytest.mark.promise("D1")
@pytest.mark.parametrize("policy", POLICIES)
@pytest.mark.parametrize("share", [0.9, 0.7, 0.5])
def test_plan_when_checked_then_legal_and_as_predicted(policy: str, share: float) -> None:
    machine = machine_with(share)
    plan = make_plan(trace(), machine, policy)
    schedule = simulate(trace(), plan, machine)
    assert find_violations(trace(), plan, machine, schedule) == []
    assert plan.prediction is not None
    assert schedule.prediction.peak_bytes <= machine.budget_bytes
    assert schedule.prediction.seconds == pytest.approx(plan.prediction.seconds)
    assert plan.bound_seconds == pytest.approx(lower_bound(lower(trace()), machine))


@pytest.mark.promise("D1")
def test_plan_when_both_actions_are_allowed_then_no_slower_than_one_alone() -> None:
    machine = machine_with(0.5)
    seconds = {
        policy: simulate(trace(), make_plan(trace(), machine, policy), machine).prediction.seconds
        for policy in POLICIES
    }
    assert seconds["auto"] <= min(seconds.values()) * 1.002


@pytest.mark.parametrize(
    ("policy", "action"), [("swap", Action.SWAP), ("recompute", Action.RECOMPUTE)]
)
def test_plan_when_policy_is_restricted_then_only_its_action(policy: str, action: Action) -> None:
    assert actions_of(make_plan(trace(), machine_with(0.6), policy)) == {action}


def test_plan_when_everything_fits_then_empty() -> None:
    machine = machine_with(1.0)
    plan = make_plan(trace(), machine)
    assert plan.decisions == ()
    assert plan.bound_seconds == pytest.approx(trace().seconds)
    assert make_candidates(trace(), machine) == (plan,)


def test_plan_when_made_twice_then_equal() -> None:
    assert make_plan(trace(), machine_with(0.5)) == make_plan(trace(), machine_with(0.5))


@pytest.mark.promise("D1")
@pytest.mark.parametrize("is_trained", [False, True], ids=["frozen", "trained"])
def test_plan_when_weights_may_leave_then_the_budget_may_be_less_than_the_model(
    is_trained: bool,
) -> None:
    step = layered_trace(12, scale=0.05, optimizer=is_trained)
    large = {Kind.STATE: 20 * MIB}
    storages = (replace(each, nbytes=large.get(each.kind, each.nbytes)) for each in step.storages)
    step = replace(step, storages=tuple(storages))
    weights = 12 * 20 * MIB
    machine = machine_with(1.0, step)
    least = []
    for each in (step, divide_weights(step)):
        with pytest.raises(InfeasibleBudget) as caught:
            make_plan(each, replace(machine, budget_bytes=1))
        least.append(caught.value.least_bytes)
    assert least[0] > weights > 3 * least[1]
    machine = replace(machine, budget_bytes=weights // 2)
    plan = swapkit.plan(step, machine=machine, weights=True)
    assert plan.trace == divide_weights(step)
    schedule = swapkit.simulate(step, plan, machine=machine)
    assert find_violations(plan.trace, plan, machine, schedule) == []
    swapped = {each.storage for each in plan.decisions if each.action is Action.SWAP}
    streamed = {each for each in swapped if plan.trace.storages[each].kind is Kind.STATE}
    # All that is left out comes back; weights are copied out once, if the step writes them.
    assert sum(plan.trace.storages[each].nbytes for each in streamed) >= weights // 2
    out = {each.storage for each in schedule.transfers if each.out_end > each.out_start}
    assert out >= swapped - streamed
    copied = sorted(weight_of(plan.trace, each) for each in out & streamed)
    assert copied == sorted(
        {weight_of(plan.trace, each) for each in streamed} if is_trained else ()
    )


def test_plan_when_frozen_weights_have_copies_on_the_host_then_others_get_the_rest() -> None:
    step = layered_trace(4, scale=0.5)
    frozen = sum(each.nbytes for each in step.storages if each.kind is Kind.STATE)
    machine = machine_with(0.7, step)
    swapped = swapkit.plan(step, machine=machine, policy="swap", weights=True)
    assert swapped.prediction is not None
    assert swapped.prediction.host_peak_bytes > 8 * MIB
    least = replace(machine, host_bytes=frozen + 8 * MIB)
    plan = swapkit.plan(step, machine=least, weights=True)
    assert plan.prediction is not None
    assert 0 < plan.prediction.host_peak_bytes <= 8 * MIB


def weight_of(trace: Trace, storage: int) -> int:
    """Return the first part of a weight."""
    while trace.storages[storage].birth != BEFORE:
        storage = trace.storages[storage].continues or 0
    return storage


def test_plan_when_optimizer_states_may_move_then_less_memory_is_enough() -> None:
    step = layered_trace(4, optimizer=True)
    none = machine_with(0.01, step)
    least = []
    for optimizer_states in (False, True):
        with pytest.raises(InfeasibleBudget) as caught:
            make_plan(step, none, optimizer_states=optimizer_states)
        least.append(caught.value.least_bytes)
    assert least[1] < least[0]
    machine = replace(none, budget_bytes=sum(least) // 2)
    with pytest.raises(InfeasibleBudget):
        make_plan(step, machine)
    plan = make_plan(step, machine, optimizer_states=True)
    kinds = {step.storages[decision.storage].kind for decision in plan.decisions}
    assert Kind.OPTIMIZER_STATE in kinds
    schedule = simulate(step, plan, machine)
    assert find_violations(step, plan, machine, schedule) == []


@pytest.mark.parametrize("policy", POLICIES)
def test_budget_when_too_small_then_the_least_is_named_and_enough(policy: str) -> None:
    with pytest.raises(InfeasibleBudget, match="smallest budget") as caught:
        make_plan(trace(), machine_with(0.02), policy)
    least = caught.value.least_bytes
    assert caught.value.operators
    enough = replace(machine_with(1.0), budget_bytes=least)
    plan = make_plan(trace(), enough, policy)
    assert simulate(trace(), plan, enough).prediction.peak_bytes <= least
    with pytest.raises(InfeasibleBudget):
        make_plan(trace(), replace(enough, budget_bytes=int(least * 0.98)), policy)


def test_policy_when_unknown_then_error_names_those_there_are() -> None:
    with pytest.raises(InvalidArgument, match="'auto', 'swap', 'recompute'"):
        make_plan(trace(), machine_with(1.0), "fast")


@pytest.mark.parametrize("policy", [None, 5, [], make_plan, Fixed, Greedy(), replace])
def test_policy_when_it_cannot_plan_then_error_says_what_can(policy: object) -> None:
    expected = r"^policy=.*: expected 'auto', .* or an object with plan\(trace, machine\)$"
    with pytest.raises(InvalidArgument, match=expected):
        make_plan(trace(), machine_with(1.0), policy)  # type: ignore[arg-type]


def test_own_policy_when_its_plan_is_legal_then_completed() -> None:
    machine = machine_with(0.7)
    plain = replace(make_plan(trace(), machine), prediction=None, bound_seconds=None)
    plan = make_plan(trace(), machine, Fixed(plain))
    assert plan.decisions == plain.decisions
    assert plan.prediction == simulate(trace(), plain, machine).prediction


def test_own_policy_when_it_names_no_moment_then_copies_back_start_ahead() -> None:
    machine = machine_with(0.7)
    full = make_plan(trace(), machine, "swap")
    bare = [replace(each, release=None, prefetch=None) for each in full.decisions]
    on_demand = replace(full, decisions=tuple(bare))
    plan = make_plan(trace(), machine, Fixed(on_demand))
    assert [(each.storage, each.action) for each in plan.decisions] == [
        (each.storage, each.action) for each in bare
    ]
    assert plan.prediction is not None
    assert plan.prediction.stall_seconds < 0.5 * (
        simulate(trace(), on_demand, machine).prediction.stall_seconds
    )


def test_own_policy_when_it_names_a_moment_then_all_its_moments_hold() -> None:
    machine = machine_with(0.7)
    full = make_plan(trace(), machine, "swap")
    bare = (full.decisions[0], *(replace(each, prefetch=None) for each in full.decisions[1:]))
    plan = make_plan(trace(), machine, Fixed(replace(full, decisions=bare)))
    assert plan.decisions == bare


def test_own_policy_when_its_plan_is_illegal_then_refused_with_reasons() -> None:
    machine = machine_with(0.7)
    weight = next(number for number, each in enumerate(trace().storages) if each.kind is Kind.STATE)
    plan = Plan(
        decisions=(Decision(storage=weight, action=Action.SWAP),), budget_bytes=machine.budget_bytes
    )
    with pytest.raises(InvalidArgument, match=f"storage {weight}"):
        make_plan(trace(), machine, Fixed(plan))


def test_own_policy_when_its_plan_is_over_the_budget_then_infeasible() -> None:
    machine = machine_with(0.5)
    plan = Plan(decisions=(), budget_bytes=machine.budget_bytes)
    with pytest.raises(InfeasibleBudget):
        make_plan(trace(), machine, Fixed(plan))


@pytest.mark.parametrize("result", [None, 5, Plan, {"decisions": ()}])
def test_own_policy_when_it_makes_no_plan_then_error(result: object) -> None:
    with pytest.raises(
        InvalidType, match=r"Fixed\.plan\(\) returned .* expected a swapkit\.ir\.plans\.Plan"
    ):
        make_plan(trace(), machine_with(0.5), Fixed(result))  # type: ignore[arg-type]


@pytest.mark.parametrize(
    ("field", "value"),
    [
        ("budget_bytes", "x"),
        ("budget_bytes", None),
        ("budget_bytes", True),
        ("budget_bytes", 10**400),
        ("decisions", None),
        ("decisions", []),
        ("decisions", (5,)),
        ("bound_seconds", float("nan")),
        ("prediction", "x"),
        ("version", 2),
    ],
)
def test_own_policy_when_a_field_of_its_plan_is_wrong_then_error_names_the_field(
    field: str, value: object
) -> None:
    machine = machine_with(0.9)
    plan = replace(make_plan(trace(), machine), **{field: value})  # type: ignore[arg-type]
    with pytest.raises(InvalidArgument, match=rf"the policy's plan is invalid: {field}\b.*: exp"):
        make_plan(trace(), machine, Fixed(plan))


def test_own_policy_when_copies_are_slower_than_its_releases_then_operators_wait_for_them() -> None:
    machine = machine_with(0.7)
    planned = make_plan(trace(), machine, "swap")
    assert any(each.release is not None for each in planned.decisions)
    slow = replace(machine, out_bytes_per_second=LINK / 8)
    own = make_plan(trace(), replace(slow, budget_bytes=1 << 40), Fixed(planned))
    assert own.decisions == planned.decisions
    assert own.prediction is not None
    assert planned.prediction is not None
    assert own.prediction.stall_seconds > planned.prediction.stall_seconds


@pytest.mark.parametrize("seed", range(4))
def test_own_policy_when_a_copy_back_begins_at_any_operator_of_its_gap_then_legal(
    seed: int,
) -> None:
    step = random_trace(seed)
    problem = lower(step)
    firsts = problem.slot_operators
    machine = Machine(budget_bytes=1 << 40, out_bytes_per_second=1e4, in_bytes_per_second=1e4)
    begins, uses = firsts[problem.releases + 1].tolist(), firsts[problem.uses].tolist()
    for storage, first, use in zip(problem.item_storages.tolist(), begins, uses, strict=True):
        for operator in range(first, use + 1):
            decision = Decision(storage=storage, action=Action.SWAP, prefetch=operator)
            plan = Plan(decisions=(decision,), budget_bytes=machine.budget_bytes)
            assert make_plan(step, machine, Fixed(plan)).decisions == (decision,)


def test_own_policy_when_it_recomputes_what_is_never_recomputed_then_invalid_argument() -> None:
    machine = machine_with(1.0)
    problem = lower(trace())
    anchor = int(problem.item_storages[~problem.can_recompute][0])
    decisions = (Decision(storage=anchor, action=Action.RECOMPUTE),)
    plan = Plan(decisions=decisions, budget_bytes=machine.budget_bytes)
    assert find_violations(trace(), plan, machine) == []
    with pytest.raises(InvalidArgument, match=f"storage {anchor} cannot be recomputed: keep or sw"):
        make_plan(trace(), machine, Fixed(plan))


@pytest.mark.promise("C1")
def test_candidates_when_made_then_different_within_the_budget_and_best_first() -> None:
    machine = machine_with(0.5)
    plans = make_candidates(trace(), machine, count=5)
    assert 3 <= len(plans) <= 5
    seconds = []
    for plan in plans:
        schedule = simulate(trace(), plan, machine)
        assert find_violations(trace(), plan, machine, schedule) == []
        seconds.append(schedule.prediction.seconds)
    assert seconds == sorted(seconds)
    outlines = {frozenset((each.storage, each.action) for each in plan.decisions) for plan in plans}
    assert len(outlines) == len(plans)


@pytest.mark.parametrize("policy", ["swap", "recompute"])
def test_candidates_when_policy_is_restricted_then_all_keep_to_it(policy: str) -> None:
    for plan in make_candidates(trace(), machine_with(0.6), policy, count=3):
        assert actions_of(plan) == {Action(policy)}


def test_candidates_when_a_simpler_policy_needs_more_then_its_plan_for_that_is_the_last() -> None:
    machine = machine_with(0.5)
    floor_bytes = find_floor(trace(), machine, "recompute")
    machine = replace(machine, budget_bytes=int(0.98 * floor_bytes))
    with pytest.raises(InfeasibleBudget):
        make_plan(trace(), machine, "recompute")
    assert all(
        each.budget_bytes == machine.budget_bytes for each in make_candidates(trace(), machine)
    )
    *others, last = make_candidates(trace(), machine, tight_bytes=floor_bytes)
    assert all(each.budget_bytes == machine.budget_bytes for each in others)
    assert last.budget_bytes == floor_bytes
    assert actions_of(last) == {Action.RECOMPUTE}
    roomy = replace(machine, budget_bytes=floor_bytes)
    assert find_violations(trace(), last, roomy, simulate(trace(), last, roomy)) == []


def test_candidates_when_one_is_wanted_then_the_plan() -> None:
    machine = machine_with(0.5)
    assert make_candidates(trace(), machine, count=1) == (make_plan(trace(), machine),)


def test_trade_offs_when_budget_grows_then_never_slower() -> None:
    shares = (0.02, 0.3, 0.4, 0.5, 0.6, 0.8, 1.0)
    curve = trade_offs(trace(), machine_with(1.0), shares)
    budgets = [each.budget_bytes for each in curve]
    seconds = [each.seconds for each in curve]
    assert budgets == sorted(set(budgets))
    assert seconds == sorted(seconds, reverse=True)
    assert seconds[-1] == pytest.approx(trace().seconds)
    assert seconds[0] > seconds[-1]
    for each in curve:
        assert each.peak_bytes <= each.budget_bytes
        assert each.bound_seconds <= each.seconds * (1 + 1e-6)


def test_trade_offs_when_copies_cost_nothing_then_more_memory_still_moves_less() -> None:
    free = replace(machine_with(1.0), out_bytes_per_second=1e15, in_bytes_per_second=1e15)
    curve = trade_offs(trace(), free, (0.5, 0.7, 0.9, 1.0))
    moved = [offer.swapped_bytes for offer in curve]
    assert moved == sorted(set(moved), reverse=True)
    assert (moved[0] > 0, moved[-1]) == (True, 0)


def test_trade_offs_when_a_share_is_not_positive_then_error() -> None:
    with pytest.raises(InvalidArgument, match="above 0"):
        trade_offs(trace(), machine_with(1.0), (0.5, 0.0))


def test_reasons_when_asked_then_one_for_each_item_with_its_price() -> None:
    machine = replace(machine_with(0.4), out_bytes_per_second=1e9, in_bytes_per_second=1e9)
    plan = make_plan(trace(), machine)
    reasons = explain_decisions(trace(), plan, machine)
    problem = lower(trace())
    assert [each.storage for each in reasons] == sorted(problem.item_storages.tolist())
    actions = {decision.storage: decision.action for decision in plan.decisions}
    for each in reasons:
        assert each.action is actions.get(each.storage, Action.KEEP)
        assert each.module == trace().storages[each.storage].module
        assert each.link_price == 1e-9
        if each.recompute_seconds is not None:
            assert each.recompute_price == each.recompute_seconds / each.nbytes
        assert (each.copy_seconds > 0) == (each.action is Action.SWAP)
        assert each.hidden_seconds + each.exposed_seconds == pytest.approx(each.copy_seconds)
    recomputed = [each for each in reasons if each.action is Action.RECOMPUTE]
    assert recomputed
    assert all(each.recompute_seconds is not None for each in recomputed)
    assert {each.why for each in reasons if each.action is Action.KEEP} <= {Why.FITS}


def test_reasons_when_a_copy_is_waited_for_then_exposed() -> None:
    machine = replace(machine_with(0.5), out_bytes_per_second=1e9, in_bytes_per_second=1e9)
    plan = make_plan(trace(), machine, "swap")
    reasons = explain_decisions(trace(), plan, machine)
    assert plan.prediction is not None
    exposed = sum(each.exposed_seconds for each in reasons)
    assert 0 < exposed <= plan.prediction.stall_seconds * (1 + 1e-9)
    late = {each.why for each in reasons if each.exposed_seconds > 0}
    assert late <= {Why.CHEAPER_COPY, Why.ONLY_COPY}
    assert np.isfinite(exposed)


@pytest.mark.parametrize("policy", POLICIES)
def test_floor_when_it_is_the_budget_then_there_is_a_plan_and_the_error_names_it(
    policy: str,
) -> None:
    floor_bytes = find_floor(trace(), machine_with(0.9), policy)
    assert floor_bytes < machine_with(0.9).budget_bytes
    plan = make_plan(trace(), replace(machine_with(0.9), budget_bytes=floor_bytes), policy)
    assert plan.decisions
    with pytest.raises(InfeasibleBudget) as caught:
        make_plan(trace(), machine_with(0.01), policy)
    assert (
        caught.value.least_bytes == floor_bytes == find_floor(trace(), machine_with(0.01), policy)
    )


def test_floor_when_a_search_finds_a_plan_below_it_then_no_more_than_that_budget(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    machine = machine_with(0.6)
    least = find_least(lower(trace()), machine)
    worse = replace(least, budget_bytes=machine.budget_bytes + 1)
    monkeypatch.setattr(planner, "find_least", lambda *_: worse)
    assert find_floor(trace(), machine, "auto") == machine.budget_bytes


def test_floor_when_the_policy_is_a_users_own_then_not_known() -> None:
    assert find_floor(trace(), machine_with(0.5), Fixed(Plan(decisions=(), budget_bytes=1))) == 0
    with pytest.raises(InvalidArgument, match="policy='none'"):
        find_floor(trace(), machine_with(0.5), "none")
