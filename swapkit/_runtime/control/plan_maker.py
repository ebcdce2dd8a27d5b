"""Plans for the recorded steps of a session, for its machine and the budget of all ranks."""

from __future__ import annotations

from dataclasses import replace
from functools import partial
from typing import TYPE_CHECKING

from swapkit._runtime.control.rank_agreement import join_ranks
from swapkit._runtime.machine.measured_machine import measure_machine
from swapkit.errors import InfeasibleBudget
from swapkit.planning.beside import ThreadJob, is_at_once
from swapkit.planning.planner import PlanTarget, find_floor, make_plans
from swapkit.planning.selection.learner import MARGIN, Learner

if TYPE_CHECKING:
    from swapkit._runtime.control.rank_agreement import Ranks
    from swapkit._runtime.control.session_config import SessionConfig
    from swapkit._runtime.saved.device import Device
    from swapkit.ir.machines import Machine
    from swapkit.ir.plans import Plan
    from swapkit.ir.traces import Trace
    from swapkit.planning.selection.asking import MakePlans

# What plans leave free at least, if there are any for that: each end of a piece of free memory may
# lie within a granule, which then serves nothing else.
SPARE_GRANULES = 16


class PlanMaker:
    """Knows what plans are made for. On the thread of the steps, but for `give_up` and `stop`."""

    def __init__(self, device: Device, config: SessionConfig) -> None:
        """Prepare; nothing is measured yet."""
        self._device = device
        self._config = config
        self.machine: Machine | None = None  # that plans are made for
        self._ranks: Ranks | None = None  # where there are others
        self._floor: ThreadJob[int] | None = None  # the smallest budget that has a plan here
        self._is_over = False

    def make_learner(self) -> Learner:
        """Return what decides for each step; a policy may bring a search of its own."""
        config = self._config
        spare = min(1.0, self._spare_bytes() / config.limits.budget_bytes)
        learner: Learner = getattr(config.policy, "make_learner", Learner)(
            self._make_plans,
            profile_steps=config.profile_steps,
            search_steps=config.search_steps,
            margin=max(MARGIN, spare),
            spare=spare,
        )
        if isinstance(config.policy, str):  # the code of a user may rely on the thread of the steps
            learner.plan_beside(self.prepare)
        return learner

    def _spare_bytes(self) -> int:
        return SPARE_GRANULES * self._device.backend.granule_bytes

    def join_ranks(self) -> None:
        """Find out with whom to agree."""
        self._ranks = join_ranks()

    # ---- what plans are for --------------------------------------------------------------------

    @property
    def is_busy(self) -> bool:
        """Whether it is not known yet what to say to the other ranks."""
        return self._floor is not None and not self._floor.is_done

    def agree(self, trace: Trace) -> bool:
        """Return whether plans may be made from a trace now: for the budget of all ranks."""
        if self._ranks is None:
            return True
        if self._is_over:
            return False
        config = self._config
        find = partial(find_floor, trace, self._measure(config.limits.budget_bytes), config.policy)
        if self._ranks.has_said or not isinstance(config.policy, str) or is_at_once():
            return self._ranks.agree(config.limits.budget_bytes, find)
        if self._floor is None:
            self._floor = ThreadJob(find)
            return False
        floor_bytes = self._floor.take()
        self._floor = None
        return self._ranks.agree(
            config.limits.budget_bytes, find if floor_bytes is None else lambda: floor_bytes
        )

    def give_up(self) -> None:
        """Let nothing more be found out. Anywhere, in finalizers too."""
        self._is_over = True
        floor = self._floor
        if floor is not None:
            floor.give_up()

    def stop(self) -> None:
        """Likewise, and wait for the thread; other ranks need not wait for this one. Any thread."""
        self.give_up()
        floor = self._floor
        if floor is not None:
            floor.wait()
        if self._ranks is not None:
            self._ranks.leave()

    def _measure(self, budget_bytes: int) -> Machine:
        machine = measure_machine(self._device, self._config.limits)
        return replace(machine, budget_bytes=budget_bytes)

    # ---- plans ---------------------------------------------------------------------------------

    def _make_plans(self, trace: Trace, *, share: float, count: int) -> tuple[Plan, ...]:
        return self.prepare()(trace, share=share, count=count)

    def prepare(self) -> MakePlans:
        """Return what makes plans on any thread: it knows plain values only."""
        config = self._config
        self.machine = machine = self._measure(config.limits.budget_bytes)
        most_bytes: int | InfeasibleBudget = config.limits.budget_bytes
        if self._ranks is not None:
            try:
                most_bytes = self._ranks.find_budget(config.limits.budget_bytes)
            except InfeasibleBudget as error:
                most_bytes = error
        tight_bytes = max(0, config.limits.budget_bytes - self._spare_bytes())
        target = PlanTarget(machine=machine, most_bytes=most_bytes, tight_bytes=tight_bytes)
        return partial(make_plans, target=target, policy=config.policy)
