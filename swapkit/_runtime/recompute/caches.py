"""Caches of keys and values that a recomputed region writes to.

A model of `transformers` hands its cache to every layer, also in training, unless it is told not
to, and each layer appends to it. Recomputation must not append again: it is given the cache as it
was when the region began, and what it writes is dropped. Kept for that is only what the region
itself changed, so that no other layer's keys and values live longer.
"""

from __future__ import annotations

import copy
import functools
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from collections.abc import Mapping, Sequence


class CacheStates:
    """The caches among a call's arguments, as they are before the region runs."""

    def __init__(self, caches: Sequence[Any]) -> None:
        self._before = {id(cache): _look(cache) for cache in caches}
        self._caches = list(caches)

    def end(self) -> None:
        """Note what the region has changed, and let go of the rest."""
        for cache in self._caches:
            before = self._before[id(cache)]
            now = _look(cache)
            self._before[id(cache)] = [
                state if number >= len(now) or _differs(state, now[number]) else None
                for number, state in enumerate(before)
            ]

    def replace(self, args: Sequence[Any], kwargs: Mapping[str, Any]) -> tuple[Any, Any]:
        """Return arguments with copies of the caches, as these were before."""
        copies = {id(cache): self._copy(cache) for cache in self._caches}
        return (
            tuple(copies.get(id(value), value) for value in args),
            {name: copies.get(id(value), value) for name, value in kwargs.items()},
        )

    def _copy(self, cache: Any) -> Any:  # noqa: ANN401 - of transformers
        twin = copy.copy(cache)
        twin.layers = [
            _with_state(layer, state)
            for layer, state in zip(cache.layers, self._before[id(cache)], strict=False)
        ]
        return twin


def find_caches(args: Sequence[Any], kwargs: Mapping[str, Any]) -> CacheStates | None:
    """Return the state of the caches among a call's arguments; None: there are none."""
    caches = [value for value in (*args, *kwargs.values()) if _is_cache(type(value))]  # type: ignore[arg-type]
    return CacheStates(caches) if caches else None


@functools.cache
def _is_cache(kind: type) -> bool:
    # By name: whoever has no such object need not load transformers.
    names = {(base.__module__, base.__name__) for base in kind.__mro__}
    return ("transformers.cache_utils", "Cache") in names


def _look(cache: Any) -> list[dict[str, Any] | None]:  # noqa: ANN401
    return [dict(vars(layer)) for layer in getattr(cache, "layers", ())]


def _differs(before: dict[str, Any] | None, now: dict[str, Any] | None) -> bool:
    assert before is not None
    assert now is not None
    return before.keys() != now.keys() or any(before[name] is not now[name] for name in now)


def _with_state(layer: Any, state: dict[str, Any] | None) -> Any:  # noqa: ANN401
    twin = copy.copy(layer)
    if state is not None:
        vars(twin).clear()
        vars(twin).update(state)
    return twin
