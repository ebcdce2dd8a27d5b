"""Hints for a user whose session runs out of memory."""

from __future__ import annotations

from typing import TYPE_CHECKING, NamedTuple

from swapkit._runtime.control.rank_alarm import ALL
from swapkit._runtime.model.node_ranks import count_node_ranks, count_ranks
from swapkit._runtime.session.step_needs import find_needs
from swapkit.planning.planner import POLICIES, find_floor
from swapkit.reporting.text import format_per_rank
from swapkit.units import format_bytes, format_limit

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence

    from swapkit._runtime.control.plan_status import PlanStatus
    from swapkit._runtime.control.session_config import SessionConfig
    from swapkit._runtime.saved.swapper import Swapper
    from swapkit._runtime.session.step_needs import StepNeeds
    from swapkit.planning.planner import Policy

SPARE = 50  # of a budget: one part of so many is left for pieces that are too small


class Shortage(NamedTuple):
    """An allocation that failed, in bytes."""

    needed_bytes: int  # in use, and the request
    began_bytes: int = 0  # in use when the session began
    spare_bytes: int = 0  # that plans leave free
    planned_bytes: int = 0  # the smallest budget with a plan for the recorded step; 0: not known


def list_hints(
    swapper: Swapper,
    config: SessionConfig,
    shortage: Shortage,
    advice: Sequence[Callable[[int], str]],
) -> list[str]:
    """Return what a session's user can try. Any thread, in the middle of an allocation.

    Args:
        swapper: of the session.
        config: its options.
        shortage: of the allocation.
        advice: hints of the code that opened the session, given a budget in bytes that fits; they
            come first.
    """
    needs, budget_bytes = _find_budget(swapper, config.limits.budget_bytes, shortage)
    hints = [each(budget_bytes) for each in advice]
    if swapper.mover.host_is_full:
        hints.append(_advise_host(swapper))
    hints += _advise_budget(needs, budget_bytes)
    if config.on_oom != ALL and count_ranks() > 1:
        hints.append(
            "the other ranks wait for this one in their next collective until the process group's "
            f"timeout, unless this process ends: on_oom={ALL!r} makes them fail at once, with this "
            "text"
        )
    return hints


def _find_budget(swapper: Swapper, limit_bytes: int, shortage: Shortage) -> tuple[StepNeeds, int]:
    """Return what the whole step needs as far as it is known, and a budget for it in bytes."""
    asked_bytes = max(0, shortage.needed_bytes - swapper.in_use_bytes())
    needs = find_needs(swapper, asked_bytes, shortage.began_bytes)
    # A session's plans leave some granules free, and pieces of memory may be too small.
    least_bytes = needs.budget_bytes + needs.budget_bytes // SPARE + shortage.spare_bytes
    return needs, max(least_bytes, shortage.needed_bytes, shortage.planned_bytes, limit_bytes + 1)


def _advise_budget(needs: StepNeeds, budget_bytes: int) -> list[str]:
    """Return the budget in words, and how to need less or to know more."""
    parts = [
        f"{format_bytes(nbytes)} {name}"
        for nbytes, name in (
            (needs.parameters, "parameters"),
            (needs.gradients, "gradients"),
            (needs.states, "optimizer states"),
            (needs.others, "others"),
            (needs.operator, "for the largest operator so far"),
        )
        if nbytes
    ]
    hints = [
        f"a budget of at least {format_limit(budget_bytes)}, which fits the whole step as far as "
        f"it is known ({', '.join(parts)}), or a smaller batch or sequence"
    ]
    if needs.are_states_largest:
        hints.append(
            "swapkit.offload(optimizer): its states, the largest part, then live on the host"
        )
    hints.append("swapkit estimate: the smallest budget of a script, and its time by budget")
    return hints


def find_planned_bytes(status: PlanStatus, policy: str | Policy) -> int:
    """Return the smallest budget with a plan for the recorded step; 0: it is not known.

    Args:
        status: of the search for a plan.
        policy: of the session.
    """
    if status.trace is None or status.machine is None or policy not in POLICIES:
        return 0
    return find_floor(status.trace, status.machine, policy)


def list_facts(swapper: Swapper) -> list[str]:
    """Return sentences about what a session could not free. Any thread, as `list_hints`."""
    kept_bytes = sum(swapper.resident_sizes())
    if not kept_bytes:
        return []
    return [
        f"{format_bytes(kept_bytes)} of saved tensors remain on the device: the running operator "
        "or other references hold them, or they are smaller than min_swap_bytes."
    ]


def _advise_host(swapper: Swapper) -> str:
    scheduler, ranks = swapper.scheduler, count_node_ranks(waits=False)
    limit_bytes = scheduler.host_limit_bytes
    if limit_bytes is None:
        taken = format_per_rank(scheduler.stats().host_reserved_bytes, ranks)
        return f"the host has no room for more copies than {taken}: pass a folder as disk="
    wanted_bytes = limit_bytes + sum(swapper.resident_sizes())
    whole = "" if ranks == 1 else f" per rank ({format_bytes(ranks * wanted_bytes)} in all)"
    return (
        f"the host has no room for more copies than {format_per_rank(limit_bytes, ranks)}: raise "
        f"host_limit, e.g. to {format_limit(wanted_bytes)}{whole}"
    )
