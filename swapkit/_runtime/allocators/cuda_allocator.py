"""CUDA: swapkit's pools, or torch's own allocator under our eyes, below torch's GPU tensors."""

from __future__ import annotations

import warnings
from typing import TYPE_CHECKING, Any, cast

import torch

from swapkit._runtime.allocators.installed_pool import PoolInstallation
from swapkit._runtime.allocators.torch_allocator import NativeInstallation
from swapkit._runtime.allocators.torch_statistics import repair_statistics
from swapkit._runtime.torch_compat.internals import C
from swapkit.config.allocator_settings import read_allocator_settings
from swapkit.errors import InvalidArgument, SessionError, Unsupported
from swapkit.units import parse_bytes

if TYPE_CHECKING:
    from collections.abc import Mapping

    from swapkit._runtime.allocators.installed_pool import Installation
    from swapkit._runtime.process.runtime import Runtime

Limit = int | float | str | None
ANY_BYTES = 1 << 40  # of a device, where a limit is only looked at


class CudaAllocator:
    """What stands below torch on all GPUs of the process; a GPU's pool is made at first use."""

    def __init__(self, runtime: Runtime, *, is_torchs: bool) -> None:
        """Put our pools below torch, unless torch's own allocator is to stay.

        Raises:
            InvalidArgument: a variable of the allocator's settings is wrong.
            SessionError: torch uses a GPU already.
            Unsupported: what is there is not torch's own allocator.
        """
        backend = torch.cuda.get_allocator_backend()
        if is_torchs and backend != "native":
            raise Unsupported(
                f"allocator='torch' is for torch's own allocator; this process has {backend!r}"
            )
        self._runtime = runtime
        self.is_torchs = is_torchs
        self.installations: dict[int, PoolInstallation | NativeInstallation] = {}
        self._limits: dict[int | None, Limit] = {}  # by device; None: of the others
        if not is_torchs:
            read_allocator_settings("cuda")  # a bad one is told here, not at the first allocation
            self._replace()
            _keep_benchmark_off()
            repair_statistics(cast("Mapping[int, Installation]", self.installations))

    def _replace(self) -> None:
        shim = self._runtime.shim
        if torch.cuda.is_initialized():  # type: ignore[no-untyped-call]
            raise SessionError(_TOO_LATE)
        allocator = shim.cuda_allocator(self)
        try:
            torch.cuda.memory.change_current_allocator(allocator)
        except RuntimeError as error:
            raise SessionError(f"{_TOO_LATE} ({error})") from None

    def installation(self, index: int | None = None) -> Installation[Any]:
        """Return a GPU's installation, made when it is first needed; None: the current one's."""
        number = torch.cuda.current_device() if index is None else index
        with self._runtime.lock:
            if number not in self.installations:
                device = self._runtime.device(torch.device("cuda", number))
                kind = NativeInstallation if self.is_torchs else PoolInstallation
                installation = kind(device)
                self.installations[number] = installation  # for good, whatever its limit comes to
                self._apply(installation, self._limit_of(number))
            return self.installations[number]

    def set_limit(self, limit: Limit, index: int | None) -> None:
        """Set the limit of one GPU, or (None) of all, those that are opened later too.

        Raises:
            InvalidArgument: the limit is not understood.
            OverBudget: more than that is in use; nothing was changed there.
        """
        if limit is not None:
            parse_bytes(limit, whole_bytes=ANY_BYTES, name="limit")
        if self.is_torchs:  # nothing else would tell it that the GPU is used
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

    def drop_limits(self) -> None:
        """Lift all limits, and give what is cached to the devices."""
        with self._runtime.lock:
            self._limits = {}
            for installation in self.installations.values():
                installation.drop_limit()

    def _limit_of(self, index: int) -> Limit:
        return self._limits.get(index, self._limits.get(None))

    @staticmethod
    def _apply(installation: Installation[Any], limit: Limit) -> None:
        limit_bytes = 0
        if limit is not None:
            whole_bytes = installation.total_bytes
            limit_bytes = parse_bytes(limit, whole_bytes=whole_bytes, name="limit")
        installation.set_limit(limit_bytes)

    # ---- for cpp/memory/cuda.cpp
    # -----------------------------------------------------------------------

    def open(self, index: int) -> int:
        """Return the address of a GPU's entry, at the first allocation there."""
        installation = self.installation(index)
        assert isinstance(installation, PoolInstallation)  # or torch would not have asked
        installation.active = True
        return installation.entry.address

    def set_fraction(self, fraction: float, index: int) -> None:
        """Limit a GPU's pool to a share of its memory, as torch's memory fraction does.

        Raises:
            InvalidArgument: it is no share.
            OverBudget: more than that is in use.
        """
        if not 0 <= fraction <= 1:
            raise InvalidArgument(f"fraction={fraction}: expected a number from 0 to 1")
        whole_bytes = self.installation(index).total_bytes
        self.set_limit(max(1, int(fraction * whole_bytes)), index)


def _keep_benchmark_off() -> None:
    """Let cuDNN choose by rule: to try algorithms it asks for what only torch's allocator can tell.

    Whoever switches `cudnn.benchmark` on is warned, and trains without.
    """
    cudnn: Any = torch.backends.cudnn
    set_benchmark = C._set_cudnn_benchmark  # noqa: SLF001

    def refuse(on: bool) -> None:  # noqa: FBT001 - as torch calls it
        if on:
            warnings.warn(
                "torch.backends.cudnn.benchmark stays off: cuDNN asks torch's own allocator what "
                "it may try. Use swapkit.install(device='cuda', allocator='torch') to have it",
                RuntimeWarning,
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


_TOO_LATE = (
    "swapkit.install(device='cuda') came too late: torch uses the GPU already, and does not change "
    "its allocator then. Call it first thing in the program, before a CUDA tensor is made and "
    "before torch.cuda.init(), set_device() or current_device(); or use allocator='torch', which "
    "can be installed at any time"
)
