"""When planned swaps are released and come back: at operators that the scope names.

With a distance of n operators, the memory of a saved tensor is released 3n operators after it was
saved, waiting for its copy if need be, or later if others than the graph still have it then; and
the copy back starts n operators before the first use in backward. An operator is an autograd node;
its number rises in forward and falls in backward (`cpp/operators.cpp`). Not every node of forward
runs in backward, so which ones are n before a use is learned: from the pass before that started
alike, and counted by numbers until there was one.

Source:
    MindFormers, fine-grained activation swap: `backward_prefetch`.
"""

from __future__ import annotations

import heapq
import itertools
import weakref
from dataclasses import dataclass, field
from operator import itemgetter
from typing import TYPE_CHECKING, NamedTuple

import torch

from swapkit._native.sched import CLEAN, COPYING_OUT, OUT, RESIDENT
from swapkit._runtime.clock import NEVER

if TYPE_CHECKING:
    from swapkit._runtime.saved import StorageGroup
    from swapkit._runtime.swapper import Swapper

# A release follows its copy by so many times the distance of the copy back.
RELEASE_FACTOR = 3
# What is remembered at most: of threads, the most recent shapes of backward passes.
THREADS_KEPT = 64
SHAPES_KEPT = 16
SAVES_KEPT = 256  # and, before dead ones are looked for, saves
FORWARD = -1  # what the clock says of where it rings: in forward, or at backward's first operator
BACKWARD_START = 1

_next_operator = torch._C._autograd._get_sequence_nr  # noqa: SLF001


class Shape(NamedTuple):
    """What a backward pass looks like at its start: groups, and how far back they begin and end."""

    groups: int
    newest: int
    oldest: int


@dataclass(slots=True)
class Thread:
    """The operators of one thread's forward passes."""

    # When they are released: operator, and serial to tell them apart; the soonest first.
    leaving: list[tuple[int, int, weakref.ref[StorageGroup]]] = field(default_factory=list)
    saved: list[weakref.ref[StorageGroup]] = field(default_factory=list)
    most_saved: int = SAVES_KEPT
    # When they come back: the soonest last; and those that were due but found no room.
    coming: list[tuple[int, weakref.ref[StorageGroup]]] = field(default_factory=list)
    waiting: list[weakref.ref[StorageGroup]] = field(default_factory=list)
    # Of backward passes by shape: where an operator comes in their order, counted from their start.
    positions: dict[Shape, dict[int, int]] = field(default_factory=dict)
    orders: dict[Shape, list[int]] = field(default_factory=dict)
    shape: Shape | None = None  # of the pass under way
    start: int = 0

    def forget_dead(self) -> None:
        """Forget the saves of graphs that are gone."""
        self.saved = [reference for reference in self.saved if reference() is not None]
        self.most_saved = max(SAVES_KEPT, 2 * len(self.saved))

    def learn(self, shape: Shape, order: list[int]) -> None:
        """Remember the order of a pass, instead of the one before that started alike."""
        self.orders.pop(shape, None)
        self.orders[shape] = order
        self.positions[shape] = {delta: at for at, delta in enumerate(order)}
        if len(self.orders) > SHAPES_KEPT:
            oldest = next(iter(self.orders))
            del self.orders[oldest], self.positions[oldest]


class Timing:
    """The alarms of one swapper."""

    def __init__(self, swapper: Swapper) -> None:
        self._swapper = swapper
        self._threads: dict[int, Thread] = {}
        self._order = itertools.count()

    def saved(self, group: StorageGroup) -> None:
        """Set the alarms of a group that an operator has just saved."""
        clock = self._swapper.runtime.clock
        number = clock.attend(self)
        thread = self._threads.get(number) or self._add_thread(number)
        group.operator = _next_operator() - 1
        reference = weakref.ref(group)
        due = group.operator + self._delay(group)
        heapq.heappush(thread.leaving, (due, next(self._order), reference))
        thread.saved.append(reference)
        if len(thread.saved) > thread.most_saved:
            thread.forget_dead()
        if thread.leaving[0][0] == due:
            clock.set_forward(self, number, due)

    def _add_thread(self, number: int) -> Thread:
        if len(self._threads) >= THREADS_KEPT:
            for other, thread in list(self._threads.items()):
                thread.forget_dead()
                if not thread.saved:
                    del self._threads[other]
        thread = self._threads[number] = Thread()
        return thread

    def ring(self, number: int, operator: int, phase: int) -> bool:
        """Do what is due at an operator; return whether anything of ours runs on that thread."""
        thread = self._threads.get(number)
        if thread is None:
            return False
        clock = self._swapper.runtime.clock
        if phase == FORWARD:
            self._release_due(thread, operator)
        elif phase == BACKWARD_START:
            self._learn(number, thread)
            self._begin(thread, operator)
        if phase != FORWARD:
            self._bring_due(thread, operator)
            # What found no room tries again at the next operator.
            soonest = thread.coming[-1][0] if thread.coming else NEVER
            clock.set_backward(self, number, operator if thread.waiting else soonest)
        if phase in {FORWARD, BACKWARD_START}:
            clock.set_forward(self, number, thread.leaving[0][0] if thread.leaving else NEVER)
        return True

    # ---- out ------------------------------------------------------------------------------------

    def _release_due(self, thread: Thread, operator: int) -> None:
        while thread.leaving and thread.leaving[0][0] <= operator:
            planned, _, reference = heapq.heappop(thread.leaving)
            group = reference()
            if group is None or group.operator + self._delay(group) > planned:
                continue
            if group.state == RESIDENT and not group.is_exclusive:
                # Others may write to it yet, and would keep its memory: at the next operator again.
                heapq.heappush(thread.leaving, (operator + 1, next(self._order), reference))
            else:
                self._release(group, operator)

    def _delay(self, group: StorageGroup) -> int:
        return RELEASE_FACTOR * (group.choice.prefetch or 0)

    def _release(self, group: StorageGroup, operator: int) -> None:
        swapper = self._swapper
        if group.state == RESIDENT:
            swapper.mover.copy_out(group)  # it has waited for neighbours, or for others to let go
        if group.state == COPYING_OUT:
            swapper.mover.finish_out(group)
        if group.state == CLEAN and group.is_on_device:
            swapper.mover.release(group)
            swapper.runtime.note("release", swapper, group, operator)

    # ---- back -----------------------------------------------------------------------------------

    def _begin(self, thread: Thread, start: int) -> None:
        """Plan the copies back of a backward pass that begins at the operator `start`."""
        groups = [group for ref in thread.saved if (group := ref()) is not None]
        window = [group for group in groups if group.operator <= start]
        thread.saved = [weakref.ref(group) for group in groups]
        thread.start = start
        thread.coming, thread.waiting = [], []
        if not window:
            thread.shape = None
            return
        operators = [group.operator for group in window]
        thread.shape = Shape(len(window), start - max(operators), start - min(operators))
        for group in window:
            due = self._due(thread, group)
            if due is not None:
                thread.coming.append((due, weakref.ref(group)))
        thread.coming.sort(key=itemgetter(0))
        self._release_late(thread, start)

    def _release_late(self, thread: Thread, start: int) -> None:
        """Release what forward did not come to, unless it is needed before it would have gone."""
        late = [entry for entry in thread.leaving if self._is_of(entry[2], start)]
        thread.leaving = [entry for entry in thread.leaving if not self._is_of(entry[2], start)]
        heapq.heapify(thread.leaving)
        needed = {id(ref()) for due, ref in thread.coming if due >= start}
        for _, _, reference in late:
            group = reference()
            if group is not None and id(group) not in needed:
                self._release(group, start)

    @staticmethod
    def _is_of(reference: weakref.ref[StorageGroup], start: int) -> bool:
        group = reference()
        return group is None or group.operator <= start

    def _due(self, thread: Thread, group: StorageGroup) -> int | None:
        """Return the operator at which a group's copy back starts; None: it is not used."""
        distance = group.choice.prefetch or 0
        shape = thread.shape
        if shape is None or shape not in thread.positions:
            return group.operator + distance
        position = thread.positions[shape].get(thread.start - group.operator)
        if position is None:
            return None  # in the pass before, no operator needed it
        return thread.start - thread.orders[shape][max(0, position - distance)]

    def _bring_due(self, thread: Thread, operator: int) -> None:
        due, thread.waiting = thread.waiting, []
        while thread.coming and thread.coming[-1][0] >= operator:
            due.append(thread.coming.pop()[1])
        for reference in due:
            group = reference()
            if group is None or group.state != OUT or group.is_on_device:
                continue
            if self._swapper.mover.bring_early(group):
                self._swapper.runtime.note("prefetch", self._swapper, group, operator)
            else:
                thread.waiting.append(reference)

    def _learn(self, number: int, thread: Thread) -> None:
        """Keep the order of the pass that ran last."""
        shape = thread.shape
        if shape is None:
            return
        record = self._swapper.runtime.shim.clock_record(number)
        order = [thread.start - operator for operator in record]
        if order and order[0] == 0:
            thread.learn(shape, order)
