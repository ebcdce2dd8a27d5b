"""Caches of keys and values that a recomputed region writes to.

A `transformers` model passes its cache to every layer, by default also in training, and each layer
appends to it. Recomputation must not append again: it gets the cache as it was when the region
began, and its writes are dropped. Only the entries that the region itself changed are kept for
this, so that no other layer's keys and values live longer.

A cache may hold other caches: an encoder-decoder cache holds one for each kind of attention.
"""

from __future__ import annotations

import copy
import functools
from typing import TYPE_CHECKING, Any, NamedTuple

import torch

if TYPE_CHECKING:
    from collections.abc import Iterable, Iterator, Mapping, Sequence


class CacheStates:
    """The caches among a call's arguments, in their state before the region runs."""

    def __init__(self, caches: Sequence[Any]) -> None:
        self._caches = list({id(one): one for cache in caches for one in _walk(cache)}.values())
        self._before = {id(cache): _look(cache) for cache in self._caches}

    def end(self) -> None:
        """Keep the earlier state of the entries that the region changed; drop the rest."""
        for cache in self._caches:
            now = _look(cache)
            for name, entries in self._before[id(cache)].items():
                later = now.get(name, {})
                for key, entry in entries.items():
                    if key in later and _is_same(entry, later[key]):
                        entries[key] = _SAME

    def replace(self, args: Sequence[Any], kwargs: Mapping[str, Any]) -> tuple[Any, Any]:
        """Return the arguments with copies of the caches in their earlier state."""
        copies = {id(cache): copy.copy(cache) for cache in self._caches}
        for cache in self._caches:
            state = vars(copies[id(cache)])
            state.update({name: copies.get(id(value), value) for name, value in state.items()})
            for name, entries in self._before[id(cache)].items():
                state[name] = _rebuild(getattr(cache, name), entries)
        return (
            tuple(copies.get(id(value), value) for value in args),
            {name: copies.get(id(value), value) for name, value in kwargs.items()},
        )


def find_caches(args: Sequence[Any], kwargs: Mapping[str, Any]) -> CacheStates | None:
    """Return the state of the caches among a call's arguments; None: there are none."""
    caches = [value for value in (*args, *kwargs.values()) if _is_cache(type(value))]  # type: ignore[arg-type]
    return CacheStates(caches) if caches else None


@functools.cache
def _is_cache(kind: type) -> bool:
    # By name, so that transformers need not be imported; some models' caches have no base class.
    return any(
        base.__module__.startswith("transformers.") and base.__name__.endswith("Cache")
        for base in kind.__mro__
    )


class _Entry(NamedTuple):
    """An element of a cache's list or dict; for an object, such as a layer, also its state."""

    element: Any
    state: dict[str, Any] | None


_SAME = _Entry(None, None)  # an entry that the region has not changed


def _walk(cache: Any) -> Iterator[Any]:  # noqa: ANN401
    """Yield a cache and the caches that it holds."""
    yield cache
    for value in vars(cache).values():
        if _is_cache(type(value)):  # type: ignore[arg-type]
            yield from _walk(value)


def _look(cache: Any) -> dict[str, dict[Any, _Entry]]:  # noqa: ANN401
    """Return the contents of the lists and dicts of a cache, by name."""
    return {
        name: {key: _note(element) for key, element in _items(value)}
        for name, value in vars(cache).items()
        if isinstance(value, (list, dict))
    }


def _items(container: list[Any] | dict[Any, Any]) -> Iterable[tuple[Any, Any]]:
    return container.items() if isinstance(container, dict) else enumerate(container)


def _note(element: Any) -> _Entry:  # noqa: ANN401
    has_state = hasattr(element, "__dict__") and not isinstance(element, (torch.Tensor, type))
    return _Entry(element, dict(vars(element)) if has_state else None)


def _is_same(entry: _Entry, now: _Entry) -> bool:
    if entry.element is not now.element or entry.state is None or now.state is None:
        return entry.element is now.element
    return entry.state.keys() == now.state.keys() and all(
        value is now.state[name] for name, value in entry.state.items()
    )


def _rebuild(container: Any, entries: Mapping[Any, _Entry]) -> Any:  # noqa: ANN401
    """Return a copy of a list or dict in its earlier state, safe to change."""
    now = dict(_items(container))
    made = {
        key: _restore(_note(now[key]) if entry is _SAME else entry)
        for key, entry in entries.items()
    }
    return made if isinstance(container, dict) else list(made.values())


def _restore(entry: _Entry) -> Any:  # noqa: ANN401
    if entry.state is None:
        return entry.element
    twin = copy.copy(entry.element)
    vars(twin).clear()
    vars(twin).update(entry.state)
    return twin
