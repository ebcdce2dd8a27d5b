"""A recorder's notes on one step, shared by its tables and the trace builder."""

from __future__ import annotations

import contextlib
import threading
from collections import Counter
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Any, NamedTuple

import torch

from swapkit._runtime.model.tracker import ModuleTracker
from swapkit._runtime.recording.tables.blocks import Blocks, Workspaces
from swapkit._runtime.recording.tables.clocks import HostTimer, StreamTimer, Timer
from swapkit._runtime.recording.tables.kept_bytes import Bytes, Holds
from swapkit._runtime.recording.tables.module_calls import Calls
from swapkit._runtime.recording.tables.storages import Storages
from swapkit._runtime.saved.device import DevicePool
from swapkit._runtime.shim.types import Mover
from swapkit._runtime.torch_compat.internals import NO_TASK, graph_task
from swapkit._runtime.torch_compat.wrappers import graph_of
from swapkit.ir.traces import BEFORE, Kind, Phase, StagePlace


@dataclass(frozen=True, slots=True, kw_only=True)
class Setting:
    """The device, model and options of a recording.

    `pool`: the pool below torch on the device; None: not ours. `root`: the model, if known.
    `stands_for`: the type of the device that tensors without memory stand for; empty: tensors have
    memory, and operators run and are timed. `make_room`: frees device memory that the allocator
    cannot: recorded storages have Python objects. `counts_outside`: whether tensors that torch made
    before it had the pool count, too.
    """

    device: torch.device
    tracker: ModuleTracker
    pool: DevicePool | None = None
    root: torch.nn.Module | None = None
    optimizers: tuple[torch.optim.Optimizer, ...] = ()
    stands_for: str = ""
    make_room: Callable[[], int] | None = None
    counts_outside: bool = False
    mover: Mover | None = None  # of the session whose weights leave; None: none do
    exclude_key: Callable[[bool], bool] | None = None  # that of weights, on this thread, or not

    @property
    def has_data(self) -> bool:
        """Whether tensors have memory, and operators compute."""
        return not self.stands_for


class NotedOperator(NamedTuple):
    """One noted operator. `taken`: the timer's handle to its time."""

    name: str
    taken: Any
    phase: Phase
    is_inside: bool  # of a module
    root_calls: int
    tag: int
    occurrence: int
    reads: tuple[int, ...]
    writes: tuple[int, ...]
    workspace: int
    is_repeatable: bool
    microbatch: int | None  # of a pipeline's schedule
    flops: float | None  # as of `Operator`
    touched_bytes: int | None


class Notes:
    """The tables of one recorded step. All callbacks take the lock."""

    def __init__(self, setting: Setting) -> None:
        """Start empty."""
        self.setting = setting
        self.lock = threading.RLock()  # reentrant: a user's finalizer may run operators
        self.rows: list[NotedOperator] = []
        self.running = 0
        self.weights: set[int] = set()  # storages of weights that may leave
        self.in_regions: Counter[int] = Counter()  # those that compiled regions use meanwhile
        self.places: set[StagePlace] = set()  # of the stages of a pipeline that ran
        self.is_paused = False
        blocks = Blocks(self._count)
        self.workspaces = Workspaces(setting.pool, blocks)
        self.storages = Storages(
            setting.device,
            setting.pool,
            self._next_operator,
            blocks,
            self.workspaces.read,
            counts_outside=setting.counts_outside,
        )
        self.storages.holds_weights = setting.mover is not None
        self.calls = Calls(setting.tracker, setting.root, self._add_module, self.is_here)
        self.holds = Holds(self.storages.lives)
        self.bytes = Bytes(self.storages, self.lock, is_on=setting.has_data)
        is_host = setting.device.type == "cpu" or not setting.has_data
        self.timer: Timer = HostTimer() if is_host else StreamTimer(setting.device)

    def is_here(self) -> bool:
        """Return whether this thread is recorded."""
        raise NotImplementedError

    def _add_module(self, module: torch.nn.Module) -> None:
        """Number the parameters and buffers of a module on its first call."""
        raise NotImplementedError

    @property
    def operator_count(self) -> int:
        """The number of operators noted so far."""
        return self._count()

    def _count(self) -> int:
        return len(self.rows)

    def add_unseen(self, tensor: torch.Tensor) -> int | None:
        """Number a storage whose making was not observed. The lock is held."""
        if isinstance(tensor, torch.nn.Parameter):
            return self.storages.number(tensor, BEFORE, Kind.STATE)
        if graph_of(tensor) is not None or graph_task() != NO_TASK:
            return self.storages.number(tensor, len(self.rows))  # made unobserved in this step
        return self.storages.number(tensor, BEFORE, Kind.INPUT)

    @contextlib.contextmanager
    def paused(self) -> Iterator[None]:
        """Suspend noting operators for the block."""
        self.is_paused = True
        try:
            yield
        finally:
            self.is_paused = False

    def _next_operator(self) -> int:
        """Return the first operator that runs without a storage that is freed now."""
        return len(self.rows) + (self.running > 0)
