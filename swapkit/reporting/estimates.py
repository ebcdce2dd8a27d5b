"""What a step needs at any budget, as values and as a table."""

from __future__ import annotations

import html
from collections.abc import Sequence
from dataclasses import dataclass, fields

from swapkit.planning.search.solving import TradeOff
from swapkit.reporting.machines import format_seconds
from swapkit.reporting.text import format_html, format_per_rank, format_table
from swapkit.units import format_bytes

_MEMORY_HEADS = ("memory of a step", "", "")
_STREAMED = "weights live on the host, and come for their operators"
_TIME_HEADS = ("budget", "of plain", "step", "vs. plain", "bound", "swapped", "recomputed")
_BATCH_HEADS = ("budget", "largest batch", "step", "samples per second")


@dataclass(frozen=True, slots=True, kw_only=True)
class LargestBatch:
    """The largest batch that trains within a budget."""

    budget_bytes: int
    batch_size: int  # 0: not even one sample fits
    step_seconds: float | None = None  # predicted, of that batch at that budget; None: not known
    is_capped: bool = False  # larger ones may fit: none of that size was considered


@dataclass(frozen=True, slots=True, kw_only=True, repr=False)
class Estimate:
    """What `swapkit.estimate` found about a step. Bytes and seconds.

    Args:
        plain_bytes: most memory in use without a budget. With this budget nothing moves.
        smallest_budget_bytes: the smallest budget at which a session trains, from its first step
            on if steps were tried in it; else once it has a plan. All weights stay on the device.
        streamed_budget_bytes: the smallest budget of a session with a plan whose weights
            leave the device while the step does not use them, as they do if the model takes more
            than the budget; 0: it is no smaller.
        floor_bytes: the part of it that stays on the device whatever the budget: parameters,
            buffers, gradients, optimizer states, and what was there before the step, at their
            largest together.
        state_bytes: parameters and buffers.
        gradient_bytes: gradients of parameters, at their largest.
        optimizer_bytes: states of the optimizer.
        operator: the operator that needs the smallest budget.
        operator_bytes: what that operator works on, beside what stays.
        outside_bytes: most memory in use outside of steps, as in an evaluation, with the states of
            the optimizer; 0: not known.
        step_seconds: the sum of the operators' times without a budget.
        times: the predicted step at several budgets, from the smallest to the largest. Empty if
            the speed of the link is not known.
        budgets: those that were asked about, in bytes.
        batch_size: the size that all of these are for; None: the step's own.
        largest_batches: for each budget that was asked about, if two sizes were recorded.
        device: the device, as torch names it.
        label: the class of the model.
        ranks: that train on this machine, this process included.
    """

    plain_bytes: int
    smallest_budget_bytes: int
    floor_bytes: int
    state_bytes: int
    gradient_bytes: int
    optimizer_bytes: int
    step_seconds: float
    streamed_budget_bytes: int = 0
    operator: str = ""
    operator_bytes: int = 0
    outside_bytes: int = 0
    times: tuple[TradeOff, ...] = ()
    budgets: tuple[int, ...] = ()
    batch_size: int | None = None
    largest_batches: tuple[LargestBatch, ...] = ()
    device: str = "cpu"
    label: str = ""
    ranks: int = 1

    @property
    def host_bytes(self) -> int | None:
        """Most host memory that copies of this rank take at one of `times`; None: not known."""
        return max((each.host_peak_bytes for each in self.times), default=None)

    @property
    def activation_bytes(self) -> int:
        """What swapping and recomputing can save: `plain_bytes` less `smallest_budget_bytes`."""
        return self.plain_bytes - self.smallest_budget_bytes

    @property
    def largest_batch(self) -> int | None:
        """The size of the largest batch within the smallest of the budgets; None: not asked."""
        return self.largest_batches[0].batch_size if self.largest_batches else None

    def fits(self, budget_bytes: int) -> bool:
        """Return whether a session with this budget trains the step."""
        return budget_bytes >= (self.streamed_budget_bytes or self.smallest_budget_bytes)

    def to_dict(self) -> dict[str, int | float | str | None]:
        """Return all values as one flat dict, for JSON. Rows are numbered: `times_0_seconds`.

        Example:
            >>> one = Estimate(
            ...     plain_bytes=8, smallest_budget_bytes=4, floor_bytes=2, state_bytes=1,
            ...     gradient_bytes=1, optimizer_bytes=0, step_seconds=0.5, budgets=(6,),
            ... )
            >>> one.to_dict()["budgets_0"], one.to_dict()["step_seconds"]
            (6, 0.5)
        """
        found = {each.name: getattr(self, each.name) for each in fields(self)}
        values: dict[str, int | float | str | None] = {
            name: value for name, value in found.items() if not isinstance(value, tuple)
        }
        host_bytes = values["host_bytes"] = self.host_bytes
        values["machine_host_bytes"] = None if host_bytes is None else self.ranks * host_bytes
        for index, each in enumerate(self.budgets):
            values[f"budgets_{index}"] = each
            values[f"budgets_{index}_fits"] = self.fits(each)
        for index, time in enumerate(self.times):
            for name in time.__slots__:
                values[f"times_{index}_{name}"] = getattr(time, name)
        for index, batch in enumerate(self.largest_batches):
            for name in batch.__slots__:
                values[f"largest_batches_{index}_{name}"] = getattr(batch, name)
        return values

    def __repr__(self) -> str:
        """Return one line."""
        label = f"{self.label}: " if self.label else ""
        return (
            f"<Estimate {label}plain {format_bytes(self.plain_bytes)}, smallest budget "
            f"{format_bytes(self.smallest_budget_bytes)}>"
        )

    def __str__(self) -> str:
        """Return all values as tables of plain text."""
        texts = [format_table(heads, rows) for heads, rows in self._tables()]
        return "\n\n".join([self._title(), *texts, *self._remarks()])

    def _repr_html_(self) -> str:
        """Return all values as tables, for a notebook."""
        parts = [f"<p>{html.escape(self._title())}</p>"]
        parts += [format_html(heads, rows) for heads, rows in self._tables()]
        parts += [f"<p>{html.escape(each)}</p>" for each in self._remarks()]
        return "\n".join(parts)

    def _title(self) -> str:
        batch = "" if self.batch_size is None else f", batch size {self.batch_size}"
        return f"{self.label or 'step'} on {self.device}{batch}"

    def _remarks(self) -> list[str]:
        remarks = []
        for each in self.budgets if self.batch_size is None else ():
            if not self.fits(each):
                smallest = format_bytes(self.streamed_budget_bytes or self.smallest_budget_bytes)
                remarks.append(f"{format_bytes(each)} is too small: try {smallest} or more.")
            elif each >= self.plain_bytes:
                remarks.append(f"With {format_bytes(each)} nothing moves.")
        if self.host_bytes:
            taken = format_per_rank(self.host_bytes, self.ranks)
            remarks.append(f"Copies take up to {taken} of host memory.")
        if not self.times:
            remarks.append(
                "Step times at other budgets are not known: pass machine=, with the link's speed."
            )
        return remarks

    def _tables(self) -> list[tuple[Sequence[str], Sequence[Sequence[str]]]]:
        tables: list[tuple[Sequence[str], Sequence[Sequence[str]]]] = [
            (_MEMORY_HEADS, self._memory_rows())
        ]
        if self.times:
            tables.append((_TIME_HEADS, [self._time_row(each) for each in self.times]))
        if self.largest_batches:
            tables.append((_BATCH_HEADS, [_batch_row(each) for each in self.largest_batches]))
        return tables

    def _memory_rows(self) -> list[tuple[str, str, str]]:
        operator = self.operator
        if not operator.endswith("optimizer's step"):
            operator += f"{'; ' if operator else ''}a smaller batch lowers it"
        rows = [
            ("without a budget", self.plain_bytes, "with this budget nothing moves"),
            ("smallest budget", self.smallest_budget_bytes, "a session trains with it"),
            ("  stays on the device", self.floor_bytes, "whatever the budget"),
            ("    parameters, buffers", self.state_bytes, ""),
            ("    gradients", self.gradient_bytes, ""),
            ("    optimizer states", self.optimizer_bytes, "swapkit.offload(optimizer) moves them"),
            ("  largest operator", self.operator_bytes, operator),
        ]
        gaps_bytes = self.smallest_budget_bytes - self.floor_bytes - self.operator_bytes
        if gaps_bytes > 0 and self.smallest_budget_bytes != self.outside_bytes:
            rows.append(("  gaps", gaps_bytes, "between tensors, until there is a plan"))
        if self.streamed_budget_bytes:
            rows.append(("smallest if weights leave", self.streamed_budget_bytes, _STREAMED))
        if self.outside_bytes:
            rows.append(("  outside of steps", self.outside_bytes, "all of it has to fit"))
        return [(name, format_bytes(nbytes), why) for name, nbytes, why in rows]

    def _time_row(self, each: TradeOff) -> tuple[str, ...]:
        plain = self.times[-1].seconds
        return (
            format_bytes(each.budget_bytes),
            f"{each.budget_bytes / self.plain_bytes:.0%}",
            format_seconds(each.seconds),
            f"{each.seconds / plain - 1:+.1%}" if plain else "",
            format_seconds(each.bound_seconds),
            format_bytes(each.swapped_bytes),
            format_seconds(each.recompute_seconds),
        )


def _batch_row(each: LargestBatch) -> tuple[str, ...]:
    seconds = each.step_seconds
    return (
        format_bytes(each.budget_bytes),
        f"{each.batch_size}{' or more' * each.is_capped}" if each.batch_size else "none fits",
        format_seconds(seconds) if seconds else "-",
        f"{each.batch_size / seconds:.1f}" if seconds else "-",
    )
