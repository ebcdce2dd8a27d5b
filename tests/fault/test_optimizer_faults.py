"""Steps that fail, and memory that is out: no state of an optimizer is lost."""

from __future__ import annotations

import copy
import logging
from typing import TYPE_CHECKING

import pytest
import torch

from swapkit._runtime.optimizer.chunked_step import attach
from swapkit.errors import BackendError
from tests.support import MIB, limit_above_reserved
from tests.support.offloading import (
    STATE,
    Recorder,
    add_gradients,
    are_equal,
    make_adam,
    make_params,
    take_steps,
    values,
)

if TYPE_CHECKING:
    from swapkit._runtime.allocators.installed_pool import Installation


@pytest.fixture
def executor(installation: Installation) -> Recorder:
    return Recorder(installation)


@pytest.mark.parametrize("error", [BackendError, KeyboardInterrupt])
def test_step_when_the_nth_copy_fails_then_every_state_is_the_old_or_the_new_one(
    installation: Installation, error: type[BaseException]
) -> None:
    optimizer = make_adam()
    old = values(optimizer)
    take_steps(optimizer)
    new = values(optimizer)
    count = 0
    while True:
        executor = Recorder(installation)
        optimizer = make_adam()
        groups = optimizer.param_groups
        states = attach(optimizer, executor, chunk_bytes=2 * STATE)
        executor.fails_at = len(executor.asked) + count + 1
        executor.error = error
        try:
            take_steps(optimizer)
        except error:
            count += 1
        else:
            break
        found = values(optimizer)
        for each, before, after in zip(found, old, new, strict=True):
            assert torch.equal(each, before) or torch.equal(each, after)
        add_gradients(groups[0]["params"])
        optimizer.step()
        assert optimizer.param_groups is groups
        assert states.hosted_bytes == 8 * STATE
    assert count == 16


def test_step_when_a_closure_raises_then_the_next_step_is_as_usual(executor: Recorder) -> None:
    def closure() -> float:
        raise ZeroDivisionError

    optimizer, plain = make_adam(), make_adam()
    groups = optimizer.param_groups
    attach(optimizer, executor, chunk_bytes=STATE)
    with pytest.raises(ZeroDivisionError):
        optimizer.step(closure)
    assert type(copy.deepcopy(optimizer).param_groups) is list
    optimizer.state_dict()
    assert optimizer.param_groups is groups
    take_steps(optimizer)
    take_steps(plain)
    assert are_equal(values(optimizer), values(plain))


def test_step_when_it_raises_midway_then_states_are_as_torch_would_leave_them(
    executor: Recorder,
) -> None:
    results = []
    for is_offloaded in (False, True):
        optimizer = torch.optim.AdamW([{"params": [p]} for p in make_params(3)], foreach=False)
        take_steps(optimizer)
        if is_offloaded:
            attach(optimizer, executor)
        for group in optimizer.param_groups:
            add_gradients(group["params"])
        good = optimizer.param_groups[1]["betas"]
        optimizer.param_groups[1]["betas"] = None
        with pytest.raises(TypeError):
            optimizer.step()
        optimizer.param_groups[1]["betas"] = good
        results.append(values(optimizer))
        take_steps(optimizer)
        results.append(values(optimizer))
    assert are_equal(results[0], results[2])
    assert are_equal(results[1], results[3])


def test_step_when_its_error_is_kept_then_what_was_fetched_ahead_is_free(
    installation: Installation, executor: Recorder
) -> None:
    optimizer = torch.optim.AdamW([{"params": [p]} for p in make_params(3)], foreach=False)
    take_steps(optimizer)
    attach(optimizer, executor)
    for group in optimizer.param_groups:
        add_gradients(group["params"])
    optimizer.param_groups[0]["betas"] = None
    before = installation.pool.in_use_bytes()
    with pytest.raises(TypeError) as caught:
        optimizer.step()
    executor.scheduler.drain()  # it keeps both ends of a copy that is under way
    assert installation.pool.in_use_bytes() - before == 2 * STATE  # of the group that failed
    del caught


def test_step_when_the_host_is_full_then_states_stay_on_the_device_with_one_warning(
    installation: Installation, caplog: pytest.LogCaptureFixture
) -> None:
    executor = Recorder(installation, host_limit_bytes=2 * MIB)
    size = MIB // 2
    optimizer = torch.optim.AdamW(make_params(4, nbytes=size))
    plain = torch.optim.AdamW(make_params(4, nbytes=size))
    with caplog.at_level(logging.WARNING):
        states = attach(optimizer, executor, chunk_bytes=MIB)
        take_steps(optimizer, 3)
    take_steps(plain, 3)
    assert are_equal(values(optimizer), values(plain))
    assert 0 < states.hosted_bytes <= 2 * MIB
    assert len(caplog.records) == 1
    assert "host_limit" in caplog.text


def test_step_when_the_device_has_room_for_one_chunk_only_then_it_succeeds(
    installation: Installation, executor: Recorder
) -> None:
    size = 2 * MIB
    optimizer = torch.optim.AdamW(make_params(4, nbytes=size), fused=True)
    plain = torch.optim.AdamW(make_params(4, nbytes=size), fused=True)
    for each in (optimizer, plain):
        take_steps(each)
        add_gradients(each.param_groups[0]["params"])
    plain.step()
    attach(optimizer, executor, chunk_bytes=2 * size)
    limit_bytes = limit_above_reserved(installation, 2 * size + size // 2)
    installation.pool.set_budget(limit_bytes)
    try:
        optimizer.step()
    finally:
        installation.pool.set_budget(0)
    assert are_equal(values(optimizer), values(plain))


def test_step_when_the_device_has_no_room_then_states_are_kept(
    installation: Installation, executor: Recorder
) -> None:
    size = 2 * MIB
    optimizer = torch.optim.AdamW(make_params(2, nbytes=size))
    take_steps(optimizer)
    add_gradients(optimizer.param_groups[0]["params"])
    attach(optimizer, executor)
    before = values(optimizer)
    installation.pool.set_budget(limit_above_reserved(installation, size))
    try:
        with pytest.raises(torch.OutOfMemoryError):
            optimizer.step()
    finally:
        installation.pool.set_budget(0)
    assert are_equal(values(optimizer), before)
