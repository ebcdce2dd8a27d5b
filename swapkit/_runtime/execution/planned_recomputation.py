"""The operators that a plan repeats, in backward and in waits for other ranks."""

from __future__ import annotations

import contextlib
import re
import weakref
from bisect import bisect_right
from collections import Counter
from collections.abc import Iterable, Iterator, Mapping
from typing import TYPE_CHECKING

from swapkit._runtime.process.captures import Capture, find_operator
from swapkit._runtime.saved.swapper import Swapper
from swapkit._runtime.shim.types import Follower
from swapkit._runtime.thread_state import thread_state, tries_memory
from swapkit._runtime.torch_compat.internals import NO_TASK, graph_task
from swapkit._runtime.torch_compat.isolation import hidden, untraced
from swapkit._runtime.torch_compat.reported_calls import waits
from swapkit._runtime.user_choices.part import changes
from swapkit._runtime.user_choices.wrapping import part_of
from swapkit.ir.plans import Action, Plan
from swapkit.ir.traces import WAIT, Trace
from swapkit.registry import Choice, Recompute, Source
from swapkit.texts import get_logger

if TYPE_CHECKING:
    import torch

# ---- planned recomputation -----------------------------------------------------------------------
#
# The operators that a plan repeats in backward, as choices of the registry next to the user's.
#
# `process/captures.py` makes the shim see these operators. This file groups them by module, so that
# reports can list them, and so that the user's choices take precedence over the plan's.


class PlannedRepetition:
    """The choices of a plan for the operators of one module."""

    def __init__(self, module: torch.nn.Module, captures: Iterable[Capture]) -> None:
        """Take the runs of the module's own operators that the plan repeats."""
        self.find_module = weakref.ref(module)
        self._captures: dict[str, list[Capture]] = {}
        for each in captures:
            self._captures.setdefault(each.name, []).append(each)
        self._choices = {
            name: _make_choice(name, len(runs)) for name, runs in sorted(self._captures.items())
        }
        self.counts: Counter[Capture] = Counter()  # how often each was captured
        self.owner: Repetitions | None = None
        self.removed = 0

    @property
    def choices(self) -> tuple[Choice, ...]:
        """One choice for each operator."""
        return tuple(self._choices.values())

    def count_of(self, choice: Choice) -> int:
        """Return how often a choice's operator was captured."""
        if self.owner is not None:
            self.owner.count()
        return sum(self.counts[each] for each in self._captures[choice.operator])

    def remove(self, choice: Choice) -> None:
        """Stop repeating a choice's operator, from the next step on."""
        self._choices = {name: each for name, each in self._choices.items() if each is not choice}
        self.removed += 1

    def captures(self) -> Iterator[Capture]:
        """Yield the runs that are repeated, except for operators with a user's choice."""
        module = self.find_module()
        part = None if module is None else part_of(module)
        if part is not None and part.is_whole:
            return
        spoken = None if part is None else part.operators
        for name in self._choices:
            if spoken is None or spoken.judged(find_operator(name)) is None:
                yield from self._captures[name]


def _make_choice(name: str, runs: int) -> Choice:
    return Choice(
        source=Source.PLANNER,
        what=Recompute(),
        operator=name,
        meaning=re.escape(name),
        occurrences=tuple(range(runs)),
    )


# The choices of plans by module, for reports; a plan that begins replaces earlier choices.
_repetitions: weakref.WeakKeyDictionary[torch.nn.Module, PlannedRepetition] = (
    weakref.WeakKeyDictionary()
)


def repetition_of(module: torch.nn.Module) -> PlannedRepetition | None:
    """Return the current plan's choices for a module's own operators, if there are any."""
    return _repetitions.get(module)


class Repetitions:
    """The runs that one plan repeats, by module."""

    def __init__(self, repetitions: Iterable[PlannedRepetition], follower: Follower) -> None:
        """Put a plan's choices into effect. `follower`: captures their operators."""
        self._all = tuple(repetitions)
        self._follower = follower
        self._captures: list[tuple[PlannedRepetition, Capture]] = []  # in the follower's order
        self._counted: list[int] = []
        self._known = (-1, 0)
        for each in self._all:
            each.owner = self
            module = each.find_module()
            if module is not None:
                _repetitions[module] = each

    def end(self) -> None:
        """Take the choices out of effect."""
        self.count()
        for each in self._all:
            each.owner = None  # this object refers to the follower
            module = each.find_module()
            if module is not None and _repetitions.get(module) is each:
                del _repetitions[module]

    def has_changed(self) -> bool:
        """Return whether choices were added or removed since the last call."""
        now = (changes(), sum(each.removed for each in self._all))
        former, self._known = self._known, now
        return now != former

    def captures(self) -> list[Capture]:
        """Return the runs that are repeated from now on, in order."""
        self.count()
        pairs = [(each, capture) for each in self._all for capture in each.captures()]
        pairs.sort(key=lambda pair: pair[1].position)
        self._captures, self._counted = pairs, [0] * len(pairs)
        return [capture for _, capture in pairs]

    def count(self) -> None:
        """Add the captures since the last call to the counts."""
        now = self._follower.captured()
        if len(now) == len(self._captures):
            for (owner, capture), before, count in zip(
                self._captures, self._counted, now, strict=True
            ):
                owner.counts[capture] += count - before
            self._counted = now


# ---- wait filling --------------------------------------------------------------------------------
#
# Planned recomputation in waits for other ranks: it takes no time there.

_log = get_logger("plan")

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
    """Recomputes what is due in a wait, before the wait (`reported_calls.WaitListener`)."""

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
