"""Hints for a user whose session runs out of memory."""

from __future__ import annotations

from typing import TYPE_CHECKING

from swapkit._runtime.control.rank_alarm import ALL
from swapkit._runtime.model.node_ranks import count_ranks
from swapkit.units import format_bytes, format_limit

if TYPE_CHECKING:
    from collections.abc import Sequence

    from swapkit._runtime.control.session_config import SessionConfig
    from swapkit._runtime.saved.swapper import Swapper


def list_hints(
    swapper: Swapper, config: SessionConfig, needed_bytes: int, advice: Sequence[str]
) -> list[str]:
    """Return what a session's user can try. Any thread, in the middle of an allocation.

    Args:
        swapper: of the session.
        config: its options.
        needed_bytes: the bytes in use plus those of the failed request.
        advice: hints of the code that opened the session; they come first.
    """
    hints = list(advice)
    limit_bytes, kept_bytes = config.limits.budget_bytes, swapper.resident_bytes()
    if swapper.mover.host_is_full:
        hints.append(_advise_host(config.limits.host_bytes, kept_bytes))
    if kept_bytes:
        hints.append(
            f"{format_bytes(kept_bytes)} of saved tensors remain on the device: the running "
            "operator or other references hold them, or they are smaller than min_swap_bytes"
        )
    larger = "a larger one"
    if needed_bytes > limit_bytes:
        larger = f"at least {format_limit(needed_bytes)}, if nothing else can be freed"
    hints.append(
        "parameters, gradients, optimizer states and the running operator must fit the budget: "
        f"try {larger}, or a smaller batch or sequence"
    )
    if config.on_oom != ALL and count_ranks() > 1:
        hints.append(
            "the other ranks wait for this one in their next collective until the process group's "
            f"timeout, unless this process ends: on_oom={ALL!r} makes them fail at once, with this "
            "text"
        )
    return hints


def _advise_host(limit_bytes: int | None, kept_bytes: int) -> str:
    if limit_bytes is None:
        return "the host has no room for more copies: pass a folder as disk="
    return (
        f"the host has no room for more copies ({format_bytes(limit_bytes)}): raise host_limit, "
        f"e.g. to {format_limit(limit_bytes + kept_bytes)}"
    )
