"""Texts about a plan: actions with reasons per site, prediction, and effects of other budgets.

Sites with the same action share one line: eighty layers that swap the same storage are
`model.layers.0-79.mlp.up#0`.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterable, Sequence
from dataclasses import dataclass

from swapkit.ir.plans import Action, Plan, Tier
from swapkit.planning.reasons import Reason
from swapkit.planning.search.solving import TradeOff
from swapkit.reporting.machines import format_seconds
from swapkit.reporting.text import format_table
from swapkit.units import format_bytes

MOST_LINES = 24
MOST_RANGES = 4  # ranges of numbers in one name
OUTSIDE = "(outside of the model)"
ORDER = ("swap", "swap to disk", "recompute", "keep")  # of rows: what moves comes first


@dataclass(frozen=True, slots=True, kw_only=True)
class SiteReport:
    """Storages of one site, or of a class of sites, with the same action."""

    site: str  # such as "model.layers.0-79.mlp.up#0"
    action: str  # "keep", "swap", "swap to disk" or "recompute"
    why: str
    count: int = 1
    nbytes: int = 0  # total
    exposed_seconds: float = 0.0  # time the step waits for them or recomputes them


def report_sites(reasons: Iterable[Reason]) -> tuple[SiteReport, ...]:
    """Return the action at each site: swapped ones first, kept ones last, each by bytes."""
    reports = [
        SiteReport(
            site=name_site(reason.module, reason.index),
            action=name_action(reason),
            why=reason.why.value,
            nbytes=reason.nbytes,
            exposed_seconds=cost_of(reason),
        )
        for reason in reasons
    ]
    groups = group_sites(reports)
    return tuple(sorted(groups, key=lambda each: (ORDER.index(each.action), -each.nbytes)))


def name_site(module: str, index: int) -> str:
    """Return the name of the storage that a module saves as its `index`-th."""
    return f"{module or OUTSIDE}#{index}"


def name_action(reason: Reason) -> str:
    """Return a decision in words."""
    to_disk = reason.action is Action.SWAP and reason.tier is Tier.DISK
    return f"{reason.action.value} to disk" if to_disk else reason.action.value


def cost_of(reason: Reason) -> float:
    """Return the seconds that a storage adds to the step."""
    if reason.action is Action.RECOMPUTE:
        return reason.recompute_seconds or 0.0
    return reason.exposed_seconds


def group_sites(reports: Iterable[SiteReport]) -> tuple[SiteReport, ...]:
    """Join reports with equal action and reason whose sites differ only in module numbers.

    Example:
        >>> rows = [
        ...     SiteReport(site=f"layers.{i}.up#0", action="swap", why="far", nbytes=4)
        ...     for i in (0, 1, 2, 5)
        ... ]
        >>> [(row.site, row.count, row.nbytes) for row in group_sites(rows)]
        [('layers.0-2,5.up#0', 4, 16)]
    """
    classes: defaultdict[tuple[object, ...], list[SiteReport]] = defaultdict(list)
    for report in reports:
        parts = report.site.split(".")
        pattern = tuple("*" if part.isdecimal() else part for part in parts)
        classes[pattern, report.action, report.why].append(report)
    return tuple(
        SiteReport(
            site=_join_sites([each.site for each in members]),
            action=members[0].action,
            why=members[0].why,
            count=sum(each.count for each in members),
            nbytes=sum(each.nbytes for each in members),
            exposed_seconds=sum(each.exposed_seconds for each in members),
        )
        for members in classes.values()
    )


def _join_sites(sites: Sequence[str]) -> str:
    """Return one name for sites that differ only in numbers."""
    columns = zip(*(site.split(".") for site in sites), strict=True)
    joined = []
    for column in columns:
        different = set(column)
        if len(different) == 1:
            joined.append(column[0])
        else:
            joined.append(format_ranges(sorted({int(number) for number in different})))
    return ".".join(joined)


def format_ranges(numbers: Sequence[int]) -> str:
    """Return ascending numbers as ranges; of many ranges, only the first ones and the last.

    Example:
        >>> format_ranges([0, 1, 2, 5]), format_ranges(range(0, 40, 2))
        ('0-2,5', '0,2,4,...,38')
    """
    ranges: list[list[int]] = []
    for number in numbers:
        if ranges and number == ranges[-1][1] + 1:
            ranges[-1][1] = number
        else:
            ranges.append([number, number])
    texts = [str(low) if low == high else f"{low}-{high}" for low, high in ranges]
    if len(texts) > MOST_RANGES:
        texts[MOST_RANGES - 1 : -1] = ["..."]
    return ",".join(texts)


def format_plan(plan: Plan, reasons: Iterable[Reason], *, step_seconds: float | None = None) -> str:
    """Return a plan's actions, site by site, and its prediction.

    Args:
        plan: the plan, with its prediction if it has one.
        reasons: the result of `swapkit.planning.reasons.explain_decisions`.
        step_seconds: measured step time; None: unknown.
    """
    reports = report_sites(reasons)
    lines = [
        f"plan {plan.policy or 'of the user'}, budget {format_bytes(plan.budget_bytes)}",
        *_format_prediction(plan, step_seconds),
        "",
        format_sites(reports),
        "",
        *format_totals(reports),
    ]
    return "\n".join(lines)


def _format_prediction(plan: Plan, step_seconds: float | None) -> list[str]:
    found = plan.prediction
    lines = []
    if found is not None:
        lines.append(
            f"predicted: step {format_seconds(found.step_seconds)} "
            f"({format_seconds(found.stall_seconds)} waiting for copies, "
            f"{format_seconds(found.recompute_seconds)} recomputing), peak "
            f"{format_bytes(found.peak_bytes)}{_format_reserved(found.reserved_bytes)}"
        )
        if plan.bound_seconds:
            gap = found.step_seconds / plan.bound_seconds - 1
            lines.append(
                f"lower bound {format_seconds(plan.bound_seconds)} for any plan; "
                f"this plan is {gap:.2%} above it"
            )
    if step_seconds is not None:
        error = (
            f", {step_seconds / found.step_seconds - 1:+.1%} from the prediction" if found else ""
        )
        lines.append(f"measured: step {format_seconds(step_seconds)}{error}")
    return lines


def _format_reserved(nbytes: int) -> str:
    return f" in use, {format_bytes(nbytes)} reserved at planned addresses" if nbytes else ""


def format_sites(reports: Sequence[SiteReport], *, most: int = MOST_LINES) -> str:
    """Return a table of the first reports, with one line for all the rest."""
    if not reports:
        return "the step saves nothing that a plan can move"
    rest = reports[most:]
    rows = [(each.site, each.action, *_list_sums([each]), each.why) for each in reports[:most]]
    if rest:
        name = f"{len(rest)} other {'class' if len(rest) == 1 else 'classes'}"
        rows.append((name, "", *_list_sums(rest), ""))
    return format_table(("site", "what", "count", "bytes", "costs", "why"), rows)


def _list_sums(reports: Sequence[SiteReport]) -> tuple[str, str, str]:
    count, nbytes, seconds = _sum_up(reports)
    return str(count), format_bytes(nbytes), "-" if seconds == 0 else format_seconds(seconds)


def format_totals(reports: Iterable[SiteReport]) -> list[str]:
    """Return a line for each kind of action, with its bytes and its cost."""
    totals: defaultdict[str, list[SiteReport]] = defaultdict(list)
    for report in reports:
        totals[report.action].append(report)
    lines = []
    for action, each in totals.items():
        count, nbytes, seconds = _sum_up(each)
        costs = f", costs {format_seconds(seconds)}" if seconds else ""
        lines.append(f"{action}: {count} storages, {format_bytes(nbytes)}{costs}")
    return lines


def _sum_up(reports: Sequence[SiteReport]) -> tuple[int, int, float]:
    """Return how many storages the reports are about, their bytes, and what they cost."""
    return (
        sum(each.count for each in reports),
        sum(each.nbytes for each in reports),
        sum(each.exposed_seconds for each in reports),
    )


def format_trade_offs(
    trade_offs: Sequence[TradeOff], *, plan: Plan | None = None, pace: float = 1.0
) -> str:
    """Return the predicted effects of other budgets as a table.

    Args:
        trade_offs: from the smallest budget to the largest.
        plan: the plan in force, whose step time is the reference. None: use the last row's.
        pace: measured step time / predicted step time: a factor for the times of steps.
    """
    if not trade_offs:
        return "effect of other budgets: unknown"
    found = None if plan is None else plan.prediction
    reference = pace * trade_offs[-1].seconds if found is None else found.step_seconds
    rows = [
        (
            format_bytes(each.budget_bytes),
            format_seconds(pace * each.seconds),
            f"{pace * each.seconds / reference - 1:+.1%}" if reference else "",
            format_seconds(pace * each.bound_seconds),
            format_bytes(each.peak_bytes),
            format_bytes(each.swapped_bytes),
            format_seconds(each.recompute_seconds),
        )
        for each in trade_offs
    ]
    than = "the largest budget" if found is None else "now"
    heads = ("budget", "step", f"vs. {than}", "bound", "peak", "swapped", "recomputed")
    return "effect of other budgets (predicted)\n" + format_table(heads, rows)
