"""`swapkit.budget(...)` decorates functions: each call runs in a session of its own."""

from __future__ import annotations

import asyncio
from typing import TYPE_CHECKING, Any

import pytest
import torch

import swapkit
from swapkit.errors import InvalidType, SessionError
from tests.support import MIB, installed

if TYPE_CHECKING:
    from collections.abc import Iterator


@pytest.fixture(autouse=True)
def _pool() -> Iterator[None]:
    with installed():
        yield
        assert swapkit.sessions() == ()


def test_function_when_decorated_then_each_call_has_a_session_of_its_own() -> None:
    seen = []

    @swapkit.budget("64MiB")
    def train(count: int, *, deeper: bool = False) -> int:
        """Train."""
        (*_, session) = swapkit.sessions()
        seen.append(session)
        assert swapkit.memory_stats()["budget_bytes"] == 64 * MIB
        session.mark_step()
        return train(count + 1) if deeper else count

    assert train(1, deeper=True) == 2
    assert train(5) == 5
    assert [session.stats.steps for session in seen] == [1, 1, 1]
    assert train.__name__ == "train"
    assert train.__doc__ == "Train."


def test_function_when_decorated_and_it_raises_then_the_session_has_ended() -> None:
    @swapkit.budget("64MiB")
    def train() -> None:
        raise KeyError("inside")

    for _ in range(2):
        with pytest.raises(KeyError):
            train()


async def wait() -> None:
    await asyncio.sleep(0)


def count() -> Iterator[int]:
    yield 1


@pytest.mark.parametrize("function", [wait, count, 5, torch.nn.Linear])
def test_function_when_others_run_in_its_middle_then_it_cannot_be_decorated(function: Any) -> None:
    with pytest.raises(InvalidType, match=r"[uU]se `with"):
        swapkit.budget("64MiB")(function)


def test_function_when_the_session_was_entered_then_it_cannot_be_decorated() -> None:
    with swapkit.budget("64MiB") as session, pytest.raises(SessionError, match="entered only once"):
        session(print)
