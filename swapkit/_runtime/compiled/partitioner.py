"""What torch's compilers call to split a joint graph; loaded with the first of them."""

from __future__ import annotations

import functools
import hashlib
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from swapkit._runtime.compiled import graphs
from swapkit._runtime.compiled.missing_names import warn_of
from swapkit._runtime.torch_compat import compilers
from swapkit.texts import get_logger
from swapkit.units import format_bytes

_log = get_logger(__name__)


class LatePartitioner(compilers.CustomPartitionerFn):
    """Splits a joint graph as torch does, and moves the saved-tensor hooks into the graphs.

    A plain object without attributes: inductor's caches pickle it, and key on its `uuid`.
    """

    def __call__(
        self, gm: compilers.GraphModule, joint_inputs: Sequence[object], **options: Any
    ) -> compilers.Graphs:
        """Return the graphs of forward and backward."""
        forward, backward = compilers.split(gm, joint_inputs, **options)
        # A handle on the CPU would end a device graph.
        if not compilers.makes_device_graphs() and _can_place():
            _move((forward, backward), options["num_fwd_outputs"], is_scheduled=True)
        return forward, backward

    def uuid(self) -> str:
        """Return what the result depends on beside the joint graph: these sources."""
        return _digest()


def _move(split: compilers.Graphs, returned: int, *, is_scheduled: bool) -> None:
    found = graphs.move_hooks(*split, returned, is_scheduled=is_scheduled)
    stays = [f"{format_bytes(nbytes)} stay: {why}" for why, nbytes in found.stays.items()]
    moves = f"{len(found.packed)} saved tensors, {format_bytes(sum(found.packed))}"
    _log.info("compiled region: %s", "; ".join([f"{moves}, move while it runs", *stays]))


@functools.cache
def _can_place() -> bool:
    try:
        compilers.place_hooks(graphs.find(graphs.PACK), graphs.find(graphs.UNPACK))
    except (AttributeError, ImportError) as error:
        warn_of(error)
        return False
    return True


@functools.cache
def _digest() -> str:
    digest = hashlib.sha256()
    for path in (*sorted(Path(__file__).parent.glob("*.py")), Path(compilers.__file__)):
        digest.update(path.read_bytes())
    return f"swapkit-{digest.hexdigest()}"


def open_inductor() -> None:
    """Let inductor call the partitioner, unless the program has set one."""
    compilers.set_partitioner(LatePartitioner())


def open_dynamo() -> None:
    """Let every other backend that uses AOTAutograd move the hooks into its graphs."""
    compilers.wrap_splits(_split_late)


def _split_late(split: compilers.Split) -> compilers.Split:
    """Return a partitioner for a backend whose compiler keeps writes in their order."""

    def split_and_move(
        gm: compilers.GraphModule, joint_inputs: Sequence[object], **options: Any
    ) -> compilers.Graphs:
        forward, backward = split(gm, joint_inputs, **options)
        _move((forward, backward), options["num_fwd_outputs"], is_scheduled=False)
        return forward, backward

    return split_and_move
