"""Plans of a session whose budget leaves no room to measure the machine."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import pytest

from swapkit._runtime.control import plan_maker as plan_making
from swapkit._runtime.control.plan_maker import PlanMaker
from swapkit._runtime.control.session_config import SessionConfig
from swapkit._runtime.saved.device import Limits
from swapkit.errors import InfeasibleBudget, OverBudget

if TYPE_CHECKING:
    from swapkit._runtime.allocators.installed_pool import Installation


def test_plans_when_copies_cannot_be_measured_then_none_is_made_and_the_reason_is_raised(
    monkeypatch: pytest.MonkeyPatch, installation: Installation
) -> None:
    def refuse(*_: object) -> None:
        raise OverBudget("too little is free")

    monkeypatch.setattr(plan_making, "measure_machine", refuse)
    device, limits = installation.device, Limits(budget_bytes=1 << 20)
    maker = PlanMaker(device, SessionConfig(device=device.name, limits=limits, min_swap_bytes=0))
    step: Any = None
    for make_plans in maker.prepare(), maker._prepare_lean(1.0):
        with pytest.raises(InfeasibleBudget, match=r"too little is free\. Try a larger budget"):
            make_plans(step, share=1.0, count=1)
    assert maker.prepare()(step, share=1.0, count=1, is_quick=True) == ()
