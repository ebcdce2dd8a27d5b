"""Swapping by stages, as SmartSwap's second policy does."""

from __future__ import annotations

import math
from dataclasses import replace
from functools import cache

import pytest

from swapkit.config.smart_swap import SmartSwapConfig, SwapPolicyPref
from swapkit.ir.machines import Machine
from swapkit.ir.plans import Action, Plan
from swapkit.ir.traces import Kind, Trace
from swapkit.planning.planner import make_plan
from swapkit.planning.policies.stage_swap import StageSwapPolicy, find_stages
from swapkit.simulation.timeline import simulate
from swapkit.simulation.validator import find_violations
from tests.support.layers import UNIT, layered_trace

MACHINE = Machine(budget_bytes=1 << 40, out_bytes_per_second=4e9, in_bytes_per_second=4e9)


@cache
def trace() -> Trace:
    return layered_trace(6, optimizer=True)


def swapped_by_layer(plan: Plan) -> dict[str, int]:
    """Return the bytes that the layers swap; the module path says which layer."""
    sums: dict[str, int] = {}
    for decision in plan.decisions:
        storage = trace().storages[decision.storage]
        layer = ".".join(storage.module.split(".")[:3])
        sums[layer] = sums.get(layer, 0) + storage.nbytes
    return sums


def policy_of(config: SmartSwapConfig) -> StageSwapPolicy:
    return StageSwapPolicy(
        bucket_bytes=config.bucket_bytes,
        layers_per_stage=config.num_attn_layers_per_stage,
        least_bytes=UNIT,
        moves_optimizer=config.moves_optimizer and config.policy_v2,
    )


@pytest.mark.promise("C10")
@pytest.mark.parametrize(("layers", "count"), [(1, 6), (2, 3), (4, 2), (6, 1), (9, 1)])
def test_stages_when_found_then_layers_by_number_of_each(layers: int, count: int) -> None:
    stages = find_stages(trace(), layers)
    assert len(stages) == count == math.ceil(6 / layers)
    assert all("layers." in trace().operators[begin].module for begin in stages)


def test_stages_when_the_paths_of_layers_are_given_then_their_names_need_no_numbers() -> None:
    named = replace(
        trace(),
        operators=tuple(
            replace(each, module=each.module.replace("layers.", "layers.b"))
            for each in trace().operators
        ),
    )
    assert find_stages(named) == ()
    paths = tuple(f"model.layers.b{number}" for number in range(6))
    assert find_stages(named, 2, paths) == find_stages(trace(), 2)
    plan = make_plan(named, MACHINE, StageSwapPolicy(least_bytes=UNIT, layers=paths))
    assert plan == replace(
        make_plan(trace(), MACHINE, StageSwapPolicy(least_bytes=UNIT)), prediction=plan.prediction
    )


def test_stages_when_modules_have_no_numbers_then_none_and_said(
    caplog: pytest.LogCaptureFixture,
) -> None:
    assert find_stages(layered_trace(3, numbered=False)) == ()
    plan = make_plan(layered_trace(3, numbered=False), MACHINE, StageSwapPolicy())
    assert plan.decisions == ()
    assert "found no layers" in caplog.text


@pytest.mark.promise("C10")
@pytest.mark.parametrize("bucket", [0, 4 * UNIT, 12 * UNIT, 1 << 40])
def test_policy_when_a_bucket_is_given_then_no_stage_swaps_more(bucket: int) -> None:
    policy = policy_of(SmartSwapConfig(swap_bucket_size=bucket))
    plan = make_plan(trace(), MACHINE, policy)
    sums = swapped_by_layer(plan)
    assert all(nbytes <= bucket for nbytes in sums.values())
    assert bool(sums) == (bucket > 0)
    if bucket >= 1 << 40:
        everything = make_plan(trace(), MACHINE, policy_of(SmartSwapConfig()))
        assert plan.decisions == everything.decisions
        assert len(sums) == 5  # all but the last: its backward follows at once


@pytest.mark.promise("C10")
@pytest.mark.parametrize("preference", SwapPolicyPref)
def test_policy_when_memory_is_preferred_then_optimizer_states_too(
    preference: SwapPolicyPref,
) -> None:
    plan = make_plan(trace(), MACHINE, policy_of(SmartSwapConfig(policy_pref=preference)))
    states = [
        decision
        for decision in plan.decisions
        if trace().storages[decision.storage].kind is Kind.OPTIMIZER_STATE
    ]
    assert len(states) == (12 if preference is SwapPolicyPref.BETTER_MEMORY_SAVING else 0)


def test_policy_when_carried_out_then_legal_and_lower_in_memory() -> None:
    plan = make_plan(trace(), MACHINE, policy_of(SmartSwapConfig()))
    assert {decision.action for decision in plan.decisions} == {Action.SWAP}
    schedule = simulate(trace(), plan, MACHINE)
    assert find_violations(trace(), plan, MACHINE, schedule) == []
    kept = simulate(trace(), Plan(decisions=(), budget_bytes=1 << 40), MACHINE)
    assert schedule.prediction.peak_bytes < 0.9 * kept.prediction.peak_bytes


def test_policy_when_all_storages_are_small_then_nothing_moves_and_said(
    caplog: pytest.LogCaptureFixture,
) -> None:
    policy = StageSwapPolicy(least_bytes=1 << 40)
    assert make_plan(trace(), MACHINE, policy).decisions == ()
    (said,) = [record.getMessage() for record in caplog.records]
    assert "tensor_size_filter leaves out tensors below 1.00 TiB" in said


def test_policy_when_storages_are_small_then_they_stay() -> None:
    plan = make_plan(trace(), MACHINE, StageSwapPolicy(least_bytes=6 * UNIT))
    sizes = {trace().storages[decision.storage].nbytes for decision in plan.decisions}
    assert sizes
    assert min(sizes) >= 6 * UNIT
