"""No name can move a terminal's cursor, or begin a line that looks like a record of a log."""

from __future__ import annotations

import copy
import io
import logging
import pickle
import sys
import time

import pytest
from torch import nn

import swapkit
from swapkit import texts
from swapkit.errors import DiskError, NativeBuildError, SwapkitError, WrongKey
from swapkit.reporting.text import AllocationFailure, Holder, format_failure, format_table
from swapkit.texts import get_logger, printable, printable_lines, waiting
from tests.meta.sources import ROOT

HOSTILE = "a\x1b[31m\r\nswapkit ERROR: forged\x07\x9b\u202e\u2028\udc80"
SHOWN = r"a\x1b[31m\r\nswapkit ERROR: forged\x07\x9b\u202e\u2028\udc80"


def test_text_when_it_has_control_characters_then_escapes_and_others_stay() -> None:
    assert printable(HOSTILE) == SHOWN
    assert printable(SHOWN) == SHOWN
    assert printable_lines(HOSTILE) == SHOWN.replace(r"\n", "\n")
    assert printable_lines("Größe\t\u6a21\u578b\n") == "Größe\t\u6a21\u578b\n"


def test_log_when_names_are_hostile_then_each_record_begins_one_line() -> None:
    logger = get_logger("swapkit.of_a_test")
    stream = io.StringIO()
    handler = logging.StreamHandler(stream)
    logger.addHandler(handler)
    try:
        for argument in (HOSTILE, ValueError(HOSTILE)):
            logger.error("module %s", argument)
        logger.error("%d of %d", 1, 2)
    finally:
        logger.removeHandler(handler)
    lines = stream.getvalue().splitlines()
    assert [line for line in lines if not line.startswith(" ")] == [
        "module a\\x1b[31m\\r",
        "module a\\x1b[31m\\r",
        "1 of 2",
    ]
    assert not set(stream.getvalue()) & set("\x1b\r\x07\x9b\u202e\u2028\udc80")


def test_loggers_when_a_module_has_one_then_its_records_are_safe() -> None:
    unsafe = [
        path.name
        for path in (ROOT / "swapkit").rglob("*.py")
        if "_log = logging.getLogger(" in path.read_text(encoding="utf-8")
    ]
    assert unsafe == []


@pytest.mark.parametrize("kind", [SwapkitError, WrongKey, DiskError, NativeBuildError])
def test_error_when_its_text_has_names_then_safe_also_as_a_copy(kind: type[SwapkitError]) -> None:
    error = kind(HOSTILE)
    for each in (error, copy.copy(error), pickle.loads(pickle.dumps(error))):
        assert str(each) == printable_lines(HOSTILE)
    assert NativeBuildError("a", name="b").name == "b"


def test_waiting_when_inside_another_then_only_the_outer_one_is_shown(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    stream = io.StringIO()
    monkeypatch.setattr(sys, "stderr", stream)
    monkeypatch.setattr(texts, "PATIENCE_SECONDS", 0.0)
    for _ in range(2):
        with waiting("outer"), waiting("inner"):
            while "outer" not in stream.getvalue():
                time.sleep(0.001)
            time.sleep(0.01)  # long enough for the other one's line
        assert stream.getvalue() == "outer ...\n"
        stream.truncate(0)
        stream.seek(0)


def test_tables_and_out_of_memory_when_names_are_hostile_then_shown_as_escapes() -> None:
    table = format_table(("name", "bytes"), [(HOSTILE, "1")])
    assert table.splitlines()[1] == f"{SHOWN}  1"
    failure = AllocationFailure(
        device="cpu",
        asked=1,
        budget=1,
        device_bytes=1,
        in_use=1,
        active=1,
        reserved=1,
        where=HOSTILE,
        holders=[Holder(HOSTILE, 1, 1)],
        hints=[HOSTILE],
    )
    text = format_failure(failure)
    assert text.count(SHOWN) == 3
    assert printable_lines(text) == text


def test_choices_when_modules_have_hostile_names_then_no_line_is_forged() -> None:
    model = nn.Sequential()
    model.add_module(HOSTILE, nn.Linear(2, 2))
    swapkit.keep(model, "(?s)a.*")
    assert SHOWN in str(swapkit.choices(model))
    with pytest.raises(SwapkitError) as caught:
        swapkit.keep(model, "b")
    assert SHOWN in str(caught.value)
