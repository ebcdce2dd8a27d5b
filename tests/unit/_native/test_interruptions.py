"""Errors that are kept for a thread: it raises them at its next hook, and no other thread does."""

from __future__ import annotations

import sys
import threading
from typing import TYPE_CHECKING

import pytest
import torch

import swapkit
from swapkit._native.backend import Backend
from swapkit._native.lib import (
    defer_interruption,
    forget_interruption,
    interruptions,
    raise_interruption,
)
from swapkit._native.pool import Pool

if TYPE_CHECKING:
    from collections.abc import Callable


def test_error_when_kept_for_a_thread_then_only_that_thread_raises_it_once() -> None:
    error = RuntimeError("for this one")
    defer_interruption(error, threading.get_ident())
    other = threading.Thread(target=raise_interruption)
    other.start()
    other.join()
    with pytest.raises(RuntimeError, match="for this one"):
        raise_interruption()
    raise_interruption()


def test_error_when_no_thread_is_named_then_the_main_one_raises_it() -> None:
    defer_interruption(KeyboardInterrupt())
    with pytest.raises(KeyboardInterrupt):
        raise_interruption()


def test_error_when_forgotten_then_never_raised() -> None:
    error, here = RuntimeError(), threading.get_ident()
    defer_interruption(error, here)
    defer_interruption(error, here + 1)
    forget_interruption(error, here)
    raise_interruption()
    forget_interruption(error, here + 1)
    assert interruptions == []


@pytest.mark.usefixtures("installation")
def test_error_when_kept_for_a_thread_that_trains_then_raised_as_it_saves_a_tensor() -> None:
    raised: list[BaseException] = []

    def train() -> None:
        weight = torch.ones(512, requires_grad=True)
        with swapkit.budget("64MiB"):
            defer_interruption(RuntimeError("from elsewhere"), threading.get_ident())
            try:
                weight.square()
            except RuntimeError as error:
                raised.append(error)

    thread = threading.Thread(target=train)
    thread.start()
    thread.join()
    assert [str(each) for each in raised] == ["from elsewhere"]


def test_rescue_when_the_program_is_near_the_limit_of_recursion_then_it_runs_all_the_same() -> None:
    def nest(depth: int, run: Callable[[], int]) -> int:
        return run() if depth == 0 else nest(depth - 1, run)

    def count_frames() -> int:
        frame, count = sys._getframe(), 0
        while frame is not None:
            frame, count = frame.f_back, count + 1  # type: ignore[assignment]
        return count

    limit = sys.getrecursionlimit()
    with (
        Backend.cpu(capacity_bytes=8 << 20) as backend,
        Pool(backend, budget_bytes=1 << 20) as pool,
    ):
        held: list[int] = []

        def free(_needed: int) -> int:
            pool.give(held.pop())
            return 1 << 20

        def take() -> int:
            held.append(pool.take(1 << 20))
            return 1

        pool.set_rescue(lambda needed: nest(50, lambda: free(needed)))
        take()
        for left in range(15, 60):  # the rescue alone needs 50 frames
            assert nest(limit - count_frames() - left, take) == 1
        pool.set_rescue(None)
        pool.give(held.pop())
    assert sys.getrecursionlimit() == limit
