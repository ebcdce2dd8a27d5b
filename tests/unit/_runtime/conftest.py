"""What tests of the runtime's parts stand on."""

from __future__ import annotations

import pytest

from swapkit._runtime.process.runtime import get_runtime


@pytest.fixture(autouse=True, scope="session")
def runtime() -> None:
    """Load the shim, without which no thread bypasses hooks, nor knows what other threads do."""
    get_runtime()
