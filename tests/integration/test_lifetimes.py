"""Lifetimes without a session: a plain training loop lies at planned addresses."""

from __future__ import annotations

import os
from typing import TYPE_CHECKING

import numpy as np
import pytest
import torch

import swapkit
from swapkit._native.layout import TAG_BACKWARD, TAG_OPTIMIZER, Lives, LivesMode
from swapkit._runtime.allocators.lifetimes import process_lifetimes
from swapkit.errors import InvalidArgument
from swapkit.planning.layout.steps import LIFE
from tests.support import MIB, limit_above_reserved, run_python
from tests.support.sessions import Training, make_training, step_in_backward, train_plainly
from tests.support.threads import on_thread, on_threads

if TYPE_CHECKING:
    from collections.abc import Iterator

    from swapkit._native.layout import LayoutStats
    from swapkit._runtime.allocators.installed_pool import Installation

pytestmark = pytest.mark.promise("E3")
STEPS = 10  # of which the first ones have no layout
PLANNED = 6  # from here on steps lie as planned

MAIN = f"""
import argparse, torch, swapkit
from swapkit._runtime.allocators.installation import require_installation
from swapkit.planning.beside import at_once
from tests.support.sessions import make_training

def train(after=lambda step: None):
    training = make_training()
    for step in range({STEPS}):
        training.step()
        after(step)
    return training.outcome()

def watch(step):
    if step == {PLANNED - 1}:
        require_installation().pool.reset_peak()

def flags(*names):
    parser = swapkit.add_arguments(argparse.ArgumentParser())
    return swapkit.from_arguments(parser.parse_args(list(names)))
"""
WAYS = {
    "argument": 'swapkit.install(device="cpu", lifetimes=True)',
    "variable": 'swapkit.install(device="cpu")',
    "later": 'swapkit.install(device="cpu"); swapkit.install("1GiB", lifetimes=True)',
    "flag": 'flags("--memory-fragmentation").install(device="cpu")',
}


@pytest.mark.promise("E5")
@pytest.mark.parametrize("way", WAYS)
def test_training_when_lifetimes_are_asked_for_then_it_lies_as_planned_with_the_same_bits(
    way: str,
) -> None:
    code = f"""{MAIN}
plain = train()
{WAYS[way]}
with at_once():
    outcome = train(watch)
layout, pool = require_installation().layout.stats(), require_installation().pool.stats()
reserved, live = (pool[f"{{name}}_bytes.all.peak"] for name in ("reserved", "allocated"))
print(outcome == plain, layout.hit_share > 0.99, reserved <= 1.02 * live)
"""
    assert run_python(code, MEMORY_FRAGMENTATION=str(int(way == "variable"))) == "True True True\n"


@pytest.mark.promise("E5")
@pytest.mark.parametrize(
    ("asks", "variable"), [("", "0"), ("lifetimes=False", "1"), ("lifetimes=None", "0")]
)
def test_training_when_lifetimes_are_not_asked_for_then_nothing_is_noted(
    asks: str, variable: str
) -> None:
    code = f"""{MAIN}
from swapkit._native.layout import Lives
swapkit.install(device="cpu", {asks})
train()
installation = require_installation()
print(installation.layout.stats().height_bytes, len(Lives(installation.pool).read()[0]))
"""
    assert run_python(code, MEMORY_FRAGMENTATION=variable) == "0 0\n"


@pytest.mark.parametrize("value", [1, "yes"])
def test_install_when_lifetimes_is_no_truth_value_then_it_is_refused(value: object) -> None:
    with pytest.raises(InvalidArgument, match=r"lifetimes=.*: expected True, False or None"):
        swapkit.install(device="cpu", lifetimes=value)  # type: ignore[arg-type]


# ---- in this process -----------------------------------------------------------------------------


@pytest.fixture
def lifetimes(installation: Installation) -> Iterator[Installation]:
    """The pool below torch, with lifetimes."""
    swapkit.install(device="cpu", lifetimes=True)
    yield installation
    process_lifetimes.forget()


def layout_of(installation: Installation) -> LayoutStats:
    assert installation.layout is not None
    return installation.layout.stats()


def steps_of(installation: Installation) -> int:
    """Return how many steps have ended, as the pool counts them."""
    return Lives(installation.pool).read()[1].step


def lies_as_planned(installation: Installation, training: Training, within: int = 12) -> bool:
    """Train until a step lies as planned."""
    for _ in range(within):
        before = layout_of(installation)
        training.step()
        after = layout_of(installation)
        if after.hit_bytes - before.hit_bytes > 0.9 * (after.served_bytes - before.served_bytes):
            return after.hit_bytes > 0
    return False


def test_lives_when_no_session_tags_them_then_their_phases_are_those_of_the_step(
    lifetimes: Installation,
) -> None:
    training = make_training()
    for _ in range(3):
        training.step()
    buffer, times = Lives(lifetimes.pool).read()
    lives = np.frombuffer(buffer, LIFE)
    lives = lives[lives["step"][:, 0] == times.step - 1]
    found = {(int(each["phase"]), int(each["tag"]) & TAG_BACKWARD != 0) for each in lives}
    assert found == {(0, False), (1, True), (2, False)}
    in_optimizer = (lives["tag"] & TAG_OPTIMIZER) != 0
    assert set(lives["phase"][in_optimizer]) == {2}


@pytest.mark.parametrize("microbatches", [1, 3])
def test_step_when_gradients_accumulate_then_it_ends_once(
    microbatches: int, lifetimes: Installation
) -> None:
    training = make_training()
    training.microbatches = microbatches
    before = steps_of(lifetimes)
    assert lies_as_planned(lifetimes, training)
    assert steps_of(lifetimes) - before == training.steps_done


def test_step_when_it_has_several_optimizers_then_it_ends_after_the_last(
    lifetimes: Installation,
) -> None:
    training = make_training()
    halves = list(training.model.parameters())
    optimizers = [torch.optim.SGD(halves[at::2], lr=0.1) for at in (0, 1)]
    training.optimizer = None
    before = steps_of(lifetimes)
    for _ in range(4):
        training.step()
        for optimizer in optimizers:
            optimizer.step()
    assert steps_of(lifetimes) - before in {4, 5}  # the second one is not known at first


def test_step_when_optimizers_step_in_backward_then_it_ends_with_the_pass(
    lifetimes: Installation,
) -> None:
    training = make_training()
    training.optimizer = None
    optimizers = step_in_backward(training.model)
    before = steps_of(lifetimes)
    assert lies_as_planned(lifetimes, training)
    assert steps_of(lifetimes) - before == training.steps_done
    assert optimizers


def train_alone() -> list[str]:
    """Train a model that starts from the same numbers on each thread; return its losses."""
    model = torch.nn.Sequential(torch.nn.Linear(64, 256), torch.nn.Tanh(), torch.nn.Linear(256, 64))
    with torch.no_grad():
        for each in model.parameters():
            each.copy_(torch.linspace(-0.1, 0.1, each.numel()).view_as(each))
    optimizer = torch.optim.AdamW(model.parameters())
    x = torch.linspace(-1, 1, 64 * 32).reshape(32, 64)
    losses = []
    for _ in range(2 * STEPS):
        loss = model(x).square().mean()
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        losses.append(loss.item().hex())
    return losses


def test_training_when_two_threads_train_then_steps_end_for_both_with_the_same_bits(
    installation: Installation,
) -> None:
    plain = on_thread(train_alone)
    swapkit.install(device="cpu", lifetimes=True)
    assert on_threads(train_alone, train_alone) == [plain, plain]
    assert steps_of(installation) > 0
    installation.pool.check()
    process_lifetimes.forget()


# ---- sessions ------------------------------------------------------------------------------------


@pytest.mark.usefixtures("steady_machine")
def test_session_when_lifetimes_are_on_then_steps_end_once_and_plain_training_goes_on(
    lifetimes: Installation,
) -> None:
    plain = train_plainly(make_training, 4 * STEPS)
    training = make_training()
    before = steps_of(lifetimes)
    for _ in range(STEPS):
        training.step()
    with swapkit.budget(plain.budget(0.9), training.model, training.optimizer) as session:
        for _ in range(STEPS):
            training.step()
        assert session.stats.steps == STEPS
    assert steps_of(lifetimes) - before == 2 * STEPS
    assert lies_as_planned(lifetimes, training, within=2 * STEPS)
    while training.steps_done < 4 * STEPS:
        training.step()
    assert steps_of(lifetimes) - before == 4 * STEPS
    assert training.outcome() == plain.outcome


@pytest.mark.parametrize("has_lifetimes", [False, True])
def test_sessions_when_nested_then_a_step_ends_once_and_lies_as_planned(
    has_lifetimes: bool, installation: Installation
) -> None:
    swapkit.install(device="cpu", lifetimes=has_lifetimes)
    training = make_training()
    before = steps_of(installation)
    with (
        swapkit.budget("2GiB", policy="rescue") as outer,
        swapkit.budget("1GiB", training.model, training.optimizer, policy="rescue") as inner,
    ):
        assert lies_as_planned(installation, training)
        assert (outer.stats.steps, inner.stats.steps) == (training.steps_done,) * 2
        assert steps_of(installation) - before == training.steps_done
        inner.close()
        training.step()
        assert steps_of(installation) - before == training.steps_done
    process_lifetimes.forget()


# ---- the end -------------------------------------------------------------------------------------


def test_uninstall_when_lifetimes_were_on_then_all_is_as_before() -> None:
    code = f"""{MAIN}
from swapkit._native.layout import Lives
from swapkit._runtime.model import global_hooks
swapkit.install(device="cpu", lifetimes=True)
with at_once():
    train()
installation = require_installation()
print(installation.layout.stats().height_bytes > 0, len(global_hooks.steps.now))
swapkit.uninstall()
print(installation.layout.stats().height_bytes, len(global_hooks.steps.now))
print(len(Lives(installation.pool).read()[0]))
swapkit.install(device="cpu")
train()
print(installation.layout.stats().height_bytes, len(global_hooks.steps.now))
"""
    assert run_python(code) == "True 1\n0 0\n0\n0 0\n"


def test_lifetimes_when_switched_off_then_sessions_keep_theirs(lifetimes: Installation) -> None:
    assert lifetimes.layout is not None
    with swapkit.budget("1GiB", policy="rescue"):
        assert set(lifetimes.layout._users.values()) == {LivesMode.NOTED, LivesMode.SEPARATE}
        swapkit.install(device="cpu", lifetimes=False)
        assert set(lifetimes.layout._users.values()) == {LivesMode.NOTED}
    assert not lifetimes.layout._users


def test_fork_when_a_child_trains_then_it_ends_well_and_the_parent_goes_on(
    lifetimes: Installation,
) -> None:
    training = make_training()
    assert lies_as_planned(lifetimes, training)
    child = os.fork()
    if child == 0:
        status = 9
        try:
            for _ in range(3):
                training.step()
            swapkit.uninstall()
            status = 0
        finally:
            os._exit(status)
    assert os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) == 0
    assert lies_as_planned(lifetimes, training, within=1)


# ---- advice --------------------------------------------------------------------------------------


@pytest.mark.promise("F14")
@pytest.mark.parametrize("has_lifetimes", [False, True])
def test_error_when_free_memory_is_scattered_then_it_names_lifetimes(
    has_lifetimes: bool, installation: Installation, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("swapkit._runtime.allocators.memory_holders.SCATTERED_BYTES", MIB)
    limit = limit_above_reserved(installation, 8 * MIB)
    swapkit.install(limit, device="cpu", lifetimes=has_lifetimes)
    halves_of_pages = [torch.empty(2048, dtype=torch.uint8) for _ in range(6 * MIB // 2048)]
    del halves_of_pages[::2]
    with pytest.raises(torch.OutOfMemoryError) as raised:
        torch.empty(4 * MIB, dtype=torch.uint8)
    is_named = "call swapkit.install(lifetimes=True), or set MEMORY_FRAG" in str(raised.value)
    assert is_named is not has_lifetimes
    process_lifetimes.forget()
    swapkit.install(device="cpu")


@pytest.mark.promise("F14")
def test_explain_when_the_peak_was_scattered_then_it_names_lifetimes(
    installation: Installation, monkeypatch: pytest.MonkeyPatch
) -> None:
    reserved_bytes = limit_above_reserved(installation, 0)
    left_bytes = reserved_bytes - installation.pool.in_use_bytes()  # by other tests
    scattered_bytes = left_bytes + MIB
    monkeypatch.setattr(
        "swapkit._runtime.allocators.memory_holders.SCATTERED_BYTES", scattered_bytes
    )
    swapkit.reset_peak_memory_stats()
    with swapkit.budget("1GiB", policy="rescue") as session:
        assert "lifetimes=True" not in session.explain()
        tensors = [torch.empty(2048, dtype=torch.uint8) for _ in range(6 * MIB // 2048)]
        del tensors[::2]
        swapkit.reset_peak_memory_stats()
        large = torch.empty(2 * MIB, dtype=torch.uint8)
        assert "at the peak: call swapkit.install(lifetimes=True), or set" in session.explain()
        del large, tensors
    process_lifetimes.forget()
