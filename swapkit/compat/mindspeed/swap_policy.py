"""`SwapPolicy`, `SwapPolicyCandidate`: a plan's swaps in the form that custom policies edit.

A `custom_policy_fcn` gets the swaps of a finished plan. It may remove candidates, add its own, and
move the stages at which memory is free again and at which the copy back starts. The edited plan is
checked and simulated like that of any other policy.

Source:
    MindSpeed, SmartSwap: the classes and their methods.
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import TYPE_CHECKING

from swapkit.compat.mindspeed.step_profile import ProfilerDataOneStep, TensorInfoDetail
from swapkit.errors import InvalidArgument
from swapkit.ir.plans import Action, Decision, Plan
from swapkit.planning.planner import make_plan
from swapkit.simulation.lowering import lower

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable, Sequence

    from swapkit.compat.mindspeed.step_profile import ProfilerOpInfo
    from swapkit.compat.mindspeed.swap_stages import SwapStage
    from swapkit.ir.machines import Machine
    from swapkit.ir.traces import Trace
    from swapkit.planning.planner import Policy


class SwapPolicyCandidate:
    """One swap: a storage, the stage after which it leaves, the stage in which it comes back."""

    def __init__(  # noqa: PLR0913, PLR0917 - MindSpeed's arguments
        self,
        tensor: TensorInfoDetail,
        is_optimizer_or_weight: bool = False,  # noqa: FBT001, FBT002
        swap_out_op: ProfilerOpInfo | None = None,
        swap_in_op: ProfilerOpInfo | None = None,
        swap_out_stage: SwapStage | None = None,
        swap_in_stage: SwapStage | None = None,
        free_stage: SwapStage | None = None,
        swap_in_free_stage: SwapStage | None = None,
    ) -> None:
        """Describe a swap.

        Args:
            tensor: the storage.
            is_optimizer_or_weight: not an activation. Only `swapkit.offload(optimizer)` moves
                these.
            swap_out_op: the last operator of forward that uses it.
            swap_in_op: the operator of backward that needs it.
            swap_out_stage: see `set_device_to_host_stage`; None: that of `swap_out_op`.
            swap_in_stage: see `set_host_to_device_stage`; None: that of `swap_in_op`.
            free_stage: see `set_device_to_host_free_stage`; None: as soon as the copy is done.
            swap_in_free_stage: see `set_host_to_device_free_stage`.

        Raises:
            InvalidArgument: `is_optimizer_or_weight`, or a stage and its operator are missing.
        """
        if is_optimizer_or_weight:
            raise InvalidArgument(
                "a plan swaps activations only. For optimizer states, use "
                "swapkit.offload(optimizer), or policy_pref=BETTER_MEMORY_SAVING."
            )
        self.tensor = tensor
        self.swap_out_op, self.swap_in_op = swap_out_op, swap_in_op
        self.swap_out_stage = swap_out_stage or _stage_of("swap_out", swap_out_op)
        self.swap_in_stage = swap_in_stage or _stage_of("swap_in", swap_in_op)
        self.free_stage = free_stage
        self.swap_in_free_stage = swap_in_free_stage
        self.is_out_edited = free_stage is not None
        self.is_in_edited = False

    def set_device_to_host_stage(self, stage: SwapStage) -> None:
        """Set the stage of the copy out.

        swapkit starts a copy out as soon as the bytes are final. A later stage delays only the
        moment at which the memory is free.
        """
        self.swap_out_stage, self.is_out_edited = stage, True

    def get_device_to_host_stage(self) -> SwapStage:
        """Return the stage of the copy out."""
        return self.swap_out_stage

    def set_device_to_host_free_stage(self, stage: SwapStage) -> None:
        """Set the stage that starts only once the memory is free."""
        self.free_stage, self.is_out_edited = stage, True

    def set_host_to_device_stage(self, stage: SwapStage) -> None:
        """Set the stage at whose start the copy back starts, once there is room."""
        self.swap_in_stage, self.is_in_edited = stage, True

    def get_host_to_device_stage(self) -> SwapStage:
        """Return the stage of the copy back."""
        return self.swap_in_stage

    def set_host_to_device_free_stage(self, stage: SwapStage) -> None:
        """Set the stage that frees the copy on the host. No effect: the graph keeps the copy."""
        self.swap_in_free_stage = stage

    def __str__(self) -> str:
        """Return the fields as text."""
        return str({name: str(value) for name, value in vars(self).items()})


def _stage_of(name: str, op: ProfilerOpInfo | None) -> SwapStage:
    if op is None:
        raise InvalidArgument(f"SwapPolicyCandidate: give {name}_op or {name}_stage")
    return op.stage


class SwapPolicy:
    """The candidates of a step, with the step's profile."""

    def __init__(
        self,
        swap_policy_candidates: Iterable[SwapPolicyCandidate],
        profiler_data: ProfilerDataOneStep,
    ) -> None:
        """Keep both.

        Args:
            swap_policy_candidates: the swaps.
            profiler_data: the step.
        """
        self._candidates = list(swap_policy_candidates)
        self._profiler_data = profiler_data

    def get_candidates(self) -> list[SwapPolicyCandidate]:
        """Return the swaps; changes of this list count."""
        return self._candidates

    def set_candidates(self, candidates: Iterable[SwapPolicyCandidate]) -> None:
        """Replace the swaps, without those that leave and come back in one stage.

        Where the memory is to be free in the stage of the copy out, it is the next stage instead.
        """
        self._candidates = [
            each for each in candidates if each.swap_out_stage != each.swap_in_stage
        ]
        for each in self._candidates:
            if each.free_stage == each.swap_out_stage:
                following = self._profiler_data.get_next_stage(each.swap_out_stage)
                each.free_stage, each.is_out_edited = following, True

    def get_profiler_data(self) -> ProfilerDataOneStep:
        """Return the step's profile."""
        return self._profiler_data


@dataclass(frozen=True, slots=True, kw_only=True)
class EditedPolicy:
    """A policy whose swaps a user's function edits. The planner's thread calls the function."""

    policy: str | Policy
    edit: Callable[[SwapPolicy], object]
    layers: tuple[str, ...] = ()

    def plan(self, trace: Trace, machine: Machine) -> Plan:
        """Return the edited plan.

        Raises:
            InfeasibleBudget: there is no plan to edit for the machine's budget.
            InvalidArgument: a candidate's storage cannot be swapped, or its stages do not exist.
        """
        made = make_plan(trace, machine, self.policy)
        profile = ProfilerDataOneStep(trace, layers=self.layers)
        gaps = _find_gaps(trace)
        former = {each.storage: each for each in made.decisions if each.action is Action.SWAP}
        candidates = [_candidate(profile, gaps, each) for each in former.values()]
        policy = SwapPolicy(candidates, profile)
        self.edit(policy)
        kept = [each for each in made.decisions if each.action is not Action.SWAP]
        edited = [_decide(profile, gaps, each, former) for each in policy.get_candidates()]
        return Plan(
            decisions=tuple(sorted((*kept, *edited), key=lambda each: each.storage)),
            budget_bytes=made.budget_bytes,
            policy="edited",
            signature=trace.signature,
        )


_Gaps = dict[int, tuple[int, int]]  # storage -> the operators before and after its idle time


def _find_gaps(trace: Trace) -> _Gaps:
    problem = lower(trace, least_bytes=0)
    firsts: Sequence[int] = problem.slot_operators.tolist()
    return {
        storage: (firsts[problem.releases[item] + 1] - 1, firsts[problem.uses[item]])
        for item, storage in enumerate(problem.item_storages.tolist())
    }


def _candidate(
    profile: ProfilerDataOneStep, gaps: _Gaps, decision: Decision
) -> SwapPolicyCandidate:
    last, use = gaps[decision.storage]
    operators = profile.op_list
    users = [op for op in operators if any(decision.storage == t.ptr for t in op.tensor_list)]
    tensor = next(t for t in users[0].tensor_list if t.ptr == decision.storage)
    detail = TensorInfoDetail(tensor)
    for op in users:
        detail.update_op(op)
    prefetch = use if decision.prefetch is None else decision.prefetch
    candidate = SwapPolicyCandidate(
        detail,
        swap_out_op=operators[last],
        swap_in_op=operators[use],
        swap_in_stage=operators[prefetch].stage,
    )
    if decision.release is not None:
        candidate.free_stage = operators[decision.release].stage
    return candidate


def _decide(
    profile: ProfilerDataOneStep,
    gaps: _Gaps,
    candidate: SwapPolicyCandidate,
    former: dict[int, Decision],
) -> Decision:
    """Return the decision for a candidate, with all moments inside the storage's idle time."""
    storage = candidate.tensor.info.ptr
    if storage not in gaps:
        raise InvalidArgument(
            f"storage {storage} cannot be swapped: forward saves it for no later operator of "
            "backward. `session.trace.storages` lists the storages."
        )
    last, use = gaps[storage]
    decision = former.get(storage)
    is_new = decision is None
    if decision is None:
        decision = Decision(storage=storage, action=Action.SWAP)
    prefetch = decision.prefetch
    if candidate.is_in_edited or is_new:
        first = profile.first_of(candidate.swap_in_stage).op_id
        prefetch = min(max(first, last + 1), use)
    release = decision.release
    if candidate.is_out_edited and candidate.free_stage is not None:
        stages = (candidate.swap_out_stage, candidate.free_stage)
        release = max(last + 1, *(profile.first_of(stage).op_id for stage in stages))
    if release is not None:
        release = min(release, use if prefetch is None else prefetch)
    return replace(decision, prefetch=prefetch, release=release)
