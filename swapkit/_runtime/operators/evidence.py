"""Whether memory in a region changes in a way that its operators do not show.

A kernel that is no operator of torch (in Triton, of numpy, of a library) may write to what an
operator has made, and nothing counts that. What is computed again from operators alone would be as
it was before. So the first run of a region takes checksums: of what an operator has made, of what
one is about to read, and in the end of what is there yet.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import torch

from swapkit._runtime.operators.checksums import Checksums
from swapkit._runtime.operators.effects import effects_of
from swapkit._runtime.torch_compat.dispatch_modes import OwnMode
from swapkit._runtime.torch_compat.internals import (
    base_of,
    free_weak_storage,
    pytree,
    storage_address,
    storage_from_weak,
    weak_storage,
)
from swapkit._runtime.torch_compat.isolation import hidden, untraced
from swapkit._runtime.torch_compat.plain_tensors import has_bytes

if TYPE_CHECKING:
    from collections.abc import Iterable

    from swapkit._runtime.operators.checksums import ChecksumSlot
    from swapkit._runtime.operators.names import Operator

_TORCH = "aten"  # whose changes are seen where they happen (`process/captures.py`)


class _TrackedStorage:
    """A storage between two writes that were seen, referred to weakly, and its latest checksum."""

    __slots__ = ("_reference", "last")

    def __init__(self, storage: torch.UntypedStorage, last: ChecksumSlot | None) -> None:
        self._reference = weak_storage(storage)
        self.last = last

    def __del__(self) -> None:
        reference = getattr(self, "_reference", None)  # an interruption may be why there is none
        if reference is not None:
            free_weak_storage(reference)

    @property
    def storage(self) -> torch.UntypedStorage | None:
        """None: it is gone. Until this goes no other one has its address."""
        found: torch.UntypedStorage | None
        found = storage_from_weak(self._reference)
        return found


class Evidence(OwnMode):
    """Looks at what the operators of one run of a region make and read."""

    count = 0  # of such looks: where one is taken, more is kept than at other times

    def __init__(self) -> None:
        """Know nothing."""
        super().__init__()  # type: ignore[no-untyped-call]
        Evidence.count += 1
        self._checksums = Checksums()
        self._eras: dict[int, _TrackedStorage] = {}  # by the storage
        self._pairs: list[
            tuple[ChecksumSlot | None, ChecksumSlot | None]
        ] = []  # that have to be the same
        self._is_unsure = False
        self.draws = False  # numbers from a generator that an operator was handed

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
        self._look(leaves)
        results = func(*args, **kwargs)
        written = effects.written(args, kwargs)
        if written and getattr(func, "namespace", "") != _TORCH:
            self._is_unsure = True
        self._begin(written)
        self._begin(pytree.tree_leaves(results), only_new=True)
        return results

    def has_changed(self) -> bool:
        """Return whether memory was changed unseen until now, as far as can be told."""
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

    def _look(self, leaves: Iterable[object]) -> None:
        for tensor in filter(_is_looked_at, leaves):
            assert isinstance(tensor, torch.Tensor)
            storage = tensor.untyped_storage()
            now = self._checksums.take(tensor)
            era = self._eras.get(storage_address(storage))
            if era is None:
                self._eras[storage_address(storage)] = _TrackedStorage(storage, now)
            else:
                self._pairs.append((era.last, now))
                era.last = now

    def _begin(self, leaves: Iterable[object], *, only_new: bool = False) -> None:
        for tensor in filter(_is_looked_at, leaves):
            assert isinstance(tensor, torch.Tensor)
            storage = tensor.untyped_storage()
            if not (only_new and storage_address(storage) in self._eras):
                now = self._checksums.take(tensor)
                self._eras[storage_address(storage)] = _TrackedStorage(storage, now)


def _view(storage: torch.UntypedStorage) -> torch.Tensor:
    return torch.empty(0, dtype=torch.uint8, device=storage.device).set_(storage)


def _is_looked_at(value: object) -> bool:
    """Whether a value is a tensor with bytes of its own, and no weight."""
    if not has_bytes(value):
        return False
    base = base_of(value)
    root = value if base is None else base
    return not (root.is_leaf and root.requires_grad)
