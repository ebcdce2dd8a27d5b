"""Separation of a region's arguments into tensors and the rest.

Tensors are found in lists, tuples, named tuples, dicts and all other containers of torch's pytree,
in the fields of dataclasses, and among the bound arguments of `functools.partial`. A `Template`
keeps the rest and holds no tensor, so that the owner of the tensors decides how long they live.
Objects without tensors are passed on as they are. Containers with tensors are rebuilt, once each.
"""

from __future__ import annotations

import copy
import dataclasses
import functools
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import torch

from swapkit._runtime.torch_compat.internals import pytree

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence


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
