"""What plain autograd refuses is refused in every mode, with autograd's own words."""

from __future__ import annotations

from typing import TYPE_CHECKING

import pytest

from tests.programs import ILLEGAL, Entry, run

if TYPE_CHECKING:
    from tests.conformance.modes import Mode

MESSAGES = "modified by an inplace operation|backward through the graph a second time"


@pytest.mark.promise("A3")
@pytest.mark.parametrize("entry", ILLEGAL, ids=lambda entry: entry.name)
def test_backward_when_plain_autograd_refuses_then_refused_in_every_mode(
    entry: Entry, mode: Mode
) -> None:
    with pytest.raises(RuntimeError, match=MESSAGES) as plain:
        run(entry.body, lambda: None)
    with mode.open() as evict, pytest.raises(RuntimeError, match=MESSAGES) as raised:
        run(entry.body, evict)
    inplace = "inplace" in str(plain.value)
    assert ("inplace" in str(raised.value)) == inplace
