"""The options of a session."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import TYPE_CHECKING

from swapkit._runtime.saved.device import Limits
from swapkit.config.environment import CpuAffinity
from swapkit.ir.plans import Plan
from swapkit.ir.traces import Trace
from swapkit.planning.planner import Policy

if TYPE_CHECKING:
    import torch

RESCUE = "rescue"  # the policy without a plan
# A host limit of this many budgets suffices for the copies of any step.
HOST_PLENTY = 4


@dataclass(frozen=True, slots=True, kw_only=True)
class SessionConfig:
    """The options of a session.

    Args:
        device: where the session trains.
        limits: the memory and disk space of the session.
        min_swap_bytes: the least size of a saved storage that moves.
        rescue_multiple: a rescue frees this many times the bytes that the allocation needs.
        policy: the name of a policy, or an object that makes plans.
        profile_steps: the steps before the first plan.
        search_steps: the number of plans that the session tries.
        saved_plan: the trace and plan to follow from the first step on.
        cpu_affinity: how to bind threads to CPUs; None: not at all.
        separates_lives: whether memory that lives unequally long is separate before addresses are
            planned.
        holds_weakly: whether the model and the optimizers may go while the session is active.
        on_step: the user's function, to call with the session after each step.
        on_oom: whose training ends when a rank runs out of memory: `"rank"` or `"all"`.
        reshard: who sets FSDP2's `reshard_after_forward`: `"user"` or `"auto"`.
    """

    device: torch.device
    limits: Limits
    min_swap_bytes: int
    rescue_multiple: int = 1
    policy: str | Policy = RESCUE
    profile_steps: int = 2
    search_steps: int = 4
    saved_plan: tuple[Trace, Plan] | None = None
    cpu_affinity: CpuAffinity | None = None
    separates_lives: bool = False
    holds_weakly: bool = False
    on_step: Callable[..., object] | None = None
    on_oom: str = "rank"
    reshard: str = "user"

    @property
    def is_host_scarce(self) -> bool:
        """Whether a step may need to swap more bytes than the host limit allows."""
        limits = self.limits
        return (
            limits.host_bytes is not None
            and limits.disk is None
            and limits.host_bytes < HOST_PLENTY * limits.budget_bytes
        )

    @property
    def policy_name(self) -> str:
        """The name of the policy, or of the class of a user's one."""
        return self.policy if isinstance(self.policy, str) else type(self.policy).__name__

    @property
    def plans(self) -> bool:
        """Whether the session makes plans, or was given one."""
        return self.policy != RESCUE or self.saved_plan is not None
