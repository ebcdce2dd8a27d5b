"""Waits for collectives: each call of `Work.wait` is reported to listeners.

Torch runs no operator in these calls. Waits inside of C++, as of DDP's reducer, are not seen.
"""

from __future__ import annotations

import contextlib
from typing import TYPE_CHECKING, Any, Protocol

from swapkit._runtime.torch_compat.internals import work_class
from swapkit._runtime.torch_compat.isolation import untraced
from swapkit._runtime.torch_compat.replaced_methods import ReplacedMethod

if TYPE_CHECKING:
    from collections.abc import Callable
    from contextlib import AbstractContextManager


class WaitListener(Protocol):
    """Notified of every wait, on the thread that waits, with no lock held."""

    def waiting(self) -> AbstractContextManager[None]:
        """Return what the wait runs in."""


def _make(plain: Any) -> Callable[..., Any]:  # noqa: ANN401 - torch's method
    # Its name, and that it calls torch's method itself, keep pybind11 from taking it for an
    # override in subclasses written in Python: torch's method would call it again.
    @untraced
    def wait(self: object, *args: Any, **kwargs: Any) -> Any:  # noqa: ANN401 - torch's
        with contextlib.ExitStack() as stack:
            for listener in waits.listeners_of(wait):
                stack.enter_context(listener.waiting())
            return plain(self, *args, **kwargs)

    return wait


waits: ReplacedMethod[WaitListener] = ReplacedMethod(work_class, "wait", _make)
