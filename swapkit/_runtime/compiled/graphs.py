"""Puts the operators that pack and unpack saved tensors into the two graphs of a region."""

from __future__ import annotations

import functools
import operator
import re
from collections.abc import Callable, Iterable, Sequence
from contextlib import AbstractContextManager
from dataclasses import dataclass
from typing import Any

import torch
from torch import fx
from torch.utils.checkpoint import CheckpointPolicy

from swapkit._runtime.compiled import NAMESPACE
from swapkit._runtime.operators.effects import HIDDEN_VIEWS, effects_of
from swapkit._runtime.torch_compat import internals
from swapkit.units import format_bytes

LEAST_BYTES = 4096  # of a storage: less is not worth an operator
IS_SWAPPED = "swapkit_is_swapped"  # our mark of a node whose result a user moves to the host
_FRAME = re.compile(r'\s*File "(?:.*/)?(.*)", line (\d+), in (\S+)')
_SWAPPED_POLICIES = ("MUST_CPU_OFFLOAD", "PREFER_CPU_OFFLOAD")  # not in every version of torch
_REPLACING = frozenset({"aten::set_", "aten::shallow_copy_data_"})  # storages of the program's
_TRANSPARENT = ("flex_attention", "triton_kernel_wrapper_functional")  # their results are new
NO_CHECK = "saved_tensor_with_no_vc_check"  # torch's mark of what autograd keeps without hooks
# Our operators, which the shim defines. The first two take storages, of which they have all that is
# saved, and give a handle for each tensor: the second one says in its schema that it writes.
PACK, PACK_IN_PLACE, UNPACK = "pack_saved", "pack_saved_", "unpack_saved"
# The first two, in Python, for tensors that a selective checkpoint of the user's moves to the host.
SWAP, SWAP_IN_PLACE = "swap_saved", "swap_saved_"
MARK = "mark_saved"  # which results of a graph inductor packs
OPERATORS = PACK, PACK_IN_PLACE, SWAP, SWAP_IN_PLACE, UNPACK, MARK  # `compilers.place_hooks`


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
    for name, made in ((SWAP, "Tensor[]"), (SWAP_IN_PLACE, "Tensor(a!)[]")):
        torch.library.define(f"{NAMESPACE}::{name}", f"({made} made, str region) -> Tensor[]")
        torch.library.impl(f"{NAMESPACE}::{name}", "CompositeExplicitAutograd")(_swap)
    torch.library.define(f"{NAMESPACE}::{MARK}", "(str region, int from_end, bool[] swapped) -> ()")
    for name in (PACK, PACK_IN_PLACE, SWAP, SWAP_IN_PLACE, UNPACK):
        torch.library.register_fake(f"{NAMESPACE}::{name}")(_fake_results)
    for name in (PACK, PACK_IN_PLACE, SWAP, SWAP_IN_PLACE, MARK):
        fx.has_side_effect(find(name))
    torch.library.impl(f"{NAMESPACE}::{MARK}", "CompositeExplicitAutograd")(lambda *_: None)


def _swap(made: Sequence[torch.Tensor], region: str) -> list[torch.Tensor]:
    with _swapping[0](made[0]):
        handles: list[torch.Tensor] = find(PACK)(made, region)
    return handles


def _fake_results(
    tensors: Sequence[torch.Tensor],
    region: str = "",  # noqa: ARG001 - of operators that pack
) -> list[torch.Tensor]:
    return [_like(each) for each in tensors]


def _like(tensor: torch.Tensor) -> torch.Tensor:
    """Return a tensor with the same layout: of a handle, and of what it was made for.

    Inductor chooses strides of saved tensors, and torch compiles the backward for those.
    """
    return torch.empty_strided(
        tensor.size(), tensor.stride(), dtype=tensor.dtype, device=tensor.device
    )


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
class _PackedStorage:
    """A storage that the forward packs."""

    members: tuple[fx.Node, ...]  # the tensors that the backward uses
    late: tuple[fx.Node, ...]  # all views, if the graph makes members behind `last`
    last: fx.Node  # the last that reads it in the forward
    nbytes: int
    is_swapped: bool  # by the user's selective checkpoint


def move_hooks(
    forward: fx.GraphModule, backward: fx.GraphModule, returned: int, *, is_scheduled: bool
) -> str:
    """Let the forward give handles for what the backward gets from it, where possible.

    Args:
        forward: changed in place.
        backward: likewise.
        returned: how many of the forward's outputs are the program's.
        is_scheduled: whether the compiler packs what the graph returns (`compilers.place_hooks`):
            its kernels are then those of the graph as it is.

    Returns:
        A line for `Session.explain`.
    """
    (output,) = forward.graph.find_nodes(op="output")
    outputs = list(output.args[0])
    saved = [node for node in outputs[returned:] if _is_tensor(node)]
    given = dict(zip(saved, _find_given(backward.graph, len(saved)), strict=True))
    chosen, stays = _choose(forward.graph, saved, outputs[:returned])
    region = _describe_region(forward.graph, [each.nbytes for each in chosen], stays)
    handles = [node for node in saved if _is_handle_inside(forward, node)]
    hidden = [*handles, *(node for each in chosen for node in each.members)]
    if hidden:
        first = _put_last(output, returned, hidden) + len(handles)
        _put_last_given([given[node] for node in hidden], given[saved[-1]])
        _hide(handles)
        (_mark if is_scheduled else _pack)(output, chosen, first, region)
        _unpack(backward.graph, chosen, given)
        _recompile(forward, backward)
    elif stays:
        torch.ops.swapkit.note_region(region)
    return region


def _hide(handles: Iterable[fx.Node]) -> None:
    """Let no hook see handles."""
    for node in handles:
        node.meta[NO_CHECK] = True


def _recompile(*modules: fx.GraphModule) -> None:
    for module in modules:
        module.graph.lint()
        module.recompile()


def _describe_region(graph: fx.Graph, packed: Sequence[int], stays: dict[str, list[int]]) -> str:
    others = "; ".join(
        f"{len(each)} of {format_bytes(sum(each))} do not: {why}" for why, each in stays.items()
    )
    moves = f"{len(packed)} saved tensors, {format_bytes(sum(packed))}, move while it runs"
    line = f"compiled region {_name_region(graph)}: {moves}"
    return f"{line}; {others}" if others else line


def note_unmoved(forward: fx.GraphModule, obstacle: str) -> None:
    """Note that nothing moves inside a region, for `Session.explain`."""
    torch.ops.swapkit.note_region(
        f"compiled region {_name_region(forward.graph)}: with {obstacle} saved tensors move only "
        "between regions. Compile without that, or compile blocks"
    )


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
    bases = _find_bases(graph)
    tensors, returned = _by_base(bases, bases), _by_base(results, bases)
    chosen: list[_PackedStorage] = []
    stays: dict[str, list[int]] = {}
    for base, members in _by_base(saved, bases).items():
        nbytes = _bytes_of(base)
        why = _why_it_stays(tensors[base], members, is_returned=base in returned)
        if why and nbytes >= LEAST_BYTES:
            stays.setdefault(why, []).append(nbytes)
        elif nbytes >= LEAST_BYTES:
            chosen.append(_describe(tensors[base], members, order, nbytes))
    return chosen, stays


def _describe(
    tensors: Sequence[fx.Node], members: Sequence[fx.Node], order: dict[fx.Node, int], nbytes: int
) -> _PackedStorage:
    """Return how a storage is packed; `tensors`: all that view it."""
    uses = [user for each in tensors for user in (each, *each.users)]
    last = max((each for each in uses if _reads(each, tensors)), key=order.__getitem__)
    has_late = any(order[node] > order[last] for node in members)
    return _PackedStorage(
        members=tuple(members),
        late=tuple(tensors[1:]) if has_late else (),
        last=last,
        nbytes=nbytes,
        is_swapped=any(node.meta.get(IS_SWAPPED) for node in (tensors[0], *members)),
    )


def _reads(user: fx.Node, tensors: Sequence[fx.Node]) -> bool:
    """Return whether a node does more than make a view of tensors, or return them."""
    return user is tensors[0] or (user not in tensors and user.op != "output")


def _by_base(
    nodes: Iterable[object], bases: dict[fx.Node, fx.Node]
) -> dict[fx.Node, list[fx.Node]]:
    """Return the tensors of each storage, in order, by the first one."""
    found: dict[fx.Node, list[fx.Node]] = {}
    for node in nodes:
        if isinstance(node, fx.Node) and node in bases:
            found.setdefault(bases[node], []).append(node)
    return found


def _find_bases(graph: fx.Graph) -> dict[fx.Node, fx.Node]:
    """Return the first tensor in the storage of each tensor with plain memory.

    By what operators do: where torch has merged equal operators, a result or a view of the one that
    is gone has its storage still. By the storages that torch traced, where no schema says that they
    are shared.
    """
    bases: dict[fx.Node, fx.Node] = {}
    firsts: dict[object, fx.Node] = {}
    for node in graph.nodes:
        storage = _storage_of(node)
        if storage is None:
            continue
        keys = (storage, node.args if node.target is operator.getitem else storage)
        first = next((firsts[key] for key in keys if key in firsts), node)
        viewed = _find_viewed(node)
        bases[node] = first if viewed is None else bases.get(viewed, first)
        firsts.update(dict.fromkeys(keys, bases[node]))
    return bases


def _find_viewed(node: fx.Node) -> fx.Node | None:
    """Return the operand whose memory a result has; None: it has its own, as far as is known."""
    call: Any
    place: Any
    call, place = node.args if node.target is operator.getitem else (node, 0)
    target = getattr(call, "target", None)
    if target in HIDDEN_VIEWS:
        return call.args[0]  # type: ignore[no-any-return]
    at = _find_shared(target, place) if isinstance(target, internals.OpOverload) else None
    given = call.args[at] if at is not None and at < len(call.args) else None
    return given if isinstance(given, fx.Node) else None


def _find_shared(target: internals.OpOverload, place: int) -> int | None:
    """Return the place of the argument whose memory a result has, by the operator's schema."""
    schema = internals.schema_of(target)
    result = schema.returns[place if len(schema.returns) > 1 else 0].alias_info
    for at, argument in enumerate(schema.arguments):
        shared = argument.alias_info
        # Schemas do not say whose memory a list of views has.
        if shared and (target.is_view or (result and shared.before_set & result.before_set)):
            return at
    return None


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
        return "operands and results of graphs inside, of collectives and of set_"
    if any(node.meta["val"].is_conj() or node.meta["val"].is_neg() for node in members):
        return "conjugate and negative views"
    if any(node.meta.get(NO_CHECK) for node in members):
        return "kept by the ctx of an autograd.Function"
    return ""


def _shares_unseen(tensor: fx.Node) -> bool:
    """Return whether what takes or makes a tensor may share its memory unseen, or use it later."""
    return any(_is_opaque(each.target) for each in (*tensor.all_input_nodes, tensor, *tensor.users))


def _is_opaque(target: object) -> bool:
    """Return whether a node is another graph, a collective or its end, or replaces a storage.

    A collective works until another operator waits for it, and that one returns its operand.
    """
    if isinstance(target, internals.HigherOrderOperator):
        return target.__name__ not in _TRANSPARENT
    if not isinstance(target, internals.OpOverload):
        return False
    return effects_of(target).is_communication or internals.schema_of(target).name in _REPLACING


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


def _is_handle_inside(module: fx.GraphModule, node: fx.Node) -> bool:
    """Return whether a tensor is the handle that a graph inside gives: torch splits that first."""
    call = node.args[0] if node.target is operator.getitem else None
    if not isinstance(call, fx.Node) or not isinstance(call.target, internals.HigherOrderOperator):
        return False
    names = [str(each.target) for each in call.all_input_nodes if each.op == "get_attr"]
    inner = [getattr(module, name, None) for name in names]
    return any(isinstance(each, fx.GraphModule) and _packs(each, node.args[1]) for each in inner)


def _packs(module: fx.GraphModule, place: Any) -> bool:  # noqa: ANN401 - an integer
    """Return whether a forward gives a handle at a place of its outputs."""
    (output,) = module.graph.find_nodes(op="output")
    outputs = output.args[0]
    if not isinstance(outputs, (tuple, list)) or place >= len(outputs):
        return False
    for mark in module.graph.find_nodes(op="call_function", target=find(MARK)):
        _region, from_end, are_swapped = mark.args
        if 0 <= place - (len(outputs) - from_end) < len(are_swapped):
            return True
    inputs = getattr(outputs[place], "all_input_nodes", ())
    return any(each.target in (find(PACK_IN_PLACE), find(SWAP_IN_PLACE)) for each in inputs)


def _put_last(output: fx.Node, returned: int, hidden: Sequence[fx.Node]) -> int:
    """Put what is packed behind the other saved tensors, where torch has what no hook sees.

    Return the first of the places.
    """
    outputs = list(output.args[0])  # type: ignore[arg-type]
    others = [at for at in range(returned, len(outputs)) if outputs[at] not in hidden]
    kept = [*range(returned), *(at for at in others if _is_tensor(outputs[at]))]
    order = [*kept, *map(outputs.index, hidden), *(at for at in others if at not in kept)]
    output.args = (tuple(outputs[at] for at in order),)
    if "desc" in output.meta:
        output.meta["desc"] = [output.meta["desc"][at] for at in order]
    return len(kept)


def _put_last_given(hidden: Iterable[fx.Node], behind: fx.Node) -> None:
    """Put the same inputs of the backward behind those of other saved tensors."""
    for place in hidden:
        behind.append(place)
        behind = place


def _mark(output: fx.Node, chosen: Sequence[_PackedStorage], first: int, region: str) -> None:
    """Name the outputs that inductor packs: all are in the graph, which is what caches key on.

    By their places from the end: torch takes those of effects away, which come first.
    """
    are_swapped = [each.is_swapped for each in chosen for _ in each.members]
    _hide(node for each in chosen for node in each.members)
    from_end = len(output.args[0]) - first  # type: ignore[arg-type]
    with output.graph.inserting_before(output):
        output.graph.call_function(find(MARK), (region, from_end, are_swapped))


def _pack(output: fx.Node, chosen: Sequence[_PackedStorage], first: int, region: str) -> None:
    """Pack storages behind their last use, and return the handles."""
    outputs, graph = list(output.args[0]), output.graph  # type: ignore[arg-type]
    for saved in chosen:
        name = SWAP_IN_PLACE if saved.is_swapped else PACK_IN_PLACE
        with graph.inserting_after(_hoist(graph, saved)):
            packed = graph.call_function(find(name), (list(saved.members), region))
        region, behind = "", packed  # with the first one
        for at, node in enumerate(saved.members):
            with graph.inserting_after(behind):
                handle = behind = graph.call_function(operator.getitem, (packed, at))
            value = node.meta["val"]
            with value.fake_mode:
                handle.meta["val"] = _like(value)
            handle.meta[NO_CHECK] = True
            outputs[first] = handle
            first += 1
    output.args = (tuple(outputs),)


def _hoist(graph: fx.Graph, saved: _PackedStorage) -> fx.Node:
    """Make views where they can be made: torch makes those for the backward at the end.

    Return the last node that needs the memory, and the tensors that are packed.
    """
    if not saved.late:
        return saved.last
    for view in saved.late:
        order = {node: at for at, node in enumerate(graph.nodes)}
        max(view.all_input_nodes, key=order.__getitem__, default=view.prev).append(view)
    order = {node: at for at, node in enumerate(graph.nodes)}
    return max((saved.last, *saved.members), key=order.__getitem__)


def _unpack(
    graph: fx.Graph, chosen: Iterable[_PackedStorage], given: dict[fx.Node, fx.Node]
) -> None:
    """Unpack storages before their first use; `given`: inputs, by the tensor of the forward."""
    order = {node: at for at, node in enumerate(graph.nodes)}
    for saved in chosen:
        users = {given[node]: tuple(given[node].users) for node in saved.members}
        every = [user for each in users.values() for user in each]
        if not every:
            continue  # a partitioner of the user's has saved what nothing uses
        with graph.inserting_before(min(every, key=order.__getitem__)):
            tensors = graph.call_function(find(UNPACK), (list(users),))
            for at, place in enumerate(users):
                tensor = graph.call_function(operator.getitem, (tensors, at))
                tensor.meta["val"] = place.meta["val"]
                for user in users[place]:
                    user.replace_input_with(place, tensor)
