"""What a session did, as plain values: each step, and the statistics of all of them."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True, slots=True, kw_only=True)
class StepRecord:
    """One step of a session.

    Args:
        step: its number; the session's first step is 1.
        stage: of the session while it ran: `"warmup"`, `"search"` or `"stable"`.
        seconds: from the end of the previous step, or the begin of the session, to its own end, on
            the host: time between steps, such as for loading data or evaluation, is included.
        peak_bytes: most bytes that the pool reserved meanwhile.
        rescues: how often memory was freed in the middle of an operator.
        swapped_out_bytes: copied from the device.
        swapped_in_bytes: copied back.
        stall_seconds: that threads waited for copies.
    """

    step: int
    stage: str
    seconds: float
    peak_bytes: int
    rescues: int
    swapped_out_bytes: int
    swapped_in_bytes: int
    stall_seconds: float


@dataclass(frozen=True, slots=True, kw_only=True)
class SessionStats:
    """The statistics of a session so far. Peaks are of reserved bytes; counters accumulate.

    `recomputed_regions` counts every recomputation of a part or of a single operator.
    `step_seconds` is the median of the latest steps of the current kind, each from its first
    forward on. The predictions are for the plan in use; None: there is no plan. No plan for the
    budget has faster steps than `bound_step_seconds`. Without a budget a step would take
    `unlimited_step_seconds`.
    """

    budget_bytes: int
    peak_bytes: int
    steps: int
    oom_rescues: int
    swapped_out_bytes: int
    swapped_in_bytes: int
    recomputed_regions: int
    stall_seconds: float
    host_peak_bytes: int
    disk_peak_bytes: int
    replans: int = 0
    step_seconds: float | None = None
    predicted_step_seconds: float | None = None
    predicted_peak_bytes: int | None = None
    predicted_reserved_bytes: int | None = None
    bound_step_seconds: float | None = None
    unlimited_step_seconds: float | None = None
