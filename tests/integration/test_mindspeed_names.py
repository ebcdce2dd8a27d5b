"""MindSpeed's names over swapkit: same bits as plain training, and memory that moves."""

from __future__ import annotations

import threading
import time
from typing import TYPE_CHECKING, Any

import pytest
import torch
from torch import nn

import swapkit
from swapkit._runtime.allocators.installation import require_installation
from swapkit._runtime.process.runtime import get_runtime
from swapkit.compat import mindspeed
from swapkit.compat.mindspeed.fsdp_memory import (
    AdamWSwap,
    TensorSwapContext,
    recompute_modules,
    swap_activation_modules,
)
from swapkit.compat.mindspeed.swap_manager import start_swap_manager
from swapkit.errors import InvalidArgument, SavedTensorModified, SessionError
from swapkit.testing import planning_at_once
from tests.support.offloading import is_on_device
from tests.support.sessions import LAYERS, Plain, Training, make_training, train_plainly
from tests.support.threads import on_threads

if TYPE_CHECKING:
    from collections.abc import Callable

    from swapkit._runtime.saved.device import Counters

STEPS = 8
LARGE = 200_000  # bytes; of a block's saved tensors, some are larger and some are not


pytestmark = pytest.mark.usefixtures("installation")


@pytest.fixture(scope="module")
def plain() -> Plain:
    swapkit.install()
    return train_plainly(make_training, STEPS)


# ---- modules by pattern --------------------------------------------------------------------------


def run_twice(choose: Callable[[nn.Module], object]) -> list[str]:
    training = make_training()
    choose(training.model)
    for _ in range(2):
        training.step()
    return training.outcome()


@pytest.fixture(scope="module")
def two_steps() -> list[str]:
    swapkit.install()
    return run_twice(lambda _: None)


def counted(run: Callable[[], object]) -> Counters:
    """Return what swapkit did outside of any session while a function ran."""
    swapper = get_runtime().current_swapper()
    before = swapper.counters()
    run()
    return swapper.counters() - before


def test_swapped_modules_when_named_then_same_bits_and_their_activations_move(
    two_steps: list[str],
) -> None:
    outcome: list[str] = []
    chosen = []

    def choose(model: nn.Module) -> None:
        chosen.append(swap_activation_modules(model, ["{0-1}", "{3-9}.up"]))

    counters = counted(lambda: outcome.extend(run_twice(choose)))
    assert outcome == two_steps
    assert counters.copied_out_bytes >= counters.copied_in_bytes > 0
    assert counters.recomputed == 0
    names = [each.where for each in swapkit.choices(chosen[0]) if each.holds]
    assert names == ["0", "1", "3.up", "4.up"]


def test_recomputed_modules_when_named_then_same_bits_and_they_run_again(
    two_steps: list[str],
) -> None:
    outcome: list[str] = []
    choose = lambda model: recompute_modules(model, ["{*}"])  # noqa: E731
    counters = counted(lambda: outcome.extend(run_twice(choose)))
    assert outcome == two_steps
    assert counters.recomputed >= 2 * LAYERS
    assert counters.copied_out_bytes == 0


@pytest.mark.parametrize("is_swap_first", [True, False])
def test_modules_when_swapped_and_recomputed_then_their_inputs_move(
    two_steps: list[str], *, is_swap_first: bool
) -> None:
    outcome: list[str] = []
    choices = [swap_activation_modules, recompute_modules]

    def choose(model: nn.Module) -> None:
        for each in choices if is_swap_first else choices[::-1]:
            each(model, ["?"])

    counters = counted(lambda: outcome.extend(run_twice(choose)))
    assert outcome == two_steps
    assert counters.recomputed >= 2 * LAYERS
    assert counters.copied_out_bytes > 0


# ---- AdamWSwap -----------------------------------------------------------------------------------


@pytest.mark.parametrize("amsgrad", [False, True])
def test_adamw_when_it_steps_then_as_torchs_and_states_are_on_the_host(*, amsgrad: bool) -> None:
    def run(kind: type[torch.optim.AdamW], **options: Any) -> Training:
        training = make_training()
        training.optimizer = kind(training.model.parameters(), lr=1e-3, amsgrad=amsgrad, **options)
        for _ in range(3):
            training.step()
        return training

    theirs = run(torch.optim.AdamW)
    ours = run(AdamWSwap, mem_fraction_static=0.5, state_keys=["exp_avg"])
    assert ours.outcome() == theirs.outcome()
    assert ours.optimizer is not None
    assert theirs.optimizer is not None
    states = zip(ours.optimizer.state.values(), theirs.optimizer.state.values(), strict=True)
    for own, other in states:
        assert own.keys() == other.keys()
        assert len(own) == 4 if amsgrad else 3
        assert all(torch.equal(own[name], other[name]) for name in own)
        for name in own.keys() - {"step"}:
            is_large = own[name].nbytes >= 1024
            assert is_on_device(require_installation(), own[name]) is not is_large


@pytest.mark.parametrize(
    ("options", "text"),
    [
        ({"mem_fraction_static": 0}, "mem_fraction_static=0: expected a number above 0"),
        ({"mem_fraction_static": 1.5}, "mem_fraction_static=1.5"),
        ({"state_keys": ["exp_avg", "x"]}, "state_keys names x; the states of AdamW are exp_avg,"),
    ],
)
def test_adamw_when_an_argument_is_wrong_then_the_error_names_it(
    options: dict[str, Any], text: str
) -> None:
    with pytest.raises(InvalidArgument, match=text):
        AdamWSwap(nn.Linear(1, 1).parameters(), **options)


def test_adamw_when_a_fraction_is_given_then_the_log_says_that_it_has_no_effect(
    caplog: pytest.LogCaptureFixture,
) -> None:
    AdamWSwap(nn.Linear(1, 1).parameters())
    assert "mem_fraction_static" not in caplog.text
    AdamWSwap(nn.Linear(1, 1).parameters(), mem_fraction_static=0.9)
    assert "mem_fraction_static=0.9 has no effect" in caplog.text


# ---- TensorSwapContext ---------------------------------------------------------------------------


def run_layers(context: TensorSwapContext | None) -> tuple[torch.Tensor, ...]:
    torch.manual_seed(0)
    first = torch.randn(64, 64, requires_grad=True)
    hidden = first * 2
    layer = nn.Linear(64, 64)
    with context or TensorSwapContext(custom_check_fn=lambda _: False):
        loss = (layer(hidden).exp().sin() * hidden).sum()
    loss.backward()
    assert first.grad is not None
    assert layer.weight.grad is not None
    return loss.detach(), first.grad, layer.weight.grad


@pytest.mark.parametrize("prefetch", [True, False])
def test_context_when_entered_then_same_bits_and_saved_tensors_move(*, prefetch: bool) -> None:
    expected = run_layers(None)
    found: list[torch.Tensor] = []
    context = TensorSwapContext("layer.*", prefetch=prefetch)
    for _ in range(2):
        found.clear()
        counters = counted(lambda: found.extend(run_layers(context)))
        assert all(map(torch.equal, expected, found))
        assert counters.copied_out_bytes >= counters.copied_in_bytes > 0


def test_context_when_a_function_picks_then_only_what_it_picks_moves() -> None:
    expected = run_layers(None)
    sizes: list[int] = []

    def is_first(tensor: torch.Tensor) -> bool:
        sizes.append(tensor.nbytes)
        return len(sizes) == 1

    found: list[torch.Tensor] = []
    context = TensorSwapContext(custom_check_fn=is_first)
    counters = counted(lambda: found.extend(run_layers(context)))
    assert all(map(torch.equal, expected, found))
    assert counters.copied_out_bytes == sizes[0] == 64 * 64 * 4
    assert len(sizes) > 2
    context.set_custom_check_fn(lambda _: False)
    assert counted(lambda: run_layers(context)).copied_out_bytes == 0


def test_context_when_a_tensor_that_stays_is_changed_then_the_error_of_torch() -> None:
    first = torch.randn(64, 64, requires_grad=True)
    with TensorSwapContext(custom_check_fn=lambda _: False):
        middle = first.exp()
        loss = middle.sin().sum()
    with torch.no_grad():
        middle.add_(1)
    with pytest.raises(SavedTensorModified):
        loss.backward()


@pytest.mark.usefixtures("steady_machine")
def test_context_when_inside_a_session_then_same_bits_and_a_plan_is_found(
    plain: Plain,
) -> None:
    training = make_training()
    context = TensorSwapContext(
        custom_check_fn=lambda tensor: tensor.untyped_storage().nbytes() > LARGE
    )
    forward = training.model[0].forward  # type: ignore[index]

    def in_context(x: torch.Tensor) -> torch.Tensor:
        with context:
            result: torch.Tensor = forward(x)
        return result

    training.model[0].forward = in_context  # type: ignore[index]
    limit = plain.budget(0.8)
    with (
        planning_at_once(),
        swapkit.budget(limit, training.model, training.optimizer, policy="swap") as session,
    ):
        for _ in range(STEPS):
            training.step()
        assert session.stage == "stable"
        assert session.stats.swapped_out_bytes > 0
    assert training.outcome() == plain.outcome


def test_context_when_hooks_of_others_are_around_then_these_see_all_tensors() -> None:
    expected = run_layers(None)
    seen = []

    def pack(tensor: torch.Tensor) -> torch.Tensor:
        seen.append(tensor.shape)
        return tensor

    context = TensorSwapContext(custom_check_fn=lambda tensor: tensor.dim() == 2)
    with torch.autograd.graph.saved_tensors_hooks(pack, lambda packed: packed):
        found = run_layers(context)
    assert all(map(torch.equal, expected, found))
    assert len(seen) > 3


def test_contexts_when_made_then_numbered_by_tag() -> None:
    first, other, second = (TensorSwapContext(tag) for tag in ("tag.*", "other.*", "tag.*"))
    assert (first.layer_idx, second.layer_idx, other.layer_idx) == (0, 1, 0)
    assert (first.layer_nums, other.layer_nums) == (2, 1)
    with pytest.raises(InvalidArgument, match="custom_check_fn=3: expected a function"):
        first.set_custom_check_fn(3)  # type: ignore[arg-type]


class SlowTag(str):
    """A tag whose look-up lets other threads run."""

    __slots__ = ()

    def __hash__(self) -> int:
        time.sleep(1e-3)
        return super().__hash__()

    __eq__ = str.__eq__


def test_contexts_when_threads_make_them_then_each_has_a_number_of_its_own() -> None:
    tag = SlowTag("tag of threads.*")
    contexts = on_threads(*[lambda: TensorSwapContext(tag)] * 8)
    assert sorted(context.layer_idx for context in contexts) == list(range(8))
    assert contexts[0].layer_nums == 8


def test_context_when_left_on_another_thread_then_refused() -> None:
    context = TensorSwapContext()
    errors: list[BaseException] = []

    def leave() -> None:
        try:
            context.__exit__(None, None, None)
        except SessionError as error:
            errors.append(error)

    with context:
        thread = threading.Thread(target=leave)
        thread.start()
        thread.join()
    assert len(errors) == 1
    assert "must end on the thread on which it began" in str(errors[0])


def test_names_when_read_from_the_package_then_these() -> None:
    assert mindspeed.SwapManager is start_swap_manager
    assert mindspeed.TensorSwapContext is TensorSwapContext
