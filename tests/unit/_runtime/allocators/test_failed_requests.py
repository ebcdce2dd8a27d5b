"""Who hears of a request for memory that fails: not of those that our own code can do without."""

from __future__ import annotations

import contextlib
from typing import TYPE_CHECKING

import pytest
import torch

import swapkit
from swapkit._native.pool import tentative
from swapkit._runtime.thread_state import thread_state, tries_memory
from tests.support import MIB

if TYPE_CHECKING:
    from collections.abc import Iterator

    from swapkit._runtime.allocators.installed_pool import Installation


@contextlib.contextmanager
def listening(installation: Installation) -> Iterator[list[str]]:
    heard: list[str] = []
    installation.failures.append(heard.append)
    try:
        yield heard
    finally:
        installation.failures.remove(heard.append)


def ask_for_too_much() -> str:
    with pytest.raises(torch.OutOfMemoryError) as raised:
        torch.empty(64 * MIB)
    return str(raised.value)


def test_request_when_it_fails_then_every_listener_gets_the_text_of_the_error(
    installation: Installation,
) -> None:
    with listening(installation) as heard, swapkit.budget("16MiB"):
        text = ask_for_too_much()
    assert len(heard) == 1
    assert text.startswith(heard[0].splitlines()[0])


def test_request_when_our_own_code_can_do_without_then_nobody_hears_of_it(
    installation: Installation,
) -> None:
    with listening(installation) as heard, swapkit.budget("16MiB"):
        with tentative():
            ask_for_too_much()
        with tries_memory():
            ask_for_too_much()
            with tries_memory():
                pass
            assert thread_state.tries_memory
    assert heard == []
    assert not thread_state.tries_memory
