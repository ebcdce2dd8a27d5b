"""What torch's compilers call to split a joint graph; loaded with the first of them."""

from __future__ import annotations

import functools
import hashlib
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from swapkit._runtime.compiled import graphs
from swapkit._runtime.compiled.missing_names import report_missing
from swapkit._runtime.torch_compat import compilers
from swapkit.texts import get_logger

_log = get_logger(__name__)
# The handles are on the CPU, and each operator of ours would end a device graph.
_DEVICE_GRAPHS = (
    "with CUDA graphs (mode='reduce-overhead') saved tensors move only between regions. Compile in "
    "another mode, or compile blocks"
)
_COMPILED_HOOKS = "the program's saved-tensor hooks are graphs, which torch compiles, too"


class LatePartitioner(compilers.CustomPartitionerFn):
    """Splits a joint graph as torch does, and moves the saved-tensor hooks into the graphs.

    A plain object without attributes: inductor's caches pickle it, and key on its `uuid`.
    """

    def __call__(
        self, gm: compilers.GraphModule, joint_inputs: Sequence[object], **options: Any
    ) -> compilers.Graphs:
        """Return the graphs of forward and backward."""
        graphs.save_swapped(gm.graph)
        forward, backward = compilers.split(gm, joint_inputs, **options)
        if compilers.makes_device_graphs() and graphs.has_device_tensors(forward.graph):
            graphs.note_unmoved(forward, _DEVICE_GRAPHS)
        elif can_place():
            _move((forward, backward), options["num_fwd_outputs"], is_scheduled=True)
        return forward, backward

    def uuid(self) -> str:
        """Return what the result depends on beside the joint graph: these sources."""
        return _digest()


def _move(split: compilers.Graphs, returned: int, *, is_scheduled: bool) -> None:
    if graphs.has_compiled_hooks():
        graphs.note_unmoved(split[0], _COMPILED_HOOKS)
    else:
        _log.info("%s", graphs.move_hooks(*split, returned, is_scheduled=is_scheduled))


@functools.cache
def can_place() -> bool:
    """Return whether inductor can place our operators."""
    try:
        packs = graphs.find(graphs.PACK), graphs.find(graphs.SWAP)
        compilers.place_hooks(packs, graphs.find(graphs.UNPACK))
    except (AttributeError, ImportError) as error:
        report_missing(error)
        return False
    return True


@functools.cache
def _digest() -> str:
    digest = hashlib.sha256()
    for path in (*sorted(Path(__file__).parent.glob("*.py")), Path(compilers.__file__)):
        digest.update(path.read_bytes())
    return f"swapkit-{digest.hexdigest()}"


def register_inductor(swapping: graphs.Swapping) -> None:
    """Let inductor call the partitioner, unless the program has set one."""
    graphs.register(swapping)
    compilers.set_partitioner(LatePartitioner())


def register_dynamo(swapping: graphs.Swapping) -> None:
    """Let every other backend that uses AOTAutograd move the hooks into its graphs."""
    graphs.register(swapping)
    compilers.wrap_splits(_split_late)


def _split_late(split: compilers.Split) -> compilers.Split:
    """Return a partitioner for a backend whose compiler keeps writes in their order."""

    def split_and_move(
        gm: compilers.GraphModule, joint_inputs: Sequence[object], **options: Any
    ) -> compilers.Graphs:
        graphs.save_swapped(gm.graph)
        forward, backward = split(gm, joint_inputs, **options)
        _move((forward, backward), options["num_fwd_outputs"], is_scheduled=False)
        return forward, backward

    return split_and_move
