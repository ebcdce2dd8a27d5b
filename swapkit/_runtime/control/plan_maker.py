"""Plans for the recorded steps of a session, for its machine and the budget of all ranks."""

from __future__ import annotations

from dataclasses import replace
from functools import partial
from typing import TYPE_CHECKING

from swapkit._runtime.control.ranks import join_ranks
from swapkit._runtime.machine.measured_machine import measure_machine
from swapkit.errors import InfeasibleBudget
from swapkit.planning.beside import ThreadJob, is_at_once
from swapkit.planning.learning import MARGIN, Learner
from swapkit.planning.planner import Limits, find_floor, make_plans

if TYPE_CHECKING:
    from swapkit._runtime.control.aim import Aim
    from swapkit._runtime.control.ranks import Ranks
    from swapkit._runtime.saved.device import Device
    from swapkit.ir.machines import Machine
    from swapkit.ir.plans import Plan
    from swapkit.ir.traces import Trace
    from swapkit.planning.asking import MakePlans

# What plans leave free at least, if there are any for that: each end of a piece of free memory may
# lie within a granule, which then serves nothing else.
SPARE_GRANULES = 16


class PlanMaker:
    """Knows what plans are made for. On the thread of the steps, but for `give_up` and `stop`."""

    def __init__(self, device: Device, aim: Aim) -> None:
        """Prepare; nothing is measured yet."""
        self._device = device
        self._aim = aim
        self.machine: Machine | None = None  # that plans are made for
        self._ranks: Ranks | None = None  # where there are others
        self._floor: ThreadJob[int] | None = None  # the smallest budget that has a plan here
        self._is_over = False

    def make_learner(self) -> Learner:
        """Return what decides for each step; a policy may bring a search of its own."""
        aim = self._aim
        spare = min(1.0, self._spare_bytes() / aim.limit_bytes)
        learner: Learner = getattr(aim.policy, "make_learner", Learner)(
            self._make_plans,
            profile_steps=aim.profile_steps,
            search_steps=aim.search_steps,
            margin=max(MARGIN, spare),
            spare=spare,
        )
        if isinstance(aim.policy, str):  # the code of a user may rely on the thread of the steps
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
        aim = self._aim
        find = partial(find_floor, trace, self._measure(aim.limit_bytes), aim.policy)
        if self._ranks.has_said or not isinstance(aim.policy, str) or is_at_once():
            return self._ranks.agree(aim.limit_bytes, find)
        if self._floor is None:
            self._floor = ThreadJob(find)
            return False
        floor_bytes = self._floor.take()
        self._floor = None
        return self._ranks.agree(
            aim.limit_bytes, find if floor_bytes is None else lambda: floor_bytes
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
        aim = self._aim
        machine = measure_machine(
            self._device,
            budget_bytes=aim.limit_bytes,
            host_bytes=aim.host_limit_bytes,
            disk=aim.disk,
            disk_bytes=aim.disk_limit_bytes,
        )
        return replace(machine, budget_bytes=budget_bytes)

    # ---- plans ---------------------------------------------------------------------------------

    def _make_plans(self, trace: Trace, *, share: float, count: int) -> tuple[Plan, ...]:
        return self.prepare()(trace, share=share, count=count)

    def prepare(self) -> MakePlans:
        """Return what makes plans on any thread: it knows plain values only."""
        aim = self._aim
        self.machine = machine = self._measure(aim.limit_bytes)
        most_bytes: int | InfeasibleBudget = aim.limit_bytes
        if self._ranks is not None:
            try:
                most_bytes = self._ranks.find_budget(aim.limit_bytes)
            except InfeasibleBudget as error:
                most_bytes = error
        tight_bytes = max(0, aim.limit_bytes - self._spare_bytes())
        limits = Limits(machine=machine, most_bytes=most_bytes, tight_bytes=tight_bytes)
        return partial(make_plans, limits=limits, policy=aim.policy)
