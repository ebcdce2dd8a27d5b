"""Plans that recompute results of operators whose operand came from a collective."""

from __future__ import annotations

from typing import TYPE_CHECKING

import pytest
import torch
from torch import nn
from torch.distributed import _functional_collectives as collectives
from torch.nn.functional import gelu

from swapkit._runtime.execution.plan_executor import PlanExecutor
from tests.support.sessions import WIDTH, Training, make_training, train_both
from tests.support.stateful import RecomputeAll

if TYPE_CHECKING:
    from swapkit._runtime.execution.plan_executor import StepReport

STEPS = 6

pytestmark = [pytest.mark.promise("A3"), pytest.mark.usefixtures("installation", "steady_machine")]


class Expert(nn.Module):
    """Computes with tokens that have just been sent to it; the first operator waits for them."""

    def __init__(self) -> None:
        super().__init__()
        self.up, self.down = nn.Linear(WIDTH, 4 * WIDTH), nn.Linear(4 * WIDTH, WIDTH)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        sent: torch.Tensor = collectives.AsyncCollectiveTensor(x.clone())
        made: torch.Tensor = self.down(gelu(self.up(sent)))
        return made


def test_result_when_its_operand_was_waited_for_then_a_plan_recomputes_it(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    def make() -> Training:
        return make_training(lambda: nn.Sequential(Expert()))

    reports: list[StepReport] = []
    end_step = PlanExecutor.end_step

    def note(executor: PlanExecutor) -> StepReport:
        reports.append(end_step(executor))
        return reports[-1]

    monkeypatch.setattr(PlanExecutor, "end_step", note)
    log = train_both(make, 2.0, STEPS, policy=RecomputeAll())
    assert log.session.stats.recomputed_regions > 0
    assert reports
    assert all(each.deviation is None for each in reports)
