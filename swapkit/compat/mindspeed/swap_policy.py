"""A recorded step and the swaps of a plan, as SmartSwap's custom policies read and edit them.

A `custom_policy_fcn` gets the swaps of a finished plan. It may remove candidates, add its own, and
move the stages at which memory is free again and at which the copy back starts. The edited plan is
checked and simulated like that of any other policy.

Source:
    MindSpeed, SmartSwap: the classes and their methods.
"""

from __future__ import annotations

import enum
from bisect import bisect_right
from collections import defaultdict
from collections.abc import Callable, Iterable, Sequence
from dataclasses import InitVar, dataclass, field, replace
from itertools import groupby
from typing import NamedTuple, TypeAlias

from swapkit.errors import InvalidArgument
from swapkit.ir.machines import Machine
from swapkit.ir.plans import Action, Decision, Plan
from swapkit.ir.traces import Kind, Phase, Trace
from swapkit.planning.planner import Policy, make_plan
from swapkit.planning.policies.stage_swap import find_stages
from swapkit.simulation.lowering import lower
from swapkit.units import show

# ---- stages --------------------------------------------------------------------------------------
#
# The stages of a step: part of the step, microbatch, layer.


class SwapStageType(enum.Enum):
    """The part of a step."""

    INIT = 0
    FWD = 1
    BWD = 2
    OPTIM = 3
    RESERVED = 4


@dataclass(frozen=True, slots=True, kw_only=True)
class SwapStage:
    """A stage; microbatches and layers count from 1, and 0 stands for none."""

    stage_type: SwapStageType | None = None
    micro_batch_index: int | None = None
    layer_index: int | None = None
    model_index: int = 0

    def copy(self) -> SwapStage:
        """Return the stage: it never changes."""
        return self

    def __str__(self) -> str:
        """Return the fields by MindSpeed's short names."""
        name = None if self.stage_type is None else self.stage_type.name
        numbers = {"mbi": self.micro_batch_index, "li": self.layer_index}
        return str({"stage_type": name, **numbers, "model_id": self.model_index})


_TYPES = {
    Phase.FORWARD: SwapStageType.FWD,
    Phase.BACKWARD: SwapStageType.BWD,
    Phase.OPTIMIZER: SwapStageType.OPTIM,
}


def name_stages(trace: Trace, layers: Sequence[str] = ()) -> list[SwapStage]:
    """Return the stage of each operator.

    A stage of forward is a layer with attention, of which the first also has the operators before
    it; without layers, all of forward is one stage. A stage of backward begins at the first read of
    a storage that was saved in its stage of forward.

    Args:
        trace: the step.
        layers: paths of the layers; empty: modules with a number.
    """
    firsts: defaultdict[int, list[int]] = defaultdict(list)  # of the layers, by microbatch
    for first in find_stages(trace, layers=layers):
        firsts[trace.operators[first].microbatch].append(first)
    forward, saved_in = _find_layers(trace, firsts)
    stages: list[SwapStage] = []
    backward = 0
    for number, operator in enumerate(trace.operators):
        kind, batch = _TYPES.get(operator.phase, SwapStageType.INIT), operator.microbatch
        layer = forward.get(number, 0)
        if kind is SwapStageType.BWD:
            before = stages[-1] if stages else SwapStage()
            is_first = (before.stage_type, before.micro_batch_index) != (kind, batch + 1)
            read = max((saved_in.get((batch, each), 0) for each in operator.reads), default=0)
            backward = len(firsts[batch]) if is_first else min(backward, read or backward)
            layer = max(backward, 1)
        microbatch = batch + 1 if layer else 0
        stages.append(SwapStage(stage_type=kind, micro_batch_index=microbatch, layer_index=layer))
    return stages


def _find_layers(
    trace: Trace, firsts: dict[int, list[int]]
) -> tuple[dict[int, int], dict[tuple[int, int], int]]:
    """Return the layers of forward by operator, and by microbatch and saved storage.

    A storage belongs to the layer of forward that touched it last.
    """
    layers: dict[int, int] = {}
    saved_in: dict[tuple[int, int], int] = {}
    for number, operator in enumerate(trace.operators):
        if operator.phase is Phase.FORWARD:
            batch = operator.microbatch
            layers[number] = max(1, bisect_right(firsts[batch], number))
            for storage in (*operator.reads, *operator.writes):
                if trace.storages[storage].is_saved:
                    saved_in[batch, storage] = layers[number]
    return layers, saved_in


# ---- profile -------------------------------------------------------------------------------------
#
# A recorded step: its operators, their tensors and stages.


class ProfiledTensor(NamedTuple):
    """One storage of a step; `ptr` identifies it: its number in the trace."""

    ptr: int
    size: int  # bytes
    tensor_type: Kind


@dataclass(frozen=True, slots=True, order=True)
class ProfilerOpInfo:
    """One operator of a step; `op_id` is its number in the trace."""

    op_id: int
    op_name: str = field(compare=False)
    stage: SwapStage = field(compare=False)
    active_bytes: int = field(compare=False)  # in use while it runs, without a plan
    tensor_list: tuple[ProfiledTensor, ...] = field(compare=False)  # read, then written

    def has_name(self, name: str) -> bool:
        """Return whether a name is the operator's: whole ("aten.mm.default"), or "mm"; "": any."""
        return name in {"", self.op_name, *self.op_name.split(".")[1:2]}


_Op: TypeAlias = ProfilerOpInfo | None


class TensorInfoDetail:
    """A storage with the operators that use it."""

    def __init__(self, profiler_tensor_info: ProfiledTensor) -> None:
        """Start without operators.

        Args:
            profiler_tensor_info: the storage, from an operator's `tensor_list`.
        """
        self.info = profiler_tensor_info
        self.used_op_list: list[ProfilerOpInfo] = []

    def update_op(self, op: ProfilerOpInfo) -> None:
        """Add an operator that uses the storage; the last one is not added again."""
        if not self.used_op_list or self.used_op_list[-1] != op:
            self.used_op_list.append(op)

    def is_used_multiple_times(self) -> bool:
        """Return whether several operators use the storage."""
        return len(self.used_op_list) > 1


class ProfilerDataOneStep:
    """The operators of a step in order. Made from a session's trace, not from a running profiler.

    `duration_time` is in seconds.
    """

    def __init__(
        self,
        duration_time: Trace | float | None = None,
        step: int = 0,
        is_oom: bool = False,  # noqa: FBT001, FBT002 - MindSpeed's arguments
        enable_profiler: bool = True,  # noqa: FBT001, FBT002
        *,
        layers: Sequence[str] = (),
    ) -> None:
        """Read a trace.

        Args:
            duration_time: the trace, such as `session.trace`.
            step: number of the step.
            is_oom: whether it ran out of memory.
            enable_profiler: False: no operators.
            layers: paths of the model's layers; empty: modules with a number.

        Raises:
            InvalidArgument: `duration_time` is not a trace.
        """
        if not isinstance(duration_time, Trace):
            raise InvalidArgument(
                f"ProfilerDataOneStep({show(duration_time)}): swapkit has no profiler of operators "
                "to read. Pass a trace: `session.trace` of `swapkit.budget`, or of "
                "`SwapManager(...).session`."
            )
        self.trace = duration_time
        self.duration_time = self.trace.step_seconds or self.trace.seconds
        self.step = step
        self.is_oom = is_oom
        self.op_list = list(_read(self.trace, layers)) if enable_profiler else []
        self.stage_list = [stage for stage, _ in groupby(each.stage for each in self.op_list)]
        self._first_of = {op.stage: op for op in reversed(self.op_list)}

    @property
    def length(self) -> int:
        """The number of operators."""
        return len(self.op_list)

    def get_all_op_info(self, op_names: Iterable[str] | None = None) -> list[ProfilerOpInfo]:
        """Return the operators with one of these names; no names: all."""
        names = list(op_names or [""])
        return [op for op in self.op_list if any(map(op.has_name, names))]

    def get_first_op_info(self, op_name: str = "") -> _Op:
        """Return the first operator of a name; "": of any."""
        return next((op for op in self.op_list if op.has_name(op_name)), None)

    def get_last_op_info(self, op_name: str = "") -> _Op:
        """Return the last operator of a name; "": of any."""
        return next((op for op in reversed(self.op_list) if op.has_name(op_name)), None)

    def get_next_op_info(self, from_op: _Op, next_op_name: str = "") -> _Op:
        """Return the first operator of a name after `from_op`; "": of any name. None: no such."""
        following = self.op_list[from_op.op_id + 1 :] if from_op else ()
        return next((op for op in following if op.has_name(next_op_name)), None)

    def get_prev_op_info(self, from_op: _Op, prev_op_name: str = "") -> _Op:
        """Return the last operator of a name before `from_op`; "": of any name. None: no such."""
        before = self.op_list[: from_op.op_id] if from_op else []
        return next((op for op in reversed(before) if op.has_name(prev_op_name)), None)

    def get_next_stage(self, stage: SwapStage | None, op_name: str = "") -> SwapStage | None:
        """Return the next stage that has an operator of a name; "": the next stage. None: none."""
        return self._find_stage(self.stage_list, stage, op_name)

    def get_prev_stage(self, stage: SwapStage | None, op_name: str = "") -> SwapStage | None:
        """Return the last stage before that has an operator of a name; "": of any name."""
        at = self.stage_list.index(stage) + 1 if stage in self._first_of else 0
        return self._find_stage(self.stage_list[:at][::-1], stage, op_name)

    def first_of(self, stage: SwapStage) -> ProfilerOpInfo:
        """Return the first operator of a stage.

        Raises:
            InvalidArgument: the step has no such stage.
        """
        if stage not in self._first_of:
            raise InvalidArgument(f"the step has no stage {stage}: see its `stage_list`")
        return self._first_of[stage]

    def _find_stage(
        self, stages: Sequence[SwapStage], stage: SwapStage | None, name: str
    ) -> SwapStage | None:
        """Return the first stage after a given one, among stages in order, with an operator."""
        named = {op.stage for op in self.op_list if op.has_name(name)}
        at = stages.index(stage) if stage in self._first_of else len(stages)
        return next((each for each in stages[at:] if each in named and each != stage), None)


def _read(trace: Trace, layers: Sequence[str]) -> Iterable[ProfilerOpInfo]:
    tensors = [
        ProfiledTensor(number, each.nbytes, each.kind) for number, each in enumerate(trace.storages)
    ]
    rows = zip(trace.operators, name_stages(trace, layers), trace.memory(), strict=True)
    for number, (operator, stage, active_bytes) in enumerate(rows):
        touched = dict.fromkeys((*operator.reads, *operator.writes))
        named = tuple(tensors[storage] for storage in touched)
        yield ProfilerOpInfo(number, operator.name, stage, active_bytes, named)


# ---- policies ------------------------------------------------------------------------------------


@dataclass(eq=False)
class SwapPolicyCandidate:
    """One swap: a storage, the stage after which it leaves, the stage in which it comes back.

    Args:
        tensor: the storage.
        is_optimizer_or_weight: not an activation. Only `swapkit.offload(optimizer)` moves these.
        swap_out_op: the last operator of forward that uses it.
        swap_in_op: the operator of backward that needs it.
        swap_out_stage: see `set_device_to_host_stage`; None: that of `swap_out_op`.
        swap_in_stage: see `set_host_to_device_stage`; None: that of `swap_in_op`.
        free_stage: see `set_device_to_host_free_stage`; None: as soon as the copy is done.
        swap_in_free_stage: see `set_host_to_device_free_stage`.

    Raises:
        InvalidArgument: `is_optimizer_or_weight`, or a stage and its operator are missing.
    """

    tensor: TensorInfoDetail
    is_optimizer_or_weight: InitVar[bool] = False
    swap_out_op: _Op = None
    swap_in_op: _Op = None
    swap_out_stage: SwapStage = None  # type: ignore[assignment]  # until made
    swap_in_stage: SwapStage = None  # type: ignore[assignment]
    free_stage: SwapStage | None = None
    swap_in_free_stage: SwapStage | None = None

    def __post_init__(self, is_optimizer_or_weight: bool) -> None:
        if is_optimizer_or_weight:
            raise InvalidArgument(
                "a plan swaps activations only. For optimizer states, use "
                "swapkit.offload(optimizer), or policy_pref=BETTER_MEMORY_SAVING."
            )
        for name in ("swap_out", "swap_in"):
            op, stage = getattr(self, f"{name}_op"), getattr(self, f"{name}_stage")
            if not (op or stage):
                raise InvalidArgument(f"SwapPolicyCandidate: give {name}_op or {name}_stage")
            setattr(self, f"{name}_stage", stage or op.stage)
        self.is_out_edited = self.free_stage is not None
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


_Swaps: TypeAlias = "Iterable[SwapPolicyCandidate]"


class SwapPolicy:
    """The candidates of a step, with the step's profile."""

    def __init__(self, swap_policy_candidates: _Swaps, profiler_data: ProfilerDataOneStep) -> None:
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

    def set_candidates(self, candidates: _Swaps) -> None:
        """Replace the swaps, without those that leave and come back in one stage.

        Where the memory is to be free in the stage of the copy out, it is the next stage instead.
        """
        swaps = [each for each in candidates if each.swap_out_stage != each.swap_in_stage]
        self._candidates = swaps
        for each in swaps:
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
        policy = SwapPolicy([_candidate(profile, gaps, each) for each in former.values()], profile)
        self.edit(policy)
        kept = [each for each in made.decisions if each.action is not Action.SWAP]
        edited = [_decide(profile, gaps, each, former) for each in policy.get_candidates()]
        decisions = tuple(sorted((*kept, *edited), key=lambda each: each.storage))
        budget = made.budget_bytes
        return Plan(
            decisions=decisions, budget_bytes=budget, policy="edited", signature=trace.signature
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
    detail = TensorInfoDetail(next(t for t in users[0].tensor_list if t.ptr == decision.storage))
    detail.used_op_list = users
    candidate = SwapPolicyCandidate(detail, False, operators[last], operators[use])  # noqa: FBT003
    if decision.prefetch is not None:
        candidate.swap_in_stage = operators[decision.prefetch].stage
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
    decision = former.get(storage, Decision(storage=storage, action=Action.SWAP))
    prefetch = decision.prefetch
    if candidate.is_in_edited or storage not in former:
        first = profile.first_of(candidate.swap_in_stage).op_id
        prefetch = min(max(first, last + 1), use)
    release = decision.release
    if candidate.is_out_edited and candidate.free_stage is not None:
        stages = (candidate.swap_out_stage, candidate.free_stage)
        release = max(last + 1, *(profile.first_of(stage).op_id for stage in stages))
    if release is not None:
        release = min(release, use if prefetch is None else prefetch)
    return replace(decision, prefetch=prefetch, release=release)
