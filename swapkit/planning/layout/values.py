"""Lifetimes, and the addresses given to them."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, TypeAlias

import numpy as np

from swapkit._native.layout import MOST_BYTES
from swapkit.errors import InvalidArgument

if TYPE_CHECKING:
    from numpy.typing import ArrayLike, NDArray

    Times: TypeAlias = NDArray[np.int64]
    Bytes: TypeAlias = NDArray[np.int64]
    Order: TypeAlias = NDArray[np.int32]

ROUNDING_BYTES = 512  # of block sizes in the pool: SK_ROUND_BYTES in pool.h
FREE = -1  # an item without a fixed offset


@dataclass(frozen=True, slots=True, eq=False)
class Lifetimes:
    """N items: when each is in memory, and its size. The arrays are int64 and cannot be written to.

    Item i lives from `starts[i]` until just before `ends[i]`, in any unit of time. An item of
    `fixed` with an offset has been placed and must not move; `FREE` is any other.
    """

    starts: Times
    ends: Times
    nbytes: Bytes
    fixed: Bytes | None = None

    def __post_init__(self) -> None:
        """Take copies of the arrays.

        Raises:
            InvalidArgument: not whole numbers, arrays of different lengths, or an item that ends
                before it starts, has no bytes, or a negative offset.
        """
        columns = {"starts": self.starts, "ends": self.ends, "nbytes": self.nbytes}
        if self.fixed is not None:
            columns["fixed"] = self.fixed
        for name, values in columns.items():
            object.__setattr__(self, name, _as_column(name, values))
        lengths = {name: len(getattr(self, name)) for name in columns}
        if len(set(lengths.values())) > 1:
            message = f"expected one value for each item in all arrays, got lengths {lengths}"
            raise InvalidArgument(message)
        self._check("ends", self.ends > self.starts, "is not after its start")
        self._check("nbytes", self.nbytes > 0, "is not above 0; leave such items out")
        if float(self.nbytes.sum(dtype=np.float64)) > MOST_BYTES:
            message = f"the items have more than {MOST_BYTES} bytes in total"
            raise InvalidArgument(message)
        if self.fixed is not None:
            is_known = (self.fixed >= FREE) & (self.fixed <= MOST_BYTES)
            self._check("fixed", is_known, "is neither an offset nor -1")

    def _check(self, name: str, is_right: NDArray[np.bool_], fault: str) -> None:
        wrong = np.flatnonzero(~is_right)
        if len(wrong):
            first = int(wrong[0])
            value = int(getattr(self, name)[first])
            message = f"{name}[{first}] = {value} {fault} (items wrong in this way: {len(wrong)})"
            raise InvalidArgument(message)

    def __len__(self) -> int:
        """Return the number of items."""
        return len(self.starts)

    @property
    def has_fixed(self) -> bool:
        """Whether any item must not move."""
        return self.fixed is not None and bool((self.fixed != FREE).any())


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class MemoryLayout:
    """An offset for each item, verified: no two items overlap in time and address."""

    offsets: Bytes
    height: int  # the end of the highest item, in bytes
    lower_bound: int  # no layout is lower
    method: str  # the search that found it, for people
    seconds: float  # it took

    @property
    def excess(self) -> float:
        """The share of the lower bound by which the layout is higher."""
        return self.height / self.lower_bound - 1 if self.lower_bound else 0.0

    def __repr__(self) -> str:
        """Return one line, because there may be many offsets."""
        return (
            f"<MemoryLayout {len(self.offsets)} items, {self.height} bytes, {self.excess:.2%} over "
            f"the bound, by {self.method} in {self.seconds:.3f} s>"
        )


def _as_column(name: str, values: ArrayLike) -> NDArray[Any]:
    """Return a copy as int64 that cannot be written to."""
    given = np.asarray(values)
    is_empty = given.size == 0
    if given.ndim != 1 or not (is_empty or np.issubdtype(given.dtype, np.integer)):
        message = (
            f"expected {name} as an array of whole numbers with one dimension, got shape "
            f"{given.shape} of {given.dtype}"
        )
        raise InvalidArgument(message)
    if given.dtype == np.uint64 and not is_empty and int(given.max()) >= 1 << 63:
        message = f"{name} has {int(given.max())}, which does not fit into 64 bits with a sign"
        raise InvalidArgument(message)
    column = given.astype(np.int64)
    column.flags.writeable = False
    return column
