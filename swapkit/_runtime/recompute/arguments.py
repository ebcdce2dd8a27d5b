"""A region's arguments: tensors and the rest, slices of inputs, caches of keys and values."""

from __future__ import annotations

import copy
import dataclasses
import functools
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple

import torch
import torch.distributed as dist

from swapkit._runtime.torch_compat.internals import pytree
from swapkit._runtime.torch_compat.isolation import hidden
from swapkit._runtime.torch_compat.wrappers import gathers_gradients

# ---- arguments -----------------------------------------------------------------------------------
#
# Separation of a region's arguments into tensors and the rest.
#
# Tensors are found in lists, tuples, named tuples, dicts and all other containers of torch's
# pytree, in the fields of dataclasses, and among the bound arguments of `functools.partial`. A
# `Template` keeps the rest and holds no tensor, so that the owner of the tensors decides how long
# they live. Objects without tensors are passed on as they are. Containers with tensors are rebuilt,
# once each.


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class _Tensor:
    """The place of a tensor, by its number."""

    index: int


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class _Tree:
    """A container: its parts, and a function that rebuilds it from them."""

    parts: tuple[object, ...]
    make: Callable[[list[Any]], object]


class Template:
    """The arguments of a call without their tensors."""

    def __init__(self, value: object) -> None:
        """Take a value apart; `take_tensors` returns its tensors, each object once."""
        self._tensors: list[torch.Tensor] = []
        self._root = _Taker(self._tensors).take(value)

    def take_tensors(self) -> list[torch.Tensor]:
        """Return the tensors, in order, and drop the references to them."""
        tensors, self._tensors = self._tensors, []
        return tensors

    def rebuild(self, tensors: Sequence[torch.Tensor]) -> Any:  # noqa: ANN401 - as it was given
        """Return the value with these tensors."""
        return _build(self._root, tensors, {})


def _build(node: object, tensors: Sequence[torch.Tensor], made: dict[int, object]) -> object:
    # Not a closure: a recursive closure would keep the tensors until the garbage collector runs.
    if isinstance(node, _Tensor):
        return tensors[node.index]
    if not isinstance(node, _Tree):
        return node
    if id(node) not in made:
        made[id(node)] = node.make([_build(part, tensors, made) for part in node.parts])
    return made[id(node)]


class _Taker:
    """Takes one value apart."""

    def __init__(self, tensors: list[torch.Tensor]) -> None:
        self.tensors = tensors
        # By the id of the value, which is kept alive: flattening may create temporary values.
        self.nodes: dict[int, tuple[object, object]] = {}
        self.open: set[int] = set()

    def take(self, value: object) -> object:
        """Return the node of a value: the value itself if it holds no tensor."""
        key = id(value)
        if key in self.nodes:
            return self.nodes[key][1]
        if isinstance(value, torch.Tensor):
            node: object = self._take_tensor(value)
        elif key in self.open:
            return value  # it contains itself
        else:
            self.open.add(key)
            node = self._take_container(value)
            self.open.discard(key)
        self.nodes[key] = value, node
        return node

    def _take_tensor(self, tensor: torch.Tensor) -> object:
        if tensor.is_inference():
            return tensor  # autograd does not save inference tensors
        self.tensors.append(tensor)
        return _Tensor(index=len(self.tensors) - 1)

    def _take_container(self, value: object) -> object:
        found = _open_container(value)
        if found is None:
            return value
        parts, make = found
        nodes = tuple(map(self.take, parts))
        if not any(isinstance(node, (_Tensor, _Tree)) for node in nodes):
            return value
        return _Tree(parts=nodes, make=make())


def _open_container(
    value: object,
) -> tuple[Sequence[object], Callable[[], Callable[[list[Any]], object]]] | None:
    """Return a container's parts and a factory of its rebuild function; None: no container."""
    if type(value) is functools.partial:
        state = dict(vars(value))
        parts = (value.func, value.args, value.keywords)
        return parts, lambda: functools.partial(_make_partial, state)
    is_root = iter([True])
    leaves, spec = pytree.tree_flatten(value, is_leaf=lambda _: not next(is_root, False))
    if not (len(leaves) == 1 and leaves[0] is value):
        return leaves, lambda: functools.partial(pytree.tree_unflatten, treespec=spec)
    if dataclasses.is_dataclass(value) and not isinstance(value, (type, torch.nn.Module)):
        names = [field.name for field in dataclasses.fields(value) if hasattr(value, field.name)]
        parts = tuple(getattr(value, name) for name in names)
        return parts, lambda: functools.partial(_make_record, names, _empty_record(value, names))
    return None


def _make_partial(state: dict[str, Any], parts: list[Any]) -> functools.partial[Any]:
    function, args, keywords = parts
    made = functools.partial(function, *args, **keywords)
    vars(made).update(state)
    return made


def _empty_record(value: object, names: list[str]) -> object:
    shell = copy.copy(value)
    for name in names:
        object.__setattr__(shell, name, None)  # works on frozen dataclasses, too
    return shell


def _make_record(names: list[str], shell: object, parts: list[Any]) -> object:
    made = copy.copy(shell)
    for name, part in zip(names, parts, strict=True):
        object.__setattr__(made, name, part)
    return made


# ---- slices --------------------------------------------------------------------------------------
#
# A region's input activations, kept in slices: each rank of a group keeps its own part.
#
# This is for tensor parallelism, where every rank of the group gets the same values. The code
# assumes that and does not check: if ranks differ, recomputation gets a mixture. A slice is a copy,
# so the activation may be changed in place afterwards. Parameters and other leaves, tensors without
# gradient, subclasses, and tensors that do not divide by the number of ranks are kept whole.

# Renamed in torch 2.13.
_gather_single = getattr(dist, "all_gather_single", None) or dist.all_gather_into_tensor


class _WholeForm(NamedTuple):
    """The layout of the whole tensor that a slice belongs to."""

    shape: torch.Size
    strides: tuple[int, ...]
    is_contiguous: bool


class Slices:
    """The tensors of one call that are kept in slices."""

    def __init__(self, group: Any, tensors: list[torch.Tensor]) -> None:  # noqa: ANN401 - a group
        """Replace each tensor that can be sliced with this rank's slice."""
        self._group = group
        self._ranks = dist.get_world_size(group)
        rank = dist.get_rank(group)
        self._forms: dict[int, _WholeForm] = {}
        for index, tensor in enumerate(tensors):
            if self._ranks > 1 and _can_slice(tensor, self._ranks):
                form = _WholeForm(tensor.shape, tensor.stride(), tensor.is_contiguous())
                self._forms[index] = form
                tensors[index] = _slice(tensor, rank, self._ranks)

    def gather(self, tensors: Sequence[torch.Tensor]) -> list[torch.Tensor]:
        """Return the whole tensors; every rank of the group must call this."""
        return [
            self._gather(tensor, self._forms[index]) if index in self._forms else tensor
            for index, tensor in enumerate(tensors)
        ]

    def _gather(self, part: torch.Tensor, form: _WholeForm) -> torch.Tensor:
        with torch.no_grad():
            # As bytes: not every backend supports every dtype.
            bits = part.view(torch.uint8)
            whole_bits = bits.new_empty(bits.numel() * self._ranks)
            _gather_single(whole_bits, bits, group=self._group)
            whole = whole_bits.view(part.dtype).view(form.shape)
            if not form.is_contiguous:
                whole = whole.new_empty_strided(form.shape, form.strides).copy_(whole)
        return whole.requires_grad_()


def _can_slice(tensor: torch.Tensor, ranks: int) -> bool:
    return (
        type(tensor) is torch.Tensor
        and tensor.layout is torch.strided
        and tensor.is_floating_point()
        and tensor.requires_grad
        and not gathers_gradients(tensor)
        and tensor.numel() % ranks == 0
        and tensor.numel() > 0
        and not any(
            stride == 0 and size > 1
            for size, stride in zip(tensor.shape, tensor.stride(), strict=True)
        )
    )


def _slice(tensor: torch.Tensor, rank: int, ranks: int) -> torch.Tensor:
    with hidden(), torch.no_grad():
        numel = tensor.numel() // ranks
        flat = tensor.detach().reshape(-1)
        return flat[rank * numel : (rank + 1) * numel].clone()


# ---- caches --------------------------------------------------------------------------------------
#
# Caches of keys and values that a recomputed region writes to.
#
# A `transformers` model passes its cache to every layer, by default also in training, and each
# layer appends to it. Recomputation must not append again: it gets the cache as it was when the
# region began, and its writes are dropped. Only the entries that the region itself changed are kept
# for this, so that no other layer's keys and values live longer.
#
# A cache may hold other caches: an encoder-decoder cache holds one for each kind of attention.


class CacheStates:
    """The caches among a call's arguments, in their state before the region runs."""

    def __init__(self, caches: Sequence[Any]) -> None:
        self._caches = list({id(one): one for cache in caches for one in _walk(cache)}.values())
        self._before = {id(cache): _contents_of(cache) for cache in self._caches}

    def end(self) -> None:
        """Keep the earlier state of the entries that the region changed; drop the rest."""
        for cache in self._caches:
            now = _contents_of(cache)
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


def _contents_of(cache: Any) -> dict[str, dict[Any, _Entry]]:  # noqa: ANN401
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
