"""Types of the compiled shim for choices about a module's operators, as protocols.

`cpp/recompute/operator_choices.hpp` describes them, and `library.py` loads them.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Protocol

if TYPE_CHECKING:
    from swapkit._runtime.model.tracker import ModuleTracker
    from swapkit._runtime.shim.placement import Placement


class OperatorChoices(Protocol):
    """The user's choices for the operators of one module."""

    def seen(self) -> list[tuple[int, int]]:
        """Return for each kind how many operators ran, and how many whose choice is not void."""


class MakeChoices(Protocol):
    """The constructor of `OperatorChoices`."""

    def __call__(
        self, kinds: tuple[tuple[bool, Placement | None], ...], places: bytes, /
    ) -> OperatorChoices:
        """Make choices.

        Args:
            kinds: per kind: whether the operators are recomputed; how their results move, or None.
            places: rows of 64-bit numbers: an operator's number, and its kind.
        """


class Choosing(Protocol):
    """A context manager in which choices hold on the thread that enters it."""

    def runs(self) -> bool:
        """Return whether the module's own operators run here, and not those of a submodule."""

    def __enter__(self) -> Choosing:
        """Begin."""

    def __exit__(self, *_: object) -> None:
        """End. If called on another thread, the thread that began ends it at its next check."""


class MakeChoosing(Protocol):
    """The constructor of `Choosing`, for a module that begins."""

    def __call__(
        self,
        choices: OperatorChoices | None,
        tracker: ModuleTracker,
        may_recompute: bool,  # noqa: FBT001 - in C++
        /,
    ) -> Choosing:
        """Make the context.

        Args:
            choices: for the module's operators; None: only make chosen results inside found.
            tracker: knows which module runs.
            may_recompute: whether no foreign mode changes the operators' results.
        """
