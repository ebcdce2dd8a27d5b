"""Errors that are kept for a thread: it raises them at its next hook, and no other thread does."""

from __future__ import annotations

import threading

import pytest
import torch

import swapkit
from swapkit._native.lib import (
    defer_interruption,
    forget_interruption,
    interruptions,
    raise_interruption,
)


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
