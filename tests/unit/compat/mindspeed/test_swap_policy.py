"""Custom policies: the swaps of a plan as candidates, and their edits in the plan."""

from __future__ import annotations

from dataclasses import replace
from functools import cache
from typing import TYPE_CHECKING

import pytest

from swapkit.compat.mindspeed.swap_policy import (
    EditedPolicy,
    ProfilerDataOneStep,
    SwapPolicy,
    SwapPolicyCandidate,
    SwapStage,
    SwapStageType,
    TensorInfoDetail,
)
from swapkit.errors import InvalidArgument
from swapkit.ir.machines import Machine
from swapkit.ir.plans import Action, Decision, Plan
from swapkit.planning.planner import make_plan
from tests.support.layers import layered_trace

if TYPE_CHECKING:
    from collections.abc import Callable

    from swapkit.ir.traces import Trace

LAYERS = 6
FWD, BWD = SwapStageType.FWD, SwapStageType.BWD


@cache
def trace() -> Trace:
    return layered_trace(LAYERS, optimizer=True)


@cache
def machine() -> Machine:
    plenty = Machine(budget_bytes=1 << 40, out_bytes_per_second=4e9, in_bytes_per_second=4e9)
    least = trace().bytes_before + (trace().peak_bytes - trace().bytes_before) // 2
    return replace(plenty, budget_bytes=least)


@cache
def profile() -> ProfilerDataOneStep:
    return ProfilerDataOneStep(trace())


def stage(kind: SwapStageType, layer: int) -> SwapStage:
    return SwapStage(stage_type=kind, micro_batch_index=1, layer_index=layer)


def make_edited(edit: Callable[[SwapPolicy], object], given: Machine | None = None) -> Plan:
    policy = EditedPolicy(policy="swap", edit=edit)
    return make_plan(trace(), given or machine(), policy)


def swaps(plan: Plan) -> dict[int, Decision]:
    return {each.storage: each for each in plan.decisions if each.action is Action.SWAP}


def test_stages_when_named_then_layers_up_in_forward_and_down_in_backward() -> None:
    assert profile().stage_list[: 2 * LAYERS] == [
        *(stage(FWD, layer) for layer in range(1, LAYERS + 1)),
        *(stage(BWD, layer) for layer in range(LAYERS, 0, -1)),
    ]
    assert profile().stage_list[-1].stage_type is SwapStageType.OPTIM
    assert str(stage(FWD, 2)) == "{'stage_type': 'FWD', 'mbi': 1, 'li': 2, 'model_id': 0}"
    assert stage(FWD, 2).copy() == stage(FWD, 2)


def test_profile_when_asked_for_operators_then_the_nearest_of_a_name() -> None:
    data = profile()
    first = data.get_first_op_info("attention")
    assert first is not None
    following = data.get_next_op_info(first, "attention")
    assert following is not None
    between = data.op_list[first.op_id + 1 : following.op_id]
    assert all("attention" not in each.op_name for each in between)
    assert data.get_prev_op_info(following, "attention") == first
    assert data.get_next_op_info(first) == data.op_list[first.op_id + 1]
    assert data.get_prev_op_info(data.op_list[0]) is None
    assert data.get_next_op_info(data.op_list[-1]) is None
    assert data.get_next_op_info(None) is data.get_prev_op_info(None) is None
    assert data.get_last_op_info() == data.op_list[-1]
    assert data.length == len(data.get_all_op_info()) == len(trace().operators)
    named = data.get_all_op_info(["attention"])
    assert named[0] == first
    assert 0 < len(named) < data.length


def test_profile_when_asked_for_stages_then_the_nearest_with_an_operator_of_the_name() -> None:
    data = profile()
    last = stage(FWD, LAYERS)
    assert data.get_next_stage(last) == stage(BWD, LAYERS)
    assert data.get_prev_stage(last) == stage(FWD, LAYERS - 1)
    assert data.get_prev_stage(data.stage_list[0]) is None
    assert data.get_next_stage(data.stage_list[-1]) is None
    assert data.get_next_stage(None) is None
    optimizer = data.stage_list[-1]
    name = data.first_of(optimizer).op_name
    assert data.get_next_stage(last, name) == optimizer
    with pytest.raises(InvalidArgument, match=r"the step has no stage .*'li': 99"):
        data.first_of(stage(FWD, 99))


def test_profile_when_made_as_in_the_original_then_the_error_names_the_trace() -> None:
    with pytest.raises(InvalidArgument, match=r"Pass a trace: `session\.trace`"):
        ProfilerDataOneStep(1.5, 3, False, True)
    assert ProfilerDataOneStep(trace(), 3, False, False).op_list == []


def test_tensors_when_operators_are_added_then_each_once() -> None:
    op = profile().op_list[0]
    detail = TensorInfoDetail(op.tensor_list[0])
    detail.update_op(op)
    detail.update_op(op)
    assert detail.used_op_list == [op]
    assert not detail.is_used_multiple_times()
    detail.update_op(profile().op_list[1])
    assert detail.is_used_multiple_times()


def test_plan_when_nothing_is_edited_then_the_planners_own() -> None:
    sizes = []
    plan = make_edited(lambda policy: sizes.append(len(policy.get_candidates())))
    own = make_plan(trace(), machine(), "swap")
    assert plan.decisions == own.decisions
    assert sizes == [len(swaps(own))]
    assert sizes[0] > 0


def test_candidates_when_listed_then_out_in_forward_and_back_in_backward() -> None:
    seen: list[SwapPolicyCandidate] = []
    make_edited(lambda policy: seen.extend(policy.get_candidates()))
    for each in seen:
        assert each.get_device_to_host_stage().stage_type is FWD
        assert each.swap_in_op is not None
        assert each.swap_in_op.stage.stage_type is BWD
        assert each.tensor.is_used_multiple_times()
        assert each.tensor.info.size == trace().storages[each.tensor.info.ptr].nbytes
        assert "swap_out_stage" in str(each)


def test_candidates_when_removed_then_their_storages_stay() -> None:
    removed = []

    def edit(policy: SwapPolicy) -> None:
        candidates = policy.get_candidates()
        removed.append(candidates[0].tensor.info.ptr)
        policy.set_candidates(candidates[1:])

    own = swaps(make_plan(trace(), machine(), "swap"))
    plan = EditedPolicy(policy="swap", edit=edit).plan(trace(), machine())
    assert set(swaps(plan)) == set(own) - set(removed)
    assert set(removed) <= set(own)


@pytest.mark.parametrize(("layer_free", "layer_back"), [(4, 3), (6, 2), (6, 6), (1, 1)], ids=str)
def test_stages_when_set_then_the_plan_releases_and_prefetches_there(
    layer_free: int, layer_back: int
) -> None:
    def edit(policy: SwapPolicy) -> None:
        for each in policy.get_candidates():
            each.set_device_to_host_free_stage(stage(FWD, layer_free))
            each.set_host_to_device_stage(stage(BWD, layer_back))
            each.set_host_to_device_free_stage(stage(BWD, 1))

    data = profile()
    plan = EditedPolicy(policy="swap", edit=edit).plan(trace(), machine())
    free, back = (
        data.first_of(each).op_id for each in (stage(FWD, layer_free), stage(BWD, layer_back))
    )
    seen: list[SwapPolicyCandidate] = []
    make_edited(lambda policy: seen.extend(policy.get_candidates()))
    gaps = {
        each.tensor.info.ptr: (each.swap_out_op.op_id, each.swap_in_op.op_id)
        for each in seen
        if each.swap_out_op and each.swap_in_op
    }
    assert plan.decisions
    for each in plan.decisions:
        last, use = gaps[each.storage]
        assert each.prefetch == min(max(back, last + 1), use)
        assert each.release == min(max(free, last + 1), each.prefetch)


def test_stage_of_the_copy_out_when_later_then_the_memory_is_free_no_earlier() -> None:
    def edit(policy: SwapPolicy) -> None:
        for each in policy.get_candidates():
            each.set_device_to_host_stage(stage(FWD, 5))
            each.set_device_to_host_free_stage(stage(FWD, 2))

    plan = EditedPolicy(policy="swap", edit=edit).plan(trace(), machine())
    start = profile().first_of(stage(FWD, 5)).op_id
    releases = [each.release for each in plan.decisions if each.release is not None]
    assert releases
    assert min(releases) >= start


def test_candidates_when_set_then_linted_as_in_the_original() -> None:
    tensor = TensorInfoDetail(profile().op_list[0].tensor_list[0])
    same = SwapPolicyCandidate(tensor, swap_out_stage=stage(FWD, 1), swap_in_stage=stage(FWD, 1))
    early = SwapPolicyCandidate(
        tensor,
        swap_out_stage=stage(FWD, 1),
        swap_in_stage=stage(BWD, 1),
        free_stage=stage(FWD, 1),
    )
    policy = SwapPolicy([], profile())
    policy.set_candidates([same, early])
    assert policy.get_candidates() == [early]
    assert early.free_stage == stage(FWD, 2)
    assert policy.get_profiler_data() is profile()


def test_candidates_when_a_policy_adds_its_own_then_they_are_swapped() -> None:
    added: list[int] = []

    def edit(policy: SwapPolicy) -> None:
        data = policy.get_profiler_data()
        taken = {each.tensor.info.ptr for each in policy.get_candidates()}
        op = next(op for op in data.get_all_op_info(["attention"]) if op.stage == stage(FWD, 1))
        tensor = next(
            each
            for each in op.tensor_list
            if trace().storages[each.ptr].is_saved and each.ptr not in taken
        )
        added.append(tensor.ptr)
        own = SwapPolicyCandidate(
            TensorInfoDetail(tensor), swap_out_op=op, swap_in_stage=stage(BWD, 2)
        )
        policy.set_candidates([*policy.get_candidates(), own])

    roomy = replace(machine(), budget_bytes=trace().peak_bytes)
    plan = make_edited(edit, roomy)
    assert list(swaps(plan)) == added
    assert swaps(plan)[added[0]].prefetch == profile().first_of(stage(BWD, 2)).op_id


def test_candidate_when_it_cannot_be_swapped_then_refused() -> None:
    tensor = TensorInfoDetail(profile().op_list[0].tensor_list[0])
    with pytest.raises(InvalidArgument, match=r"swapkit\.offload\(optimizer\)"):
        SwapPolicyCandidate(tensor, True)
    with pytest.raises(InvalidArgument, match="give swap_out_op or swap_out_stage"):
        SwapPolicyCandidate(tensor)
    weight = next(
        each
        for op in profile().op_list
        for each in op.tensor_list
        if not trace().storages[each.ptr].is_saved
    )
    own = SwapPolicyCandidate(
        TensorInfoDetail(weight), swap_out_stage=stage(FWD, 1), swap_in_stage=stage(BWD, 1)
    )
    with pytest.raises(InvalidArgument, match=f"storage {weight.ptr} cannot be swapped"):
        make_edited(lambda policy: policy.set_candidates([own]))
