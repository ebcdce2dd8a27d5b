"""The exact optimum for alike layers, each with one choice of modules to recompute and swap.

This is the problem that module-level systems solve. A layer holds the sum of its modules' bytes for
each microbatch in flight. Recomputing or swapping a module trades bytes for seconds. An action for
a whole module excludes actions for its parts. Nothing overlaps, so no simulation is needed.

The search combines the choices of a layer module by module, and then layers one by one. After each
step it drops every choice that another choice dominates in both bytes and seconds. The other choice
can always replace the dropped one, so the optimum stays. There is no full enumeration.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, NamedTuple, TypeAlias

import numpy as np

from swapkit.ir.plans import Action

if TYPE_CHECKING:
    from collections.abc import Iterable, Sequence

    from numpy.typing import NDArray

    Floats: TypeAlias = NDArray[np.float64]
    Counts: TypeAlias = NDArray[np.int32]


@dataclass(frozen=True, slots=True, kw_only=True)
class Module:
    """A measured module of a layer. Bytes are for one microbatch."""

    name: str
    nbytes: float  # saved by its forward for backward, including its parts
    seconds: float = 0.0  # of its forward
    kept_bytes: float = 0.0  # its inputs, which stay when it is recomputed
    can_recompute: bool = True
    swapped_bytes: float = 0.0  # that leave when it is swapped
    swap_seconds: float | None = None  # not hidden by computing; None: it cannot be swapped
    parts: tuple[Module, ...] = ()


class LayerOption(NamedTuple):
    """One choice for a layer, with its bytes and seconds relative to doing nothing."""

    nbytes: float  # added; negative
    seconds: float  # added
    actions: tuple[tuple[str, Action], ...]  # of modules, by name


class LayerGroup(NamedTuple):
    """A number of alike layers, and the most microbatches in flight through them."""

    layers: int
    in_flight: float = 1.0


@dataclass(frozen=True, slots=True, kw_only=True)
class Assignment:
    """The best assignment: for each group, the number of layers with each choice."""

    seconds: float  # added to the time without a limit
    nbytes: float
    counts: tuple[tuple[tuple[LayerOption, int], ...], ...]


def find_choices(modules: Iterable[Module]) -> tuple[LayerOption, ...]:
    """Return all choices of a layer of these modules that no other choice dominates.

    The first one does nothing; each next one holds less and takes longer.
    """
    choices = [LayerOption(0.0, 0.0, ())]
    for module in modules:
        choices = _keep_best(
            LayerOption(a.nbytes + b.nbytes, a.seconds + b.seconds, a.actions + b.actions)
            for a in choices
            for b in _find_own_choices(module)
        )
    return tuple(choices)


def _find_own_choices(module: Module) -> list[LayerOption]:
    choices = list(find_choices(module.parts))
    if module.can_recompute:
        change = module.kept_bytes - module.nbytes
        choices.append(LayerOption(change, module.seconds, ((module.name, Action.RECOMPUTE),)))
    if module.swap_seconds is not None:
        actions = ((module.name, Action.SWAP),)
        choices.append(LayerOption(-module.swapped_bytes, module.swap_seconds, actions))
    return _keep_best(choices)


def _keep_best(choices: Iterable[LayerOption]) -> list[LayerOption]:
    kept: list[LayerOption] = []
    for choice in sorted(choices, key=lambda choice: choice[:2]):
        while kept and kept[-1].seconds == choice.seconds and kept[-1].nbytes > choice.nbytes:
            kept.pop()
        if not kept or choice.seconds < kept[-1].seconds:
            kept.append(choice)
    return kept[::-1]


def assign_layers(
    choices: Sequence[LayerOption],
    layer_bytes: float,
    groups: Sequence[LayerGroup],
    budget_bytes: float,
) -> Assignment | None:
    """Return the fastest choice of each layer within a budget; None: none fits.

    Args:
        choices: choices of a layer, from `find_choices`.
        layer_bytes: bytes that a layer holds for a microbatch when it does nothing.
        groups: the layers.
        budget_bytes: limit of the bytes of all layers together.
    """
    stack = _LayerSums(choices, layer_bytes, groups, budget_bytes)
    for group in range(len(groups)):
        for _ in range(groups[group].layers):
            stack.add_layer(group)
    return stack.finish()


class _LayerSums:
    """The layers so far: sums of bytes and seconds, and the count of each choice."""

    def __init__(
        self,
        choices: Sequence[LayerOption],
        layer_bytes: float,
        groups: Sequence[LayerGroup],
        budget_bytes: float,
    ) -> None:
        self._choices = choices
        self._groups = groups
        self._budget = budget_bytes
        self._own_bytes = layer_bytes + np.array([choice.nbytes for choice in choices])
        self._own_seconds = np.array([choice.seconds for choice in choices])
        self._left = [group.layers for group in groups]
        self._bytes, self._seconds = np.zeros(1), np.zeros(1)
        self._counts = np.zeros((1, len(groups), len(choices)), dtype=np.int32)
        self._price = self._find_price()
        self._enough = self._fill_up()

    def add_layer(self, group: int) -> None:
        """Combine every sum with every choice of one more layer."""
        self._left[group] -= 1
        nbytes = self._bytes[:, None] + self._own_bytes * self._groups[group].in_flight
        seconds = self._seconds[:, None] + self._own_seconds
        nbytes, seconds = nbytes.ravel(), seconds.ravel()
        hopeful = np.flatnonzero(self._has_hope(nbytes, seconds))
        order = hopeful[np.lexsort((seconds[hopeful], nbytes[hopeful]))]
        # In the order of bytes, keep each sum that takes less time than all before it.
        least = np.minimum.accumulate(np.concatenate(([np.inf], seconds[order])))
        kept = order[seconds[order] < least[:-1]]
        sums, made = np.divmod(kept, len(self._choices))
        self._bytes, self._seconds = nbytes[kept], seconds[kept]
        self._counts = self._counts[sums]
        self._counts[np.arange(len(kept)), group, made] += 1

    def finish(self) -> Assignment | None:
        """Return the best sum within the budget."""
        if len(self._bytes) == 0:
            return None
        best = int(np.argmin(self._seconds))
        return Assignment(
            seconds=float(self._seconds[best]),
            nbytes=float(self._bytes[best]),
            counts=tuple(
                tuple((choice, int(n)) for choice, n in zip(self._choices, row, strict=True) if n)
                for row in self._counts[best]
            ),
        )

    def _has_hope(self, nbytes: Floats, seconds: Floats) -> NDArray[np.bool_]:
        """Return which sums may fit and may be better than the best known assignment."""
        least = sum(
            left * group.in_flight * float(np.min(self._own_bytes))
            for left, group in zip(self._left, self._groups, strict=True)
        )
        room = self._budget - nbytes
        # Lagrangian bound: with a price on bytes, each remaining layer decides independently. No
        # choice of the remaining layers takes less than this, with the free room credited.
        bound = seconds - self._price * room
        for left, group in zip(self._left, self._groups, strict=True):
            each = self._own_seconds + self._price * group.in_flight * self._own_bytes
            bound += left * float(np.min(each))
        slack = 1e-9 * (1.0 + abs(self._enough))
        hopeful: NDArray[np.bool_] = (room >= least) & (bound <= self._enough + slack)
        return hopeful

    def _decide(self, price: float) -> tuple[float, float]:
        """Return the bytes and seconds if every layer pays this price for bytes."""
        nbytes = seconds = 0.0
        for group in self._groups:
            costs = self._own_seconds + price * group.in_flight * self._own_bytes
            best = int(np.argmin(costs))
            nbytes += group.layers * group.in_flight * float(self._own_bytes[best])
            seconds += group.layers * float(self._own_seconds[best])
        return nbytes, seconds

    def _find_price(self) -> float:
        """Return approximately the lowest price of a byte at which the layers' choices fit."""
        if self._decide(0.0)[0] <= self._budget:
            return 0.0
        low, high = 0.0, 1e-12
        while self._decide(high)[0] > self._budget and high < 1e12:
            low, high = high, 4 * high
        for _ in range(60):
            middle = (low + high) / 2
            low, high = (low, middle) if self._decide(middle)[0] <= self._budget else (middle, high)
        return high

    def _fill_up(self) -> float:
        """Return the seconds of some assignment that fits; math.inf: none was found."""
        nbytes, seconds = self._decide(self._price)
        return seconds if nbytes <= self._budget else np.inf
