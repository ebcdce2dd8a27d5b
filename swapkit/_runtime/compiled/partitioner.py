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

_log = get_logger("compiled")
_COMPILED_HOOKS = "saved-tensor hooks that are graphs, which torch compiles"


class LatePartitioner(compilers.CustomPartitionerFn):
    """Splits a joint graph as torch does, and moves the saved-tensor hooks into the graphs.

    A plain object without attributes: inductor's caches pickle it, and key on its `uuid`.
    """

    __name__ = "PARTITIONER"  # below: torch's scripts that repeat a compilation import it

    def __call__(
        self, gm: compilers.GraphModule, joint_inputs: Sequence[object], **options: Any
    ) -> compilers.Graphs:
        """Return the graphs of forward and backward."""
        split = _split_late(compilers.split, is_inductors=True)
        return split(gm, joint_inputs, **options)

    def uuid(self) -> str:
        """Return what the result depends on beside the joint graph: these sources."""
        return _digest()


PARTITIONER = LatePartitioner()


def _split_late(split: compilers.Split, *, is_inductors: bool) -> compilers.Split:
    """Return a partitioner for inductor, or for a compiler that keeps writes in their order."""

    def split_and_move(
        gm: compilers.GraphModule, joint_inputs: Sequence[object], **options: Any
    ) -> compilers.Graphs:
        graphs.save_swapped(gm.graph)
        forward, backward = split(gm, joint_inputs, **options)
        has_device = is_inductors and graphs.has_device_tensors(forward.graph)
        has_hooks = graphs.has_compiled_hooks()
        obstacle = _COMPILED_HOOKS if has_hooks else compilers.find_obstacle(has_device=has_device)
        if obstacle:
            graphs.note_unmoved(forward, obstacle)
        elif can_place() or not is_inductors:
            returned = options["num_fwd_outputs"]
            found = graphs.move_hooks(forward, backward, returned, is_scheduled=is_inductors)
            _log.info("%s", found)
        return forward, backward

    return split_and_move


@functools.cache
def can_place() -> bool:
    """Return whether inductor can place our operators."""
    try:
        compilers.place_hooks(*map(graphs.find, graphs.OPERATORS))
    except (AttributeError, ImportError) as error:
        report_missing(error)
        return False
    return True


@functools.cache
def _digest() -> str:
    digest = hashlib.sha256()
    package = Path(__file__).parents[1]
    operators = package / "shim/cpp/saved/late_hooks.cpp"
    for path in (*sorted(package.glob("compiled/*.py")), Path(compilers.__file__), operators):
        digest.update(path.read_bytes())
    return f"swapkit-{digest.hexdigest()}"


def register_inductor(swapping: graphs.Swapping) -> None:
    """Let inductor call the partitioner, unless the program has set one."""
    graphs.register(swapping)
    compilers.set_partitioner(PARTITIONER)


def register_dynamo(swapping: graphs.Swapping) -> None:
    """Let every other backend that uses AOTAutograd move the hooks into its graphs."""
    graphs.register(swapping)
    compilers.wrap_splits(_split_late)
