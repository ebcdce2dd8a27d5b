"""Simulated choices of actions: rounded from shares, and changed at random."""

from __future__ import annotations

import random
from bisect import bisect_left
from collections.abc import Sequence
from dataclasses import dataclass
from itertools import accumulate
from typing import NamedTuple, TypeAlias

import numpy as np
from numpy.typing import NDArray

from swapkit.ir.machines import Machine
from swapkit.ir.traces import HostTime
from swapkit.planning.beside import go_on
from swapkit.planning.bounds.fluid import IDLE
from swapkit.simulation import timeline
from swapkit.simulation.problems import Floats, Indexes, Problem
from swapkit.simulation.timeline import KEEP, RECOMPUTE, SWAP, SWAP_TO_DISK

Actions: TypeAlias = NDArray[np.int8]


# ---- trials --------------------------------------------------------------------------------------
#
# Simulated choices of actions, which a search compares.

# Cost of a step that cannot finish, above any step that can; more for a step stuck earlier.
STUCK_SECONDS = 1e12


@dataclass(frozen=True, slots=True, eq=False)
class Trial:
    """One choice of actions and its simulated run. `cost`: seconds, if the step can finish."""

    actions: Actions
    window: int  # a copy back may start at most this many slots before its need
    run: timeline.Run
    cost: float

    @property
    def is_possible(self) -> bool:
        """Whether the step can finish."""
        return self.run.stuck_slot < 0


class Trials:
    """A simulator for one problem on one machine, with a count of simulations."""

    def __init__(self, problem: Problem, machine: Machine, host: HostTime | None = None) -> None:
        self.problem = problem
        self.machine = machine
        self._host = host  # None: the host is never the limit
        self.count = 0
        self._slots = len(problem.slot_seconds)

    def simulate(
        self, actions: Actions, window: int | None = None, *, earlies: Indexes | None = None
    ) -> Trial:
        """Return the trial of these actions, which must not change afterwards.

        Args:
            actions: the action of each item.
            window: most slots before its need that a copy back may start; None: any number.
            earlies: the slots before which items are recomputed ahead of their needs.

        Raises:
            GivenUp: the result of this thread's search is not needed.
        """
        go_on()
        window = self._slots if window is None else window
        self.count += 1
        moments = timeline.Moments(earlies=earlies)
        run = timeline.run(self.problem, self.machine, actions, moments, window=window)
        if run.stuck_slot < 0:
            idle = max(0.0, timeline.find_host_seconds(self._host, actions) - run.seconds)
            return Trial(actions, window, run, run.seconds + IDLE * idle)
        left = (self._slots - run.stuck_slot) / self._slots
        return Trial(actions, window, run, STUCK_SECONDS * (1 + left))

    def keep_all(self) -> Actions:
        """Return the actions that move nothing."""
        return np.zeros(len(self.problem.item_bytes), np.int8)


# ---- rounding ------------------------------------------------------------------------------------
#
# Rounding of item shares to whole actions.


class Shares(NamedTuple):
    """The shares of each item that are swapped and recomputed, from 0 to 1."""

    swapped: Floats
    recomputed: Floats

    def blend(self, other: Shares, part: float) -> Shares:
        """Return these shares, moved by `part` of the way to the other shares."""
        return Shares(
            self.swapped + part * (other.swapped - self.swapped),
            self.recomputed + part * (other.recomputed - self.recomputed),
        )


class Rounder:
    """A rounder for the shares of one problem."""

    def __init__(self, problem: Problem, machine: Machine) -> None:
        self._problem = problem
        self._machine = machine
        self._order = np.lexsort((problem.item_storages, problem.births)).tolist()
        self._classes = problem.classes.tolist()
        self._can_swap = problem.can_swap.tolist()
        self._can_recompute = problem.can_recompute.tolist()
        self._rows = [np.array(row, np.intp) for row in list_rows(problem)]
        self.nclasses = max(self._classes, default=-1) + 1

    def diffuse(self, shares: Shares, phases: Sequence[tuple[float, float]]) -> Actions:
        """Return actions whose running sums stay close to those of the shares, in each class.

        Args:
            shares: the shares of all items.
            phases: for each class, the initial values of its swapped and recomputed sums.
        """
        actions = [KEEP] * len(self._order)
        sums = [list(phase) for phase in phases]
        swapped, recomputed = shares.swapped.tolist(), shares.recomputed.tolist()
        for item in self._order:
            owed = sums[self._classes[item]]
            owed[0] += swapped[item]
            owed[1] += recomputed[item]
            for index in (1, 0) if owed[1] >= owed[0] else (0, 1):
                allowed = (self._can_recompute if index else self._can_swap)[item]
                if allowed and owed[index] >= 0.5:
                    actions[item] = RECOMPUTE if index else SWAP
                    owed[index] -= 1
                    break
        return self.spill(np.array(actions, np.int8))

    def take_first(self, shares: Shares) -> Actions:
        """Return actions that swap the first of each row, recompute the next, and keep the last.

        A row is a class in one pass through the model. The items used soonest are kept.
        """
        actions = np.zeros(len(self._order), np.int8)
        for row in self._rows:
            nswapped = int(np.ceil(shares.swapped[row].sum() - 1e-6))
            nrecomputed = int(np.ceil(shares.recomputed[row].sum() - 1e-6))
            swappable = row[self._problem.can_swap[row]][:nswapped]
            actions[swappable] = SWAP
            rest = row[self._problem.can_recompute[row] & (actions[row] == KEEP)]
            actions[rest[:nrecomputed]] = RECOMPUTE
        return self.spill(actions)

    def spill(self, actions: Actions) -> Actions:
        """Swap items to disk that do not fit on the host, those that are away longest."""
        problem, machine = self._problem, self._machine
        if machine.host_bytes is None or not machine.disk_bytes:
            return actions
        held = np.zeros(len(problem.slot_seconds) + 2, np.int64)
        firsts, lasts = problem.copies
        # Weights stay on the host; of the others, the longest away go to disk first.
        order = np.lexsort((problem.births - problem.deaths, problem.is_weight))
        for item in order[::-1]:
            if actions[item] not in {SWAP, SWAP_TO_DISK} or not problem.is_copied[item]:
                continue
            span = slice(int(firsts[item]), int(lasts[item]) + 1)
            held[span] += problem.item_bytes[item]
            if held[span].max() > machine.host_bytes and not problem.is_weight[item]:
                held[span] -= problem.item_bytes[item]
                actions[item] = SWAP_TO_DISK
        return actions


# ---- moves ---------------------------------------------------------------------------------------
#
# Small random changes to the actions of items.

REACH = 4  # mean distance, in items of a class, between two items that exchange actions
PARTS = (0.02, 0.05, 0.1, 0.2)  # shares of all items to copy from another choice
NEARBY = 12  # items on each side of a stall that may have caused it


class Moves:
    """A source of random changes; promising kinds of changes come more often."""

    def __init__(self, problem: Problem, machine: Machine, random_numbers: random.Random) -> None:
        self._random = random_numbers
        self._choices = list_choices(problem, machine)
        self.items = [item for item, choices in enumerate(self._choices) if len(choices) > 1]
        self._peers, self._ranks = _list_peers(problem, self.items)
        self._siblings = _list_siblings(problem, self.items)
        self._orders = [
            _sort_by(values.tolist(), self.items)
            for values in (problem.uses, problem.births, problem.releases)
        ]
        self._columns = _list_columns(problem, self.items)
        self._makers = [
            *(self._flip, self._flip_recomputed, self._exchange_peers, self._exchange_peers),
            *(self._exchange_any, self._flip_stalled, self._flip_two_stalled, self._flip_siblings),
        ]
        self._others: Sequence[Actions] = ()
        if any(len(column) > 1 for column in self._columns.values()):
            self._makers += [self._flip_column, self._exchange_columns, self._exchange_columns]

    def learn(self, others: Sequence[Actions]) -> None:
        """From now on, also copy parts of these choices."""
        if others and not self._others:
            self._makers += [self._borrow, self._borrow]
        self._others = others

    def propose(self, trial: Trial) -> Actions | None:
        """Return changed actions; None: the change was not possible."""
        actions = trial.actions.copy()
        maker = self._random.choice(self._makers)
        return actions if maker(actions, trial) else None

    def _flip(self, actions: Actions, _trial: Trial) -> bool:
        return self._change(actions, self._random.choice(self.items))

    def _flip_recomputed(self, actions: Actions, _trial: Trial) -> bool:
        """Change an item that is recomputed."""
        recomputed = np.flatnonzero(actions == RECOMPUTE)
        if not len(recomputed):
            return False
        return self._change(actions, int(recomputed[self._random.randrange(len(recomputed))]))

    def _exchange_peers(self, actions: Actions, _trial: Trial) -> bool:
        """Exchange the actions of two items of a class, mostly near ones."""
        item = self._random.choice(self.items)
        peers, rank = self._peers[item], self._ranks[item]
        step = self._random.choice((-1, 1))
        left = int(self._random.expovariate(1 / REACH))
        place = rank + step
        while 0 <= place < len(peers):
            if actions[peers[place]] != actions[item]:
                if left == 0:
                    return self._exchange(actions, item, peers[place])
                left -= 1
            place += step
        return False

    def _exchange_any(self, actions: Actions, _trial: Trial) -> bool:
        item, other = self._random.choice(self.items), self._random.choice(self.items)
        return bool(actions[item] != actions[other]) and self._exchange(actions, item, other)

    def _flip_stalled(self, actions: Actions, trial: Trial) -> bool:
        """Change an item that is born, released or needed close to a stall."""
        item = self._find_stalled(trial)
        return item is not None and self._change(actions, item)

    def _flip_two_stalled(self, actions: Actions, trial: Trial) -> bool:
        return self._flip_stalled(actions, trial) and self._flip_stalled(actions, trial)

    def _flip_siblings(self, actions: Actions, _trial: Trial) -> bool:
        """Give all items of one operator the same action: recomputing one makes the others."""
        if not self._siblings:
            return self._flip(actions, _trial)
        group = self._random.choice(self._siblings)
        action = self._random.choice((KEEP, SWAP, RECOMPUTE))
        changed = [item for item in group if action in self._choices[item]]
        before = actions[changed].copy()
        actions[changed] = action
        return bool((before != action).any())

    def _flip_column(self, actions: Actions, _trial: Trial) -> bool:
        """Change the items in the same place of several passes through the model."""
        item = self._random.choice(self.items)
        column = self._cut_column(item)
        before = actions[item]
        if not self._change(actions, item):
            return False
        for other in column:
            if actions[other] == before and actions[item] in self._choices[other]:
                actions[other] = actions[item]
        return True

    def _exchange_columns(self, actions: Actions, _trial: Trial) -> bool:
        """Exchange the actions of two near places of a class, in several passes."""
        item = self._random.choice(self.items)
        column = self._columns[item]
        peers, rank = self._peers[item], self._ranks[item]
        shift = self._random.choice((-1, 1)) * (1 + int(self._random.expovariate(1 / REACH)))
        if not 0 <= rank + shift < len(peers) or actions[peers[rank + shift]] == actions[item]:
            return False
        first, second = actions[item], actions[peers[rank + shift]]
        for each in self._cut_column(item):
            place = self._ranks[each] + shift
            if not 0 <= place < len(peers):
                continue
            if actions[each] == first and actions[peers[place]] == second:
                self._exchange(actions, each, peers[place])
        return bool(len(column)) and self._exchange(actions, item, peers[rank + shift])

    def _borrow(self, actions: Actions, _trial: Trial) -> bool:
        """Copy the actions of one part of the step, or of one class, from another choice."""
        other = self._random.choice(self._others)
        if self._random.random() < 0.2:
            item = self._random.choice(self.items)
            chosen = self._peers[item]
        else:
            _, order = self._random.choice(self._orders)
            length = max(2, int(len(order) * self._random.choice(PARTS)))
            begin = self._random.randint(-length + 1, len(order) - 1)
            chosen = order[max(begin, 0) : begin + length]
        if (actions[chosen] == other[chosen]).all():
            return False
        actions[chosen] = other[chosen]
        return True

    def _cut_column(self, item: int) -> list[int]:
        """Return some neighbours of an item in its column, without the item."""
        column = self._columns[item]
        place = column.index(item)
        begin = self._random.randint(0, place)
        end = self._random.randint(place, len(column) - 1)
        return [other for other in column[begin : end + 1] if other != item]

    def _find_stalled(self, trial: Trial) -> int | None:
        stalls = np.flatnonzero(trial.run.slot_stalls > 0)
        if trial.run.stuck_slot >= 0:
            slot = trial.run.stuck_slot
        elif len(stalls):
            sums = list(accumulate(trial.run.slot_stalls[stalls].tolist()))
            slot = int(stalls[bisect_left(sums, self._random.random() * sums[-1])])
        else:
            return None
        values, items = self._random.choice(self._orders)
        place = bisect_left(values, slot) + self._random.randint(-NEARBY, NEARBY)
        return items[min(max(place, 0), len(items) - 1)]

    def _change(self, actions: Actions, item: int) -> bool:
        choices = self._choices[item]
        if len(choices) < 2:
            return False
        others = [action for action in choices if action != actions[item]]
        actions[item] = self._random.choice(others)
        return True

    def _exchange(self, actions: Actions, item: int, other: int) -> bool:
        first, second = int(actions[item]), int(actions[other])
        if second not in self._choices[item] or first not in self._choices[other]:
            return False
        actions[item], actions[other] = second, first
        return True


def list_choices(problem: Problem, machine: Machine) -> list[tuple[int, ...]]:
    """Return the possible actions of each item; the disk is used only if the host is limited."""
    places = (
        (SWAP, SWAP_TO_DISK) if machine.disk_bytes and machine.host_bytes is not None else (SWAP,)
    )
    return [
        (KEEP,) + (places[:1] if is_weight else places) * can_swap + (RECOMPUTE,) * can_recompute
        for can_swap, is_weight, can_recompute in zip(
            problem.can_swap.tolist(),
            problem.is_weight.tolist(),
            problem.can_recompute.tolist(),
            strict=True,
        )
    ]


def _list_peers(
    problem: Problem, items: Sequence[int]
) -> tuple[dict[int, list[int]], dict[int, int]]:
    """Return, for each item, the items of its class in order of birth, and its place in them."""
    births, classes = problem.births.tolist(), problem.classes.tolist()
    peers: dict[int, list[int]] = {}
    ranks = {}
    for item in sorted(items, key=lambda item: (births[item], item)):
        group = peers.setdefault(classes[item], [])
        ranks[item] = len(group)
        group.append(item)
    return {item: peers[classes[item]] for item in items}, ranks


def _list_columns(problem: Problem, items: Sequence[int]) -> dict[int, list[int]]:
    """Return, for each item, the items in the same place of every pass through the model."""
    movable = set(items)
    columns: dict[tuple[int, int], list[int]] = {}
    for row in list_rows(problem):
        for place, item in enumerate(row):
            if item in movable:
                columns.setdefault((int(problem.classes[item]), place), []).append(item)
    return {item: column for column in columns.values() for item in column}


def list_rows(problem: Problem) -> list[list[int]]:
    """Return the items of each class and each pass through the model, in order of birth.

    Within one pass, an item that is born later is used earlier.
    """
    uses, classes = problem.uses.tolist(), problem.classes.tolist()
    rows: list[list[int]] = []
    latest: dict[int, list[int]] = {}
    for item in np.lexsort((problem.item_storages, problem.births)).tolist():
        row = latest.get(classes[item])
        if row is None or uses[item] > uses[row[-1]]:
            row = latest[classes[item]] = []
            rows.append(row)
        row.append(item)
    return rows


def _list_siblings(problem: Problem, items: Sequence[int]) -> list[list[int]]:
    """Return groups of several items that the same operator makes."""
    groups: dict[int, list[int]] = {}
    steps = problem.own_steps.tolist()
    for item in items:
        if steps[item] >= 0:
            groups.setdefault(steps[item], []).append(item)
    return [group for group in groups.values() if len(group) > 1]


def _sort_by(values: Sequence[int], items: Sequence[int]) -> tuple[list[int], list[int]]:
    order = sorted(items, key=lambda item: (values[item], item))
    return [values[item] for item in order], order
