"""What sessions say when a step does not fit, and of steps that differ."""

from __future__ import annotations

import functools
import gc
import re
from typing import TYPE_CHECKING

import pytest
import torch
from torch.utils.checkpoint import checkpoint

import swapkit
from swapkit.errors import OverBudget
from swapkit.units import format_bytes
from tests.support import MIB, installed, limit_above_reserved
from tests.support.sessions import make_training, train_plainly

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator

    from swapkit._runtime.allocators.installed_pool import Installation
    from swapkit._runtime.session.session import Session


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
        assert find_size(text) >= needed_bytes


@pytest.mark.promise("F19")
def test_host_memory_when_eight_ranks_share_the_machine_then_texts_give_it_for_one_and_for_all(
    installation: Installation, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("LOCAL_WORLD_SIZE", "8")
    limit_bytes = limit_above_reserved(installation, 8 * MIB)
    weight = torch.ones(MIB // 4, requires_grad=True)
    with swapkit.budget(limit_bytes, policy="rescue", host_limit=2 * MIB) as session:
        total = [(weight * each).square() for each in range(1, 4)]
        text = failure_of(lambda: torch.ones(limit_bytes // 4))
        assert "than 2.00 MiB per rank, 16.00 MiB for the 8 ranks of this machine" in text
        (one, whole) = re.findall(r"host_limit, e.g. to (\d+)MiB per rank \((\S+) MiB", text)[0]
        assert 8 * (int(one) - 1) < float(whole) <= 8 * int(one)
        del total
    taken = session.stats.host_peak_bytes
    assert 0 < taken <= 2 * MIB
    shown = f"{format_bytes(taken)} per rank, {format_bytes(8 * taken)} for the 8 ranks"
    assert f"host copies: {shown} of this machine at most" in session.explain()


def find_size(text: str) -> int:
    """Return the budget that an error names, in bytes."""
    (found,) = re.findall(r"a budget of at least (\d+)MiB", text)
    return int(found) * MIB


class WideHead(torch.nn.Module):
    """A body with small tensors, and a head whose results are the largest of the step."""

    def __init__(self) -> None:
        super().__init__()
        self.body = torch.nn.Sequential(
            *[torch.nn.Sequential(torch.nn.Linear(64, 64), torch.nn.GELU()) for _ in range(8)]
        )
        self.head = torch.nn.Linear(64, 1024)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        words = self.head(self.body(x))
        labels = torch.arange(len(x)) % words.shape[1]
        return torch.nn.functional.cross_entropy(words, labels)


MAKERS: dict[str, Callable[..., torch.optim.Optimizer]] = {
    "AdamW": torch.optim.AdamW,
    "SGD": functools.partial(torch.optim.SGD, lr=0.1, momentum=0.9),
    "foreach": functools.partial(torch.optim.RMSprop, foreach=True),
}


@pytest.mark.promise("F11")
@pytest.mark.promise("F22")
@pytest.mark.parametrize("is_warm", [False, True])
@pytest.mark.parametrize("policy", ["rescue", "recompute", "auto"])
@pytest.mark.parametrize("knows", [True, False])
@pytest.mark.parametrize("kind", [*MAKERS, ""])
def test_size_in_a_failure_when_taken_then_the_whole_step_fits(
    installation: Installation, kind: str, knows: bool, policy: str, is_warm: bool
) -> None:
    torch.manual_seed(0)
    model = WideHead()
    optimizer = MAKERS[kind](model.parameters()) if kind else None
    inputs = torch.randn(1024, 64)

    def step(session: Session | None = None) -> None:
        model(inputs).backward()
        if optimizer is not None:
            optimizer.step()
        elif session is not None:
            session.mark_step()
        model.zero_grad()

    installation.pool.reset_accumulated()  # what other tests did is no part of this one
    if is_warm:
        step()

    def train(limit_bytes: int) -> None:
        trained = (model, optimizer) if knows else (None, None)
        with swapkit.budget(limit_bytes, *trained, policy=policy) as session:
            for _ in range(5):
                step(session)
        assert session.stats.peak_bytes <= limit_bytes

    model.zero_grad()
    text = failure_of(lambda: train(limit_above_reserved(installation, 5 * MIB)))
    model.zero_grad()
    if kind != "foreach":  # its states are about as large as the gradients
        assert ("swapkit.offload(optimizer)" in text) is (kind == "AdamW")
    assert text.index("a budget of at least") < text.index("swapkit estimate")
    train(find_size(text))


@pytest.mark.promise("F20")
def test_failure_when_read_then_its_figures_are_those_of_the_pool(
    installation: Installation,
) -> None:
    limit_bytes = limit_above_reserved(installation, 8 * MIB)
    with swapkit.budget(limit_bytes, policy="rescue"):
        text = failure_of(lambda: torch.ones(limit_bytes // 2))
        stats = swapkit.memory_stats()
    names = ("allocated_bytes", "active_bytes", "reserved_bytes")
    shown = [format_bytes(stats[f"{name}.all.current"]) for name in names]
    free = format_bytes(limit_bytes - stats["reserved_bytes.all.current"])
    assert (
        f"Capacity {format_bytes(limit_bytes)}: allocated {shown[0]}, active {shown[1]}, "
        f"reserved {shown[2]}, free {free}."
    ) in text


@pytest.mark.usefixtures("installation")
def test_budget_when_below_what_is_in_use_then_the_error_names_one_for_the_step() -> None:
    kept = torch.ones(8 * MIB // 4)
    model = WideHead()
    optimizer = torch.optim.AdamW(model.parameters())
    with pytest.raises(OverBudget) as caught, swapkit.budget("4MiB", model, optimizer):
        raise AssertionError
    with swapkit.budget(find_size(str(caught.value)), model, optimizer):
        model(torch.randn(64, 64)).backward()
        optimizer.step()
    assert kept.numel()


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
        assert session._find_status().other_step_seconds == (
            medians[1],
        )  # the step before's, of its kind
        text = session.explain()
    assert session.stats.steps == steps
    assert medians[0] != medians[1]
    assert "steps of one other kind, with plans of their own: " in text


@pytest.mark.promise("F11")
@pytest.mark.filterwarnings("ignore:The .grad attribute of a Tensor:UserWarning")
@pytest.mark.parametrize("in_backward", [False, True])
def test_failure_when_inside_a_compiled_model_then_recomputation_there_is_advised(
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

    # With all saved tensors on the host, forward takes 2 MiB at most, and backward more than 5.
    with swapkit.budget(
        limit_above_reserved(installation, (6 if in_backward else 3) * MIB // 2), policy="rescue"
    ):
        text = failure_of(work)
        assert "inside a compiled graph" in text
        assert "activation_memory_budget" in text
        assert ("CompiledFunctionBackward" in text) is in_backward
        assert "compiled graph" not in failure_of(lambda: torch.ones(4 * MIB))
    assert done == []
    torch._dynamo.reset()
