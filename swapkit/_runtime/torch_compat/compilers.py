"""The private names of torch's compilers: the part of `internals.py` that is loaded with them.

The first import of inductor's settings or of Dynamo's backends loads this file, while torch may
still import more of its modules: so only `torch.fx` and inductor's base class come first.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Sequence
from typing import Any

from torch._inductor.custom_graph_pass import CustomPartitionerFn
from torch.fx import GraphModule

__all__ = [
    "CustomPartitionerFn",
    "GraphModule",
    "Graphs",
    "Split",
    "makes_device_graphs",
    "place_hooks",
    "set_partitioner",
    "split",
    "wrap_splits",
]

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


def makes_device_graphs() -> bool:
    """Return whether inductor records its kernels as device graphs, such as CUDA's."""
    from torch._inductor import config

    return bool(config.triton.cudagraphs)


# ---- other backends ------------------------------------------------------------------------------


def wrap_splits(wrap: Callable[[Split], Split]) -> None:
    """Replace the partitioner of every backend of Dynamo that uses AOTAutograd, but inductor's."""
    from torch._dynamo.backends import common
    from torch._functorch.partitioners import default_partition

    backends: Any = common
    compile_graphs = backends.aot_module_simplified

    @functools.wraps(compile_graphs)
    def compile_wrapped(*args: Any, **kwargs: Any) -> object:
        given = kwargs.get("partition_fn", default_partition)
        if not _is_inductors(given):
            kwargs["partition_fn"] = wrap(given)
        return compile_graphs(*args, **kwargs)

    backends.aot_module_simplified = compile_wrapped


def _is_inductors(given: Split) -> bool:
    """Return whether a partitioner asks for inductor's setting, whoever has set that."""
    function = given.func if isinstance(given, functools.partial) else given
    return getattr(function, "__module__", "") == "torch._inductor.compile_fx"


# ---- inductor: the order of kernels --------------------------------------------------------------


@functools.cache
def place_hooks(packs: tuple[object, ...], unpack: object) -> None:
    """Let inductor place operators: behind the last, and before the first use of a tensor.

    A pack ends the life of a buffer: it runs behind all readers, and nothing is written to the
    memory any more. Only its lowering says so: a mutation in the graph would keep kernels from
    being fused, and a reader that is fused behind the pack would read memory that is gone.

    Args:
        packs: operators that take a tensor's memory away, at the end of a graph.
        unpack: an operator that gives a tensor back.
    """
    from torch._inductor import ir, lowering
    from torch._inductor.scheduler import Scheduler
    from torch._inductor.virtualized import V

    make: Any = lowering.fallback_handler

    def lower_pack(call: Any, made: Any, region: str) -> Any:  # noqa: ANN401 - inductor's
        made.realize()
        if not _owns_memory(made):
            copied = ir.ExternKernel.copy_input(made)
            made = ir.ExternKernel.require_exact_strides(copied, made.get_stride())
        handle = call(made, region)
        kernel = handle.data.data.inputs[0]  # of a MultiOutput in a StorageBox in a TensorBox
        V.graph.never_reuse_buffers.add(made.get_name())
        layout = ir.NoneLayout(device=made.get_device())
        kernel.mutation_outputs.append(ir.MutationOutput(layout, made, kernel))
        return handle

    for pack in packs:
        lower = functools.partial(lower_pack, make(pack, add_to_fallback_set=False))
        lowering.register_lowering(pack, type_promotion_kind=None)(lower)
    scheduler: Any = Scheduler
    compute_last_usage = scheduler.compute_last_usage  # called once all nodes have their places

    def place_first(self: Any) -> None:  # noqa: ANN401 - a Scheduler
        self.nodes = _place(self.nodes, packs, unpack)
        compute_last_usage(self)

    scheduler.compute_last_usage = place_first


def _owns_memory(made: Any) -> bool:  # noqa: ANN401 - inductor's
    """Return whether a realized tensor is all that there is in its memory, in the graph so far.

    The graph before inductor does not say so: inductor writes operands of a `cat` into its result,
    and removes operators that copy.
    """
    from torch._inductor import ir
    from torch._inductor.virtualized import V

    buffer = made.data.data if type(made.data) is ir.StorageBox else None  # else a view
    if not isinstance(buffer, ir.Buffer) or isinstance(buffer, ir.InputBuffer):
        return False
    is_part = not isinstance(buffer.layout, (ir.FixedLayout, ir.FlexibleLayout))
    name = buffer.get_name()
    if is_part or buffer.get_inputs_that_alias_output() or name in V.graph.never_reuse_buffers:
        return False
    returned = V.get_current_node().graph.output_node().args[0]
    results = (V.graph.env.get(node) for node in returned)
    return all(each.maybe_get_name() != name for each in results if isinstance(each, ir.IRNode))


def _place(nodes: Sequence[Any], packing: tuple[object, ...], unpack: object) -> list[Any]:
    """Put each pack behind the last node that it depends on, each unpack before its first user."""
    packs, unpacks = _with_results(nodes, packing), _with_results(nodes, (unpack,))
    moved = {id(node) for group in (*packs, *unpacks) for node in group}
    rest = [node for node in nodes if id(node) not in moved]
    made = {name: at for at, node in enumerate(rest) for name in node.get_buffer_names()}
    behind: dict[int, list[Any]] = {}
    before: dict[int, list[Any]] = {}
    for group in packs:
        at = max((made[name] for name in _needs(group[0]) if name in made), default=-1)
        behind.setdefault(at, []).extend(group)
        # Inductor drops a dependency on a reader that another pack implies.
        made.update(dict.fromkeys(_names(group), at))
    for group in unpacks:
        before.setdefault(_find_user(rest, _names(group)), []).extend(group)
    placed = behind.get(-1, [])
    for at, node in enumerate(rest):
        placed += [*before.get(at, ()), node, *behind.get(at, ())]
    return placed + before.get(len(rest), [])


def _find_user(nodes: Sequence[Any], names: set[str]) -> int:
    """Return the place of the first node that needs a buffer of these names."""
    users = (at for at, node in enumerate(nodes) if not names.isdisjoint(_needs(node)))
    return next(users, len(nodes))


def _with_results(nodes: Sequence[Any], operators: tuple[object, ...]) -> list[list[Any]]:
    """Return the kernels of operators, each with the nodes that only name its results."""
    from torch._inductor import ir

    results = [each for each in nodes if isinstance(getattr(each, "node", None), ir.MultiOutput)]
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
