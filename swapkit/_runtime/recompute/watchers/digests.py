"""The value check of recomputation: every operator must give the same bits as in forward.

A region's first run notes each operator and a digest of each result. A recomputation compares, and
stops at the first operator that differs. The check skips

- unwritten memory: results of `empty` and similar operators, and the additional results of
  attention and recurrent operators;
- results of collectives that are not waited for yet, and views (only shapes are compared);
- buffers in which modules count, such as the batch count of a batch norm;
- `detach`, which torch calls a different number of times in each run, and operators that a cache
  may replace: autocast's copies of weights, and runs that only infer shapes.
"""

from __future__ import annotations

from collections.abc import Callable
from fnmatch import fnmatchcase
from typing import TYPE_CHECKING, Any, NamedTuple

import torch

from swapkit._runtime.model.tracker import ModuleTracker
from swapkit._runtime.operators.effects import can_keep, effects_of
from swapkit._runtime.operators.names import Operator, operator_names
from swapkit._runtime.recompute.watchers.operator_modes import (
    OperatorMode,
    ReplayMode,
    inspect,
    may_be_under_way,
)
from swapkit._runtime.recompute.watchers.selection import CAUSES
from swapkit._runtime.torch_compat.internals import pytree, storage_address
from swapkit._runtime.torch_compat.isolation import hidden
from swapkit.errors import RecomputeMismatch

if TYPE_CHECKING:
    _Tell = Callable[[Operator, list[torch.Tensor]], None]

_UNWRITTEN = ("empty*", "new_empty*", "_empty_*", "resize_*")
_FIRST_ONLY = ("*attention*", "*_rnn*", "*lstm*", "*gru*", "_embedding_bag*", "*_ctc_loss*")
_UNSEEN = ("detach*", "alias", "lift_fresh*")
_INTEGERS = {1: torch.int8, 2: torch.int16, 4: torch.int32, 8: torch.int64}
_CHUNK = 1 << 16  # elements at a time: little memory may be free
# Odd numbers with irregular bits, as multipliers that lose nothing modulo 2**64.
_SPREAD, _MIX, _MIX_AGAIN = -7046029254386353131, -4658895280553007687, -7723592293110705685
_SHIFT = 29


class _Row(NamedTuple):
    """One operator of a region."""

    name: str
    module: str
    shapes: tuple[str, ...]
    digests: tuple[int | None, ...]


class RegionDigests:
    """The operators of a region's first run, with digests of their results."""

    def __init__(self, tracker: ModuleTracker) -> None:
        """Start empty. The tracker knows modules and their buffers."""
        self._tracker = tracker
        self._rows: list[_Row] = []
        self.is_complete = False
        # Recomputations under way, if backward runs inside of the first run.
        self.replays: set[OperatorMode] = set()

    def recording(self) -> OperatorMode:
        """Return the mode of the first run."""
        return _Watching(self._note)

    def comparing(self) -> _Comparing:
        """Return the mode of one recomputation."""
        return _Comparing(self)

    def _note(self, operator: Operator, results: list[torch.Tensor]) -> None:
        if not self.replays:
            module = self._tracker.name(self._tracker.current())
            self._rows.append(self._row(operator, results, module))

    def compare(self, number: int, operator: Operator, results: list[torch.Tensor]) -> None:
        """Compare the operator with this number.

        Raises:
            RecomputeMismatch: the operator or its results differ from forward.
        """
        if number >= len(self._rows):
            if not self.is_complete:
                return  # backward inside of the first run has passed the first run's position
            raise RecomputeMismatch(
                f"recomputation ran operator {number}, {operator}, but forward ran only "
                f"{len(self._rows)}. {CAUSES}"
            )
        first, again = self._rows[number], self._row(operator, results)
        if first.name != again.name or first.shapes != again.shapes:
            raise RecomputeMismatch(
                f"operator {number} was {_describe(first)} in forward, and is {_describe(again)} "
                f"in recomputation. {CAUSES}"
            )
        for index, (before, after) in enumerate(zip(first.digests, again.digests, strict=True)):
            if before != after:
                raise RecomputeMismatch(
                    f"operator {number}, {_describe(first)}: result {index} differs between "
                    f"forward and recomputation. {CAUSES}"
                )

    def end(self, count: int) -> None:
        """Note that a recomputation has ended after `count` operators.

        Raises:
            RecomputeMismatch: forward had more.
        """
        if self.is_complete and count < len(self._rows):
            raise RecomputeMismatch(
                f"recomputation ended after {count} operators; in forward operator {count} was "
                f"{_describe(self._rows[count])}. {CAUSES}"
            )

    def _row(self, operator: Operator, results: list[torch.Tensor], module: str = "") -> _Row:
        digested = self._count_digested(operator, results)
        with hidden():
            digests = tuple(
                digest(tensor) if number < digested else None
                for number, tensor in enumerate(results)
            )
        shapes = tuple(f"{str(each.dtype)[6:]} {list(each.shape)}" for each in results)
        return _Row(str(operator), module, shapes, digests)

    def _count_digested(self, operator: Operator, results: list[torch.Tensor]) -> int:
        """Return how many of the results are written and must repeat."""
        base = _base(operator)
        if _is_any(base, _UNWRITTEN) or may_be_under_way(operator):
            return 0
        if not can_keep(operator):
            is_view = not effects_of(operator).declares_writes
            return 0 if is_view or any(map(self._is_state, results)) else len(results)
        return 1 if _is_any(base, _FIRST_ONLY) else len(results)

    def _is_state(self, tensor: torch.Tensor) -> bool:
        if tensor.layout is not torch.strided or hasattr(tensor, "__tensor_flatten__"):
            return False
        return self._tracker.is_state(storage_address(tensor.untyped_storage()))


class _Watching(OperatorMode):
    """Reports each operator that the check covers, with its results."""

    def __init__(self, tell: _Tell) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self._report = tell

    def run(self, func: Operator, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:  # noqa: ANN401
        """Run an operator."""
        return _run(func, args, kwargs, self._report)


class _Comparing(ReplayMode):  # type: ignore[no-untyped-call]
    """Compares one recomputation with the first run."""

    def __init__(self, digests: RegionDigests) -> None:
        super().__init__(digests.replays)
        self._digests = digests
        self._count = 0

    def run(self, func: Operator, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:  # noqa: ANN401
        """Run an operator."""
        return _run(func, args, kwargs, self._compare)

    def _compare(self, operator: Operator, results: list[torch.Tensor]) -> None:
        self._digests.compare(self._count, operator, results)
        self._count += 1

    def end(self) -> None:
        """Note that the recomputation has ended."""
        self._digests.end(self._count)


def _run(func: Operator, args: tuple[Any, ...], kwargs: dict[str, Any], tell: _Tell) -> Any:  # noqa: ANN401 - whatever the operator returns
    """Run an operator; report it with its results if the check covers it."""
    results = func(*args, **kwargs)
    tensors = [leaf for leaf in pytree.tree_leaves(results) if isinstance(leaf, torch.Tensor)]
    if tensors and not _is_any(_base(func), _UNSEEN):
        call = inspect(func, args, kwargs)
        if not (call.is_abstract or call.is_weight_cast):
            tell(func, tensors)
    return results


def _base(operator: Operator) -> str:
    own: str = operator_names(operator)[0]
    return own


def _is_any(base: str, patterns: tuple[str, ...]) -> bool:
    return any(fnmatchcase(base, pattern) for pattern in patterns)


def _describe(row: _Row) -> str:
    where = f" in {row.module}" if row.module else ""
    return f"{row.name}{where} ({', '.join(row.shapes)})"


def digest(tensor: torch.Tensor) -> int | None:
    """Return a digest of a tensor's bits; None: a kind of tensor that is not checked.

    The digest depends on the elements and their order, not on the strides. Other bits are most
    unlikely to give the same digest.
    """
    parts = getattr(tensor, "__tensor_flatten__", None)
    if parts is not None:
        return hash(tuple(digest(getattr(tensor, name)) for name in parts()[0]))
    if tensor.layout is not torch.strided or tensor.is_quantized or tensor.device.type == "meta":
        return None
    flat = tensor.detach().resolve_conj().resolve_neg().contiguous()
    if flat.is_complex():
        flat = torch.view_as_real(flat)
    bits = flat.reshape(-1).view(_INTEGERS[flat.element_size()])
    total = bits.new_zeros((), dtype=torch.int64)
    for start in range(0, bits.numel(), _CHUNK):
        chunk = bits[start : start + _CHUNK].to(torch.int64, copy=True)
        places = torch.arange(start, start + len(chunk), device=chunk.device)
        mixed = chunk.bitwise_xor_(places.mul_(_SPREAD)).mul_(_MIX)
        mixed = mixed.bitwise_xor_(mixed >> _SHIFT).mul_(_MIX_AGAIN)
        total.bitwise_xor_(mixed.sum())
    return int(total)
