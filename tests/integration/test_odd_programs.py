"""Orders and interruptions that are easy to forget."""

from __future__ import annotations

import signal
from typing import TYPE_CHECKING, Any

import pytest
import torch

import swapkit
from swapkit._native.lib import call_back
from tests.programs import SIDE, leaf

if TYPE_CHECKING:
    from types import FrameType

EVERYTHING = 1 << 40


def test_graph_when_its_session_has_ended_then_the_next_session_may_evict_it() -> None:
    swapkit.install()
    x = leaf(1024, 1024)
    expected = run_exp(x.detach())
    with swapkit.budget("256MiB"):
        loss = (x * 0.1).exp().sum()
    with swapkit.budget("64MiB") as session:
        before = swapkit.memory_stats()["allocated_bytes.all.current"]
        assert session.rescue(EVERYTHING) == 0, "it has none of its own"
        torch.empty((64 << 20) - before + (3 << 20), dtype=torch.uint8)
    (grad,) = torch.autograd.grad(loss, x)
    assert torch.equal(grad, expected)


def run_exp(x: torch.Tensor) -> torch.Tensor:
    x = x.clone().requires_grad_()
    return torch.autograd.grad((x * 0.1).exp().sum(), x)[0]


class Interruption(Exception):
    """What a timeout's signal handler raises."""


@pytest.mark.parametrize("kind", [KeyboardInterrupt, Interruption])
def test_callback_when_a_signal_handler_raises_in_it_then_finished_and_raised_afterwards(
    kind: type[BaseException],
) -> None:
    calls: list[int] = []

    def handler(_number: int, _frame: FrameType | None) -> Any:
        raise kind

    def body() -> int:
        calls.append(1)
        if len(calls) == 1:
            signal.raise_signal(signal.SIGUSR1)
        return 42

    previous = signal.signal(signal.SIGUSR1, handler)
    try:
        assert call_back("test", body, 0) == 42
    finally:
        signal.signal(signal.SIGUSR1, previous)
    assert calls == [1, 1]
    swapkit.install()
    with swapkit.budget("64MiB"), pytest.raises(kind):
        leaf().exp()
    with swapkit.budget("64MiB"):
        leaf().exp()  # it is raised once


def test_saves_when_thousands_share_one_storage_then_looks_stay_cheap() -> None:
    swapkit.install()
    shared = torch.randn(SIDE, SIDE) * 1
    x = leaf()
    with swapkit.budget("8MiB") as session:
        y = x
        for _ in range(3000):
            y = y * shared
        group = session._active.swapper.mover.resident[0]  # type: ignore[union-attr]
        assert not group.is_exclusive
        del y
    assert session.stats.peak_bytes <= 8 << 20
