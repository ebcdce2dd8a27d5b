"""The private names of torch's compilers: the part of `internals.py` that is loaded with them.

The first import of inductor's settings or of Dynamo's backends loads this file, while torch may
still import more of its modules: so only `torch.fx` and inductor's base class come first.
"""

from __future__ import annotations

import functools
import importlib
import itertools
import sys
from collections.abc import Callable, Sequence
from graphlib import TopologicalSorter
from typing import Any, NamedTuple

from torch._inductor.custom_graph_pass import CustomPartitionerFn
from torch.fx import GraphModule, Node

__all__ = ["CustomPartitionerFn", "GraphModule"]  # re-exported
_inductor: Any = sys.modules["torch._inductor"]
_MARKS = "_swapkit_marks"  # of one of inductor's graphs
_OWN_LAYOUTS = ("FixedLayout", "FlexibleLayout")  # of buffers with memory of their own
Graphs = tuple[GraphModule, GraphModule]  # forward and backward
Split = Callable[..., Graphs]  # of a joint graph and its inputs

# ---- inductor: the split -------------------------------------------------------------------------


def split(joint: GraphModule, inputs: Sequence[object], **options: Any) -> Graphs:
    """Split a joint graph as inductor does without a partitioner of others."""
    from torch._functorch.partitioners import min_cut_rematerialization_partition

    return min_cut_rematerialization_partition(joint, inputs, **options)


def set_partitioner(partitioner: CustomPartitionerFn) -> None:
    """Let inductor call a partitioner, unless the program has set one."""
    from torch._inductor import config

    if config.custom_partitioner_fn is None:
        config.custom_partitioner_fn = partitioner


def find_obstacle(*, has_device: bool) -> str:
    """Return the setting of torch's that leaves no room for hooks inside of graphs; empty: none.

    Each operator of ours would end a device graph; compiled autograd asks no node for what no hook
    sees; processes without swapkit use precompiled code, too; and handles have nothing to assert.
    """
    from torch._dynamo import config as dynamo

    inductor = _inductor.config
    found = {
        "compiled_autograd": dynamo.compiled_autograd,
        "caching_precompile": getattr(dynamo, "caching_precompile", False),
        "nan_asserts": inductor.nan_asserts,
        "CUDA graphs (mode='reduce-overhead')": has_device and inductor.triton.cudagraphs,
    }
    return next((name for name, is_set in found.items() if is_set), "")


# ---- other backends ------------------------------------------------------------------------------


def wrap_splits(wrap: Callable[..., Split]) -> None:
    """Replace the partitioner of every backend of Dynamo that uses AOTAutograd, but inductor's."""
    from torch._dynamo.backends import common
    from torch._functorch.partitioners import default_partition

    backends: Any = common
    compile_graphs = backends.aot_module_simplified

    @functools.wraps(compile_graphs)
    def compile_wrapped(*args: Any, **kwargs: Any) -> object:
        given = kwargs.get("partition_fn", default_partition)
        if not _is_inductors(given):
            is_inductors = _is_inductors(kwargs.get("fw_compiler"))
            kwargs["partition_fn"] = wrap(given, is_inductors=is_inductors)
        return compile_graphs(*args, **kwargs)

    backends.aot_module_simplified = compile_wrapped


def _is_inductors(given: object) -> bool:
    """Return whether a function is inductor's: its partitioner calls whatever has been set."""
    function = given.func if isinstance(given, functools.partial) else given
    return getattr(function, "__module__", "") == "torch._inductor.compile_fx"


# ---- inductor: the order of kernels --------------------------------------------------------------


class _Marks(NamedTuple):
    """What is packed of the outputs of one graph."""

    region: str
    is_swapped: dict[int, bool]  # by the place of the output, from the end


@functools.cache
def place_hooks(
    pack: object, pack_: object, swap: object, swap_: object, unpack: object, mark: object
) -> None:
    """Let inductor pack what graphs return, and place operators: the kernels stay as they are.

    Behind the last, and before the first use of a tensor. A pack ends the life of a buffer: it runs
    behind all readers, and nothing is written to the memory any more.

    Args:
        pack: an operator that takes the memory of tensors away.
        pack_: the same, in graphs for other compilers, which some then give to inductor.
        swap: another one.
        swap_: the same.
        unpack: the operator that gives tensors back.
        mark: the operator that names the outputs of a graph that are packed.
    """
    importlib.import_module("torch._inductor.graph")  # and all that it needs
    lowering, compiler = _inductor.lowering, _inductor.graph.GraphLowering
    scheduler = _inductor.scheduler.Scheduler

    def lower_mark(region: str, from_end: int, are_swapped: Sequence[bool]) -> None:
        marks = _Marks(region, dict(enumerate(are_swapped, -from_end)))
        setattr(_inductor.virtualized.V.graph, _MARKS, marks)

    lowering.register_lowering(mark, type_promotion_kind=None)(lower_mark)
    for each in (pack_, swap_):  # the graph then returns what is packed
        lowering.register_lowering(each, type_promotion_kind=None)(lambda made, _region: made)
    lower_output, compute_last_usage = compiler.output, scheduler.compute_last_usage

    def lower_and_pack(self: Any, *args: Any) -> None:  # noqa: ANN401 - a GraphLowering
        lower_output(self, *args)
        outputs = self.current_node.args[0]
        marks = getattr(self, _MARKS, None) or _find_marks(outputs, pack_, swap_)
        _pack_outputs(self, marks, pack, swap)

    def place_first(self: Any) -> None:  # noqa: ANN401 - a Scheduler
        self.nodes = _place(self.nodes, (pack, swap), unpack)
        compute_last_usage(self)  # called once all nodes have their places

    compiler.output = lower_and_pack
    scheduler.compute_last_usage = place_first


def _find_marks(outputs: object, pack: object, swap: object) -> _Marks:
    """Return which outputs are of operators that pack."""
    region, is_swapped = "", {}
    values = outputs if isinstance(outputs, (tuple, list)) else ()
    for at, node in enumerate(values, -len(values)):
        inputs = node.all_input_nodes if isinstance(node, Node) else ()
        packed = next((each for each in inputs if each.target in (pack, swap)), None)
        if packed is not None:
            region = region or str(packed.args[1])
            is_swapped[at] = packed.target is swap
    return _Marks(region, is_swapped)


def _pack_outputs(graph: Any, marks: _Marks, pack: object, swap: object) -> None:  # noqa: ANN401
    """Replace outputs of a graph by their handles.

    One that shares memory with an input or with another output stays: nothing could be freed.
    """
    outputs = graph.graph_outputs
    roots = [_root_of(each) for each in outputs]
    places = enumerate(roots, -len(roots))
    others = {"", *(_name_of(root) for at, root in places if at not in marks.is_swapped)}
    groups: dict[str, list[int]] = {}
    for at in marks.is_swapped:
        name = _name_of(roots[at])
        if name not in others and type(roots[at].layout).__name__ in _OWN_LAYOUTS:
            groups.setdefault(name, []).append(at)
    region = marks.region
    for name, chosen in groups.items():
        operator = swap if any(marks.is_swapped[at] for at in chosen) else pack
        _pack_group(graph, operator, name, chosen, region)
        region = ""  # with the first one


def _pack_group(
    graph: Any,  # noqa: ANN401 - inductor's
    pack: object,
    root: str,
    chosen: Sequence[int],
    region: str,
) -> None:
    """Replace outputs that share the memory of a buffer by their handles."""
    call: Any = _inductor.lowering.fallback_handler
    made = [graph.graph_outputs[at] for at in chosen]
    handles = call(pack, add_to_fallback_set=False)(made, region)
    graph.never_reuse_buffers.update((root, *(each.get_name() for each in made)))
    graph.unaligned_buffers.update(each.get_name() for each in handles)  # without an address
    for at, handle in zip(chosen, handles, strict=True):
        graph.graph_outputs[at] = handle


def _root_of(made: Any) -> Any:  # noqa: ANN401 - inductor's
    """Return the buffer whose memory an output has.

    The graph before inductor does not say so: inductor writes operands of a `cat` into its result,
    and removes operators that copy.
    """
    while True:
        if isinstance(made, (_inductor.ir.MutableBox, _inductor.ir.BaseView)):
            made = made.data
            continue
        names: set[str] = set()
        if isinstance(made, _inductor.ir.Buffer):
            names = {*made.get_inputs_that_alias_output(), *made.get_mutation_names()}
        if len(names) != 1:
            return made
        made = _inductor.virtualized.V.graph.get_buffer(names.pop())


def _name_of(root: Any) -> str:  # noqa: ANN401 - inductor's
    """Return a buffer's name; empty: the graph does not make the memory."""
    is_given = isinstance(root, _inductor.ir.InputBuffer)
    return root.get_name() if isinstance(root, _inductor.ir.Buffer) and not is_given else ""


def _place(nodes: Sequence[Any], packing: tuple[object, ...], unpack: object) -> list[Any]:
    """Put each pack behind the last node that has its memory, each unpack before its first user.

    Inductor does not know that a pack changes memory: it would fuse no reader with what it reads.
    """
    root_name = functools.cache(_root_name)
    packs, unpacks = _with_results(nodes, packing), _with_results(nodes, (unpack,))
    if not (packs or unpacks):
        return list(nodes)
    moved = set(map(id, itertools.chain(*packs, *unpacks)))
    rest = [node for node in _keep_writes(nodes, root_name) if id(node) not in moved]
    last = _find_last(rest, root_name)
    first = _find_first(rest)
    behind: dict[int, list[Any]] = {}
    before: dict[int, list[Any]] = {}
    for group in packs:
        at = max(last.get(root_name(name), -1) for name in _needs(group[0]))
        behind.setdefault(at, []).extend(group)
    for group in unpacks:
        at = min(first.get(name, len(rest)) for name in _names(group))
        before.setdefault(at, []).extend(group)
    placed = behind.get(-1, [])
    for at, node in enumerate(rest):
        placed += [*before.get(at, ()), node, *behind.get(at, ())]
    return placed + before.get(len(rest), [])


def _find_first(nodes: Sequence[Any]) -> dict[str, int]:
    """Return the place of the first node that needs each buffer."""
    return {name: at for at in reversed(range(len(nodes))) for name in _needs(nodes[at])}


def _find_last(nodes: Sequence[Any], root_name: Callable[[str], str]) -> dict[str, int]:
    """Return the place of the last node that has each memory."""
    return {
        root_name(name): at
        for at, node in enumerate(nodes)
        for name in (*node.get_buffer_names(), *_needs(node))
    }


def _keep_writes(nodes: Sequence[Any], root_name: Callable[[str], str]) -> Sequence[Any]:
    """Return nodes in an order in which writes and reads of a memory are as in the program.

    Inductor loses these dependencies where it fuses outer loops (CPU). It keeps the order by
    chance, and our operators change the chances.
    """
    graph = _find_makers(nodes)
    for touches in _find_touches(nodes, root_name).values():
        for (_, first, is_write), (_, second, writes) in itertools.combinations(sorted(touches), 2):
            if (is_write or writes) and first != second:
                graph[second].add(first)
    if all(at > max(firsts, default=-1) for at, firsts in graph.items()):
        return nodes
    return [nodes[at] for at in TopologicalSorter(graph).static_order()]


def _find_makers(nodes: Sequence[Any]) -> dict[int, set[int]]:
    """Return the places of the nodes that make what each node needs."""
    makers = {name: at for at, node in enumerate(nodes) for name in node.get_buffer_names()}
    needs = {at: _needs(node) & makers.keys() for at, node in enumerate(nodes)}
    return {at: {makers[name] for name in names} - {at} for at, names in needs.items()}


def _find_touches(
    nodes: Sequence[Any], root_name: Callable[[str], str]
) -> dict[str, list[tuple[int, int, bool]]]:
    """Return who has each memory that is written: order in the program, place, is a write."""
    touches: dict[str, list[tuple[int, int, bool]]] = {}
    parts = [(at, part) for at, node in enumerate(nodes) for part in node.get_nodes()]
    written: set[str] = set()
    for at, part in parts:
        changed = {root_name(name) for each in part.get_outputs() for name in each.get_mutations()}
        written |= changed
        for root in {root_name(name) for name in (*part.get_buffer_names(), *_needs(part))}:
            touches.setdefault(root, []).append((part.min_order, at, root in changed))
    return {root: each for root, each in touches.items() if root in written}


def _root_name(name: str) -> str:
    """Return the buffer whose memory a buffer has."""
    return _name_of(_root_of(_inductor.virtualized.V.graph.try_get_buffer(name))) or name


def _with_results(nodes: Sequence[Any], operators: tuple[object, ...]) -> list[list[Any]]:
    """Return the kernels of operators, each with the nodes that only name its results."""
    results = [
        each for each in nodes if isinstance(getattr(each, "node", None), _inductor.ir.MultiOutput)
    ]
    kernels = [
        each
        for each in nodes
        if getattr(getattr(each, "node", None), "op_overload", None) in operators
    ]
    return [
        [kernel, *(each for each in results if _needs(each) & set(kernel.get_buffer_names()))]
        for kernel in kernels
    ]


def _names(group: Sequence[Any]) -> set[str]:
    return {name for node in group for name in node.get_buffer_names()}


def _needs(node: Any) -> set[str]:  # noqa: ANN401 - inductor's
    """Return the names of the buffers that a node depends on."""
    return {each.name for each in (*node.unmet_dependencies, *node.read_writes.reads)}
