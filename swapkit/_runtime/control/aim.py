"""What a session is to reach with a plan."""

from __future__ import annotations

from typing import TYPE_CHECKING, Protocol

if TYPE_CHECKING:
    from pathlib import Path

    from swapkit.ir.plans import Plan
    from swapkit.ir.traces import Trace
    from swapkit.planning.planner import Policy


class Aim(Protocol):
    """What a plan is to reach, and how long to look for it."""

    @property
    def limit_bytes(self) -> int:
        """Most bytes reserved."""

    @property
    def host_limit_bytes(self) -> int | None:
        """Most bytes of host copies; None: what the machine has."""

    @property
    def disk(self) -> Path | None:
        """The folder for what the host has no room for."""

    @property
    def disk_limit_bytes(self) -> int:
        """Most bytes there; 0: what the file system has."""

    @property
    def policy(self) -> str | Policy:
        """Who plans."""

    @property
    def profile_steps(self) -> int:
        """Steps before there is a plan."""

    @property
    def search_steps(self) -> int:
        """Plans that are tried."""

    @property
    def saved_plan(self) -> tuple[Trace, Plan] | None:
        """What is followed from the first step on."""
