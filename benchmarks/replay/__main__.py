"""The figures of promises E4 and E6, or those of the requests in a memory snapshot.

E6: the memory that planned addresses save for Llama 2 7B, 13B and 70B. E4: a step that runs out of
memory with torch's allocator, and fits with planned addresses. See `benchmarks/fragmentation.py`.

`--snapshot FILE` replays a file of `torch.cuda.memory._dump_snapshot` instead, as a step that
repeats.
"""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING

from benchmarks import fragmentation
from benchmarks.replay.comparing import compare_allocators, measure_demand
from benchmarks.replay.snapshots import read_snapshot
from benchmarks.replay.texts import format_replay
from swapkit.units import parse_bytes

if TYPE_CHECKING:
    import argparse
    from collections.abc import Sequence


def replay_snapshot(options: argparse.Namespace) -> str:
    """Return the figures of a snapshot as text."""
    trace = read_snapshot(options.snapshot, device=options.device)
    budget_bytes = options.budget and parse_bytes(options.budget, name="--budget")
    reports = compare_allocators(trace, budget_bytes=budget_bytes, search_least=True)
    return format_replay(trace, measure_demand(trace), reports, budget_bytes=budget_bytes)


def main(arguments: Sequence[str] | None = None) -> None:
    """Print the figures."""
    parser = fragmentation.make_parser(__doc__)
    parser.add_argument("--snapshot", type=Path, metavar="FILE", help="replay this file instead")
    parser.add_argument("--device", type=int, metavar="N", help="of the snapshot")
    parser.add_argument("--budget", metavar="SIZE", help="also replay the snapshot within it")
    options = parser.parse_args(arguments)
    if options.snapshot is not None:
        print(replay_snapshot(options))
    else:
        fragmentation.run(options)


if __name__ == "__main__":
    main()
