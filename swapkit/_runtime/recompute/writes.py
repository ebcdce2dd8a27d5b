"""What operators write to in a region that runs twice: a module's buffers are written once.

A batch norm in such a region has updated its statistics when the region runs again in backward. So
the second run begins with the bytes that the first one found in the buffers of the region's module,
and after it those come back that were there before it. Torch counts no version for either.
"""

from __future__ import annotations

import contextlib
from typing import TYPE_CHECKING, NamedTuple

import torch

from swapkit._runtime.captures import see_writes
from swapkit._runtime.effects import effects_of
from swapkit._runtime.guards import hidden, untraced
from swapkit._runtime.runtime import get_runtime

if TYPE_CHECKING:
    from collections.abc import Iterable, Iterator, Sequence

    from swapkit._runtime.operators import Operator
    from swapkit._runtime.shim import WatchesWrites

# Of a buffer whose bytes are kept until the second run. Statistics are such; a cache of keys and
# values may take as much memory as the region saves: a second run finds it as it is by then.
_MOST_BYTES = 1 << 20


class _Written(NamedTuple):
    """A storage, and what it held before; None: nobody has kept that."""

    memory: torch.Tensor
    content: torch.Tensor | None


class Writes:
    """What the first run of a region wrote to, and whether a second one has to reach its end."""

    def __init__(self, module: torch.nn.Module | None) -> None:
        """Nothing has run yet. `module`: whose buffers are looked at."""
        # An operator has filled what autograd had saved by then: torch's checkpoint stops at what
        # is saved last, before that is filled.
        self.must_end = False
        buffers = () if module is None else module.buffers()
        self._storages = {
            buffer.untyped_storage()._cdata: buffer.untyped_storage()  # noqa: SLF001
            for buffer in filter(_has_bytes, buffers)
        }
        self._found: list[_Written] = []
        self._around: WatchesWrites | None = None

    @contextlib.contextmanager
    @untraced
    def noting(self) -> Iterator[None]:
        """Note what the first run writes to."""
        shim = get_runtime().shim
        see_writes(shim.operators_known())
        self._around = shim.watch_writes(self._note)
        try:
            yield
        finally:
            shim.watch_writes(self._around)
            self._around = None
            self._storages.clear()

    @contextlib.contextmanager
    @untraced
    def undone(self) -> Iterator[None]:
        """Let a second run find what the first one found, and leave what it found itself."""
        with hidden(), torch.no_grad():
            former = [_Written(each.memory, each.memory.clone()) for each in self._found]
            _bring_back(self._found)
        try:
            yield
        finally:
            with hidden(), torch.no_grad():
                _bring_back(former)

    @untraced
    def _note(self, function: Operator | None, tensors: Sequence[torch.Tensor]) -> None:
        if function is not None:
            self.must_end = self.must_end or effects_of(function).fills_saved
        for tensor in tensors:
            storage = self._find(tensor)
            if storage is not None:
                with hidden(), torch.no_grad():
                    self._found.append(_look_at(storage))
        if self._around is not None:  # a second run of that one runs this region again
            self._around(None, tensors)

    def _find(self, tensor: torch.Tensor) -> torch.UntypedStorage | None:
        """Return a buffer's storage before it is written to for the first time."""
        if not self._storages or tensor.layout is not torch.strided:
            return None
        return self._storages.pop(tensor.untyped_storage()._cdata, None)  # noqa: SLF001


def _has_bytes(buffer: torch.Tensor) -> bool:
    """Whether a buffer has bytes of its own."""
    is_plain = type(buffer) is torch.Tensor and buffer.layout is torch.strided
    return is_plain and buffer.device.type != "meta" and buffer.untyped_storage().nbytes() > 0


def _look_at(storage: torch.UntypedStorage) -> _Written:
    # All of its bytes, as a tensor with a version of its own.
    memory = torch.empty(0, dtype=torch.uint8, device=storage.device).set_(storage)
    return _Written(memory, memory.clone() if storage.nbytes() <= _MOST_BYTES else None)


def _bring_back(written: Iterable[_Written]) -> None:
    for memory, content in written:
        if content is not None:
            memory.copy_(content)
