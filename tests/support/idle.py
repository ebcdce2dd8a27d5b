"""What an installation and a thread look like while no session is active."""

from __future__ import annotations

from typing import TYPE_CHECKING

import torch

import swapkit
from swapkit._runtime.thread_state import thread_state
from swapkit._runtime.torch_compat.dispatch_modes import mode_stack

if TYPE_CHECKING:
    from swapkit._runtime.allocators.installed_pool import Installation


def budget_bytes() -> int:
    return swapkit.memory_stats()["budget_bytes"]


def has_hooks() -> bool:
    """Return whether something stands between autograd and what it saves on this thread."""
    return torch._C._autograd._top_saved_tensors_default_hooks(True) is not None


def assert_idle(installation: Installation) -> None:
    assert swapkit.sessions() == ()
    assert installation.sessions == []
    assert installation.runtime.active == []
    assert thread_state.sessions == []
    assert not installation.tracker._users
    assert budget_bytes() == 0
    assert not has_hooks()
    assert len(mode_stack()) == 0
