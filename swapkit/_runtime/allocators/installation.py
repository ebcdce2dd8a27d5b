"""Installation and lookup of the allocator that serves torch on each device."""

from __future__ import annotations

import threading
from typing import Any

import torch

from swapkit._runtime.allocators.accelerator_allocator import AcceleratorAllocator
from swapkit._runtime.allocators.installed_pool import Installation, PoolInstallation
from swapkit._runtime.allocators.lifetimes import process_lifetimes
from swapkit._runtime.allocators.limits import ProcessLimit
from swapkit._runtime.process.runtime import get_runtime
from swapkit._runtime.saved.device import CPU, TYPES, DevicePool
from swapkit._runtime.torch_compat.accelerators import (
    ACCELERATORS,
    CUDA,
    NPU,
    present_accelerator,
)
from swapkit.errors import InvalidArgument, SessionError, Unsupported
from swapkit.units import show

OURS, TORCHS = "swapkit", "torch"

_cpu: PoolInstallation | None = None
_accelerator: AcceleratorAllocator | None = None
_lock = threading.RLock()


def install(
    limit: int | float | str | None = None,
    *,
    device: str | torch.device | None = None,
    allocator: str = OURS,
    lifetimes: bool | None = None,
    reserve: int | float | str | None = None,
) -> None:
    """Allocate all new tensors on the device from swapkit's pool.

    You can call `install` again to change the limit. Existing tensors stay where they are: they
    are outside the budget, and a session's summary names them.

    On the CPU this covers only tensors of torch's own allocator; shared memory, files and numpy
    arrays keep their own memory. On CUDA and Ascend NPUs, call it before torch first uses a device.
    It then covers all devices, each with its own pool. The memory functions of `torch.cuda` and
    `torch.npu` keep working. Device graphs, `MemPool` and sharing tensors with other processes need
    torch's own allocator: on CUDA, `allocator="torch"` keeps it, and can be installed at any time.
    The limit is then torch's memory fraction, and a session frees memory when torch runs out.
    swapkit cannot promise more: torch reports that it needs memory, not how much (see
    `docs/cuda.md`).

    Args:
        limit: maximum bytes the pool may reserve in this process, regardless of sessions: bytes,
            `"10GiB"`, `"80%"` or a fraction of the device's memory (on the CPU: of this rank's
            equal part of the machine's memory, as in `swapkit.budget`). None: the share that
            `per_process_memory_fraction` in PYTORCH_ALLOC_CONF gives, or no limit. An allocation
            that would exceed it raises `torch.OutOfMemoryError`.
        device: `"cpu"`, `"cuda"` or `"npu"` for all devices (with `allocator="torch"` the current
            one), or `"cuda:1"` to set the limit of one. None: where swapkit is installed already;
            else the accelerator that torch reports (`torch.accelerator`), if swapkit supports it;
            else the CPU.
        allocator: `"swapkit"`, or on CUDA `"torch"`.
        lifetimes: whether the pools keep memory that lives unequally long apart, also outside of
            sessions, and serve a step that repeats at planned addresses (`docs/addresses.md`). It
            holds for all devices until `uninstall()`. A step ends when each optimizer of the
            process has stepped. None: as before; at first, whether MEMORY_FRAGMENTATION is 1.
        reserve: memory of the device that the pool leaves to code without it, such as HCCL's or
            NCCL's buffers: bytes, `"2GiB"`, `"5%"` or a fraction. The pool may reserve at most the
            rest of the device's memory, and `limit`. None: nothing.

    Raises:
        InvalidArgument: an argument is invalid.
        OverBudget: more memory than the limit is already in use.
        NativeBuildError: the allocator shim could not be compiled; see the message.
        SessionError: torch already uses the device, and the message says when to call `install`;
            or swapkit serves another type of accelerator in this process.
        Unsupported: swapkit does not support the device, or the device does not exist.

    Example:
        >>> import swapkit, torch
        >>> swapkit.install(device="cpu")
        >>> x = torch.zeros(1024)
        >>> swapkit.memory_stats(device="cpu")["allocated_bytes.all.current"] >= 4096
        True
    """
    name = default_device() if device is None else parse_device(device)
    if allocator not in {OURS, TORCHS}:
        raise InvalidArgument(f"allocator={allocator!r}: expected 'swapkit' or 'torch'")
    _check_lifetimes(lifetimes, allocator)
    asked = ProcessLimit(limit=limit, reserve=reserve)
    with _lock:
        if name != CPU:
            _install_accelerator(asked, name, allocator)
        elif allocator == TORCHS:
            raise InvalidArgument("allocator='torch' is only for CUDA: pass device='cuda' as well")
        else:
            _install_cpu(asked)
        process_lifetimes.choose(get_runtime().tracker, on=lifetimes)


def _check_lifetimes(lifetimes: object, allocator: str) -> None:
    if lifetimes is not None and not isinstance(lifetimes, bool):
        raise InvalidArgument(f"lifetimes={show(lifetimes)}: expected True, False or None")
    if lifetimes and allocator == TORCHS:
        raise InvalidArgument(
            "lifetimes=True needs swapkit's pool: leave out allocator='torch', or lifetimes"
        )


def default_device() -> torch.device:
    """Return where swapkit is installed, an accelerator first.

    If it is not installed: the accelerator that torch reports, else the CPU.
    """
    if _accelerator is not None:
        return torch.device(_accelerator.accelerator.type)
    if _cpu is not None and _cpu.active:
        return CPU
    present = present_accelerator()
    return CPU if present is None else torch.device(present.type)


def _install_cpu(limit: ProcessLimit) -> None:
    global _cpu  # noqa: PLW0603 - torch has one allocator per device and process
    # Kept even if the limit is refused below: its hooks stay until the process ends.
    _cpu = _cpu or PoolInstallation(get_runtime().cpu)
    _cpu.set_limit(limit.resolve(_cpu.shared_bytes, _cpu.usual_limit_bytes))
    _cpu.runtime.shim.install(_cpu.entry.address)
    _cpu.active = True
    process_lifetimes.cover(_cpu)


def _install_accelerator(limit: ProcessLimit, name: torch.device, allocator: str) -> None:
    global _accelerator  # noqa: PLW0603
    kind = ACCELERATORS[name.type]
    if _accelerator is None:
        _accelerator = AcceleratorAllocator(get_runtime(), kind, is_torchs=allocator == TORCHS)
    elif _accelerator.accelerator is not kind:
        raise SessionError(
            f"device={str(name)!r}: swapkit already serves {_accelerator.accelerator.title} in "
            "this process, and serves one type of accelerator. Train on the other in a process of "
            "its own"
        )
    elif _accelerator.is_torchs != (allocator == TORCHS):
        present = TORCHS if _accelerator.is_torchs else OURS
        raise SessionError(
            f"allocator={allocator!r}: swapkit is already installed on {kind.title} with "
            f"allocator={present!r}, which cannot change in this process"
        )
    _accelerator.set_limit(limit, name.index)


def uninstall(*, force: bool = False) -> None:
    """Allocate new tensors from torch's own allocator again.

    Tensors in the pool stay valid and are freed as usual. Torch cannot switch the allocator of an
    accelerator back: only its limits are removed, and lifetimes are off. Without an installation
    this does nothing.

    Args:
        force: close all active sessions on all threads, as `session.close()` does.

    Raises:
        SessionError: a session is active, and `force` is false.
    """
    with _lock:
        ours = [] if _accelerator is None else list(_accelerator.installations.values())
        for installation in [*ours, *([_cpu] if _cpu is not None else [])]:
            if force:
                installation.end_sessions()
            installation.require_no_session()
        process_lifetimes.forget()
        uninstall_cpu()
        if _accelerator is not None:
            _accelerator.drop_limits()


def uninstall_cpu() -> None:
    """Allocate new tensors on the CPU from torch's own allocator again; see `uninstall`.

    Raises:
        SessionError: a session is active there.
    """
    with _lock:
        if _cpu is not None and _cpu.active:
            _cpu.require_no_session()
            _cpu.runtime.shim.uninstall()
            _cpu.active = False
            _cpu.drop_limit()


def is_installed(device: torch.device) -> bool:
    """Return whether swapkit is installed on a device."""
    try:
        require_installation(device)
    except SessionError:
        return False
    return True


def require_installation(device: torch.device = CPU) -> Installation[Any]:
    """Return the active installation on a device.

    Raises:
        SessionError: swapkit is not installed there.
    """
    if _accelerator is not None and device.type == _accelerator.accelerator.type:
        return _accelerator.installation(device.index)
    if device.type == "cpu" and _cpu is not None and _cpu.active:
        return _cpu
    raise SessionError(
        "swapkit's pool is not installed: call swapkit.install("
        f"{'' if device.type == default_device().type else f'device={device.type!r}'}) first"
    )


def ensure_installation(device: torch.device = CPU) -> Installation[Any]:
    """Return the active installation on a device; install swapkit if necessary.

    Raises:
        SessionError: it is too late to install swapkit.
    """
    with _lock:
        if device.type != "cpu" and _accelerator is None:
            install(device=device.type)
        elif device.type == "cpu" and (_cpu is None or not _cpu.active):
            install(device=CPU)
    return require_installation(device)


def installed_pool(device: str | torch.device | None = None) -> DevicePool:
    """Return the pool that serves torch on a device. None: the installed one, an accelerator first.

    Raises:
        SessionError: swapkit is not installed.
    """
    pool: DevicePool = require_installation(choose_device(device)).pool
    return pool


def choose_device(
    device: str | torch.device | None, model: torch.nn.Module | None = None
) -> torch.device:
    """Return the given device, else the model's device, else the installed one.

    Raises:
        InvalidArgument: `device` is not a valid device.
        Unsupported: swapkit does not support the device.
    """
    if device is None and model is not None:
        devices = (parameter.device for parameter in model.parameters())
        # Skip other kinds, such as the meta device of a model without memory.
        device = next((each for each in devices if each.type in TYPES), None)
    if device is None:
        device = default_device()
    name = parse_device(device)
    if name != CPU and name == torch.device(name.type):  # without an index
        return ACCELERATORS[name.type].current_device()
    return name


def parse_device(device: str | torch.device) -> torch.device:
    """Parse a device and check that swapkit supports it.

    Raises:
        InvalidArgument: `device` is not a valid device.
        Unsupported: swapkit does not support the device, or it does not exist.
    """
    if isinstance(device, str) and device.partition(":")[0] == "npu" and not NPU.exists():
        raise Unsupported(
            f"device={device!r}: this torch ({torch.__version__}) has no NPUs: install torch_npu "
            "(`pip install swapkit[npu]`), and import it"
        )
    try:
        name = torch.device(device)
    except (RuntimeError, TypeError) as error:
        raise InvalidArgument(f"device={device!r} is not understood: {error}") from None
    if name.type not in TYPES:
        raise Unsupported(f"device={str(device)!r}: swapkit supports {', '.join(TYPES)}")
    if name.type == "cpu":
        return CPU
    _require_device(name)
    return name


def _require_device(name: torch.device) -> None:
    """Check that an accelerator's device exists.

    Raises:
        Unsupported: it does not.
    """
    accelerator = ACCELERATORS[name.type]
    count = accelerator.count()
    if count == 0:
        lacks = accelerator is CUDA and torch.version.cuda is None
        why = "has no CUDA" if lacks else f"sees no {accelerator.unit}"
        raise Unsupported(f"device={str(name)!r}: this torch ({torch.__version__}) {why}")
    if name != torch.device(name.type) and name.index >= count:
        raise Unsupported(
            f"device={str(name)!r}: this machine has {count} {accelerator.unit}s, counted from 0"
        )
