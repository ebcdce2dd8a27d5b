"""The pool below torch, for the tests that ask for it."""

from __future__ import annotations

from typing import TYPE_CHECKING

import pytest

from tests.support import installed

if TYPE_CHECKING:
    from collections.abc import Iterator

    from swapkit._runtime.installation import Installation


@pytest.fixture
def installation() -> Iterator[Installation]:
    with installed() as installation:
        yield installation
