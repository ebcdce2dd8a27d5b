"""Names of kernels that announce themselves: by the hooks in C and C++, or by `swapkit.op`.

The shim calls `AnnouncedKernels` on the thread that runs the kernel, with no lock held.
"""

from __future__ import annotations

import atexit
import weakref
from collections.abc import Sequence
from typing import Protocol

from swapkit._native.pool import RingKind
from swapkit._runtime.model.tracker import ModuleTracker, RunningOperator
from swapkit._runtime.saved.device import Device
from swapkit._runtime.saved.swapper import Swapper
from swapkit._runtime.shim.library import Naming, Shim
from swapkit._runtime.torch_compat.isolation import untraced


class KernelNames(Protocol):
    """What kernels need of the runtime."""

    shim: Shim
    tracker: ModuleTracker

    @property
    def active(self) -> Sequence[Swapper]:
        """The swappers of the sessions that are active on any thread."""

    def current_device(self) -> Device:
        """Return the device that kernels run on."""


class AnnouncedKernels:
    """The runtime's side of the hooks. Threads: any, each for its own kernels."""

    def __init__(self, runtime: KernelNames) -> None:
        """Begin for a runtime. Python's end stops it: threads may run kernels even then."""
        self._runtime = weakref.proxy(runtime)
        self._has_pool = False
        shim = runtime.shim
        atexit.register(lambda: shim.kernels_listen(None))

    def note_pool(self) -> None:
        """Note that a pool was installed: its memory has labels from now on."""
        self._has_pool = True
        self.set_naming()

    def set_naming(self) -> None:
        """Tell the shim which names are needed now."""
        least = Naming.LABELS if self._has_pool else Naming.NONE
        self._runtime.shim.kernels_name(Naming.ALL if self._runtime.tracker.is_on else least)

    @property
    @untraced
    def is_planned(self) -> bool:
        """Whether a session captures operators."""
        return bool(self._runtime.active)

    @untraced
    def label(self, outer: int, name: str) -> int:
        """Return the tag of a kernel that runs under another tag."""
        tag: int = self._runtime.tracker.tag_below(outer, name)  # a proxy has no types
        return tag

    @untraced
    def begin(self, name: str) -> tuple[int, RunningOperator]:
        """Note that a kernel begins; return its tag, and the operator for `end`."""
        self._note(RingKind.OP_BEGIN, 0)
        operator: RunningOperator = self._runtime.tracker.enter_operator(name)
        return operator.tag, operator

    @untraced
    def end(self, operator: RunningOperator, nbytes: int) -> int | None:
        """Note that a kernel, with so many bytes of operands and outputs, has ended.

        Returns:
            The tag of the thread's place; None: the one before the kernel.
        """
        tag: int | None = self._runtime.tracker.leave_operator(operator)
        self._note(RingKind.OP_END, nbytes)
        return tag

    def _note(self, kind: RingKind, nbytes: int) -> None:
        """Write an event to the ring of the current device."""
        pool = self._runtime.current_device().pool
        if pool is not None:
            pool.note(kind, nbytes)
