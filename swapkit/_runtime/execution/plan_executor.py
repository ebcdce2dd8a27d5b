"""Carries out a plan in a session's steps, as long as they go as recorded.

The code that runs at every event is in `shim/cpp/moves/plan_cursor.cpp`. This file has the work
done once per step, and when a step deviates from the plan.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass

import torch

from swapkit._runtime.execution.plan_compiler import compile_plan
from swapkit._runtime.execution.planned_recomputation import (
    PlannedRepetition,
    Repetitions,
    WaitFiller,
    find_early,
)
from swapkit._runtime.model import global_hooks, hook_bypass
from swapkit._runtime.model.tracker import find_weakly
from swapkit._runtime.process.captures import Capture, capture_table
from swapkit._runtime.saved.device import Curve
from swapkit._runtime.saved.swapper import Swapper
from swapkit._runtime.saved.weights import list_leaving
from swapkit._runtime.shim.types import Follower, HeldUse
from swapkit._runtime.torch_compat.internals import storage_id
from swapkit._runtime.torch_compat.isolation import untraced
from swapkit.errors import SessionError
from swapkit.ir.plans import Plan
from swapkit.ir.traces import EventKind, Storage, Trace
from swapkit.units import format_bytes

_NOTHING = -1


@dataclass(frozen=True, slots=True, kw_only=True)
class StepReport:
    """How a step went. `deviation` None: as recorded, to its end."""

    deviation: str | None
    # Of the tensor whose size alone was unexpected, where it deviated; 0: it was something else.
    resized_bytes: int
    events: int  # until it deviated
    stall_seconds: float  # waited for copies
    late_prefetches: int  # storages whose copy was waited for at their use
    refused_prefetches: int  # and early recomputations that found no room when they were due


NO_REPORT = StepReport(
    deviation=None,
    resized_bytes=0,
    events=0,
    stall_seconds=0.0,
    late_prefetches=0,
    refused_prefetches=0,
)


class PlanExecutor:
    """One plan, carried out in the steps of a session."""

    def __init__(
        self,
        swapper: Swapper,
        model: torch.nn.Module | None,
        trace: Trace,
        plan: Plan,
        *,
        for_any_length: bool = False,
    ) -> None:
        """Prepare; it has no effect before `start`.

        Args:
            swapper: the session's swapper.
            model: its operators are repeated.
            trace: the step that the plan is for.
            plan: the plan to follow.
            for_any_length: whether storages may have other sizes than in the trace.

        Raises:
            PlanMismatch: the plan does not fit the trace, or the trace has no events.
            SessionError: the swapper belongs to no session.
        """
        if swapper.events is None:
            raise SessionError("a plan can only be followed inside a session, which counts events")
        self.plan = plan
        self.for_any_length = for_any_length
        self.bytes_before = trace.bytes_before
        self.needs_modules = False  # for `tracker.Sites`
        self._trace = trace
        self._swapper = swapper
        self._find_model = find_weakly(model)
        self._packer = swapper.events
        self._tracker = swapper.shared.tracker
        self._table = compile_plan(trace, plan, self._tracker, for_any_length=for_any_length)
        # The room for it is known for the sizes of the trace only.
        self._early = {} if for_any_length else find_early(trace, plan)
        self.is_following = False  # between a `start` and a `stop`, neither of them interrupted
        self._follower: Follower | None = None
        self._repetitions: Repetitions | None = None  # None: the plan repeats no operators
        self._filler: WaitFiller | None = None  # None: the plan recomputes nothing in waits
        self._deviation: str | None = None
        self._resized_bytes = 0

    # ---- life -----------------------------------------------------------------------------------

    @property
    def has_ended(self) -> bool:
        """Whether nothing of a `start` is in effect."""
        return self._follower is None

    def start(self) -> None:
        """Follow the plan from the next event on, which has to be the first event of a step."""
        swapper, table = self._swapper, self._table
        with swapper.shared.lock:
            self._follower = follower = swapper.shared.shim.follower(
                swapper.mover, self, table.events, table.storages, table.continuing
            )
            swapper.mover.follower = follower
            swapper.device.expect(table.largest_bytes)
            swapper.mover.plan_held(*self._find_weight_moves())
            if table.captures:
                self._repetitions = Repetitions(self._find_repetitions(), follower)
                global_hooks.steps.add(self)
            if self._early:
                self._filler = WaitFiller(swapper, follower, self._early)
                self._filler.start()
            self._counted_before = swapper.counters()
            self._begin(follower)
        self._packer.has_saved_late = False
        self._packer.follows = True
        self.is_following = True

    def stop(self) -> None:
        """Stop following the plan. Groups that are out come back as memory allows.

        If it is interrupted, the next call goes on.
        """
        self.is_following = False
        if self._follower is None:
            return
        swapper = self._swapper
        self._packer.follows = self._packer.skips_backward = False
        if self._repetitions is not None:
            self._repetitions.end()
            self._repetitions = None
        if self._filler is not None:
            self._filler.stop()
            self._filler = None
        global_hooks.steps.remove(self)
        with swapper.shared.lock:
            self._follower.end()
            swapper.mover.follower = None
            swapper.mover.plan_held([], [])
            swapper.curve = None
            swapper.evictor.resume()
            self._follower = None

    def end_step(self) -> StepReport:
        """Return a report of the step that ends here, and begin the next one.

        Raises:
            SessionError: the plan was not started.
        """
        follower, swapper = self._follower, self._swapper
        if follower is None:
            raise SessionError("this plan is not being followed: call start() first")
        with swapper.shared.lock:
            position, count = int(follower.position), len(self._trace.events)
            if follower.is_on and position < count:
                self._deviation = (
                    f"the step ended after {position} of {count} events: {self._expected(position)}"
                )
            now = swapper.counters()
            counted, self._counted_before = now - self._counted_before, now
            report = StepReport(
                deviation=self._deviation,
                resized_bytes=self._resized_bytes,
                events=position,
                stall_seconds=counted.stall_seconds,
                late_prefetches=int(follower.late),
                refused_prefetches=int(follower.refused),
            )
            # After a rescue the hooks stay on in backward: tensors that were saved there unseen may
            # be the cause, and the next step has to see them.
            is_rescued = counted.rescues > 0
            is_planned = report.deviation is None and not self._packer.has_saved_late
            self._packer.skips_backward = is_planned and not is_rescued
            self._begin(follower)
        return report

    def _begin(self, follower: Follower) -> None:
        self._deviation, self._resized_bytes = None, 0
        self._swapper.curve = None
        self._swapper.evictor.hold()
        repetitions = self._repetitions
        if repetitions is not None and repetitions.has_changed():
            follower.capture(capture_table(repetitions.captures(), self._table.operators))
        if self._filler is not None:
            self._filler.begin_step()
        follower.reset()

    def begin_weights(self) -> None:
        """Expect the first use of a weight: evaluations before this step used weights, too."""
        if self._table.weights.uses:
            with self._swapper.shared.lock:
                self._swapper.mover.end_held_step()

    def _find_weight_moves(self) -> tuple[list[HeldUse], list[tuple[int, int]]]:
        """Return what the plan lets happen to weights that may leave, as the shim takes it."""
        if not self._table.weights.uses:
            return [], []
        leaving = list_leaving(self._find_model())
        return self._table.weights.as_rows({name: storage_id(each) for name, each in leaving})

    # ---- recomputation and events ---------------------------------------------------------------

    def _find_repetitions(self) -> Iterator[PlannedRepetition]:
        """Yield the operators that the plan repeats, by module."""
        model = self._find_model()
        by_module: dict[str, list[Capture]] = {}
        for capture in self._table.captures:
            by_module.setdefault(capture.module, []).append(capture)
        for module in self._tracker.modules() if model is None else model.modules():
            captures = by_module.get(self._tracker.name_of(module))
            if captures is not None:
                yield PlannedRepetition(module, captures)

    def now(self) -> int | None:
        """Return the number of events in this step so far; None: the step has deviated."""
        follower = self._follower
        return int(follower.position) if follower is not None and follower.is_on else None

    def find_site(self) -> tuple[int, int] | None:
        """Return the site of the current save as the plan expects it; None: unknown.

        See `tracker.Sites`.
        """
        follower = self._follower
        return None if follower is None else follower.site()

    def set_blind(self, *, is_blind: bool) -> None:
        """Set whether the sites of this thread's saves are known only from `find_site`.

        See `tracker.Sites`.
        """
        if self._follower is not None:
            self._follower.set_untracked(is_blind)

    def has_used(self) -> bool:
        """Return whether a saved tensor was used in the step; True (maybe) after a deviation."""
        position = self.now()
        if position is None:
            return True
        return any(event.kind is EventKind.USE for event in self._trace.events[:position])

    def before_step(self, optimizer: torch.optim.Optimizer) -> None:
        """Keep results that would be recomputed from parameters that change now. Any thread."""
        parameters = (each for group in optimizer.param_groups for each in group["params"])
        changed = [each for each in parameters if torch.is_tensor(each)]
        self._swapper.shared.shim.settle(changed, False, False)  # noqa: FBT003 - positional only

    def after_step(self, _optimizer: torch.optim.Optimizer) -> None:
        """Do nothing."""

    # ---- deviations -----------------------------------------------------------------------------

    @untraced
    def deviated(self, found: tuple[int, bool, int, int, int, bool]) -> None:
        """Handle an event that was not as expected; see `Owner`."""
        assert self._follower is not None
        hook_bypass.end()
        self._packer.skips_backward = False
        position = found[0]  # not the follower's position, which also counts other threads' events
        expected = self._expected(position)
        self._deviation = f"event {position}: {expected}; instead, autograd {self._describe(found)}"
        self._resized_bytes = self._find_resized(found)
        self._swapper.curve = Curve(
            self._swapper.mover, self._table.curve, int(self._follower.moved_bytes)
        )
        self._swapper.evictor.resume()
        self._swapper.evictor.set_standby(is_on=True)

    def _expected(self, position: int) -> str:
        events = self._trace.events
        if position >= len(events):
            return f"expected the step to end after {len(events)} events"
        event = events[position]
        verb = "save" if event.kind is EventKind.SAVE else "use"
        if event.storage is None:
            return f"expected autograd to {verb} a tensor that the plan does not move"
        storage = self._trace.storages[event.storage]
        return (
            f"expected autograd to {verb} storage {event.storage}, {format_bytes(storage.nbytes)} "
            f"of {storage.module or 'no module'}"
        )

    def _find_resized(self, found: tuple[int, bool, int, int, int, bool]) -> int:
        """Return the bytes of a tensor saved where it was expected, in another size; 0: none."""
        position, is_save, tag, nbytes, number, _ = found
        storage = self._find_saved(position) if is_save else None
        if storage is None or nbytes in {_NOTHING, storage.nbytes}:
            return 0
        is_there = number == _NOTHING and self._tracker.name(tag) == storage.module
        return nbytes if is_there else 0

    def _find_saved(self, position: int) -> Storage | None:
        """Return the storage that was expected to be saved; None: another event was expected."""
        event = self._trace.events[position] if position < len(self._trace.events) else None
        if event is None or event.storage is None or event.kind is not EventKind.SAVE:
            return None
        return self._trace.storages[event.storage]

    def _describe(self, found: tuple[int, bool, int, int, int, bool]) -> str:
        _, is_save, tag, nbytes, number, is_recipe = found
        verb = "saves" if is_save else "uses"
        if is_recipe:
            return f"{verb} a recomputed tensor"
        if nbytes == _NOTHING:
            return f"{verb} a tensor that is not moved"
        which = "a storage unknown to the plan" if number == _NOTHING else f"storage {number}"
        where = self._tracker.name(tag) or "no module"
        return f"{verb} {which}, {format_bytes(nbytes)} of {where}"
