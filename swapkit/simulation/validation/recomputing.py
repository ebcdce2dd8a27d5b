"""The needs of recomputing: when storages must be present, and which operators run again.

The operators that run again are fixed once forward has run. They make all inputs that no longer
exist when the storage is first used, even if a plan recomputes the storage earlier, as an input of
another one.
"""

from __future__ import annotations

from collections import defaultdict
from dataclasses import dataclass, field
from typing import TYPE_CHECKING

from swapkit.ir.plans import Action
from swapkit.ir.traces import BEFORE, Phase

if TYPE_CHECKING:
    from collections.abc import Mapping

    from swapkit.ir.traces import Trace
    from swapkit.simulation.validation.gaps import Gap, Touch


@dataclass(slots=True, kw_only=True)
class Demand:
    """The decisions of a plan, by storage, and their requirements.

    `actions` has the storages that are not kept, `gaps` the longest time that each may be away, and
    `needs` the operator by which each must be back. `reruns` has the operators that run again
    before an operator. `violations` lists storages that cannot be recomputed.
    """

    actions: Mapping[int, Action]
    gaps: Mapping[int, Gap]
    needs: dict[int, int] = field(default_factory=dict)
    reruns: dict[int, set[int]] = field(default_factory=lambda: defaultdict(set))
    violations: list[str] = field(default_factory=list)

    def rerun_seconds(self, trace: Trace, operator: int) -> float:
        """Return the total time of the operators that run again before `operator`."""
        return sum(trace.operators[step].seconds for step in self.reruns.get(operator, ()))


class Resolver:
    """Finds the demand of a plan.

    `actions` has the decisions for storages with a gap that are not kept. `scheduled` has the
    operator before which a schedule recomputes a storage; None: as late as possible.
    """

    def __init__(
        self,
        trace: Trace,
        touches: list[list[Touch]],
        gaps: Mapping[int, Gap],
        actions: Mapping[int, Action],
        scheduled: Mapping[int, int] | None = None,
    ) -> None:
        self.trace, self.touches, self.gaps, self.actions = trace, touches, gaps, actions
        self.scheduled = scheduled or {}
        needs = {storage: gaps[storage].need for storage in actions}
        self.demand = Demand(actions=actions, gaps=gaps, needs=needs)

    def resolve(self) -> Demand:
        """Return the demand. Newest storages come first, because inputs are always older."""
        makers: defaultdict[int, list[int]] = defaultdict(list)
        for storage, action in self.actions.items():
            if action is Action.RECOMPUTE:
                makers[self.trace.storages[storage].birth].append(storage)
        for maker in sorted(makers, reverse=True):
            self._resolve_together(maker, makers[maker])
        return self.demand

    def _resolve_together(self, maker: int, storages: list[int]) -> None:
        """Find the needs of recomputing `storages`, all made by `maker`."""
        needs = self.demand.needs
        if maker == BEFORE:
            named = ", ".join(map(str, storages))
            self._object(f"storage {named}: no operator of the step makes it")
            return
        need = min(needs[storage] for storage in storages)
        for storage in storages:
            asked = self.scheduled.get(storage, need)
            if self.gaps[storage].last < asked < need:
                need = asked
        for storage in storages:
            if self.gaps[storage].last < need:  # else forward still uses it, and it is made later
                needs[storage] = need
            self._check_sole_writer(storage, maker, needs[storage])
        for need, use in {(needs[storage], self.gaps[storage].need) for storage in storages}:
            self._rerun(maker, need, use)

    def _rerun(self, maker: int, need: int, use: int) -> None:
        """Add the rerun of `maker` before `need`, and the reruns that make its missing inputs.

        `use`: the first operator that uses the result.
        """
        waiting = [maker]
        seen: set[int] = set()
        while waiting:
            step = waiting.pop()
            if step in seen:
                continue
            seen.add(step)
            self.demand.reruns[need].add(step)
            operator = self.trace.operators[step]
            if not operator.is_repeatable:
                self._object(f"operator {step} ({operator.name}) is not repeatable")
            for storage in set(operator.writes):
                if self.trace.storages[storage].birth < step:
                    self._object(f"operator {step}, when rerun, changes storage {storage}")
            waiting += [
                self.trace.storages[storage].birth
                for storage in sorted(set(operator.reads))
                if self._is_missing(storage, step, need, use)
            ]

    def _is_missing(self, storage: int, step: int, need: int, use: int) -> bool:
        """Return whether `storage` must be made again for `step`; if not, require it by `need`."""
        about = self.trace.storages[storage]
        where = f"operator {step}, when rerun before operator {need}, reads storage {storage}"
        if any(touch.is_write and step <= touch.operator < need for touch in self.touches[storage]):
            self._object(f"{where}, which was written in between")
            return False
        is_there = use < about.death
        if is_there and about.keeps_bytes(self._last_use(storage), use):
            if storage in self.actions and self.gaps[storage].last < need:
                self.demand.needs[storage] = min(self.demand.needs[storage], need)
            return False
        if about.birth == BEFORE:
            why = "the training loop may have changed" if is_there else "is gone"
            self._object(f"{where}, which {why} by then")
            return False
        self._check_sole_writer(storage, about.birth, need)
        return True

    def _last_use(self, storage: int) -> int:
        """Return the last operator of backward that reads a storage; BEFORE: none."""
        touches = self.touches[storage]
        reads = [each for each in touches if each.phase is Phase.BACKWARD and each.is_read]
        return max((each.operator for each in reads), default=BEFORE)

    def _check_sole_writer(self, storage: int, maker: int, need: int) -> None:
        writers = [
            each.operator
            for each in self.touches[storage]
            if each.is_write and each.operator < need
        ]
        if writers != [maker]:
            self._object(
                f"storage {storage}: rerunning operator {maker} does not make it, as its writers "
                f"are {writers or 'none'}"
            )

    def _object(self, violation: str) -> None:
        if violation not in self.demand.violations:
            self.demand.violations.append(violation)
