"""Swapping by stages, and plans below the budget or for some of the storages."""

from __future__ import annotations

import re
from bisect import bisect_right
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace

from swapkit.errors import InfeasibleBudget
from swapkit.ir.machines import Machine
from swapkit.ir.plans import Action, Decision, Plan
from swapkit.ir.traces import Kind, Phase, Trace
from swapkit.planning.bounds.bound import lower_bound
from swapkit.planning.planner import make_plan, restrict, solve_or_raise
from swapkit.simulation.lowering import lower
from swapkit.simulation.timeline import as_plan
from swapkit.texts import get_logger
from swapkit.units import format_bytes

# ---- stage swap ----------------------------------------------------------------------------------
#
# Swapping by stages: each stage of forward swaps its idle storages, up to a bucket of bytes.
#
# A *stage* is a number of layers with attention, in forward or in backward. A storage that one
# stage of forward makes and uses, and that backward reads, is copied out after its last use in
# forward. Its memory is free when the copy is done (in the source: two stages later), and the copy
# back starts one stage before the read. The policy searches and simulates nothing: the step may not
# fit the budget.
#
# Source:
#   MindSpeed, SmartSwap, policy version 2.

_log = get_logger("plan")

LEAST_STAGES = 2  # between copy out and copy back
_LAYER = re.compile(r"(?:^|.*?\.)\d+(?=\.|$)")
_ATTENTION = re.compile(r"attention|attn", re.IGNORECASE)


@dataclass(frozen=True, slots=True, kw_only=True)
class StageSwapPolicy:
    """A policy for `make_plan`, with the fields of SmartSwap's configuration."""

    bucket_bytes: int | None = None  # most bytes that a stage swaps; None: no limit, 0: nothing
    layers_per_stage: int = 1
    least_bytes: int = 0  # smallest storage to swap
    moves_optimizer: bool = False  # swap optimizer states, too
    layers: tuple[str, ...] = ()  # paths of the model's layers; empty: modules with a number

    def plan(self, trace: Trace, machine: Machine) -> Plan:
        """Return the plan with the swaps of all stages; of the machine, it uses only the budget."""
        stages = find_stages(trace, self.layers_per_stage, self.layers)
        if not stages:
            _log.warning("found no layers, so no stage swaps anything")
        gaps = list(self._list_gaps(trace, stages))
        if stages and not gaps and self.least_bytes > 0 and self.bucket_bytes != 0:
            least, largest = self.least_bytes, max((s.nbytes for s in trace.storages), default=0)
            _log.warning(
                "no stage swaps anything: tensor_size_filter leaves out tensors below %s, and the "
                "largest one takes %s; set a smaller tensor_size_filter",
                format_bytes(least),
                format_bytes(largest),
            )
        # A stage of backward begins at the first read of a storage of its stage of forward.
        begins = {stage: min(gap.use for gap in gaps if gap.stage == stage) for stage in
                  {gap.stage for gap in gaps}}  # fmt: skip
        bounds = sorted({*stages, *begins.values()})
        decisions = [*self._swap(gaps, bounds), *self._swap_states(trace, bounds)]
        return Plan(
            decisions=tuple(sorted(decisions, key=lambda each: each.storage)),
            budget_bytes=machine.budget_bytes,
            policy="stages",
            signature=trace.signature,
        )

    def _list_gaps(self, trace: Trace, stages: Sequence[int]) -> Iterator[_Gap]:
        """Yield the gaps of storages that one stage of forward makes and uses, by last use."""
        problem = lower(trace, least_bytes=self.least_bytes)
        firsts = problem.slot_operators.tolist()
        gaps = []
        for item, storage in enumerate(problem.item_storages.tolist()):
            if trace.storages[storage].continues is not None:
                continue  # no stage of forward makes it
            birth, use = firsts[problem.births[item]], firsts[problem.uses[item]]
            last = firsts[problem.releases[item] + 1] - 1
            stage = bisect_right(stages, last)
            if bisect_right(stages, birth) == stage and stage:
                gaps.append(_Gap(last, storage, trace.storages[storage].nbytes, stage, use))
        yield from sorted(gaps, key=lambda gap: (gap.last, gap.storage))

    def _swap(self, gaps: Sequence[_Gap], bounds: Sequence[int]) -> Iterator[Decision]:
        left: dict[int, float] = {}
        for gap in gaps:
            room = left.setdefault(
                gap.stage, float("inf") if self.bucket_bytes is None else self.bucket_bytes
            )
            out, back = bisect_right(bounds, gap.last), bisect_right(bounds, gap.use) - 1
            # The last stage of forward and the first of backward are adjacent: no use in swapping.
            if gap.nbytes > room or back - out < LEAST_STAGES:
                continue
            left[gap.stage] = room - gap.nbytes
            yield Decision(
                storage=gap.storage,
                action=Action.SWAP,
                prefetch=bounds[back - 1],
            )

    def _swap_states(self, trace: Trace, bounds: Sequence[int]) -> Iterator[Decision]:
        """Yield swaps of all optimizer states, with the copy back in the last stage of backward."""
        if not self.moves_optimizer:
            return
        problem = lower(trace, optimizer_states=True, least_bytes=self.least_bytes)
        for item, storage in enumerate(problem.item_storages.tolist()):
            if trace.storages[storage].kind is Kind.OPTIMIZER_STATE:
                use = int(problem.slot_operators[problem.uses[item]])
                before = bounds[: bisect_right(bounds, use)]
                yield Decision(
                    storage=storage,
                    action=Action.SWAP,
                    prefetch=before[-1] if before else use,
                )


@dataclass(frozen=True, slots=True)
class _Gap:
    """The idle time of a storage: after operator `last`, before `use`."""

    last: int
    storage: int
    nbytes: int
    stage: int  # of forward, from 1
    use: int


def find_stages(
    trace: Trace, layers_per_stage: int = 1, layers: Sequence[str] = ()
) -> tuple[int, ...]:
    """Return the first operator of each stage of forward.

    Args:
        trace: the step; each microbatch has its own stages.
        layers_per_stage: number of layers with attention; if no layer has attention, all count.
        layers: paths of the layers. Empty: a layer is the outermost module whose name is a number.
    """
    pattern = _layer_pattern(layers)
    forward = [
        (number, operator.microbatch, match.group(), operator)
        for number, operator in enumerate(trace.operators)
        if operator.phase is Phase.FORWARD and (match := pattern.match(operator.module))
    ]
    attending = {
        layer
        for _, _, layer, operator in forward
        if _ATTENTION.search(operator.name) or _ATTENTION.search(operator.module)
    }
    begins: dict[tuple[int, str], int] = {}
    counts: dict[int, int] = {}
    stages = []
    for number, microbatch, layer, _ in forward:
        if (microbatch, layer) in begins or (attending and layer not in attending):
            continue
        begins[microbatch, layer] = number
        count = counts[microbatch] = counts.get(microbatch, 0) + 1
        if (count - 1) % layers_per_stage == 0:
            stages.append(number)
    return tuple(stages)


def _layer_pattern(layers: Sequence[str]) -> re.Pattern[str]:
    """Return a pattern for the part of a module's path that names its layer."""
    if not layers:
        return _LAYER
    paths = "|".join(map(re.escape, sorted(layers, key=len, reverse=True)))
    return re.compile(rf"(?:{paths})(?=\.|$)")


# ---- lower budgets -------------------------------------------------------------------------------
#
# A policy that plans below the budget, or moves only a part of the movable storages.


@dataclass(frozen=True, slots=True, kw_only=True)
class AimedPolicy:
    """A named policy with additional limits.

    If no plan meets the limits, the plan comes as close as possible, and the log says so. The
    machine's budget always holds.

    Attributes:
        policy: `"auto"`, `"swap"` or `"recompute"`.
        reduction_bytes: distance of the plan's peak below the peak without a plan.
        least_bytes: smallest storage to move; storages too small to matter stay in any case.
        stages: the policy to use if its plan fits.
    """

    policy: str = "swap"
    reduction_bytes: int = 0
    least_bytes: int = 0
    stages: StageSwapPolicy | None = None

    def plan(self, trace: Trace, machine: Machine) -> Plan:
        """Return the plan for a trace.

        Raises:
            InfeasibleBudget: there is no plan for the machine's budget.
        """
        target_bytes = max(1, trace.peak_bytes - self.reduction_bytes)
        aimed = replace(machine, budget_bytes=min(machine.budget_bytes, target_bytes))
        if self.stages is not None:
            try:
                return make_plan(trace, aimed, self.stages)
            except InfeasibleBudget:
                _log.warning(
                    "swapping by stage does not reach a peak of %s: swapping more",
                    format_bytes(aimed.budget_bytes),
                )
        try:
            return self._make(trace, aimed)
        except InfeasibleBudget as error:
            least = replace(machine, budget_bytes=error.least_bytes)
            if least.budget_bytes > machine.budget_bytes:
                raise
        _log.warning(
            "no plan reaches a peak of %s: using %s, the smallest budget with a plan",
            format_bytes(aimed.budget_bytes),
            format_bytes(least.budget_bytes),
        )
        return self._make(trace, least)

    def _make(self, trace: Trace, machine: Machine) -> Plan:
        if not self.least_bytes:
            return make_plan(trace, machine, self.policy)
        # Keep the slots and chains of all items, because the plan is simulated again with them.
        problem = restrict(lower(trace), self.policy, least_bytes=self.least_bytes)
        solution = solve_or_raise(trace, problem, machine, self.policy)
        trial = solution.trial
        plan = as_plan(trace, problem, machine, trial.actions, trial.run, policy=self.policy)
        return replace(plan, bound_seconds=lower_bound(lower(trace), machine))
