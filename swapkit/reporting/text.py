"""Texts about memory: the statistics table and the out-of-memory message."""

from __future__ import annotations

import html
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import NamedTuple

from swapkit.texts import printable
from swapkit.units import format_bytes

_ROWS = (
    ("in use", "allocated_bytes", True),
    ("  requested by torch", "requested_bytes", True),
    ("in use or awaited", "active_bytes", True),
    ("reserved", "reserved_bytes", True),
    ("cached", "inactive_split_bytes", True),
    ("blocks in use", "allocation", False),
    ("segments", "segment", False),
)
_WIDTHS = (22, 14, 14, 14, 14)
LARGEST_SHOWN = 8


@dataclass(frozen=True, slots=True)
class Holder:
    """Tensors or blocks with the same name, with their total bytes and count."""

    name: str
    nbytes: int
    count: int


def format_holders(holders: Sequence[Holder], *, most: int = LARGEST_SHOWN) -> list[str]:
    """Return a line for each of the first holders, and one line for all the rest."""
    lines = [
        f"  {format_bytes(each.nbytes):>12}  {printable(each.name)} ({each.count})"
        for each in holders[:most]
    ]
    if len(holders) > most:
        rest = holders[most:]
        total = format_bytes(sum(each.nbytes for each in rest))
        lines.append(f"  {total:>12}  {len(rest)} others")
    return lines


def format_per_rank(nbytes: int, ranks: int) -> str:
    """Return the bytes of one rank, and those of all ranks of its machine if there are several.

    Example:
        >>> format_per_rank(30 << 30, 1), format_per_rank(30 << 30, 8)
        ('30.00 GiB', '30.00 GiB per rank, 240.00 GiB for the 8 ranks of this machine')
    """
    each = format_bytes(nbytes)
    if ranks == 1:
        return each
    return f"{each} per rank, {format_bytes(ranks * nbytes)} for the {ranks} ranks of this machine"


def format_table(heads: Sequence[str], rows: Sequence[Sequence[str]]) -> str:
    """Return rows below their headings, with each column as wide as its longest cell."""
    rows = [[printable(cell) for cell in row] for row in rows]
    widths = [max(map(len, column)) for column in zip(heads, *rows, strict=True)]
    return "\n".join(
        "  ".join(cell.ljust(width) for cell, width in zip(row, widths, strict=True)).rstrip()
        for row in (heads, *rows)
    )


def format_html(heads: Sequence[str], rows: Sequence[Sequence[str]]) -> str:
    """Return rows as a table in HTML; leading spaces become an indent."""
    lines = [f"<tr>{_cells('th', heads)}</tr>", *(f"<tr>{_cells('td', row)}</tr>" for row in rows)]
    return "\n".join(["<table>", *lines, "</table>"])


def _cells(tag: str, texts: Sequence[str]) -> str:
    indents = ["&nbsp;" * (len(text) - len(text.lstrip())) for text in texts]
    return "".join(
        f'<{tag} style="text-align: left">{indent}{html.escape(text.lstrip())}</{tag}>'
        for indent, text in zip(indents, texts, strict=True)
    )


def format_stats(stats: Mapping[str, int], *, title: str) -> str:
    """Return the pool's statistics as a table."""
    heads = ("", "current", "peak", "allocated", "freed")
    lines = [title, "=" * sum(_WIDTHS)]
    lines.append("".join(f"{head:>{width}}" for head, width in zip(heads, _WIDTHS, strict=True)))
    for label, name, is_bytes in _ROWS:
        cells = [label.ljust(_WIDTHS[0])]
        for field, width in zip(
            ("current", "peak", "allocated", "freed"), _WIDTHS[1:], strict=True
        ):
            value = stats[f"{name}.all.{field}"]
            cells.append(f"{format_bytes(value) if is_bytes else value:>{width}}")
        lines.append("".join(cells))
    budget = stats["budget_bytes"]
    lines.append("-" * sum(_WIDTHS))
    lines.append(
        f"budget {format_bytes(budget) if budget else 'none'}; "
        f"allocations that had to wait, trim or rescue: {stats['num_alloc_retries']}; "
        f"rescues: {stats['num_rescues']} ({format_bytes(stats['rescued_bytes'])}); "
        f"out of memory: {stats['num_ooms']}"
    )
    return "\n".join(lines)


class AllocationFailure(NamedTuple):
    """A failed allocation. Amounts are bytes; `budget` 0: none.

    `active`: in use, or given back and awaited by other streams. `pieces`: sizes of the free
    reserved blocks; memory that can still be reserved is one more.
    """

    asked: int
    where: str
    in_use: int
    active: int
    reserved: int
    budget: int
    device: str
    device_bytes: int
    holders: Sequence[Holder]
    hints: Sequence[str]
    facts: Sequence[str] = ()
    pieces: Sequence[int] = ()
    rank: str = ""  # such as "rank 1 of 2"; empty: there are no other ranks
    cause: str = ""  # what the pool said when the request failed, with its figures of that moment


def _describe_pieces(failure: AllocationFailure, whole: int) -> list[str]:
    """Return why a request fails for which enough memory is not allocated; none: there is not."""
    unused = max(0, whole - failure.in_use)
    pieces = [nbytes for nbytes in (*failure.pieces, whole - failure.reserved) if nbytes > 0]
    if failure.asked > unused:
        return []
    if not pieces:
        return [f"{format_bytes(unused)} are not allocated, but other streams still use them."]
    if failure.asked <= max(pieces):
        return [f"It would fit by these figures. It failed with: {printable(failure.cause)}."]
    return [
        f"{format_bytes(unused)} are not allocated, but in {len(pieces)} "
        f"{'piece' if len(pieces) == 1 else 'pieces'}, the largest of "
        f"{format_bytes(max(pieces))}."
    ]


def _torch_words(device: str) -> str:
    """Return what torch's error for a device says.

    Libraries look for these words and try a smaller batch: accelerate, transformers, Lightning.
    """
    if device.startswith(("cuda", "npu")):
        return f"{device.partition(':')[0].upper()} out of memory."
    return "DefaultCPUAllocator: can't allocate memory: out of memory."


def format_failure(failure: AllocationFailure) -> str:
    """Return the text of an out-of-memory error: request, memory by use, holders, and hints."""
    whole = failure.budget or failure.device_bytes
    limit = (
        f"the budget is {format_bytes(whole)}"
        if failure.budget
        else f"there is no budget; the device has {format_bytes(whole)}"
    )
    if failure.asked > whole:
        limit += ", less than this request alone"
    where = f" in {printable(failure.where)}" if failure.where else ""
    rank = f" ({failure.rank})" if failure.rank else ""
    lines = [
        f"swapkit: out of memory on {failure.device}{rank}: {format_bytes(failure.asked)} "
        f"({failure.asked} bytes) requested{where}; {limit}.",
        f"Capacity {format_bytes(whole)}: allocated {format_bytes(failure.in_use)}, active "
        f"{format_bytes(failure.active)}, reserved {format_bytes(failure.reserved)}, free "
        f"{format_bytes(max(0, whole - failure.reserved))}.",
        *_describe_pieces(failure, whole),
        *(["Largest holders (number of tensors):"] if failure.holders else []),
        *format_holders(failure.holders),
        *map(printable, failure.facts),
        *format_hints(failure.hints),
        f"In the words of torch: {_torch_words(failure.device)}",
    ]
    return "\n".join(lines)


def format_hints(hints: Sequence[str]) -> list[str]:
    """Return lines about what to try; none: there are no hints."""
    return ["What to try:", *(f"  - {printable(hint)}" for hint in hints)] if hints else []
