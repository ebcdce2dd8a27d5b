"""Collectives of a recomputed region: whether they run again, or their results are kept.

The choice covers torch's functional collectives, also those that DTensor calls. A collective that
writes into its argument always runs again, and so does one of `torch.distributed` itself. Forward
decides, from names and the gathered tensors, so that all ranks of the same program decide alike. If
they did not, ranks would wait for each other.
"""

from __future__ import annotations

import functools
from typing import TYPE_CHECKING, Any

import torch

from swapkit._runtime.operators.effects import FUNCTIONAL, can_keep
from swapkit._runtime.operators.names import operator_names
from swapkit._runtime.torch_compat.graphs import gathers_gradients
from swapkit._runtime.torch_compat.internals import (
    HigherOrderOperator,
    buffers_of,
    parameters_of,
    pytree,
    schema_of,
    storage_address,
)
from swapkit._runtime.torch_compat.plain_tensors import is_plain

if TYPE_CHECKING:
    from swapkit._runtime.operators.names import Operator
    from swapkit._runtime.saved.swapper import Swapper
    from swapkit.registry import Collectives

_OTHERS = ("_dtensor::shard_dim_alltoall",)
_WAIT = "wait_tensor"
_NO_COLLECTIVES = (_WAIT, "_wrap_tensor_autograd", "isend", "irecv", "batch_p2p_ops")
_GATHER = "all_gather_into_tensor"


@functools.cache
def is_collective(operator: Operator) -> bool:
    """Return whether an operator starts a collective whose result is a tensor of its own."""
    if isinstance(operator, HigherOrderOperator) or not can_keep(operator):
        return False
    qualified: str = schema_of(operator).name
    namespace, _, base = qualified.partition("::")
    return (namespace == FUNCTIONAL and base not in _NO_COLLECTIVES) or qualified in _OTHERS


@functools.cache
def may_be_under_way(operator: Operator) -> bool:
    """Return whether a collective may still be writing to an operator's result."""
    names = operator_names(operator)
    return names[0] != _WAIT and any(name.startswith(f"{FUNCTIONAL}::") for name in names)


class RepeatedCollectives:
    """Decides by the user's terms which collectives run again."""

    def __init__(
        self, terms: Collectives, swapper: Swapper, module: torch.nn.Module | None
    ) -> None:
        """Store the terms. `module`: the region's module; None: it belongs to none."""
        self._terms = terms
        self._swapper = swapper
        self._tracker = swapper.shared.tracker
        self._module = module
        self._sharded: set[int] | None = None

    def is_kept(self, operator: Operator, args: tuple[Any, ...]) -> bool:
        """Return whether to keep the results of a collective that runs now."""
        terms = self._terms
        name = self._tracker.name(self._tracker.current())
        if _is_inside(name, terms.keep_in):
            return True
        if _is_inside(name, terms.repeat_in):
            return False
        return not (terms.repeat_weights if self._gathers_weight(operator, args) else terms.repeat)

    def _gathers_weight(self, operator: Operator, args: tuple[Any, ...]) -> bool:
        if not operator_names(operator)[0].startswith(_GATHER):
            return False
        inputs = [leaf for leaf in pytree.tree_leaves(args) if isinstance(leaf, torch.Tensor)]
        return any(map(self._is_weight, inputs))

    def _is_weight(self, tensor: torch.Tensor) -> bool:
        if gathers_gradients(tensor):
            return True
        storage = storage_address(tensor.untyped_storage())
        if self._tracker.is_state(storage) or self._swapper.is_weight(tensor):
            return True
        if self._sharded is None:
            self._sharded = self._find_sharded()
        return storage in self._sharded

    def _find_sharded(self) -> set[int]:
        """Return the storages of this rank's shards of parameters and buffers."""
        modules = set(self._tracker.modules())
        if self._module is not None:
            modules.update(self._module.modules())
        return {
            storage_address(shard.untyped_storage())
            for module in modules
            for tensor in (*parameters_of(module).values(), *buffers_of(module).values())
            for shard in [getattr(tensor, "_local_tensor", tensor)]
            if is_plain(shard)
        }


def _is_inside(name: str, modules: tuple[str, ...]) -> bool:
    # A copy of a configured model may be trained inside another module, which lengthens its names.
    return any(f".{module}." in f".{name}." for module in modules)
