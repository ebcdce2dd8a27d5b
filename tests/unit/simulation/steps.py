"""Tiny steps made by hand."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

from swapkit.ir.traces import BEFORE, Kind, Operator, Phase, Storage, Trace

F, B, O, I = Phase.FORWARD, Phase.BACKWARD, Phase.OPTIMIZER, Phase.IDLE  # noqa: E741
Row = tuple[Phase, tuple[int, ...], tuple[int, ...]]


def make_step(
    rows: list[Row],
    sizes: dict[int, int],
    *,
    saved: tuple[int, ...] = (),
    changes: dict[int, dict[str, Any]] | None = None,
    base_bytes: int = 0,
) -> Trace:
    """Return a step whose operators take a second each and repeat their results.

    A row is a phase, what is read and what is written. A storage is made where it is first touched,
    if that writes it, and else was there before; it stays until what touches it last. `changes` has
    other fields of storages.
    """
    operators = tuple(
        Operator(
            name=f"op{number}", seconds=1.0, phase=phase, reads=reads, writes=writes,
            is_repeatable=True,
        )
        for number, (phase, reads, writes) in enumerate(rows)
    )  # fmt: skip
    storages = []
    for storage in sorted(sizes):
        touched = [n for n, (_, reads, writes) in enumerate(rows) if storage in reads + writes]
        is_made = storage in rows[touched[0]][2] and storage not in rows[touched[0]][1]
        about = Storage(
            nbytes=sizes[storage],
            kind=Kind.ACTIVATION if is_made else Kind.INPUT,
            birth=touched[0] if is_made else BEFORE,
            death=touched[-1] + 1,
            is_saved=storage in saved,
        )
        storages.append(replace(about, **(changes or {}).get(storage, {})))
    return Trace(operators=operators, storages=tuple(storages), base_bytes=base_bytes)


def with_operator(trace: Trace, number: int, **changes: Any) -> Trace:
    """Return a step with one operator changed."""
    operators = list(trace.operators)
    operators[number] = replace(operators[number], **changes)
    return replace(trace, operators=tuple(operators))
