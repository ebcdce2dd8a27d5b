"""Planned addresses for training without a session: `install(lifetimes=True)`.

A session tells the pool where steps end and which requests belong to a backward pass. Without one,
the optimizers of the process end the steps, and the pool asks autograd for the phase
(`shim/cpp/running/backward.cpp`).
"""

from __future__ import annotations

import threading
from typing import Any

from swapkit._native.layout import TAG_OPTIMIZER, LivesMode
from swapkit._native.pool import RingKind, set_tag
from swapkit._runtime.allocators.installed_pool import Installation
from swapkit._runtime.model.step_counter import OPTIMIZER_STEP, StepCounter
from swapkit._runtime.model.tracker import NO_MODULE, ModuleTracker
from swapkit.config.environment import read_environment
from swapkit.texts import get_logger

_log = get_logger("memory")


class ProcessLifetimes:
    """The pools of the process, and whether they separate and plan lives outside of sessions too.

    A step ends as in a session without a model: once each optimizer that steps, on any thread, has
    stepped at least once. While a pool has sessions, these end its steps instead.

    All methods may be called from any thread. The lock is not held while a step ends.
    """

    def __init__(self) -> None:
        self.is_on = False
        self._is_chosen = False  # by the user; else by the environment
        self._installations: tuple[Installation[Any], ...] = ()  # replaced, never changed
        self._counter: StepCounter | None = None
        self._steps = 0
        # Guards all. Not a fork lock: it is held while a layout takes its own, which is newer.
        self._lock = threading.RLock()

    def choose(self, tracker: ModuleTracker, *, on: bool | None) -> None:
        """Switch on or off.

        Args:
            tracker: labels the allocations of optimizers.
            on: the user's choice. None: as before; at first as MEMORY_FRAGMENTATION says.
        """
        with self._lock:
            if on is not None:
                self._is_chosen = True
            elif self._is_chosen:
                on = self.is_on
            else:
                on = read_environment().memory_fragmentation
            if on and not self.is_on:
                self._start(tracker)
            elif self.is_on and not on:
                self._stop()

    def cover(self, installation: Installation[Any]) -> None:
        """Include a pool from now on; a second call does nothing."""
        if installation in self._installations:
            return
        with self._lock:
            if installation not in self._installations:
                self._installations = (*self._installations, installation)
                if self.is_on:
                    self._begin(installation)

    def forget(self) -> None:
        """Switch off, and forget the user's choice."""
        with self._lock:
            self._stop()
            self._is_chosen = False

    def _start(self, tracker: ModuleTracker) -> None:
        self.is_on = True
        self._counter = StepCounter(
            None,
            (),
            self._end_step,
            is_here=lambda: True,
            rebase=tracker.rebase,
            tag=tracker.tag_named(OPTIMIZER_STEP) | TAG_OPTIMIZER,
        )
        self._counter.start()
        for installation in self._installations:
            self._begin(installation)

    def _begin(self, installation: Installation[Any]) -> None:
        if installation.layout is not None:
            installation.layout.start(self, LivesMode.SEPARATE)
        else:
            _log.warning(
                "no lifetimes on %s: its allocator has no virtual memory (expandable segments) of "
                "swapkit",
                installation.device.name,
            )

    def _stop(self) -> None:
        """Undo `_start`. Safe to call again."""
        self.is_on = False
        if self._counter is not None:
            self._counter.stop()
            self._counter = None
        for installation in self._installations:
            if installation.layout is not None:
                installation.layout.stop(self)

    def _end_step(self) -> None:
        """End a step of the pools that have no session, on the thread that ran it."""
        set_tag(NO_MODULE)  # a scope's backward left the tag of its last module
        for installation in self._installations:
            if installation.layout is not None and not installation.sessions:
                installation.pool.note(RingKind.MARK, self._steps)
                installation.layout.end_step(is_settled=True)
        self._steps += 1


process_lifetimes = ProcessLifetimes()
