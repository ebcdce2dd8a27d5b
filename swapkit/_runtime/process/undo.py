"""Undoing steps in reverse order, even if some of them fail."""

from __future__ import annotations

from collections.abc import Callable, Sequence


class Undo:
    """A stack of undo steps. A step that fails is kept and runs again at the next `run`.

    Not locked: only one thread at a time may add or run steps. A signal handler or finalizer may
    call `run` inside a step: it runs that step once more, and the remaining ones.
    """

    def __init__(self) -> None:
        self._steps: list[Callable[[], object]] = []
        self._failed: list[Callable[[], object]] = []

    def add(self, step: Callable[[], object]) -> None:
        """Add a step that runs before the steps added earlier. It may run twice if it fails."""
        self._steps.append(step)

    @property
    def is_done(self) -> bool:
        """Whether no step is left, failed ones included."""
        return not (self._steps or self._failed)

    def run(self) -> list[BaseException]:
        """Run all remaining steps; return the errors raised. Failed steps stay."""
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
            if self._steps and self._steps[-1] is step:  # else a run inside the step took it
                self._steps.pop()
        return errors


def raise_first(errors: Sequence[BaseException]) -> None:
    """Raise the first error, if any, with the other errors as its notes.

    An interruption, such as Ctrl-C, comes before errors that a program may handle and go on.
    """
    if errors:
        first = next((each for each in errors if not isinstance(each, Exception)), errors[0])
        others = [each for each in errors if each is not first]
        add_notes(first, "another error while ending a swapkit session", others)
        raise first


def add_notes(error: BaseException, what: str, others: Sequence[BaseException]) -> None:
    """Add other errors as notes, so that the traceback shows them but they do not hide `error`."""
    for other in others:
        note = f"{what}: {type(other).__name__}: {other}"
        if hasattr(error, "add_note"):  # Python 3.11
            error.add_note(note)
        else:
            error.__notes__ = [*getattr(error, "__notes__", ()), note]
