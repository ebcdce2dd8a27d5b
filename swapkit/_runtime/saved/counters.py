"""The counters of a session, in one place: statistics, step reports and `explain()` read them."""

from __future__ import annotations

from dataclasses import dataclass, fields


@dataclass(frozen=True, slots=True, kw_only=True)
class Counters:
    """What a session has freed, recomputed and transferred since it began.

    Args:
        rescues: rescues that freed memory.
        recomputed: recomputations of a part or of a single operator.
        copied_out_bytes: bytes copied from the device.
        copied_in_bytes: bytes copied back.
        stall_seconds: the time that threads waited for transfers.
    """

    rescues: int
    recomputed: int
    copied_out_bytes: int
    copied_in_bytes: int
    stall_seconds: float

    def __sub__(self, earlier: Counters) -> Counters:
        """Return what was counted since `earlier`."""
        names = [field.name for field in fields(self)]
        return Counters(**{name: getattr(self, name) - getattr(earlier, name) for name in names})
