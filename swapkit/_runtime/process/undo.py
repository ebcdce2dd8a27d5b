"""Taking back what was done, in the reverse order, whatever fails on the way."""

from __future__ import annotations

from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence


class Undo:
    """Steps that each take one thing back. Each runs until it has succeeded once.

    Not locked: one thread at a time adds or runs steps.
    """

    def __init__(self) -> None:
        self._steps: list[Callable[[], object]] = []
        self._failed: list[Callable[[], object]] = []

    def add(self, step: Callable[[], object]) -> None:
        """Let a step run before those that were added earlier. It may run twice if it fails."""
        self._steps.append(step)

    def run(self) -> list[BaseException]:
        """Run every step that is left; return what they raised. Those that did so stay."""
        self._steps = [*self._failed[::-1], *self._steps]
        self._failed = []
        errors: list[BaseException] = []
        while self._steps:
            step = self._steps[-1]
            try:
                step()
            except BaseException as error:  # noqa: BLE001 - the caller raises it
                errors.append(error)
                self._failed.append(step)
            self._steps.pop()
        return errors


def raise_first(errors: Sequence[BaseException]) -> None:
    """Raise the first of several errors, if any; the others are notes of it."""
    if errors:
        add_notes(errors[0], "another error while ending a swapkit session", errors[1:])
        raise errors[0]


def add_notes(error: BaseException, what: str, others: Sequence[BaseException]) -> None:
    """Let an error's traceback tell of others, which must not hide it."""
    for other in others:
        note = f"{what}: {type(other).__name__}: {other}"
        if hasattr(error, "add_note"):  # Python 3.11
            error.add_note(note)
        else:
            error.__notes__ = [*getattr(error, "__notes__", ()), note]
