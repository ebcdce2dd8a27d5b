"""What the integration tests share."""

from __future__ import annotations

import gc
from typing import TYPE_CHECKING

import pytest

import swapkit
from swapkit._runtime.control import plan_maker as plan_making
from tests.support.sessions import steady_machine_like

if TYPE_CHECKING:
    from collections.abc import Iterator


@pytest.fixture(autouse=True, scope="module")
def forget(request: pytest.FixtureRequest) -> Iterator[None]:
    """Let what a module's tests remember go with them: it would stay in the pool for all others."""
    yield
    for value in vars(request.module).values():
        is_ours = str(getattr(value, "__module__", "")).startswith("tests.integration.")
        if is_ours and hasattr(value, "cache_clear"):
            value.cache_clear()


@pytest.fixture
def served() -> Iterator[None]:
    """Serve torch on the CPU."""
    swapkit.install(device="cpu")
    yield
    gc.collect()
    swapkit.uninstall()


@pytest.fixture
def steady_machine(monkeypatch: pytest.MonkeyPatch) -> None:
    """Let sessions plan for one machine, however busy the one at hand is."""
    monkeypatch.setattr(plan_making, "measure_machine", steady_machine_like)
