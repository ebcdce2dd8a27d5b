"""The base of all modes that watch a region, and the one for collectives."""

from __future__ import annotations

import abc
import functools
from typing import TYPE_CHECKING, Any, NamedTuple

import torch

from swapkit._runtime.operators.effects import FUNCTIONAL, can_keep
from swapkit._runtime.operators.names import Operator, operator_names
from swapkit._runtime.saved.swapper import Swapper
from swapkit._runtime.torch_compat.dispatch_modes import DispatchMode
from swapkit._runtime.torch_compat.internals import (
    FakeTensor,
    HigherOrderOperator,
    ModeKind,
    buffers_of,
    mode_of_kind,
    parameters_of,
    pytree,
    schema_of,
    storage_address,
)
from swapkit._runtime.torch_compat.isolation import untraced
from swapkit._runtime.torch_compat.wrappers import gathers_gradients, is_plain
from swapkit.registry import Collectives

if TYPE_CHECKING:
    from typing_extensions import Self

# ---- operator modes ------------------------------------------------------------------------------
#
# The base of all modes that watch a region, and the properties of calls that they look at.

_DISTRIBUTED = {
    ("torch.distributed.tensor", "DTensor"),
    ("torch.distributed.tensor._api", "DTensor"),
    ("torch.distributed._functional_collectives", "AsyncCollectiveTensor"),
}


class OperatorCall(NamedTuple):
    """The properties of an operator's arguments that the modes use."""

    form: tuple[object, ...]  # shapes and dtypes of the tensors
    is_abstract: bool  # runs only to infer shapes; a cache may replace the next run
    is_weight_cast: bool  # autocast's cache may replace the next run


def inspect(operator: Operator, args: tuple[Any, ...], kwargs: dict[str, Any]) -> OperatorCall:
    """Return the properties of an operator's arguments."""
    tensors = [leaf for leaf in pytree.tree_leaves((args, kwargs)) if is_tensor(leaf)]
    is_cast = operator is torch.ops.aten._to_copy.default  # noqa: SLF001 - an operator's name
    return OperatorCall(
        form=tuple((tensor.shape, tensor.dtype) for tensor in tensors),
        is_abstract=mode_of_kind(ModeKind.FAKE) is not None or any(map(_is_abstract, tensors)),
        is_weight_cast=is_cast and gathers_gradients(tensors[0]),
    )


def is_tensor(value: object) -> bool:
    """Return whether a value is a tensor."""
    return isinstance(value, torch.Tensor)


def _is_abstract(tensor: torch.Tensor) -> bool:
    is_fake = isinstance(tensor, FakeTensor)
    return is_fake or tensor.device.type == "meta"


def _stands_for_others(types: tuple[type, ...]) -> bool:
    """Return whether operators on these types call other operators on plain tensors."""
    return any(map(_is_collective, types))


@functools.cache
def _is_collective(kind: type) -> bool:
    # By name, so that the modules of these types need not be imported.
    return any((base.__module__, base.__name__) in _DISTRIBUTED for base in kind.__mro__)


class OperatorMode(DispatchMode):  # type: ignore[no-untyped-call]
    """A mode that sees operators on plain tensors, including `torch.ops.higher_order`."""

    @untraced
    def __torch_dispatch__(
        self,
        func: Operator,
        types: tuple[type, ...],
        args: tuple[Any, ...] = (),
        kwargs: dict[str, Any] | None = None,
    ) -> Any:  # noqa: ANN401 - whatever the operator returns
        return NotImplemented if _stands_for_others(types) else self.run(func, args, kwargs or {})

    @abc.abstractmethod
    def run(self, func: Operator, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:  # noqa: ANN401
        """Run an operator; return its result."""


class ReplayMode(OperatorMode):  # type: ignore[no-untyped-call]
    """The mode of one recomputation."""

    def __init__(self, replays: set[OperatorMode]) -> None:
        """Create the mode. `replays`: the region's recomputations under way; has it while entered.

        The mode of the first run ignores operators while backward runs inside of the first run.
        """
        super().__init__()  # type: ignore[no-untyped-call]
        self._replays = replays

    def __enter__(self) -> Self:
        self._replays.add(self)
        super().__enter__()
        return self

    def leave(self) -> None:
        """Leave the mode stack; no effect if the mode has left."""
        try:
            super().leave()
        finally:
            self._replays.discard(self)


# ---- collectives ---------------------------------------------------------------------------------
#
# Collectives of a recomputed region: whether they run again, or their results are kept.
#
# The choice covers torch's functional collectives, also those that DTensor calls. A collective that
# writes into its argument always runs again, and so does one of `torch.distributed` itself. Forward
# decides, from names and the gathered tensors, so that all ranks of the same program decide alike.
# If they did not, ranks would wait for each other.

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
