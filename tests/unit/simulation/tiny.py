"""Problems small enough to be worked out by hand: slots of one second, links of a byte a second."""

from __future__ import annotations

from dataclasses import dataclass
from types import MappingProxyType
from typing import TYPE_CHECKING, Any

import numpy as np

from swapkit.ir.machines import Machine
from swapkit.simulation.problems import Problem

if TYPE_CHECKING:
    from collections.abc import Mapping

LINK = Machine(budget_bytes=100, out_bytes_per_second=1.0, in_bytes_per_second=1.0)


@dataclass(frozen=True, kw_only=True)
class Item:
    """`step`: its own; `chain`: all of its steps, if there are more."""

    birth: int
    use: int
    nbytes: int = 1
    ready: int | None = None
    release: int | None = None
    death: int | None = None
    step: int = -1
    chain: tuple[int, ...] = ()
    inputs: tuple[int, ...] = ()
    chain_bytes: int = 0
    tail: int = -1
    former: int = -1

    @property
    def steps(self) -> tuple[int, ...]:
        """The steps that make it."""
        return self.chain or ((self.step,) if self.step >= 0 else ())


def make_problem(
    slots: int,
    *items: Item,
    held: tuple[int, ...] = (),
    steps: tuple[float, ...] = (),
    waits: Mapping[int, int] = MappingProxyType({}),
) -> Problem:
    """Return a problem of slots of a second.

    Args:
        slots: their number.
        items: the items.
        held: the slots' bytes; else 0.
        steps: seconds of the steps.
        waits: slots that wait, and since which slot.
    """
    chains = [item.steps for item in items]
    births, uses, steps_of = column(items, "birth"), column(items, "use"), column(items, "step")
    readies = column(items, "ready", births)
    return Problem(
        slot_seconds=np.ones(slots),
        slot_bytes=np.array(held or (0,) * slots, np.int64),
        since=indexes(waits.get(slot, slot) for slot in range(slots)),
        waits=indexes(waits),
        slot_operators=indexes(range(slots + 1)),
        item_bytes=column(items, "nbytes").astype(np.int64),
        item_storages=indexes(range(len(items))),
        births=births,
        readies=readies,
        releases=column(items, "release", readies),
        uses=uses,
        deaths=column(items, "death", uses),
        tails=column(items, "tail"),
        formers=column(items, "former"),
        is_weight=(column(items, "tail") >= 0) | (column(items, "former") >= 0),
        can_swap=np.ones(len(items), np.bool_),
        can_recompute=steps_of >= 0,
        chain_bytes=column(items, "chain_bytes").astype(np.int64),
        classes=np.zeros(len(items), np.int32),
        own_steps=steps_of,
        step_seconds=np.array(steps, np.float64),
        chain_starts=starts(chains),
        chain_steps=indexes(step for chain in chains for step in chain),
        input_starts=starts([item.inputs for item in items]),
        inputs=indexes(other for item in items for other in item.inputs),
    )


def column(items: tuple[Item, ...], name: str, otherwise: Any = None) -> Any:
    """Return one value of each item; where there is none, that of `otherwise`."""
    values = [getattr(item, name) for item in items]
    return indexes(otherwise[row] if value is None else value for row, value in enumerate(values))


def starts(rows: list[tuple[int, ...]]) -> Any:
    return indexes(np.cumsum([0, *map(len, rows)]))


def indexes(values: Any) -> Any:
    return np.fromiter(values, np.int32)


def actions(*values: int) -> Any:
    return np.array(values, np.int8)
