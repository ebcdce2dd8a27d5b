"""The limit of a device's pool for the whole process, as the user states it."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

from swapkit.errors import InvalidArgument
from swapkit.units import parse_bytes, show

if TYPE_CHECKING:
    from collections.abc import Callable

Amount = int | float | str
ANY_BYTES = 1 << 40  # assumed device memory while a limit is only validated


@dataclass(frozen=True, slots=True, kw_only=True)
class ProcessLimit:
    """The most bytes that a pool may reserve, and those that it leaves to other code.

    Args:
        limit: bytes, text or a share of the device's memory. None: the pool's usual limit.
        reserve: likewise. None: nothing is left.
    """

    limit: Amount | None = None
    reserve: Amount | None = None

    def check(self) -> None:
        """Check what can be checked before the device is known.

        Raises:
            InvalidArgument: an amount is invalid.
        """
        if self.limit is not None:
            parse_bytes(self.limit, whole_bytes=ANY_BYTES, name="limit")
        if self.reserve is not None:
            parse_bytes(self.reserve, whole_bytes=ANY_BYTES, name="reserve", least=0)

    def resolve(self, find_total: Callable[[], int], usual_bytes: int) -> int:
        """Return the limit in bytes; 0: none.

        Args:
            find_total: returns the device's memory in bytes, or this process's part of it; called
                only if it matters.
            usual_bytes: the limit if none is stated; 0: none.

        Raises:
            InvalidArgument: an amount is invalid, or nothing is left for the pool.
        """
        limit_bytes = usual_bytes
        if self.limit is not None:
            limit_bytes = parse_bytes(self.limit, whole_bytes=find_total, name="limit")
        if not self.reserve:
            return limit_bytes
        total_bytes = find_total()
        left = total_bytes - parse_bytes(
            self.reserve, whole_bytes=total_bytes, name="reserve", least=0
        )
        if left <= 0:
            raise InvalidArgument(
                f"reserve={show(self.reserve)}: expected less than the device's memory of "
                f"{total_bytes} bytes"
            )
        return min(limit_bytes or left, left)
