"""MindSpeed's SwapManager over swapkit: a session that obeys `swap_policy_config`."""

from __future__ import annotations

import argparse
import copy
import gc
import weakref
from typing import TYPE_CHECKING, Any

import pytest
import torch
from torch import nn

import swapkit
from swapkit._runtime.allocators.installation import require_installation
from swapkit.compat.mindspeed.swap_manager import StepSession, start_swap_manager
from swapkit.config.smart_swap import SwapPolicyConfig, SwapPolicyPref
from swapkit.errors import InvalidArgument, SessionError
from swapkit.testing import planning_at_once
from tests.support.offloading import is_on_device
from tests.support.sessions import LAYERS, Plain, Training, make_training, train_plainly

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator

    from swapkit.compat.mindspeed.swap_policy import SwapPolicy

STEPS = 8


@pytest.fixture(autouse=True)
def settings() -> Iterator[SwapPolicyConfig]:
    """The object that scripts edit, as it was afterwards; no SwapManager survives a test."""
    namespace: dict[str, Any] = {}
    exec("from swapkit.compat.mindspeed import swap_policy_config", namespace)
    own: SwapPolicyConfig = namespace["swap_policy_config"]
    former = {name: copy.copy(value) for name, value in vars(own).items()}
    swapkit.install()
    yield own
    vars(own).clear()
    vars(own).update(former)
    for session in swapkit.sessions():
        session.close()


@pytest.fixture(scope="module")
def plain() -> Plain:
    swapkit.install()
    return train_plainly(make_training, STEPS)


def train_managed(
    training: Training, custom: Callable[[SwapPolicy], object] | None = None
) -> StepSession:
    """Train as the original's adapter does: ask for the manager in each step."""
    with planning_at_once():
        for _ in range(STEPS):
            manager = start_swap_manager(
                lambda: 1,
                [training.model],
                LAYERS,
                optimizer=training.optimizer,
                custom_policy_fcn=custom,
            )
            training.step()
            manager.step()
    return manager


@pytest.mark.promise("F1")
@pytest.mark.usefixtures("steady_machine")
def test_swap_manager_when_the_configuration_has_a_target_then_the_same_bits_in_less_memory(
    plain: Plain, settings: SwapPolicyConfig
) -> None:
    settings.target_mode = True
    settings.target_memory = plain.budget(0.7)
    training = make_training()
    manager = train_managed(training)
    stats = manager.session.stats
    assert training.outcome() == plain.outcome
    assert stats.budget_bytes == plain.budget(0.7) >= stats.peak_bytes
    assert stats.swapped_out_bytes > 0
    assert stats.recomputed_regions == 0
    assert stats.steps == STEPS
    manager.close()
    assert not manager.session.is_active


@pytest.mark.promise("F1")
@pytest.mark.usefixtures("steady_machine")
def test_flag_when_given_after_the_imported_object_was_edited_then_the_session_obeys(
    plain: Plain, settings: SwapPolicyConfig
) -> None:
    parsed = swapkit.add_arguments(argparse.ArgumentParser()).parse_args(["--smart-swap"])
    settings.swap_bucket_size = 0
    training = make_training()
    with (
        planning_at_once(),
        swapkit.from_arguments(parsed).budget(training.model, training.optimizer) as session,
    ):
        for _ in range(STEPS):
            training.step()
        assert session.stats.swapped_out_bytes == 0
    settings.swap_bucket_size, settings.tensor_size_filter = 1 << 20, 1024
    with (
        planning_at_once(),
        swapkit.from_arguments(parsed).budget(training.model, training.optimizer) as session,
    ):
        for _ in range(STEPS):
            training.step()
        assert session.stats.swapped_out_bytes > 0
    ends = 2 * STEPS  # a loss and the gradients of each step
    assert training.results[:ends] == plain.outcome[:ends]


@pytest.mark.usefixtures("steady_machine")
def test_swap_manager_when_a_custom_policy_keeps_everything_then_the_session_follows_it(
    plain: Plain, settings: SwapPolicyConfig
) -> None:
    settings.reduction_memory = plain.peak_bytes // 4
    settings.tensor_size_filter = 1024
    counts = []

    def keep_all(policy: SwapPolicy) -> None:
        counts.append(len(policy.get_candidates()))
        assert policy.get_profiler_data().length > 0
        policy.set_candidates([])

    training = make_training()
    manager = train_managed(training, keep_all)
    assert counts
    assert min(counts) > 0
    assert manager.session.stage == "stable"
    assert manager.session.stats.swapped_out_bytes == 0
    assert training.outcome() == plain.outcome
    manager.close()
    training = make_training()
    manager = train_managed(training, lambda _: None)  # the planner's plan
    assert manager.session.stats.swapped_out_bytes > 0
    assert training.outcome() == plain.outcome
    manager.close()


def test_swap_manager_when_memory_is_to_be_saved_then_optimizer_states_leave(
    plain: Plain, settings: SwapPolicyConfig
) -> None:
    settings.policy_pref = SwapPolicyPref.BETTER_MEMORY_SAVING
    for _ in range(2):  # the second manager finds the states offloaded
        training = make_training()
        manager = train_managed(training)
        assert training.outcome() == plain.outcome
        assert training.optimizer is not None
        moments = [state["exp_avg"] for state in training.optimizer.state.values()]
        large = [each for each in moments if each.nbytes >= 1024]
        assert large
        assert not any(is_on_device(require_installation(), each) for each in large)
        manager.close()
        start_swap_manager(lambda: 1, training.model, LAYERS, optimizer=training.optimizer).close()


def test_swap_manager_when_one_runs_then_it_is_returned_again_and_serves_one_model() -> None:
    model = nn.Linear(4, 4)
    manager = start_swap_manager(lambda: 1, model, -1)
    assert start_swap_manager(lambda: 2, (model,), 1) is manager
    with pytest.raises(SessionError, match=r"other models runs: call its close\(\)"):
        start_swap_manager(lambda: 1, nn.Linear(4, 4), 1)
    manager.close()
    other = start_swap_manager(lambda: 1, [nn.Linear(4, 4), nn.Linear(4, 4)], 1)
    assert other is not manager
    other.close()
    with pytest.raises(SessionError):
        other.step()


def test_swap_manager_when_closed_then_it_holds_no_model_and_no_optimizer(
    settings: SwapPolicyConfig,
) -> None:
    settings.policy_pref = SwapPolicyPref.BETTER_MEMORY_SAVING
    model = nn.Linear(64, 64)
    optimizer = torch.optim.Adam(model.parameters())
    manager = start_swap_manager(
        lambda: 1, model, -1, optimizer=optimizer, custom_policy_fcn=lambda _: None
    )
    model(torch.ones(4, 64)).sum().backward()
    optimizer.step()
    manager.step()
    manager.close()
    manager.close()
    of_model, of_optimizer = weakref.ref(model), weakref.ref(optimizer)
    of_session = weakref.ref(manager.session)
    del model, optimizer
    gc.collect()
    assert of_model() is None
    assert of_optimizer() is None
    del manager
    gc.collect()
    assert of_session() is None


def test_swap_manager_when_the_session_does_not_start_then_the_states_are_back(
    settings: SwapPolicyConfig, monkeypatch: pytest.MonkeyPatch
) -> None:
    settings.policy_pref = SwapPolicyPref.BETTER_MEMORY_SAVING
    layers = [nn.Linear(64, 64), nn.Linear(64, 64)]
    optimizers = [torch.optim.Adam(each.parameters()) for each in layers]
    for layer, optimizer in zip(layers, optimizers, strict=True):
        layer(torch.ones(4, 64)).sum().backward()
        optimizer.step()
    swapkit.offload(optimizers[0])

    def refuse(_session: object) -> None:
        raise SessionError("no session now")

    monkeypatch.setattr(type(swapkit.budget(1 << 40)), "__enter__", refuse)
    with pytest.raises(SessionError, match="no session now"):
        start_swap_manager(lambda: 1, layers[1], 1, optimizer=optimizers)
    moments = [
        optimizer.state[layer.weight]["exp_avg"]
        for layer, optimizer in zip(layers, optimizers, strict=True)
    ]
    device = require_installation()
    assert [is_on_device(device, each) for each in moments] == [False, True]


def test_swap_manager_when_the_optimizer_is_chained_then_its_members_are_found(
    settings: SwapPolicyConfig,
) -> None:
    settings.policy_pref = SwapPolicyPref.BETTER_MEMORY_SAVING

    class Wrapper:
        def __init__(self, optimizer: torch.optim.Optimizer) -> None:
            self.optimizer = optimizer

    class Chained:
        def __init__(self, members: list[Wrapper]) -> None:
            self.chained_optimizers = members

    layers = [nn.Linear(64, 64), nn.Linear(64, 64)]
    optimizers = [torch.optim.Adam(each.parameters()) for each in layers]
    manager = start_swap_manager(
        lambda: 1, layers, 2, optimizer=Chained([Wrapper(each) for each in optimizers])
    )
    for layer, optimizer in zip(layers, optimizers, strict=True):
        layer(torch.ones(4, 64)).sum().backward()
        optimizer.step()
        moment = optimizer.state[layer.weight]["exp_avg"]
        assert not is_on_device(require_installation(), moment)
    manager.close()


@pytest.mark.parametrize(
    ("arguments", "text"),
    [
        ({"num_layers": 0}, "num_layers=0: expected a number above 0, or -1"),
        ({"num_layers": 2.0}, "num_layers=2.0"),
        ({"num_layers": True}, "num_layers=True"),
        ({"models": []}, r"models=\[\]: expected a Module"),
        ({"models": 3}, "models=3"),
        ({"num_micro_batch_fcn": 1}, "num_micro_batch_fcn=1: expected a function"),
        ({"custom_policy_fcn": 1}, "1: expected a function or None"),
        ({"optimizer": 3}, "optimizer=3: expected a torch.optim.Optimizer"),
    ],
)
def test_swap_manager_when_an_argument_is_wrong_then_the_error_names_it(
    arguments: dict[str, Any], text: str
) -> None:
    given = {"num_micro_batch_fcn": int, "models": nn.Linear(1, 1), "num_layers": 1, **arguments}
    with pytest.raises(InvalidArgument, match=text):
        start_swap_manager(**given)
    assert swapkit.sessions() == ()
