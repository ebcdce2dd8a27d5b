"""The base of all modes that watch a region, and the properties of calls that they look at."""

from __future__ import annotations

import abc
import functools
from typing import TYPE_CHECKING, Any, NamedTuple

import torch

from swapkit._runtime.torch_compat.dispatch_modes import DispatchMode
from swapkit._runtime.torch_compat.graphs import gathers_gradients
from swapkit._runtime.torch_compat.internals import FakeTensor, ModeKind, mode_of_kind, pytree
from swapkit._runtime.torch_compat.isolation import untraced

if TYPE_CHECKING:
    from typing_extensions import Self

    from swapkit._runtime.operators.names import Operator

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
    return any(map(_comes_to_others, types))


@functools.cache
def _comes_to_others(kind: type) -> bool:
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
