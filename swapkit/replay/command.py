"""One replay: its options, files and text."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

from swapkit.errors import InvalidArgument

if TYPE_CHECKING:
    from pathlib import Path


@dataclass(frozen=True, slots=True, kw_only=True)
class ReplayOptions:
    """The options of a replay.

    Args:
        trace: the path of the recorded allocations.
        device: of a snapshot: the device whose history to replay; None: the only one.
        budget_bytes: also replay within this much memory; None: no.
        search_least: whether to find the least budget of each allocator.
        json: the file for the figures; None: none.
        plot: the file for the picture; None: none.
    """

    trace: str
    device: int | None
    budget_bytes: int | None
    search_least: bool
    json: str | None
    plot: Path | None


def replay_trace(options: ReplayOptions) -> str:
    """Replay a trace, write the files that were asked for, and return the figures as text.

    Raises:
        InvalidArgument: the trace is malformed, or has no allocation.
        OSError: a file cannot be read or written.
    """
    from swapkit.ir.documents import write_document
    from swapkit.replay.comparing import compare_allocators, measure_demand
    from swapkit.replay.export import encode_replay
    from swapkit.replay.reading import read_replayable
    from swapkit.reporting.replays import format_replay

    trace = read_replayable(options.trace, device=options.device)
    demand = measure_demand(trace)
    if demand.requests == 0:
        raise InvalidArgument(f"{options.trace}: the trace has no allocation to replay")
    budget_bytes = options.budget_bytes
    reports = compare_allocators(
        trace, budget_bytes=budget_bytes, search_least=options.search_least
    )
    if options.json is not None:
        write_document(
            options.json, encode_replay(trace, demand, reports, budget_bytes=budget_bytes)
        )
    if options.plot is not None:
        from swapkit.replay.chart import draw_replay

        draw_replay(trace, reports, options.plot)
    return format_replay(trace, demand, reports, budget_bytes=budget_bytes)
