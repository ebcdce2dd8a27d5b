"""The ways in which the conformance suite lets saved tensors move, in one table.

A mode is a context manager that yields `evict`. Inside it a program must give the bits of plain
training. Copies are made by a backend whose latency is part of the mode: with 5 ms every copy is
still in flight when the program goes on. A GPU's copies take the time they take, or that the
simulated one is told.
"""

from __future__ import annotations

import gc
import random
import threading
import warnings
import weakref
from contextlib import contextmanager
from dataclasses import dataclass
from functools import partial
from typing import TYPE_CHECKING, Any, TypeAlias
from unittest import mock

import torch
from torch.nn.modules.module import (
    register_module_buffer_registration_hook,
    register_module_parameter_registration_hook,
)

import swapkit
from swapkit._native.backend import Backend
from swapkit._native.sched import Scheduler
from swapkit._runtime.process.runtime import Runtime, get_runtime
from swapkit._runtime.saved.device import Device
from swapkit._runtime.saved.swapper import Swapper
from swapkit._runtime.shim.types import Placement
from swapkit._runtime.thread_state import thread_state
from swapkit._runtime.torch_compat.isolation import hidden, untraced
from swapkit._runtime.torch_compat.wrappers import KINDS
from swapkit.ir.plans import Action
from tests.programs.remains import watchers
from tests.support.place import DEVICE, ON_CPU, install

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator
    from contextlib import AbstractContextManager

    from swapkit._runtime.saved.device import Limits
    from swapkit._runtime.shim.types import SavedTensor
    from tests.programs import Evict

Opener: TypeAlias = "Callable[[], AbstractContextManager[Evict]]"

EVERYTHING = 1 << 40
BUDGET = "512MiB"
MIN_BYTES = 1024
SEED = 20


@dataclass(frozen=True, slots=True, kw_only=True)
class Mode:
    """A way to move saved tensors.

    Attributes:
        name: as test ids show it.
        opener: makes the context manager.
        latency_ms: of every copy.
        moves_all: everything that can move has done so after `evict()`.
        drops_all: likewise, everything that can be computed again was dropped.
    """

    name: str
    opener: Opener
    latency_ms: int = 0
    moves_all: bool = False
    drops_all: bool = False

    @contextmanager
    def open(self) -> Iterator[Evict]:
        """Enter the mode."""
        with injected_latency(self.latency_ms), self.opener() as evict:
            yield evict


# ---- how swapkit is driven: the only part that knows its insides -------------------------------


class Here(threading.local):
    """What the modes that this thread is in ask for."""

    def __init__(self) -> None:
        self.latency_ms = 0
        self.chance: random.Random | None = None


here = Here()


class Replaced:
    """A method that modes replace, on several threads at once; the last one puts it back."""

    def __init__(self, owner: type, name: str, replacement: Callable[..., Any]) -> None:
        self.owner, self.name, self.replacement = owner, name, replacement
        self.original = getattr(owner, name)
        self.users = 0
        self.lock = threading.Lock()

    def __enter__(self) -> None:
        with self.lock:
            self.users += 1
            setattr(self.owner, self.name, self.replacement)

    def __exit__(self, *_exception: object) -> None:
        with self.lock:
            self.users -= 1
            if self.users == 0:
                setattr(self.owner, self.name, self.original)


# Graphs may outlive a mode, so these are never closed.
_slow_backends: dict[int, Backend] = {}
_slow_swappers: dict[int, Swapper] = {}
_slow_lock = threading.Lock()


def _open_scheduler(scheduler: Scheduler, backend: Backend, **options: Any) -> None:
    """Open a scheduler, over a slow backend where this thread wants one."""
    if here.latency_ms:
        with _slow_lock:
            backend = _slow_backends.setdefault(
                here.latency_ms, Backend.cpu(copy_latency_ns=here.latency_ms * 1_000_000)
            )
    replaced_scheduler.original(scheduler, backend, **options)


def _default_swapper(runtime: Runtime, device: Device) -> Swapper:
    """Return the swapper of scopes outside any session: a slow one where this thread wants it."""
    if not here.latency_ms:
        usual: Swapper = replaced_default.original(runtime, device)
        return usual
    with runtime.lock:
        if here.latency_ms not in _slow_swappers:
            _slow_swappers[here.latency_ms] = runtime.new_swapper(device, device.new_scheduler())
        return _slow_swappers[here.latency_ms]


def _packer(swapper: Swapper, choice: Placement) -> Callable[[torch.Tensor], SavedTensor]:
    """Return a pack hook that keeps a tensor by the chance that this thread wants."""
    pack: Callable[[torch.Tensor], SavedTensor] = replaced_packer.original(swapper, choice)
    chance = here.chance
    if chance is None:
        return pack
    saved_tensor = swapper.shared.shim.saved_tensor

    @untraced
    def choose(tensor: torch.Tensor) -> SavedTensor:
        if type(tensor) is not torch.Tensor or chance.random() < 0.5:
            return pack(tensor)
        with hidden():
            return saved_tensor(tensor)

    return choose


replaced_scheduler = Replaced(Scheduler, "__init__", _open_scheduler)
replaced_default = Replaced(Runtime, "default_swapper", _default_swapper)
replaced_packer = Replaced(Swapper, "packer", _packer)


@contextmanager
def injected_latency(latency_ms: int) -> Iterator[None]:
    """Let every scheduler that this thread opens meanwhile copy through a slow backend."""
    if latency_ms == 0 or not ON_CPU:
        yield
        return
    before, here.latency_ms = here.latency_ms, latency_ms
    try:
        with replaced_scheduler, replaced_default:
            yield
    finally:
        here.latency_ms = before


@contextmanager
def choose_per_save(chance: random.Random) -> Iterator[None]:
    """Let swapkit take each saved tensor with probability one half, and keep the others."""
    before, here.chance = here.chance, chance
    try:
        with replaced_packer:
            yield
    finally:
        here.chance = before


@contextmanager
def frozen_objects() -> Iterator[None]:
    """Spare sessions and rescues, which look at all objects, those of torch and its compiler."""
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        import torch._dynamo
        import torch._inductor.compile_fx  # noqa: F401
    gc.collect()
    gc.freeze()
    yield
    gc.unfreeze()


def settle() -> None:
    """Let copies that have waited begin; wait for them, and let go of what they were made of."""
    runtime = get_runtime()
    with hidden():
        swapper = runtime.current_swapper()
    with runtime.lock:
        swapper.mover.release_done(False)
        swapper.scheduler.drain()
        swapper.mover.release_done(False)


@contextmanager
def holding(min_bytes: int, *, is_late: bool = False) -> Iterator[Evict]:
    """Hold each leaf and each weight that is made, in the thread's innermost session.

    `is_late`: only watch them; what this returns holds those that still exist.
    """
    swapper = thread_state.sessions[-1]
    placement = Placement(Action.AUTO, min_bytes=min_bytes)
    watched: list[weakref.ref[torch.Tensor]] = []

    def hold(tensor: torch.Tensor | None) -> None:
        if tensor is not None and type(tensor) in KINDS:
            with swapper.shared.lock:
                swapper.mover.watch(tensor, min_bytes)
            watched.append(weakref.ref(tensor))
            if not is_late:
                hold_all()

    def hold_all() -> None:
        with swapper.shared.lock:
            for each in watched:
                tensor = each()
                if tensor is not None:
                    swapper.mover.hold(tensor, placement)
            if not is_late:
                watched.clear()
            swapper.mover.begin_held()

    hooks = (
        register_module_parameter_registration_hook(lambda _module, _name, each: hold(each)),
        register_module_buffer_registration_hook(lambda _module, _name, each: hold(each)),
    )
    watchers.append(hold)
    try:
        yield hold_all
    finally:
        watchers.remove(hold)
        for hook in hooks:
            hook.remove()
        swapper.weights.stop()


def forget_captured() -> None:
    """Let recipes go as where memory is asked for: the latest may outlive what it is of."""
    runtime = get_runtime()
    with runtime.lock:
        for swapper in runtime.swappers(runtime.current_device()):
            swapper.mover.sweep_captured()


def allocated_bytes() -> int:
    """Return the bytes of the pool that tensors hold now."""
    with hidden():
        return swapkit.memory_stats(device=DEVICE)["allocated_bytes.all.current"]


class Copied:
    """Bytes that schedulers copied in each direction since this was made; operators repeated."""

    def __init__(self, swappers: list[Swapper]) -> None:
        self.schedulers = [swapper.scheduler for swapper in swappers]
        self.swappers = swappers
        self._before = self._total()
        self._repeated_before = self._total_repeated()

    def _total(self) -> tuple[int, int]:
        stats = [scheduler.stats() for scheduler in self.schedulers]
        return sum(s.copied_out_bytes for s in stats), sum(s.copied_in_bytes for s in stats)

    @property
    def out_bytes(self) -> int:
        """To the host."""
        return self._total()[0] - self._before[0]

    @property
    def in_bytes(self) -> int:
        """Back to the device."""
        return self._total()[1] - self._before[1]

    def _total_repeated(self) -> int:
        return sum(swapper.counters().recomputed for swapper in self.swappers)

    @property
    def repeated(self) -> int:
        """Operators, and regions, that were computed again."""
        return self._total_repeated() - self._repeated_before


@contextmanager
def count_copies() -> Iterator[Copied]:
    """Count what is copied between device and host meanwhile, whoever does it."""
    runtime = get_runtime()
    with runtime.lock:
        copied = Copied(runtime.swappers(runtime.current_device()))
    new_scheduler, new_swapper = Device.new_scheduler, Runtime.new_swapper

    def noted(device: Device, *limits: Limits, **options: Any) -> Scheduler:
        copied.schedulers.append(new_scheduler(device, *limits, **options))
        return copied.schedulers[-1]

    def noted_swapper(runtime: Runtime, *args: Any, **options: Any) -> Swapper:
        copied.swappers.append(new_swapper(runtime, *args, **options))
        return copied.swappers[-1]

    with (
        mock.patch.object(Device, "new_scheduler", noted),
        mock.patch.object(Runtime, "new_swapper", noted_swapper),
    ):
        yield copied


# ---- the modes ----------------------------------------------------------------------------------


@contextmanager
def swap_everything() -> Iterator[Evict]:
    """Copy all that is saved to the host, and let go of it as soon as it is there."""
    install()
    with swapkit.offload(min_bytes=MIN_BYTES):
        yield settle


@contextmanager
def swap_in_flight() -> Iterator[Evict]:
    """Do so without ever waiting, so that the program goes on while copies are under way."""
    install()
    with swapkit.offload(min_bytes=MIN_BYTES):
        yield lambda: None


@contextmanager
def swap_by_operators() -> Iterator[Evict]:
    """Let go, and bring back, a few operators behind and ahead."""
    install()
    with swapkit.offload(min_bytes=MIN_BYTES, prefetch=1):
        yield lambda: None


@contextmanager
def swap_random_half() -> Iterator[Evict]:
    """Swap every second saved tensor, on average."""
    install()
    with choose_per_save(random.Random(SEED)), swapkit.offload(min_bytes=MIN_BYTES):
        yield settle


@contextmanager
def rescue_everything(host_limit: str | None = None) -> Iterator[Evict]:
    """Move all that can be moved wherever memory could run out."""
    install()
    with swapkit.budget(BUDGET, device=DEVICE, host_limit=host_limit) as session:
        yield lambda: session.rescue(EVERYTHING)


@contextmanager
def rescue_at_random(host_limit: str | None = None) -> Iterator[Evict]:
    """Move nothing, one tensor, half, or all wherever memory could run out."""
    install()
    chance = random.Random(SEED)
    with swapkit.budget(BUDGET, device=DEVICE, host_limit=host_limit) as session:

        def evict() -> None:
            needed_bytes = chance.choice([0, 1, allocated_bytes() // 2, EVERYTHING])
            if needed_bytes:
                session.rescue(needed_bytes)

        yield evict


@contextmanager
def hold_everything(min_bytes: int = MIN_BYTES) -> Iterator[Evict]:
    """Hold all leaves and weights of programs, too; like saved tensors, they leave."""
    install()
    with swapkit.budget(BUDGET, device=DEVICE, policy="rescue") as session, holding(min_bytes):
        yield lambda: session.rescue(EVERYTHING)


@contextmanager
def hold_late(min_bytes: int = MIN_BYTES) -> Iterator[Evict]:
    """Hold leaves and weights where memory runs out, in the middle of programs."""
    install()
    with (
        swapkit.budget(BUDGET, device=DEVICE, policy="rescue") as session,
        holding(min_bytes, is_late=True) as hold,
    ):

        def evict() -> None:
            hold()
            session.rescue(EVERYTHING)

        yield evict


@contextmanager
def plain() -> Iterator[Evict]:
    """Move nothing; not in the table."""
    yield lambda: None


MODES = (
    Mode(name="swap_everything", opener=swap_everything, moves_all=True),
    Mode(name="swap_everything_5ms", opener=swap_in_flight, latency_ms=5),
    Mode(name="swap_by_operators", opener=swap_by_operators),
    Mode(name="swap_by_operators_5ms", opener=swap_by_operators, latency_ms=5),
    Mode(name="swap_random_half", opener=swap_random_half),
    Mode(name="swap_random_half_5ms", opener=swap_random_half, latency_ms=5),
    Mode(name="rescue_everything", opener=rescue_everything, moves_all=True),
    Mode(name="rescue_at_random", opener=rescue_at_random),
    Mode(name="rescue_at_random_5ms", opener=rescue_at_random, latency_ms=5),
    Mode(name="hold_everything", opener=hold_everything, moves_all=True),
    Mode(name="hold_late", opener=hold_late, moves_all=True),
    # Without room on the host: what can be is dropped, and computed again.
    Mode(name="drop_everything", opener=partial(rescue_everything, "0"), drops_all=True),
    Mode(name="drop_at_random", opener=partial(rescue_at_random, "16KiB")),
)


def find_mode(name: str) -> Mode:
    """Return the mode with this name."""
    (mode,) = (mode for mode in MODES if mode.name == name)
    return mode
