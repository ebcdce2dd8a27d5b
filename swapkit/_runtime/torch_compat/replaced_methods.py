"""Methods of torch's classes that are replaced while somebody listens: torch has no hook there."""

from __future__ import annotations

import threading
from typing import TYPE_CHECKING, Any, Generic, TypeVar

if TYPE_CHECKING:
    from collections.abc import Callable

_Listener = TypeVar("_Listener")


class ReplacedMethod(Generic[_Listener]):
    """One method; `listeners` are for its replacement, which calls `plain`."""

    def __init__(
        self, find_class: Callable[[], Any], name: str, replacement: Callable[..., Any]
    ) -> None:
        """Replace nothing yet. `find_class`: returns None if there is no such class here."""
        self.listeners: tuple[_Listener, ...] = ()
        self.plain: Any = None
        self._find_class = find_class
        self._name = name
        self._replacement = replacement
        self._lock = threading.Lock()

    def add(self, listener: _Listener) -> None:
        """Report calls to a listener from now on."""
        owner = self._find_class()
        if owner is None:
            return
        with self._lock:
            self.listeners = (*self.listeners, listener)
            method = getattr(owner, self._name)
            if method is not self._replacement:
                self.plain = method
                setattr(owner, self._name, self._replacement)

    def remove(self, listener: _Listener) -> None:
        """Report no more calls to a listener; without others, torch has its own method again.

        Calls under way, and those that begin meanwhile on other threads, may still be reported.
        """
        owner = self._find_class()
        with self._lock:
            self.listeners = tuple(each for each in self.listeners if each is not listener)
            is_ours = owner is not None and getattr(owner, self._name) is self._replacement
            if is_ours and not self.listeners:
                setattr(owner, self._name, self.plain)
