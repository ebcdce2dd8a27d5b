"""What sessions say when a step does not fit, and of steps that differ."""

from __future__ import annotations

import gc
from typing import TYPE_CHECKING

import pytest
import torch
from torch.utils.checkpoint import checkpoint

import swapkit
from tests.support import MIB, installed, limit_above_reserved
from tests.support.sessions import make_training, train_plainly

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator

    from swapkit._runtime.allocators.installed_pool import Installation


@pytest.fixture
def installation() -> Iterator[Installation]:
    with installed() as installation:
        gc.collect()
        yield installation


def failure_of(work: Callable[[], object]) -> str:
    with pytest.raises(torch.OutOfMemoryError) as caught:
        work()
    return str(caught.value)


@pytest.mark.promise("A6")
@pytest.mark.promise("F11")
def test_failure_when_one_request_is_larger_than_the_budget_then_it_says_so_and_what_fits(
    installation: Installation,
) -> None:
    limit_bytes = limit_above_reserved(installation, 8 * MIB)
    with swapkit.budget(limit_bytes, policy="rescue"):
        text = failure_of(lambda: torch.ones(limit_bytes // 2))
        assert "less than this request alone" in text
        assert "of saved tensors" not in text  # there are none
        needed_bytes = swapkit.memory_stats()["allocated_bytes.all.current"] + 2 * limit_bytes
        assert f"try at least {-(-needed_bytes // MIB)}MiB" in text


@pytest.mark.promise("F11")
@pytest.mark.parametrize("use_reentrant", [False, True])
def test_failure_when_inside_torchs_checkpoint_then_its_region_is_named(
    installation: Installation,
    use_reentrant: bool,
) -> None:
    limit_bytes = limit_above_reserved(installation, 18 * MIB)  # 25 are enough

    def region(x: torch.Tensor) -> torch.Tensor:
        for _ in range(8):
            x = (x * 1.5).sin()
        return x

    with swapkit.budget(limit_bytes, policy="rescue"):
        x = torch.ones(MIB, requires_grad=True)
        loss = checkpoint(region, x, use_reentrant=use_reentrant).sum()
        text = failure_of(loss.backward)
    assert "inside a checkpointed region (torch.utils.checkpoint)" in text


def test_failure_when_not_inside_a_region_then_none_is_named(installation: Installation) -> None:
    with swapkit.budget(limit_above_reserved(installation, 8 * MIB), policy="rescue"):
        text = failure_of(lambda: [torch.ones(MIB) for _ in range(8)])
    assert "torch.utils.checkpoint" not in text


@pytest.mark.usefixtures("installation", "steady_machine")
def test_explain_when_two_kinds_of_steps_alternate_then_each_plan_has_its_own_time() -> None:
    sizes = (1024, 64)

    def alternate(training: object, step: int) -> None:
        training.tokens = sizes[step % 2]  # type: ignore[attr-defined]

    steps = 16
    plain = train_plainly(make_training, steps, alternate)
    training = make_training()
    with swapkit.budget(plain.budget(0.7), training.model, training.optimizer) as session:
        medians: list[float | None] = []
        for step in range(steps):
            alternate(training, step)
            training.step()
            medians = [session.stats.step_seconds, *medians[:1]]
        assert session._look().other_step_seconds == (medians[1],)  # the step before's, of its kind
        text = session.explain()
    assert session.stats.steps == steps
    assert medians[0] != medians[1]
    assert "steps of one other kind, with plans of their own: " in text


@pytest.mark.promise("F11")
@pytest.mark.filterwarnings("ignore:The .grad attribute of a Tensor:UserWarning")
@pytest.mark.parametrize("in_backward", [False, True])
def test_failure_when_inside_a_compiled_model_then_compiling_its_blocks_is_advised(
    installation: Installation,
    in_backward: bool,
) -> None:
    def run(x: torch.Tensor, weight: torch.Tensor) -> torch.Tensor:
        for _ in range(8):
            x = (x @ weight).tanh()
        return x.sum()

    torch._dynamo.reset()
    compiled = torch.compile(run, backend="aot_eager", fullgraph=True)
    weight = torch.ones(512, 512, requires_grad=True)  # 1 MiB, as is each of 8 that are saved
    x = torch.ones(512, 512)
    compiled(x, weight).backward()
    weight.grad = None
    done: list[torch.Tensor] = []

    def work() -> None:
        done.append(compiled(x, weight))
        done.pop().backward()
        done.append(x)

    # Forward takes 9 MiB at most, and backward 10.
    with swapkit.budget(
        limit_above_reserved(installation, (19 if in_backward else 10) * MIB // 2),
        policy="rescue",
    ):
        text = failure_of(work)
        assert "inside a compiled graph" in text
        assert "block.compile()" in text
        assert "activation_memory_budget" in text
        assert ("CompiledFunctionBackward" in text) is in_backward
        assert "compiled graph" not in failure_of(lambda: torch.ones(4 * MIB))
    assert done == []
    torch._dynamo.reset()
