"""What torch_npu queues on the host is in the stream later, as on an NPU.

They run inside of `python -m tests.npu.simulated -m pytest tests/npu/test_simulated_queue.py`;
`test_simulation.py` starts that, once for each kind of queue.
"""

from __future__ import annotations

import os

import pytest
import torch
from torch_npu import npu

from tests.cuda.control import last_problem
from tests.npu.control import copy_raw, handle_of, handle_without_draining, held_queue

HAS_QUEUE = os.environ.get("TASK_QUEUE_ENABLE", "1") != "0"
OPERATORS = 20


def ones_added(count: int) -> torch.Tensor:
    tensor = torch.zeros(1000, device="npu")
    npu.synchronize()
    for _ in range(count):
        tensor.add_(1)
    return tensor


@pytest.fixture
def host() -> torch.Tensor:
    return torch.full((1000,), -1.0, pin_memory=True)


@pytest.mark.skipif(not HAS_QUEUE, reason="nothing is queued")
def test_raw_copy_on_a_handle_that_was_not_drained_overtakes_queued_operators(
    host: torch.Tensor,
) -> None:
    tensor = torch.zeros(1000, device="npu")
    npu.synchronize()
    with held_queue():
        for _ in range(OPERATORS):
            tensor.add_(1)
        copy_raw(host, tensor, handle_without_draining())
    assert (host == 0).all()
    assert (tensor == OPERATORS).all()


def test_raw_copy_after_draining_sees_what_was_queued(host: torch.Tensor) -> None:
    tensor = ones_added(OPERATORS)
    copy_raw(host, tensor, handle_of(npu.current_stream()))
    assert (host == OPERATORS).all()


def test_raw_copy_on_a_side_stream_after_draining_sees_what_was_queued(host: torch.Tensor) -> None:
    side = npu.Stream()
    with npu.stream(side):
        tensor = ones_added(OPERATORS)
        copy_raw(host, tensor, handle_of(side))
    assert (host == OPERATORS).all()


@pytest.mark.skipif(not HAS_QUEUE, reason="nothing is queued")
def test_copy_through_torch_needs_no_draining(host: torch.Tensor) -> None:
    tensor = torch.zeros(1000, device="npu")
    npu.synchronize()
    with held_queue():
        tensor.add_(1)
        host.copy_(tensor, non_blocking=True)
        event = npu.Event()
        event.record()
        assert not event.query()
    event.synchronize()
    assert (host == 1).all()
    assert last_problem() == ""


def test_queue_may_be_longer_than_the_driver_is_fast() -> None:
    assert (ones_added(5000) == 5000).all()
