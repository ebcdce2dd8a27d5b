"""Detection of memory changes in a region that its operators do not declare.

A kernel that is not a torch operator (in Triton, of numpy, of a library) may write to an operator's
result, and no version counter changes. A recomputation that repeats operators alone would miss
such a write. So the first run of a region takes checksums: of each operator's results, of each
operator's inputs, at the start of what the function can reach, and at the end of all storages still
alive.
"""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

import torch

from swapkit._runtime.operators.checksums import Checksums, ChecksumSlot
from swapkit._runtime.operators.effects import effects_of
from swapkit._runtime.operators.names import Operator
from swapkit._runtime.torch_compat.dispatch_modes import OwnMode
from swapkit._runtime.torch_compat.internals import (
    base_of,
    free_weak_storage,
    pytree,
    storage_address,
    storage_from_weak,
    weak_storage,
)
from swapkit._runtime.torch_compat.isolation import hidden, unseen, untraced
from swapkit._runtime.torch_compat.wrappers import has_bytes

_TORCH = "aten"  # its writes are seen when they happen (`process/captures.py`)


class _TrackedStorage:
    """A weak reference to a storage between two known writes, with its latest checksum."""

    __slots__ = ("_reference", "last")

    def __init__(self, storage: torch.UntypedStorage, last: ChecksumSlot | None) -> None:
        self._reference = weak_storage(storage)
        self.last = last

    def __del__(self) -> None:
        reference = getattr(self, "_reference", None)  # unset after an interruption
        if reference is not None:
            free_weak_storage(reference)

    @property
    def storage(self) -> torch.UntypedStorage | None:
        """The storage; None: freed. The weak reference keeps its address from being reused."""
        found: torch.UntypedStorage | None
        found = storage_from_weak(self._reference)
        return found


class Evidence(OwnMode):
    """Takes checksums of the inputs and results of operators in one run of a region."""

    count = 0  # of all such runs: during them, more memory is kept than usual

    def __init__(self, tensors: Iterable[torch.Tensor] = ()) -> None:
        """Start with checksums of some tensors: kernels may write to them before operators read."""
        super().__init__()  # type: ignore[no-untyped-call]
        Evidence.count += 1
        self._checksums = Checksums()
        self._eras: dict[int, _TrackedStorage] = {}  # by storage address
        self._pairs: list[
            tuple[ChecksumSlot | None, ChecksumSlot | None]
        ] = []  # pairs that must be equal
        self._is_unsure = False
        self.draws = False  # whether an operator got a generator as an argument
        self._begin(tensors)

    @untraced
    def __torch_dispatch__(
        self,
        func: Operator,
        types: object,
        args: tuple[Any, ...] = (),
        kwargs: dict[str, Any] | None = None,
    ) -> Any:  # noqa: ANN401 - whatever the operator returns
        kwargs = kwargs or {}
        effects = effects_of(func)
        leaves = pytree.tree_leaves((args, kwargs))
        self.draws = self.draws or any(isinstance(leaf, torch.Generator) for leaf in leaves)
        self._compare(leaves)
        results = func(*args, **kwargs)
        written = effects.written(args, kwargs)
        if written and getattr(func, "namespace", "") != _TORCH:
            self._is_unsure = True
        self._begin(written)
        self._begin(pytree.tree_leaves(results), only_new=True)
        return results

    @unseen
    def has_changed(self) -> bool:
        """Return whether an unseen write has, or may have, changed memory so far."""
        there = {key: found for key, era in self._eras.items() if (found := era.storage)}
        for key, storage in there.items():
            self._pairs.append((self._eras[key].last, self._take(storage)))
        values: dict[ChecksumSlot | None, int] = self._checksums.read()
        pairs, self._pairs = self._pairs, []
        self._checksums = Checksums()
        self._eras = {
            key: _TrackedStorage(found, self._take(found)) for key, found in there.items()
        }
        self._is_unsure = self._is_unsure or any(
            one is None or values.get(one) != values.get(other) for one, other in pairs
        )
        return self._is_unsure

    def _take(self, storage: torch.UntypedStorage) -> ChecksumSlot | None:
        with hidden():
            return self._checksums.take(_view(storage)) if storage.nbytes() else None

    @unseen
    def _compare(self, leaves: Iterable[object]) -> None:
        for tensor in filter(_is_compared, leaves):
            assert isinstance(tensor, torch.Tensor)
            storage = tensor.untyped_storage()
            now = self._checksums.take(tensor)
            era = self._eras.get(storage_address(storage))
            if era is None:
                self._eras[storage_address(storage)] = _TrackedStorage(storage, now)
            else:
                self._pairs.append((era.last, now))
                era.last = now

    @unseen
    def _begin(self, leaves: Iterable[object], *, only_new: bool = False) -> None:
        for tensor in filter(_is_compared, leaves):
            assert isinstance(tensor, torch.Tensor)
            storage = tensor.untyped_storage()
            if not (only_new and storage_address(storage) in self._eras):
                now = self._checksums.take(tensor)
                self._eras[storage_address(storage)] = _TrackedStorage(storage, now)


def _view(storage: torch.UntypedStorage) -> torch.Tensor:
    return torch.empty(0, dtype=torch.uint8, device=storage.device).set_(storage)


def _is_compared(value: object) -> bool:
    """Return whether a value is a tensor with bytes, and not a weight or a view of one."""
    if not has_bytes(value):
        return False
    base = base_of(value)
    root = value if base is None else base
    return not (root.is_leaf and root.requires_grad)
