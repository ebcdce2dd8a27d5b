"""Undo steps that fail, are interrupted, or run undo steps themselves."""

from __future__ import annotations

import pytest

from swapkit._runtime.process.undo import Undo, raise_first


def test_step_when_it_fails_then_the_others_run_and_the_next_run_repeats_it() -> None:
    undo, ran, reasons = Undo(), [], [OSError("busy")]

    def fail() -> None:
        ran.append("second")
        if reasons:
            raise reasons.pop()

    undo.add(lambda: ran.append("first"))
    undo.add(fail)
    undo.add(lambda: ran.append("third"))
    assert [str(error) for error in undo.run()] == ["busy"]
    assert ran == ["third", "second", "first"]
    assert undo.run() == []
    assert ran == ["third", "second", "first", "second"]


def test_step_when_it_runs_the_steps_itself_then_each_runs_and_errors_are_kept() -> None:
    """As a signal handler that closes a session that is being closed."""
    undo, ran = Undo(), []

    def nest() -> None:
        ran.append("nested")
        if ran.count("nested") == 1:
            assert undo.run() == []
        raise OSError("after it")

    undo.add(lambda: ran.append("first"))
    undo.add(nest)
    undo.add(lambda: ran.append("last"))
    with pytest.raises(AssertionError):
        raise_first(undo.run())
    assert ran == ["last", "nested", "nested", "first"]


def test_errors_when_one_is_an_interruption_then_it_is_raised_with_the_others_as_notes() -> None:
    with pytest.raises(KeyboardInterrupt) as raised:
        raise_first([RuntimeError("no"), KeyboardInterrupt(), ValueError("neither")])
    notes = " ".join(raised.value.__notes__)
    assert "RuntimeError: no" in notes
    assert "ValueError: neither" in notes
    raise_first([])
