"""Planned recomputation in waits for other ranks: it takes no time there."""

from __future__ import annotations

import contextlib
from bisect import bisect_right
from typing import TYPE_CHECKING

from swapkit._runtime.thread_state import thread_state, tries_memory
from swapkit._runtime.torch_compat.collective_waits import waits
from swapkit._runtime.torch_compat.internals import NO_TASK, graph_task
from swapkit._runtime.torch_compat.isolation import hidden, untraced
from swapkit.ir.plans import Action
from swapkit.ir.traces import WAIT
from swapkit.texts import get_logger

if TYPE_CHECKING:
    from collections.abc import Mapping

    from swapkit._runtime.saved.swapper import Swapper
    from swapkit._runtime.shim.types import Follower
    from swapkit.ir.plans import Plan
    from swapkit.ir.traces import Trace

_log = get_logger(__name__)

Wait = tuple[int, int]  # the events of the step before it, and its number among waits since then


def find_early(trace: Trace, plan: Plan) -> dict[Wait, list[int]]:
    """Return the storages that a plan recomputes in each wait, in the order of their making."""
    named: dict[int, list[int]] = {}
    for each in plan.decisions:
        if each.action is Action.RECOMPUTE and each.prefetch is not None:
            named.setdefault(each.prefetch, []).append(each.storage)
    events = [event.operator for event in trace.events]
    found: dict[Wait, list[int]] = {}
    position, number = -1, 0
    for at, operator in enumerate(trace.operators):
        if operator.name != WAIT:
            continue
        before = bisect_right(events, at)
        number = number + 1 if before == position else 0
        position = before
        if at in named:
            found[position, number] = sorted(named[at], key=lambda s: trace.storages[s].birth)
    return found


class WaitFiller:
    """Recomputes what is due in a wait, before the wait (`collective_waits.WaitListener`)."""

    def __init__(
        self, swapper: Swapper, follower: Follower, early: Mapping[Wait, list[int]]
    ) -> None:
        """Have no effect before `start`. `early`: see `find_early`."""
        self._swapper = swapper
        self._follower = follower
        self._early = early
        self._latest: Wait = -1, 0

    def start(self) -> None:
        """Fill the waits from now on."""
        waits.add(self)

    def stop(self) -> None:
        """Fill no more waits. A second call does nothing."""
        waits.remove(self)

    def begin_step(self) -> None:
        """Count the waits of a step that begins."""
        self._latest = -1, 0

    def waiting(self) -> contextlib.AbstractContextManager[None]:
        """Recompute what is due. Any thread; those of other programs change nothing."""
        if self._is_ours():
            try:
                self._recompute()
            except Exception:  # noqa: BLE001 - backward recomputes it again, and raises the error
                _log.debug("recomputing in a wait failed", exc_info=True)
        return contextlib.nullcontext()

    def _is_ours(self) -> bool:
        """Return whether the session runs on this thread, or backward does for an accelerator."""
        is_elsewhere = self._swapper.device.name.type != "cpu" and graph_task() != NO_TASK
        return thread_state.sessions[-1:] == [self._swapper] or is_elsewhere

    @untraced
    def _recompute(self) -> None:
        follower = self._follower
        with self._swapper.shared.lock, hidden(), tries_memory():
            position, number = follower.position, self._latest[1] + 1
            self._latest = position, number if position == self._latest[0] else 0
            for storage in self._early.get(self._latest, ()):
                follower.recompute(storage)
