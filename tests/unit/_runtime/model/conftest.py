"""Listeners and hooks for the tests of this folder."""

from __future__ import annotations

from typing import TYPE_CHECKING

import pytest
from torch.nn.modules import module as module_hooks

from swapkit._runtime.model import global_hooks
from tests.support.listeners import NotingListener

if TYPE_CHECKING:
    from collections.abc import Iterator


@pytest.fixture
def listener() -> Iterator[NotingListener]:
    listener = NotingListener()
    global_hooks.calls.add(listener)
    global_hooks.steps.add(listener)
    yield listener
    global_hooks.calls.remove(listener)
    global_hooks.steps.remove(listener)


@pytest.fixture
def foreign_hook() -> Iterator[None]:
    """A global hook of the user's."""
    with module_hooks.register_module_forward_hook(lambda *_: None):
        yield
