"""Where the host has little room or none, what a session cannot swap is computed again.

Also before there is a plan: operators are captured, and a rescue drops what they made.
"""

from __future__ import annotations

import functools
from typing import TYPE_CHECKING, Any

import pytest
import torch
from torch import nn

import swapkit
from swapkit._runtime.process.runtime import get_runtime
from swapkit.errors import RecomputeMismatch
from tests.support.regions import Numbers
from tests.support.sessions import (
    Block,
    Training,
    make_training,
    train,
    train_both,
    train_plainly,
)
from tests.support.stateful import MODELS, make_stateful

if TYPE_CHECKING:
    from collections.abc import Callable

KIB, MIB = 1 << 10, 1 << 20
HOSTS = (0, 256 * KIB, MIB)
SHARE = 0.6
STEPS = 8
PLENTY = 3.0
COUNT = 8
WIDTH = 64
ROWS = 512

pytestmark = [pytest.mark.usefixtures("installation", "steady_machine"), pytest.mark.promise("A3")]


def in_tiers(main: str, *others: str) -> list[Any]:
    """Return all pairs of a policy and a limit: one policy with all limits, others with one."""
    return [
        *[(main, limit) for limit in HOSTS],
        *[
            pytest.param(policy, limit, marks=() if limit == HOSTS[1] else pytest.mark.slow)
            for policy in others
            for limit in HOSTS
        ],
    ]


@pytest.mark.promise("B5")
@pytest.mark.parametrize(("policy", "host_limit"), in_tiers("auto", "recompute", "rescue"))
def test_training_when_the_host_has_little_room_then_same_bits_within_both_limits(
    policy: str, host_limit: int
) -> None:
    log = train_both(make_training, SHARE, STEPS, policy=policy, host_limit=host_limit)
    stats = log.session.stats
    assert stats.recomputed_regions > 0
    assert stats.host_peak_bytes <= host_limit
    if policy != "rescue":
        assert log.stages[-1] == "stable"


class Turning(Training):
    """Runs its blocks the other way round in each other step, once its plan has settled."""

    def forward(self) -> torch.Tensor:
        x = torch.randn(self.tokens, WIDTH)
        is_other = self.steps_done >= STEPS and self.steps_done % 2 == 0
        blocks = list(self.model.children())
        for block in reversed(blocks) if is_other else blocks:
            x = block(x)
        return x.square().mean()


@pytest.mark.parametrize(("policy", "host_limit"), in_tiers("auto", "recompute"))
def test_step_when_it_goes_another_way_than_a_settled_plan_then_same_bits_within_both_limits(
    policy: str, host_limit: int
) -> None:
    def make() -> Turning:
        training = make_training()
        return Turning(training.model, training.optimizer)

    log = train_both(make, SHARE, STEPS + 6, policy=policy, host_limit=host_limit)
    assert log.stages[STEPS - 1] == "stable"
    assert log.session.stats.host_peak_bytes <= host_limit


class Growing(Training):
    """Saves other sizes in each step, and larger ones once its plan has settled."""

    def forward(self) -> torch.Tensor:
        tokens = self.tokens if self.steps_done >= STEPS else self.tokens // 2
        x = torch.randn(tokens - 8 * (self.steps_done % 5), WIDTH)
        for block in self.model.children():
            x = block(x)
        return x.square().mean()


@pytest.mark.parametrize(("policy", "host_limit"), in_tiers("auto", "recompute"))
def test_step_when_it_is_larger_than_a_plan_followed_at_any_size_then_same_bits_within_both_limits(
    policy: str, host_limit: int
) -> None:
    def make() -> Growing:
        training = make_training()
        return Growing(training.model, training.optimizer)

    log = train_both(make, SHARE, STEPS + 6, policy=policy, host_limit=host_limit)
    assert log.stages[STEPS - 1] == "stable"
    assert log.session.stats.host_peak_bytes <= host_limit


def test_operand_when_changed_after_a_drop_and_another_way_then_the_result_is_as_it_was() -> None:
    def gradient(between: Callable[[], object]) -> torch.Tensor:
        weight = torch.linspace(-1, 1, MIB // 4, requires_grad=True)
        operand = weight * 2
        loss = operand.exp().sum()  # saves the result
        between()
        operand.add_(1)
        loss.backward()
        assert weight.grad is not None
        return weight.grad

    def drop() -> None:
        session.rescue(1 << 40)
        # As where a step goes another way than its plan.
        get_runtime().current_swapper().evictor.set_standby(is_on=True)

    expected = gradient(lambda: None)
    with swapkit.budget("64MiB", policy="rescue", host_limit=0) as session:
        assert torch.equal(gradient(drop), expected)
        assert session.stats.recomputed_regions > 0


def test_training_when_what_is_dropped_was_computed_with_numbers_then_same_bits() -> None:
    def make() -> Training:
        torch.manual_seed(0)
        model = nn.Sequential(*[Numbers() for _ in range(4)])
        return Training(model, torch.optim.SGD(model.parameters(), lr=0.1))

    log = train_both(make, SHARE, STEPS, policy="auto", host_limit=0)
    assert log.session.stats.recomputed_regions > 0


@pytest.mark.parametrize("name", ["mse_loss", "smooth_l1_loss", "soft_margin_loss"])
def test_loss_when_torch_leaves_most_of_its_memory_unwritten_then_computed_again(name: str) -> None:
    function = getattr(nn.functional, name)

    def gradient(drop: Any = lambda: None) -> torch.Tensor:
        weight = torch.linspace(-1, 1, MIB // 4, requires_grad=True)
        loss = function(weight, torch.ones(MIB // 4))
        assert loss.untyped_storage().nbytes() == MIB
        square = loss * loss
        del loss
        drop()
        square.backward()
        assert weight.grad is not None
        return weight.grad

    def drop() -> None:
        session.rescue(1 << 40)
        [torch.full((MIB // 4,), 7.0) for _ in range(COUNT)].clear()  # what lies in free memory

    expected = gradient()
    with swapkit.budget("1GiB", policy="rescue", host_limit=0) as session:
        assert torch.equal(gradient(drop), expected)
        assert session.stats.recomputed_regions > 0


@pytest.mark.parametrize("name", MODELS)
def test_states_when_all_is_dropped_then_same_bits(name: str) -> None:
    make = functools.partial(make_stateful, name)
    plain = train_plainly(make, STEPS)
    training = make()
    with swapkit.budget(
        plain.budget(PLENTY), training.model, training.optimizer, policy="rescue", host_limit=0
    ) as session:
        training.model.register_forward_hook(lambda *_: session.rescue(1 << 40) and None)
        log = train(session, training, STEPS)
    assert training.outcome() == plain.outcome
    assert log.session.stats.swapped_out_bytes == 0


@pytest.mark.parametrize("prefetch", [None, 2])
def test_backward_when_what_a_scope_would_bring_back_was_dropped_then_computed_again(
    prefetch: int | None,
) -> None:
    def forward(x: torch.Tensor) -> torch.Tensor:
        for _ in range(6):
            y = x.sin()
            u = y.cos()  # saves it, as what can be dropped
            with swapkit.offload(prefetch=prefetch):
                x = u + y.exp() * y  # saves it once more, with a moment to come back at
        return x.sum()

    weight = torch.linspace(-1, 1, MIB // 4, requires_grad=True)
    (expected,) = torch.autograd.grad(forward(weight), weight)
    with swapkit.budget("64MiB", policy="rescue", host_limit=0) as session:
        loss = forward(weight)
        session.rescue(1 << 40)
        (found,) = torch.autograd.grad(loss, weight)
        assert session.stats.recomputed_regions > 0
    assert torch.equal(found, expected)


def test_memory_when_nothing_has_to_be_dropped_then_recipes_keep_none_of_it() -> None:
    peaks = []
    for host_limit in (None, 0):
        training = make_training()
        training.step()
        limit = train_plainly(make_training, 1).budget(PLENTY)
        with swapkit.budget(
            limit, training.model, training.optimizer, policy="rescue", host_limit=host_limit
        ):
            training.step()
            swapkit.reset_peak_memory_stats()
            training.step()
            peaks.append(swapkit.memory_stats()["allocated_bytes.all.peak"])
    assert peaks[1] <= peaks[0] + 64 * KIB


def test_memory_when_nobody_saves_an_operand_then_no_recipe_keeps_it() -> None:
    weight = torch.ones(MIB // 4, requires_grad=True)

    def forward() -> torch.Tensor:
        total = torch.zeros(())
        for _ in range(COUNT):
            filled = torch.empty(MIB // 4)
            filled.fill_(1.0)
            total = total + (filled + weight).exp().sum()
        return total

    with swapkit.budget("1GiB", policy="rescue", host_limit=0) as session:
        swapkit.reset_peak_memory_stats()
        before_bytes = swapkit.memory_stats()["allocated_bytes.all.current"]
        total = forward()
        kept_bytes = swapkit.memory_stats()["allocated_bytes.all.current"] - before_bytes
        del total
        session.rescue(1)
        left_bytes = swapkit.memory_stats()["allocated_bytes.all.current"] - before_bytes
    assert left_bytes < MIB
    assert COUNT * MIB <= kept_bytes < (COUNT + 2) * MIB


def test_backward_when_two_operands_do_not_fit_at_once_then_out_of_memory() -> None:
    weight = torch.ones(MIB // 4, requires_grad=True)
    with swapkit.budget("8MiB", policy="rescue", host_limit=0) as session:
        first, second = weight.sin().exp(), weight.cos().exp()
        loss = (first + second).exp().sum()
        del first, second
        session.rescue(1 << 40)
        ballast = torch.empty(5 * MIB - 64 * KIB, dtype=torch.uint8)
        with pytest.raises(torch.OutOfMemoryError):
            loss.backward()
        del ballast
        loss.backward()
    expected = torch.ones(MIB // 4, requires_grad=True)
    (expected.sin().exp() + expected.cos().exp()).exp().sum().backward()
    assert torch.equal(weight.grad, expected.grad)  # type: ignore[arg-type]


class Squares(torch.autograd.Function):
    """Squares in a kernel of its own, which leaves nothing of what it is given."""

    @staticmethod
    def forward(ctx: Any, x: torch.Tensor) -> Any:
        ctx.save_for_backward(x.clone())
        content = x.numpy()
        squares = content * content
        content[:] = 0
        return torch.from_numpy(squares)

    @staticmethod
    def backward(ctx: Any, *grads: Any) -> torch.Tensor:
        (x,) = ctx.saved_tensors
        made: torch.Tensor = 2 * x * grads[0]
        return made


class Overwriting(nn.Module):
    """Saves what a kernel that torch does not run overwrites."""

    def __init__(self) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.randn(WIDTH, WIDTH))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        made = x @ self.weight
        result: torch.Tensor = made.sin() + Squares.apply(made)
        return result


def test_results_when_an_unseen_kernel_overwrites_what_is_dropped_then_refused() -> None:
    model = Overwriting()
    with swapkit.budget("64MiB", model, policy="rescue", host_limit=0) as session:
        loss = model(torch.randn(ROWS, WIDTH)).sum()
        session.rescue(1 << 40)
        with pytest.raises(RecomputeMismatch, match=r"mm.*swapkit\.op"):
            loss.backward()


@pytest.mark.parametrize("is_dropped", [False, True])
def test_results_when_an_operand_is_changed_in_place_then_those_of_before(
    *, is_dropped: bool
) -> None:
    weight = torch.randn(WIDTH, WIDTH, requires_grad=True)
    x = torch.randn(ROWS, WIDTH)
    (x @ weight).exp().sum().backward()
    expected, weight.grad = weight.grad, None
    with swapkit.budget("64MiB", policy="rescue", host_limit=0) as session:
        given = x.clone()
        product = given.mul(1) @ weight
        loss = product.exp().sum()
        if is_dropped:
            session.rescue(1 << 40)
        with torch.no_grad():
            given.add_(1)
            product.add_(1)
        loss.backward()
    assert torch.equal(weight.grad, expected)  # type: ignore[arg-type]


def test_training_when_blocks_are_many_then_chains_are_computed_within_the_limit() -> None:
    def make() -> Training:
        return make_training(lambda: nn.Sequential(*[Block() for _ in range(12)]))

    log = train_both(make, 0.33, 3, policy="rescue", host_limit=0)
    assert log.session.stats.recomputed_regions > 0
