"""An accelerator's allocator: swapkit's pools, or torch's own allocator observed by swapkit."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from typing import Any, cast

import torch

from swapkit._runtime.allocators.installed_pool import Installation, PoolInstallation
from swapkit._runtime.allocators.lifetimes import process_lifetimes
from swapkit._runtime.allocators.limits import ProcessLimit
from swapkit._runtime.allocators.torch_allocator import NativeInstallation, repair_statistics
from swapkit._runtime.process.runtime import Runtime
from swapkit._runtime.torch_compat.accelerators import CUDA, Accelerator
from swapkit._runtime.torch_compat.internals import C
from swapkit.config.allocator_settings import read_allocator_settings
from swapkit.errors import InvalidArgument, SessionError, Unsupported, warn

NO_LIMIT = ProcessLimit()


class AcceleratorAllocator:
    """The allocator of all devices of one type; each device's pool is created at first use."""

    def __init__(self, runtime: Runtime, accelerator: Accelerator, *, is_torchs: bool) -> None:
        """Replace torch's allocator with our pools, unless `is_torchs`.

        Raises:
            InvalidArgument: an environment variable with allocator settings is invalid.
            SessionError: torch already uses a device of this type.
            Unsupported: `is_torchs`, but another allocator has replaced torch's own.
        """
        if is_torchs:
            _require_native(accelerator)
        self._runtime = runtime
        self.accelerator = accelerator
        self.is_torchs = is_torchs
        self.installations: dict[int, PoolInstallation | NativeInstallation] = {}
        self._limits: dict[int | None, ProcessLimit] = {}  # by device; None: all other devices
        self._unlimited: set[int] = set()  # devices whose limit was not yet applied
        if not is_torchs:
            read_allocator_settings(accelerator.type)  # report errors now, not at an allocation
            self._replace()
            if accelerator is CUDA:
                _keep_benchmark_off()
            opened = cast("Mapping[int, Installation]", self.installations)
            repair_statistics(accelerator, opened)

    def _replace(self) -> None:
        if self.accelerator.is_initialized():
            raise SessionError(_describe_lateness(self.accelerator))
        try:
            self._runtime.shim.replace_allocator(self.accelerator, self)
        except RuntimeError as error:
            raise SessionError(f"{_describe_lateness(self.accelerator)} ({error})") from None

    def installation(self, index: int | None = None) -> Installation[Any]:
        """Return a device's installation, created on first use. None: of the current device."""
        number = self.accelerator.current_device().index if index is None else index
        with self._runtime.lock:
            if number not in self.installations:
                device = self._runtime.device(torch.device(self.accelerator.type, number))
                kind = NativeInstallation if self.is_torchs else PoolInstallation
                installation = kind(device)
                self.installations[number] = installation  # kept even if its limit fails
                self._unlimited.add(number)
            installation = self.installations[number]
            if number in self._unlimited:  # one that failed fails again: it must not go unnoticed
                self._apply(installation, self._limit_of(number))
                self._unlimited.discard(number)
        process_lifetimes.cover(installation)  # takes locks that a fork takes before the runtime's
        return installation

    def set_limit(self, limit: ProcessLimit, index: int | None) -> None:
        """Set the limit of one device. None: of all devices, also of those opened later.

        Raises:
            InvalidArgument: the limit is invalid.
            OverBudget: more memory than the limit is in use; all limits stay as they were.
        """
        limit.check()
        if self.is_torchs:  # no allocation of torch would open the device
            index = self.installation(index).device.index
        with self._runtime.lock:
            meant = {n: each for n, each in self.installations.items() if index in {None, n}}
            try:
                for installation in meant.values():
                    self._apply(installation, limit)
            except BaseException:
                for number, installation in meant.items():
                    self._apply(installation, self._limit_of(number))
                raise
            self._limits = {index: limit} if index is None else {**self._limits, index: limit}
            self._unlimited -= meant.keys()

    def drop_limits(self) -> None:
        """Remove all limits and return cached memory to the devices."""
        with self._runtime.lock:
            self._limits = {}
            for installation in self.installations.values():
                installation.drop_limit()

    def _limit_of(self, index: int) -> ProcessLimit:
        return self._limits.get(index, self._limits.get(None, NO_LIMIT))

    @staticmethod
    def _apply(installation: Installation[Any], limit: ProcessLimit) -> None:
        usual_bytes = installation.usual_limit_bytes
        installation.set_limit(limit.resolve(installation.shared_bytes, usual_bytes))

    # ---- called by cpp/memory/device_allocator.cpp -----------------------------------------------

    def open(self, index: int) -> int:
        """Return the address of a device's entry; called at its first allocation."""
        installation = self.installation(index)
        assert isinstance(installation, PoolInstallation)  # else torch would not call this
        installation.active = True
        return installation.entry.address

    def set_fraction(self, fraction: float, index: int) -> None:
        """Limit a device's pool to a share of its memory, as torch's memory fraction does.

        The memory that is reserved for other code stays so.

        Raises:
            InvalidArgument: `fraction` is not between 0 and 1.
            OverBudget: more memory than that is in use.
        """
        if not 0 <= fraction <= 1:
            raise InvalidArgument(f"fraction={fraction}: expected a number from 0 to 1")
        whole_bytes = self.installation(index).total_bytes
        limit_bytes = max(1, int(fraction * whole_bytes))
        self.set_limit(replace(self._limit_of(index), limit=limit_bytes), index)


def _require_native(accelerator: Accelerator) -> None:
    """Check that torch's own allocator is in use and can be observed.

    Raises:
        Unsupported: it is not, or cannot.
    """
    if accelerator is not CUDA:
        raise Unsupported(
            f"allocator='torch' is only for CUDA: torch's allocator for {accelerator.unit}s does "
            "not let other code free memory when it runs out. Leave the argument out"
        )
    backend = torch.cuda.get_allocator_backend()
    if backend != "native":
        raise Unsupported(
            f"allocator='torch' requires torch's native allocator; this process uses {backend!r}"
        )


def _describe_lateness(accelerator: Accelerator) -> str:
    text = (
        f"swapkit.install(device={accelerator.type!r}) was called too late: torch already uses the "
        f"{accelerator.unit} and can no longer change its allocator. Call it at the start of the "
        f"program, before a tensor is created on the {accelerator.unit} and before "
        f"torch.{accelerator.type}.init(), set_device() or current_device(). To train on the CPU, "
        "pass device='cpu'"
    )
    if accelerator is CUDA:
        text += ". Or pass allocator='torch', which can be installed at any time"
    return text


def _keep_benchmark_off() -> None:
    """Keep `cudnn.benchmark` off: trying algorithms needs a query only torch's allocator answers.

    Switching it on only gives a warning.
    """
    cudnn: Any = torch.backends.cudnn
    set_benchmark = C._set_cudnn_benchmark  # noqa: SLF001

    def refuse(on: bool) -> None:  # noqa: FBT001 - as torch calls it
        if on:
            warn(
                "torch.backends.cudnn.benchmark stays off: cuDNN can query free memory only from "
                "torch's own allocator. To turn it on, use swapkit.install(device='cuda', "
                "allocator='torch')",
                stacklevel=3,
            )
        set_benchmark(False)

    was_on = cudnn.benchmark
    C._set_cudnn_benchmark = refuse  # noqa: SLF001
    type(cudnn).benchmark = torch.backends.ContextProp(  # type: ignore[no-untyped-call]
        C._get_cudnn_benchmark,  # noqa: SLF001
        refuse,
    )
    if was_on:
        cudnn.benchmark = True  # so that the warning is seen
