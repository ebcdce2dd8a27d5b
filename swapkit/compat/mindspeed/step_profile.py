"""A recorded step as SmartSwap's custom policies read it: operators, their tensors, their stages.

Source:
    MindSpeed, SmartSwap, `ProfilerDataOneStep` and the classes of its lists.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from itertools import groupby
from typing import TYPE_CHECKING

from swapkit.compat.mindspeed.swap_stages import SwapStage, name_stages
from swapkit.errors import InvalidArgument
from swapkit.ir.traces import Trace
from swapkit.units import show

if TYPE_CHECKING:
    from collections.abc import Iterable, Sequence

    from swapkit.ir.traces import Kind


@dataclass(frozen=True, slots=True, kw_only=True)
class ProfiledTensor:
    """One storage of a step; `ptr` identifies it: its number in the trace."""

    ptr: int
    size: int  # bytes
    tensor_type: Kind


@dataclass(frozen=True, slots=True, kw_only=True, order=True)
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
        self._first_of: dict[SwapStage, ProfilerOpInfo] = {}
        for op in self.op_list:
            self._first_of.setdefault(op.stage, op)

    @property
    def length(self) -> int:
        """The number of operators."""
        return len(self.op_list)

    def get_all_op_info(self, op_names: Iterable[str] | None = None) -> list[ProfilerOpInfo]:
        """Return the operators with one of these names; no names: all."""
        names = list(op_names or [""])
        return [op for op in self.op_list if any(map(op.has_name, names))]

    def get_first_op_info(self, op_name: str = "") -> ProfilerOpInfo | None:
        """Return the first operator of a name; "": of any."""
        return next((op for op in self.op_list if op.has_name(op_name)), None)

    def get_last_op_info(self, op_name: str = "") -> ProfilerOpInfo | None:
        """Return the last operator of a name; "": of any."""
        return next((op for op in reversed(self.op_list) if op.has_name(op_name)), None)

    def get_next_op_info(
        self, from_op: ProfilerOpInfo | None, next_op_name: str = ""
    ) -> ProfilerOpInfo | None:
        """Return the first operator of a name after `from_op`; "": of any name. None: no such."""
        if from_op is None:
            return None
        following = self.op_list[from_op.op_id + 1 :]
        return next((op for op in following if op.has_name(next_op_name)), None)

    def get_prev_op_info(
        self, from_op: ProfilerOpInfo | None, prev_op_name: str = ""
    ) -> ProfilerOpInfo | None:
        """Return the last operator of a name before `from_op`; "": of any name. None: no such."""
        if from_op is None:
            return None
        before = reversed(self.op_list[: from_op.op_id])
        return next((op for op in before if op.has_name(prev_op_name)), None)

    def get_next_stage(self, stage: SwapStage | None, op_name: str = "") -> SwapStage | None:
        """Return the next stage that has an operator of a name; "": the next stage. None: none."""
        return self._find_stage(stage, op_name, 1)

    def get_prev_stage(self, stage: SwapStage | None, op_name: str = "") -> SwapStage | None:
        """Return the last stage before that has an operator of a name; "": of any name."""
        return self._find_stage(stage, op_name, -1)

    def first_of(self, stage: SwapStage) -> ProfilerOpInfo:
        """Return the first operator of a stage.

        Raises:
            InvalidArgument: the step has no such stage.
        """
        if stage not in self._first_of:
            raise InvalidArgument(f"the step has no stage {stage}: see its `stage_list`")
        return self._first_of[stage]

    def _find_stage(self, stage: SwapStage | None, name: str, step: int) -> SwapStage | None:
        if stage not in self._first_of:
            return None
        named = {op.stage for op in self.op_list if op.has_name(name)}
        at = self.stage_list.index(stage)
        others = self.stage_list[at + 1 :] if step > 0 else self.stage_list[:at][::-1]
        return next((each for each in others if each in named and each != stage), None)


def _read(trace: Trace, layers: Sequence[str]) -> Iterable[ProfilerOpInfo]:
    tensors = [
        ProfiledTensor(ptr=number, size=storage.nbytes, tensor_type=storage.kind)
        for number, storage in enumerate(trace.storages)
    ]
    rows = zip(trace.operators, name_stages(trace, layers), trace.memory(), strict=True)
    for number, (operator, stage, active_bytes) in enumerate(rows):
        touched = dict.fromkeys((*operator.reads, *operator.writes))
        yield ProfilerOpInfo(
            op_id=number,
            op_name=operator.name,
            stage=stage,
            active_bytes=active_bytes,
            tensor_list=tuple(tensors[storage] for storage in touched),
        )
