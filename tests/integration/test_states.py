"""Whatever a model changes besides its parameters changes in a session as without one.

Running statistics, observers, power iterations and moving averages: an operator that is computed
again must not update them again.
"""

from __future__ import annotations

import copy
import functools
from typing import TYPE_CHECKING

import pytest
import torch
from torch import nn

from swapkit.registry import Recompute, Swap
from tests.programs import assert_same_bits
from tests.support.operators import Calls, choose, recomputed
from tests.support.sessions import train_both, train_plainly
from tests.support.stateful import MODELS, RecomputeAll, make_stateful

if TYPE_CHECKING:
    from swapkit.registry import What

STEPS = 6
SHARE = 0.85
SEARCHED = ("batch norm 2d", "batch norm 1d, cumulative", "instance norm", "generator")
PLENTY = 3.0

pytestmark = pytest.mark.usefixtures("installation", "steady_machine")


@pytest.mark.promise("A3")
@pytest.mark.parametrize("name", MODELS)
def test_states_when_a_plan_recomputes_all_that_it_may_then_same_bits(name: str) -> None:
    policy = RecomputeAll()
    log = train_both(
        functools.partial(make_stateful, name), PLENTY, STEPS, policy=policy, search_steps=1
    )
    assert log.stages[-1] == "stable"
    assert policy.recomputed > 0
    assert log.session.stats.recomputed_regions > 0


@pytest.mark.promise("A3")
@pytest.mark.parametrize("policy", ["recompute", "auto"])
@pytest.mark.parametrize(
    "name",
    [name if name in SEARCHED else pytest.param(name, marks=pytest.mark.slow) for name in MODELS],
)
def test_states_when_a_session_plans_then_same_bits(name: str, policy: str) -> None:
    train_both(functools.partial(make_stateful, name), SHARE, STEPS, policy=policy, search_steps=2)


@pytest.mark.promise("A3")
@pytest.mark.parametrize("what", [Recompute(), Swap(min_bytes=1)], ids=["recomputed", "swapped"])
@pytest.mark.parametrize("name", MODELS)
def test_states_when_a_user_chooses_every_operator_then_same_bits(name: str, what: What) -> None:
    plain = train_plainly(functools.partial(make_stateful, name), STEPS)
    training = make_stateful(name)
    for module in training.model.modules():
        choose(module, {".*": what}, training.model)
    for _ in range(STEPS):
        training.step()
    assert training.outcome() == plain.outcome


def test_batch_norm_when_a_user_chooses_it_then_it_runs_again_and_counts_its_batch_once() -> None:
    torch.manual_seed(0)
    plain = nn.Sequential(nn.BatchNorm1d(64), nn.GELU())
    model = copy.deepcopy(plain)
    choose(model[0], {"native_batch_norm": Recompute()}, model)
    x = torch.randn(32, 64, requires_grad=True)
    again = x.detach().clone().requires_grad_()
    plain(x).square().sum().backward()
    before = recomputed()
    model(again).square().sum().backward()
    assert recomputed() == before + 1
    assert x.grad is not None
    assert again.grad is not None
    assert_same_bits(
        [again.grad, *model.state_dict().values()], [x.grad, *plain.state_dict().values()]
    )


def test_statistics_when_changed_after_an_operator_that_read_them_then_it_is_not_repeated() -> None:
    """A batch norm in training changes what another one in evaluation was given."""

    def forward(x: torch.Tensor, mean: torch.Tensor, var: torch.Tensor) -> torch.Tensor:
        still = nn.functional.batch_norm(x, mean, var).relu()
        return still * nn.functional.batch_norm(still, mean, var, training=True)

    results: list[list[torch.Tensor]] = []
    for chosen in (False, True):
        torch.manual_seed(0)
        model = Calls(forward)
        if chosen:
            choose(model, {"native_batch_norm": Recompute(), "relu": Recompute()})
        x, mean, var = torch.randn(32, 64, requires_grad=True), torch.zeros(64), torch.ones(64)
        model(x, mean, var).sum().backward()
        assert x.grad is not None
        results.append([x.grad, mean, var])
    assert_same_bits(*results)
