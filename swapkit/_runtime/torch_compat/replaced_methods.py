"""Methods of torch's classes that are replaced while somebody listens: torch has no hook there."""

from __future__ import annotations

import threading
from typing import TYPE_CHECKING, Any, Generic, TypeVar

if TYPE_CHECKING:
    from collections.abc import Callable

_Listener = TypeVar("_Listener")


class ReplacedMethod(Generic[_Listener]):
    """One method. Each replacement is a new one that knows the method in its place.

    So another library may replace the method, too, at any time, and call what it found there.
    """

    def __init__(
        self, find_class: Callable[[], Any], name: str, make: Callable[[Any], Callable[..., Any]]
    ) -> None:
        """Replace nothing yet.

        Args:
            find_class: returns torch's class; None: there is no such class here.
            name: of the method.
            make: returns a replacement that reports to `listeners_of` it, and calls its argument.
        """
        self._listeners: tuple[_Listener, ...] = ()
        self._find_class = find_class
        self._name = name
        self._make = make
        self._plain: Any = None
        self._replacement: Callable[..., Any] | None = None  # while it is there
        self._lock = threading.Lock()

    def listeners_of(self, replacement: Callable[..., Any]) -> tuple[_Listener, ...]:
        """Return to whom a replacement reports: nobody if it is one of earlier."""
        return self._listeners if replacement is self._replacement else ()

    def add(self, listener: _Listener) -> None:
        """Report calls to a listener from now on."""
        owner = self._find_class()
        if owner is None:
            return
        with self._lock:
            self._listeners = (*self._listeners, listener)
            if self._replacement is None:
                self._plain = getattr(owner, self._name)
                self._replacement = self._make(self._plain)
                setattr(owner, self._name, self._replacement)

    def remove(self, listener: _Listener) -> None:
        """Report no more calls to a listener; without others, torch has its own method again.

        Calls under way, and those that begin meanwhile on other threads, may still be reported.
        """
        owner = self._find_class()
        with self._lock:
            self._listeners = tuple(each for each in self._listeners if each is not listener)
            if self._listeners or self._replacement is None:
                return
            if getattr(owner, self._name) is self._replacement:
                setattr(owner, self._name, self._plain)
            self._replacement = None
