"""Choices for the operators of a module, as Python sees them: the types are the compiled shim's.

`cpp/recompute/operator_choices.hpp` tells what they are, and `library.py` loads them.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Protocol

if TYPE_CHECKING:
    from swapkit._runtime.model.tracker import ModuleTracker
    from swapkit._runtime.shim.placement import Placement


class OperatorChoices(Protocol):
    """What users have chosen for the operators of one module."""

    def seen(self) -> list[int]:
        """Return how many operators of each kind ran."""


class MakeChoices(Protocol):
    """Makes them."""

    def __call__(
        self, kinds: tuple[tuple[bool, Placement | None], ...], places: bytes, /
    ) -> OperatorChoices:
        """Return them.

        Args:
            kinds: whether operators are computed again; how what they make moves, if it does.
            places: rows of 64-bit numbers: of an operator, and its kind.
        """


class Choosing(Protocol):
    """A context manager in which choices hold on the thread that enters it."""

    def runs(self) -> bool:
        """Return whether the module's own operators run here, and not those of one inside."""

    def __enter__(self) -> Choosing:
        """Begin."""

    def __exit__(self, *_: object) -> None:
        """End: on another thread than it began on, where that one next looks."""


class MakeChoosing(Protocol):
    """Makes one, for a module that begins."""

    def __call__(
        self,
        choices: OperatorChoices | None,
        tracker: ModuleTracker,
        may_recompute: bool,  # noqa: FBT001 - in C++
        /,
    ) -> Choosing:
        """Return it.

        Args:
            choices: for its operators; None: what is chosen inside is found until it ends.
            tracker: who knows which module runs.
            may_recompute: nobody changes what operators make.
        """
