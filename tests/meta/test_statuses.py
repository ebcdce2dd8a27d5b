"""Every status that the core returns on failure has an exception of its own kind."""

from __future__ import annotations

import builtins
import re

import pytest

from swapkit import errors
from swapkit._native.lib import EXCEPTIONS
from tests.meta.sources import HEADER

NOT_FAILURES = {"SK_OK", "SK_NOT_READY"}


def list_statuses() -> dict[str, int]:
    found = re.findall(r"\bX\((SK_\w+), (\d+)\)", HEADER.read_text(encoding="utf-8"))
    return {name: int(value) for name, value in found}


def test_statuses_when_listed_then_exceptions_cover_exactly_the_failures() -> None:
    failures = {value for name, value in list_statuses().items() if name not in NOT_FAILURES}
    assert len(failures) >= 7
    assert set(EXCEPTIONS) == failures


@pytest.mark.parametrize("code", sorted(EXCEPTIONS))
def test_exception_when_mapped_then_public_and_refines_a_builtin(code: int) -> None:
    kind = EXCEPTIONS[code]
    assert issubclass(kind, errors.SwapkitError)
    assert getattr(errors, kind.__name__) is kind
    plain = {vars(builtins).get(base.__name__) for base in kind.__mro__}
    assert plain - {None, BaseException, Exception, object}, f"{kind} refines no builtin error"
