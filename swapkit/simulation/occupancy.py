"""The memory of a simulated step over time, by kind of data."""

from __future__ import annotations

import enum
import itertools
from collections import defaultdict
from collections.abc import Iterator
from dataclasses import dataclass
from typing import NamedTuple

import numpy as np

from swapkit.ir.plans import Action, Plan, Schedule, Tier
from swapkit.ir.traces import BEFORE, Kind, Storage, Trace
from swapkit.simulation.items import is_weight
from swapkit.simulation.timeline import lower_for
from swapkit.simulation.validation.gaps import find_tails


class Layer(enum.Enum):
    """A kind of data; `BASE` to `TEMPORARY` are on the device, and their sum is in use there."""

    BASE = "other"  # in use throughout, outside the storages of the trace
    STATE = "parameters and buffers"
    OPTIMIZER_STATE = "optimizer states"
    GRADIENT = "gradients"
    INPUT = "inputs"
    SAVED = "saved tensors"  # that autograd keeps for backward
    TEMPORARY = "temporary"  # all others, and the workspace of operators
    HOST = "copies on the host"  # except those of weights, which are there all the time
    DISK = "copies on the disk"
    PLAIN = "without a plan"  # in use on the device while the same operators run without a plan


ON_DEVICE = (
    Layer.BASE,
    Layer.STATE,
    Layer.OPTIMIZER_STATE,
    Layer.GRADIENT,
    Layer.INPUT,
    Layer.SAVED,
    Layer.TEMPORARY,
)
_MOST_SPANS = 1 << 20  # of one step
_LAYERS = {
    Kind.STATE: Layer.STATE,
    Kind.OPTIMIZER_STATE: Layer.OPTIMIZER_STATE,
    Kind.GRADIENT: Layer.GRADIENT,
    Kind.INPUT: Layer.INPUT,
}


@dataclass(frozen=True, slots=True, kw_only=True)
class Occupancy:
    """Bytes by layer: row i holds from `times[i]` until `times[i + 1]`, the last until `end`.

    Thinned out, a row has the state at the instant between the two with the most bytes in use; its
    `PLAIN`, `HOST` and `DISK` are the most of any instant there.
    """

    times: tuple[float, ...]  # seconds from the start of the step
    end: float
    layers: dict[Layer, tuple[int, ...]]
    instants: int  # rows before thinning out

    def in_use(self) -> list[int]:
        """Return the bytes in use on the device in each row."""
        return [sum(row) for row in zip(*(self.layers[each] for each in ON_DEVICE), strict=True)]


class Presence(NamedTuple):
    """Bytes that count for a layer between two times."""

    layer: Layer
    start: float
    end: float
    nbytes: int
    storage: int | None = None  # None: the workspace of an operator, or what is in no storage


def find_peak(trace: Trace, plan: Plan, schedule: Schedule) -> list[Presence]:
    """Return what is on the device at the instant with the most bytes in use."""
    stays = [each for each in _list_stays(trace, plan, schedule) if each.layer in ON_DEVICE]
    changes = [(each.start, 1, each.nbytes) for each in stays]
    changes += [(each.end, 0, -each.nbytes) for each in stays]  # first: a block may be taken again
    most, peak_at, in_use = -1, 0.0, 0
    for at, _, change in sorted(changes):
        in_use += change
        if in_use > most:
            most, peak_at = in_use, at
    return [each for each in stays if each.start <= peak_at < each.end]


def measure_occupancy(
    trace: Trace, plan: Plan, schedule: Schedule, *, most_rows: int | None = None
) -> Occupancy:
    """Return the memory of a schedule over time.

    Args:
        trace: the step.
        plan: the plan that the schedule follows.
        schedule: the result of `simulate`.
        most_rows: thin out to about this many rows, which keeps every peak; None: keep all rows.
    """
    stays = _list_stays(trace, plan, schedule)
    end = schedule.ends[-1]
    instants = np.array([(each.start, each.end) for each in stays] or [(0.0, end)])
    times, places = np.unique(instants, return_inverse=True)
    changes = np.zeros((len(Layer), len(times)), np.int64)
    order = list(Layer)
    for stay, first, last in zip(stays, *places.reshape(-1, 2).T.tolist(), strict=False):
        row = order.index(stay.layer)
        changes[row, first] += stay.nbytes
        changes[row, last] -= stay.nbytes
    rows = np.cumsum(changes, axis=1)
    before_end = times < end
    times, rows = times[before_end], rows[:, before_end]
    count = len(times)
    if most_rows is not None and count > most_rows:
        times, rows = _thin(times, rows, end, most_rows)
    return Occupancy(
        times=tuple(times.tolist()),
        end=end,
        layers={layer: tuple(rows[row].tolist()) for row, layer in enumerate(order)},
        instants=count,
    )


def _thin(
    times: np.ndarray, rows: np.ndarray, end: float, most: int
) -> tuple[np.ndarray, np.ndarray]:
    """Return one row for each of many equal spans of time in which something changes."""
    count = most
    firsts = _find_firsts(times, end, count)
    while len(finer := _find_firsts(times, end, 2 * count)) <= most and count < _MOST_SPANS:
        firsts, count = finer, 2 * count
    in_use = rows[: len(ON_DEVICE)].sum(axis=0)
    bounds = np.append(firsts, len(times))
    peaks = [
        first + int(np.argmax(in_use[first:last]))
        for first, last in itertools.pairwise(bounds.tolist())
    ]
    thinned = rows[:, peaks]
    for row in range(len(ON_DEVICE), len(rows)):
        thinned[row] = np.maximum.reduceat(rows[row], firsts)
    return times[firsts], thinned


def _find_firsts(times: np.ndarray, end: float, count: int) -> np.ndarray:
    """Return the first row in each of `count` equal spans of time that has one."""
    return np.flatnonzero(np.diff((times * (count / end)).astype(np.int64), prepend=-1))


def _list_stays(trace: Trace, plan: Plan, schedule: Schedule) -> list[Presence]:
    """Return when the bytes of each layer are there."""
    stays = _find_stays(trace, plan, schedule)
    return [each for each in stays if each.end > each.start and each.nbytes > 0]


def _find_stays(trace: Trace, plan: Plan, schedule: Schedule) -> Iterator[Presence]:
    starts, ends = schedule.starts, schedule.ends
    yield Presence(Layer.BASE, 0.0, ends[-1], trace.base_bytes)
    yield from _list_storages(trace, plan, schedule)
    for at, operator in enumerate(trace.operators):
        yield Presence(Layer.TEMPORARY, starts[at], ends[at], operator.workspace_bytes)
    for at, nbytes in _sum_chains(trace, plan, schedule).items():
        yield Presence(Layer.TEMPORARY, starts[at], ends[at], nbytes)
    yield from _list_copies(trace, plan, schedule)
    nexts = (*starts[1:], ends[-1])
    for start, end, nbytes in zip((0.0, *starts[1:]), nexts, trace.memory(), strict=True):
        yield Presence(Layer.PLAIN, start, end, nbytes)


def _list_copies(trace: Trace, plan: Plan, schedule: Schedule) -> Iterator[Presence]:
    """Yield when copies are on the host or the disk."""
    ends = schedule.ends
    tails = find_tails(trace, {each.storage for each in schedule.transfers})
    tiers = {decision.storage: decision.tier for decision in plan.decisions}
    for each in schedule.transfers:
        layer = Layer.DISK if tiers[each.storage] is Tier.DISK else Layer.HOST
        about = trace.storages[each.storage]
        if each.out_start == each.out_end:  # a weight that has its copy all the time, or still
            continue
        if is_weight(about) and about.birth == BEFORE:
            assert about.continues is not None
            yield Presence(layer, 0.0, ends[tails[about.continues]], about.nbytes)
            yield Presence(layer, each.out_start, ends[-1], about.nbytes)
        else:
            yield Presence(layer, each.out_start, each.in_end, about.nbytes)


def _list_storages(trace: Trace, plan: Plan, schedule: Schedule) -> Iterator[Presence]:
    """Yield when each storage is on the device: once, or before and after its gap."""
    gaps = _find_gaps(trace, plan, schedule)
    tails = find_tails(trace, gaps)
    away = {  # when weights leave that the next step begins without
        about.continues: leaves
        for number, (leaves, _) in gaps.items()
        if (about := trace.storages[number]).continues in tails and about.birth == BEFORE
    }
    ends = schedule.ends
    for number, storage in enumerate(trace.storages):
        if storage.death <= 0:
            continue
        layer = _layer_of(storage)
        start = 0.0 if storage.birth < 0 else schedule.starts[storage.birth]
        end = ends[tails.get(number, storage.death - 1)]
        end = max(end, min(away.get(number, 0.0), ends[-1]))
        goes, comes = gaps.get(number, (end, end))
        if storage.birth == BEFORE and storage.continues in tails:
            goes = 0.0
        if goes >= comes:  # it never goes, or is back before it is gone
            goes = comes = end
        yield Presence(layer, start, goes, storage.nbytes, number)
        yield Presence(layer, comes, end, storage.nbytes, number)


def _layer_of(storage: Storage) -> Layer:
    return _LAYERS.get(storage.kind, Layer.SAVED if storage.is_saved else Layer.TEMPORARY)


def _find_gaps(trace: Trace, plan: Plan, schedule: Schedule) -> dict[int, tuple[float, float]]:
    """Return when each storage that moves is gone, and when its memory is taken again."""
    gaps = {each.storage: (each.released, each.in_start) for each in schedule.transfers}
    if schedule.recomputations:
        problem = lower_for(trace, plan)
        lasts = problem.slot_operators[problem.releases + 1] - 1  # of forward, that need the item
        last_of = dict(zip(problem.item_storages.tolist(), lasts.tolist(), strict=True))
        for made in schedule.recomputations:
            gone = schedule.ends[last_of[made.storage]]
            gaps[made.storage] = (gone, schedule.starts[made.operator])
    return gaps


def _sum_chains(trace: Trace, plan: Plan, schedule: Schedule) -> dict[int, int]:
    """Return the bytes that recomputing takes besides its results, by operator."""
    if not any(each.action is Action.RECOMPUTE for each in plan.decisions):
        return {}
    problem = lower_for(trace, plan)
    items = {storage: item for item, storage in enumerate(problem.item_storages.tolist())}
    most: defaultdict[tuple[int, int], int] = defaultdict(int)
    for made in schedule.recomputations:
        item = items[made.storage]
        key = (made.operator, int(problem.own_steps[item]))  # these are made together
        most[key] = max(most[key], int(problem.chain_bytes[item]))
    sums: defaultdict[int, int] = defaultdict(int)
    for (operator, _), nbytes in most.items():
        sums[operator] += nbytes
    return dict(sums)
