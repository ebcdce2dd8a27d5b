"""Puts the operators that pack and unpack saved tensors into the two graphs of a region."""

from __future__ import annotations

import functools
import operator
import re
from collections.abc import Callable, Iterable, Sequence
from contextlib import AbstractContextManager
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import fx
from torch.utils.checkpoint import CheckpointPolicy

from swapkit._runtime.compiled import NAMESPACE
from swapkit._runtime.torch_compat import internals
from swapkit.units import format_bytes

LEAST_BYTES = 4096  # of a storage: less is not worth an operator
HANDLE_BYTES = 8  # `shim/cpp/saved/late_hooks.cpp`
IS_SWAPPED = "swapkit_is_swapped"  # our mark of a node whose result a user moves to the host
_FRAME = re.compile(r'\s*File "(?:.*/)?(.*)", line (\d+), in (\S+)')
_SWAPPED_POLICIES = ("MUST_CPU_OFFLOAD", "PREFER_CPU_OFFLOAD")  # not in every version of torch
_TRANSPARENT = ("flex_attention", "triton_kernel_wrapper_functional")  # their results are new
EXACT_OPERANDS = "eager_input_vals"  # torch's name of what inductor restores the strides of
NO_CHECK = "saved_tensor_with_no_vc_check"  # torch's mark of what autograd keeps without hooks
# Our operators, which the shim defines. The first two are the same, for a compiler that places it,
# and with the write in its schema, for others: a write would keep inductor from fusing kernels.
PACK, PACK_IN_PLACE, UNPACK = "pack_saved", "pack_saved_", "unpack_saved"
# The first two, in Python, for tensors that a selective checkpoint of the user's moves to the host.
SWAP, SWAP_IN_PLACE = "swap_saved", "swap_saved_"
_SWAPPING = {PACK: SWAP, PACK_IN_PLACE: SWAP_IN_PLACE}


def find(name: str) -> internals.OpOverload:
    """Return an operator of ours; the shim must be loaded."""
    found: internals.OpOverload = getattr(getattr(torch.ops, NAMESPACE), name).default
    return found


Swapping = Callable[[torch.Tensor], AbstractContextManager[object]]


_swapping: list[Swapping] = []  # of the process


def register(swapping: Swapping) -> None:
    """Let torch trace the operators.

    Args:
        swapping: returns hooks that move what autograd saves on a tensor's device to the host.
    """
    _swapping[:] = [swapping]
    _define()


@functools.cache
def _define() -> None:
    for name, made in ((SWAP, "Tensor"), (SWAP_IN_PLACE, "Tensor(a!)")):
        torch.library.define(
            f"{NAMESPACE}::{name}",
            f"({made} made, str region) -> Tensor",
            tags=(torch.Tag.needs_exact_strides,),
        )
        torch.library.impl(f"{NAMESPACE}::{name}", "CompositeExplicitAutograd")(_swap)
    for name in (*_SWAPPING, *_SWAPPING.values()):
        torch.library.register_fake(f"{NAMESPACE}::{name}")(_fake_pack)
        fx.has_side_effect(find(name))
    torch.library.register_fake(f"{NAMESPACE}::{UNPACK}")(_fake_unpack)


def _swap(made: torch.Tensor, region: str) -> torch.Tensor:
    with _swapping[0](made):
        handle: torch.Tensor = find(PACK)(made, region)
    return handle


def _fake_pack(
    made: torch.Tensor,  # noqa: ARG001 - of the operator
    region: str,  # noqa: ARG001
) -> torch.Tensor:
    return torch.empty(HANDLE_BYTES, dtype=torch.uint8, device="cpu")


def _fake_unpack(
    handle: torch.Tensor,  # noqa: ARG001 - of the operator
    size: Sequence[int],
    stride: Sequence[int],
    dtype: torch.dtype,
    device: torch.device,
) -> torch.Tensor:
    return torch.empty_strided(size, stride, dtype=dtype, device=device)


def save_swapped(joint: fx.Graph) -> None:
    """Let a partitioner save what a selective checkpoint moves to the host, and mark it."""
    for node in joint.nodes:
        if getattr(node.meta.get("recompute"), "name", "") in _SWAPPED_POLICIES:
            node.meta["recompute"] = CheckpointPolicy.MUST_SAVE
            node.meta[IS_SWAPPED] = True


def has_compiled_hooks() -> bool:
    """Return whether torch is about to compile the thread's saved-tensor hooks into the graphs."""
    return all(isinstance(hook, fx.GraphModule) for hook in internals.top_hooks(True) or [None])  # noqa: FBT003


def has_device_tensors(graph: fx.Graph) -> bool:
    """Return whether a graph works on an accelerator."""
    return any(_is_tensor(node) and node.meta["val"].device.type != "cpu" for node in graph.nodes)


@dataclass(frozen=True, slots=True, kw_only=True)
class MovedHooks:
    """What happens to the saved tensors of one region."""

    region: str  # a name for people: where its code begins
    packed: tuple[int, ...] = ()  # bytes of the storages that the graphs pack
    stays: dict[str, list[int]] = field(default_factory=dict)  # bytes of the others, by reason

    def __str__(self) -> str:
        """Return a line for `Session.explain`."""
        others = "; ".join(
            f"{len(each)} of {format_bytes(sum(each))} do not: {why}"
            for why, each in self.stays.items()
        )
        moves = f"{len(self.packed)} saved tensors, {format_bytes(sum(self.packed))}, move"
        line = f"compiled region {self.region}: {moves} while it runs"
        return f"{line}; {others}" if others else line


@dataclass(frozen=True, slots=True, kw_only=True)
class _PackedStorage:
    """A storage that the forward packs."""

    target: fx.Node  # the tensor that is packed
    members: tuple[fx.Node, ...]  # the tensors that the backward uses
    views: tuple[tuple[fx.Node, ...], ...]  # the operators from the target to each of them
    last: fx.Node  # the last use in the forward
    nbytes: int
    is_swapped: bool  # by the user's selective checkpoint


def move_hooks(
    forward: fx.GraphModule, backward: fx.GraphModule, returned: int, *, is_scheduled: bool
) -> MovedHooks:
    """Replace what the backward graph gets from the forward graph by handles, where possible.

    Args:
        forward: changed in place.
        backward: likewise.
        returned: how many of the forward's outputs are the program's.
        is_scheduled: whether the compiler places the operators (`compilers.place_hooks`). The
            forward then packs at its end: no use may be fused into a kernel behind the pack.
    """
    (output,) = forward.graph.find_nodes(op="output")
    outputs = list(output.args[0])
    saved = [node for node in outputs[returned:] if _is_tensor(node)]
    given = _find_given(backward.graph, len(saved))
    chosen, stays = _choose(forward.graph, saved, outputs[:returned])
    found = MovedHooks(
        region=_name_region(forward.graph),
        packed=tuple(each.nbytes for each in chosen),
        stays=stays,
    )
    if chosen:
        symbols = _Symbols(forward.graph, backward.graph)
        for each in chosen:
            symbols.add(each.target)
        pack = PACK if is_scheduled else PACK_IN_PLACE
        handles = [
            _pack(forward.graph, pack, each, behind=output.prev if is_scheduled else each.last)
            for each in chosen
        ]
        handles[0].update_arg(1, str(found))  # in the graph, for whoever runs it from a cache
        _unpack(backward.graph, chosen, handles, dict(zip(saved, given, strict=True)), symbols)
        _replace_outputs(output, returned, chosen, [*handles, *symbols.made])
        for module in (forward, backward):
            module.graph.lint()
            module.recompile()
    elif stays:
        torch.ops.swapkit.note_region(str(found))
    return found


def note_unmoved(forward: fx.GraphModule, why: str) -> None:
    """Note that nothing moves inside a region, for `Session.explain`."""
    torch.ops.swapkit.note_region(f"compiled region {_name_region(forward.graph)}: {why}")


def _name_region(graph: fx.Graph) -> str:
    """Return where the code of a region begins, such as `forward (model.py:12)`, or its module."""
    for node in graph.nodes:
        for line in node.meta.get("stack_trace", "").splitlines():
            if found := _FRAME.match(line):
                file, number, function = found.groups()
                return f"{function} ({file}:{number})"
        for _path, module in node.meta.get("nn_module_stack", {}).values():
            return str(getattr(module, "__name__", module))
    return "without a place"


def _find_given(backward: fx.Graph, count: int) -> list[fx.Node]:
    """Return the inputs of a backward that are the saved tensors of the forward, in their order.

    Their names may differ. Sizes are before them, gradients behind.
    """
    return [node for node in backward.find_nodes(op="placeholder") if _is_tensor(node)][:count]


# ---- which tensors -------------------------------------------------------------------------------


def _choose(
    graph: fx.Graph, saved: Sequence[fx.Node], results: Sequence[Any]
) -> tuple[list[_PackedStorage], dict[str, list[int]]]:
    """Return the storages to pack, and the bytes of the others by the reason why they stay."""
    order = {node: at for at, node in enumerate(graph.nodes)}
    tensors, returned = _by_storage(graph.nodes), _by_storage(results)
    chosen: list[_PackedStorage] = []
    stays: dict[str, list[int]] = {}
    for storage, members in _by_storage(saved).items():
        nbytes = _bytes_of(members[0])
        why = _why_it_stays(tensors[storage], members, is_returned=storage in returned)
        if why and nbytes >= LEAST_BYTES:
            stays.setdefault(why, []).append(nbytes)
        elif nbytes >= LEAST_BYTES:
            chosen.append(_describe(tensors[storage], members, order, nbytes))
    return chosen, stays


def _describe(
    tensors: Sequence[fx.Node], members: Sequence[fx.Node], order: dict[fx.Node, int], nbytes: int
) -> _PackedStorage:
    """Return how a storage is packed; `tensors`: all that view it."""
    base = tensors[0]
    uses = [user for each in tensors for user in (each, *each.users) if user.op != "output"]
    return _PackedStorage(
        target=base,
        members=tuple(members),
        views=tuple(_find_views(base, node) or () for node in members),
        last=max(uses, key=order.__getitem__),
        nbytes=nbytes,
        is_swapped=any(node.meta.get(IS_SWAPPED) for node in (base, *members)),
    )


def _by_storage(nodes: Iterable[object]) -> dict[int, list[fx.Node]]:
    """Return the tensors of each storage, in order."""
    found: dict[int, list[fx.Node]] = {}
    for node in nodes:
        if isinstance(node, fx.Node) and (storage := _storage_of(node)) is not None:
            found.setdefault(storage, []).append(node)
    return found


def _why_it_stays(
    tensors: Sequence[fx.Node], members: Sequence[fx.Node], *, is_returned: bool
) -> str:
    """Return why the graphs do not pack a storage; empty: they do."""
    base = tensors[0]
    if base.op != "call_function":
        return "inputs and parameters of the region"
    if is_returned:
        return "results of the region"
    if any(map(_shares_unseen, tensors)):
        return "operands and results of graphs inside"
    if any(node.meta.get(NO_CHECK) for node in members):
        return "kept by the ctx of an autograd.Function"
    if any(_find_views(base, node) is None for node in members):
        return "views that cannot be made again"
    return ""


def _shares_unseen(tensor: fx.Node) -> bool:
    """Return whether another graph takes or makes a tensor: its results may share its memory."""
    targets = [each.target for each in (*tensor.all_input_nodes, tensor, *tensor.users)]
    graphs = [each for each in targets if isinstance(each, internals.HigherOrderOperator)]
    return any(each.__name__ not in _TRANSPARENT for each in graphs)


def _find_views(base: fx.Node, node: fx.Node) -> tuple[fx.Node, ...] | None:
    """Return the operators that make a view of a base; None: they need more than the base."""
    views: list[fx.Node] = []
    storage = _storage_of(base)
    while node is not base:
        inputs = node.all_input_nodes
        if len(inputs) != 1 or not _is_pure(node.target):
            return None
        if _is_tensor(inputs[0]) and _storage_of(inputs[0]) != storage:
            return None
        views.append(node)
        node = inputs[0]
    return tuple(reversed(views))


def _is_pure(target: object) -> bool:
    """Return whether a node may be repeated: one of several results, or an operator's."""
    is_operator = (
        isinstance(target, internals.OpOverload) and not internals.schema_of(target).is_mutable
    )
    return target is operator.getitem or is_operator


def _is_tensor(node: object) -> bool:
    return isinstance(node, fx.Node) and isinstance(node.meta.get("val"), torch.Tensor)


def _storage_of(node: fx.Node) -> int | None:
    """Return a number for a node's storage; None: the node is no tensor with plain memory."""
    value = node.meta.get("val")
    if (
        type(value) is not internals.FakeTensor
        or value.layout is not torch.strided
        or value.is_nested
    ):
        return None
    return internals.storage_id(value)


def _bytes_of(node: fx.Node) -> int:
    """Return the bytes of a node's storage: of those of a symbolic size, as first compiled."""
    nbytes = node.meta["val"].untyped_storage().nbytes()
    return int(nbytes) if isinstance(nbytes, int) else int(nbytes.node.hint or LEAST_BYTES)


# ---- the graphs ----------------------------------------------------------------------------------


def _pack(graph: fx.Graph, pack: str, saved: _PackedStorage, *, behind: fx.Node) -> fx.Node:
    """Pack a storage behind a node; return the handle."""
    value = saved.target.meta["val"]
    operator = find(_SWAPPING[pack] if saved.is_swapped else pack)
    with graph.inserting_after(behind):
        handle = graph.call_function(operator, (saved.target, ""), name=f"packed_{saved.target}")
    with value.fake_mode:
        handle.meta["val"] = torch.empty(HANDLE_BYTES, dtype=torch.uint8)
    handle.meta[NO_CHECK] = True  # other code's hooks need not see it
    # Inductor may have chosen other strides. The backward was traced with these.
    handle.meta[EXACT_OPERANDS] = (value, ""), {}
    return handle


class _Symbols:
    """The symbolic sizes that the backward needs, and does not get yet."""

    def __init__(self, forward: fx.Graph, backward: fx.Graph) -> None:
        """Find those that the backward gets."""
        self._forward, self._backward = forward, backward
        inputs = forward.find_nodes(op="placeholder")
        self._known = {_symbol_of(node): node for node in inputs if _symbol_of(node)}
        given = [node for node in backward.find_nodes(op="placeholder") if _symbol_of(node)]
        self._given = {_symbol_of(node): node for node in given}
        self._last: fx.Node | None = given[-1] if given else None
        self.made: list[fx.Node] = []  # new outputs of the forward

    def add(self, target: fx.Node) -> None:
        """Let the backward have the sizes and strides of a tensor of the forward."""
        value = target.meta["val"]
        for query, sizes in (
            (torch.ops.aten.sym_size.int, value.size()),
            (torch.ops.aten.sym_stride.int, value.stride()),
        ):
            for dimension, size in enumerate(sizes):
                symbol = "" if isinstance(size, int) else str(size.node.expr)
                if not symbol or symbol in self._given:
                    continue
                node = self._known.get(symbol)
                if node is None:
                    with self._forward.inserting_after(target):
                        node = self._forward.call_function(query, (target, dimension))
                    node.meta["val"] = size
                self.made.append(node)
                self._given[symbol] = self._place(node)

    def _place(self, node: fx.Node) -> fx.Node:
        """Return a new input of the backward, behind its other sizes, which come first."""
        last = self._last
        before = next(iter(self._backward.nodes))
        with (
            self._backward.inserting_before(before)
            if last is None
            else self._backward.inserting_after(last)
        ):
            place = self._last = self._backward.placeholder(node.name)
        place.meta["val"] = node.meta["val"]
        return place

    def find(self, sizes: Sequence[Any]) -> list[Any]:
        """Return sizes as operands of the backward."""
        return [
            each if isinstance(each, int) else self._given[str(each.node.expr)] for each in sizes
        ]


def _symbol_of(node: fx.Node) -> str:
    """Return the expression of a symbolic size; empty: the node is none."""
    value = node.meta.get("val")
    return str(value.node.expr) if isinstance(value, torch.SymInt) else ""


def _unpack(
    graph: fx.Graph,
    chosen: Iterable[_PackedStorage],
    handles: Iterable[fx.Node],
    given: dict[fx.Node, fx.Node],
    symbols: _Symbols,
) -> None:
    """Unpack storages before their first use, from handles behind the inputs of saved tensors.

    `given`: these inputs, in order, by the tensor of the forward.
    """
    order = {node: at for at, node in enumerate(graph.nodes)}
    behind = next(reversed(given.values()))
    for saved, packed in zip(chosen, handles, strict=True):
        places = [given[node] for node in saved.members]
        with graph.inserting_after(behind):
            handle = behind = graph.placeholder(packed.name)
        handle.meta.update(places[0].meta, val=packed.meta["val"])
        handle.meta.pop("tensor_meta", None)
        first = min((user for each in places for user in each.users), key=order.__getitem__)
        with graph.inserting_before(first):
            _unpack_one(graph, saved, handle, places, symbols)
    for place in [given[node] for saved in chosen for node in saved.members]:
        graph.erase_node(place)


def _unpack_one(
    graph: fx.Graph,
    saved: _PackedStorage,
    handle: fx.Node,
    places: Sequence[fx.Node],
    symbols: _Symbols,
) -> None:
    """Unpack a storage here, and let its views take the place of inputs."""
    value = saved.target.meta["val"]
    sizes, strides = symbols.find(value.size()), symbols.find(value.stride())
    layout = sizes, strides, value.dtype, value.device
    whole = graph.call_function(find(UNPACK), (handle, *layout), name=saved.target.name)
    whole.meta["val"] = value
    for place, views in zip(places, saved.views, strict=True):
        tensor = whole
        for view in views:
            tensor = _call_again(graph, view, tensor)
        place.replace_all_uses_with(tensor)


def _call_again(graph: fx.Graph, view: fx.Node, tensor: fx.Node) -> fx.Node:
    """Add the operator of a view with another operand."""
    return graph.node_copy(view, lambda _: tensor)


def _replace_outputs(
    output: fx.Node, returned: int, chosen: Iterable[_PackedStorage], added: Sequence[fx.Node]
) -> None:
    """Return handles for what is packed, behind all other saved tensors, and new sizes last."""
    outputs = list(output.args[0])  # type: ignore[arg-type]
    gone = {node for each in chosen for node in each.members}
    kept = [at for at in range(returned, len(outputs)) if outputs[at] not in gone]
    first = [*range(returned), *(at for at in kept if _is_tensor(outputs[at]))]
    last = [at for at in kept if at not in first]
    handles = [node for node in added if _is_tensor(node)]

    def arrange(values: Sequence[Any], new: Sequence[Any]) -> list[Any]:
        before, behind = [values[at] for at in first], [values[at] for at in last]
        return [*before, *new[: len(handles)], *behind, *new[len(handles) :]]

    output.args = (tuple(arrange(outputs, added)),)
    if "desc" in output.meta:  # of each output: what is new gets that of what goes
        kinds = list(output.meta["desc"])
        freed = [kinds[at] for at in range(returned, len(outputs)) if at not in kept]
        freed += freed[-1:] * len(added)
        output.meta["desc"] = arrange(kinds, freed[: len(added)])
