"""Loads and calls the C++ shim between the native core and torch.

The files of `cpp/` form one module: torch's CPU allocator over the pool, saved tensors and their
moves, and the clock of operators. It is compiled on first use (`build.py`).
"""

from __future__ import annotations

import ctypes
import enum
import importlib.machinery
import importlib.util
import tempfile
from collections.abc import Callable, Sequence
from functools import partial
from pathlib import Path
from types import ModuleType
from typing import Any, Protocol, TypeVar

import torch

from swapkit._native.hooks import hook_addresses
from swapkit._native.lib import (
    address_of,
    error_of,
    interruptions,
    note_failure,
    note_interruption,
    raise_interruption,
)
from swapkit._runtime.model import hook_bypass
from swapkit._runtime.operators.effects import ArgumentPlaces
from swapkit._runtime.operators.names import Operator
from swapkit._runtime.shim import build
from swapkit._runtime.shim import callbacks as again
from swapkit._runtime.shim.types import (
    Lock,
    MakeChoices,
    MakeChoosing,
    MakeFollower,
    MakeMover,
    MakeRegion,
    MakeSavedTensor,
    Placement,
    SavedTensor,
    refuse_modified,
)
from swapkit._runtime.torch_compat import isolation as guards
from swapkit._runtime.torch_compat import thread_stacks as threads
from swapkit._runtime.torch_compat import wrappers
from swapkit._runtime.torch_compat.accelerators import ACCELERATORS, Accelerator
from swapkit._runtime.torch_compat.dispatch_modes import set_late_modes_of
from swapkit._runtime.torch_compat.internals import (
    AROUND_MODULE_CALL,
    MODULE_CALL,
    NoDispatchModes,
    NoFunctionModes,
    NoTransforms,
    storage_from_weak,
)
from swapkit._runtime.torch_compat.isolation import hide, untraced
from swapkit._runtime.torch_compat.reported_calls import REGIONS, regions
from swapkit._runtime.torch_compat.stream_delays import is_capturing
from swapkit.errors import NativeBuildError, Unsupported
from swapkit.imports import when_imported

_Result = TypeVar("_Result")


class NameOperator(Protocol):
    """Makes the shim see the runs of an operator from now on."""

    def __call__(
        self,
        function: Operator,
        name: tuple[str, str],
        kind: tuple[bool, bool, bool, bool, bool],
        places: ArgumentPlaces,
        /,
    ) -> int:
        """Return the operator's number.

        `name`: with its overload. `kind`: whether calls can be repeated, may be random, and may
        fill tensors that autograd has already saved.
        """


class InRange(Protocol):
    """Calls a function inside a range of torch's profiler."""

    def __call__(self, name: str, function: Callable[[], _Result], /) -> _Result:
        """Return the function's result.

        Args:
            name: `"swap_out"`, `"swap_in"` or `"swap_in_wait"`.
            function: called on this thread.
        """


class Naming(enum.IntEnum):
    """Which names of kernels are needed even if no saved tensor needs to know of them."""

    NONE = 0
    LABELS = 1  # of the memory that they make
    ALL = 2


class KernelOwner(Protocol):
    """The runtime's side of kernels that announce themselves; called on their threads."""

    @property
    def is_planned(self) -> bool:
        """Whether a session captures operators."""

    def label(self, outer: int, name: str, /) -> int:
        """Return the tag of a kernel that runs under another tag."""

    def begin(self, name: str, /) -> tuple[int, Any]:
        """Note that a kernel begins; return its tag, and an object for `end`."""

    def end(
        self,
        begun: Any,  # noqa: ANN401 - whatever `begin` has returned
        nbytes: int,
        /,
    ) -> int | None:
        """Note that a kernel, with so many bytes of operands and outputs, has ended.

        Returns:
            The tag of the thread's place; None: the one before the kernel.
        """


class DeviceOwner(Protocol):
    """Opens devices for `cpp/memory/device_allocator.cpp`."""

    def open(self, index: int, /) -> int:
        """Return the address of a device's entry."""

    def set_fraction(self, fraction: float, index: int, /) -> None:
        """Limit a device's pool to a share of its memory."""


def _explain(error: ImportError | OSError) -> NativeBuildError:
    """Return the error of a shim that cannot be loaded."""
    if isinstance(error, NativeBuildError):
        return error  # of another library, with advice of its own
    return NativeBuildError(
        f"swapkit's allocator shim could not be loaded: {error}\nRun `swapkit "
        "build --force` to compile it again"
    )


class Shim:
    """The loaded shim. It is never unloaded: tensors keep pointers into it."""

    clock_rings: Callable[[], int]  # how often alarms of planned moves have rung
    in_range: InRange  # `cpp/running/profiler_range.hpp`

    def __init__(self, library: Path) -> None:
        """Load a compiled shim.

        Raises:
            NativeBuildError: the file cannot be loaded.
        """
        try:
            module = _load(library)
            self._library = ctypes.CDLL(module.__file__)
            quick = ctypes.PyDLL(module.__file__)  # keeps the GIL, for short calls
        except (ImportError, OSError) as error:
            raise _explain(error) from None
        self.lock: Callable[[], Lock] = module.Lock
        self.mover: MakeMover = module.Mover
        self.follower: MakeFollower = module.Follower
        self.region: MakeRegion = module.Region
        self.saved_tensor: MakeSavedTensor = module.SavedTensor
        self.unpack: Callable[[SavedTensor], torch.Tensor] = module.unpack
        # For wrappers (`cpp/saved/wrappers.hpp`): keep a tensor inside; let a new wrapper count
        # changes in place with the one that the saved tensor was inside.
        self.keep_inside: Callable[[torch.Tensor, torch.Tensor], SavedTensor] = module.keep_inside
        self.count_with: Callable[[torch.Tensor, SavedTensor], None] = module.count_with
        # Choices for results of single operators (`cpp/saved/storage_choices.hpp`).
        self.mark: Callable[[torch.Tensor, Placement, int], bool] = module.mark
        self.void_swaps: Callable[[Sequence[torch.Tensor]], None] = module.void_swaps
        self.has_marks: Callable[[], bool] = module.has_marks
        self.marks_count: Callable[[], int] = module.marks_count
        # Choices for operators of the module that runs (`cpp/recompute/operator_choices.hpp`), and
        # a number that changes when an operator is defined.
        self.choices: MakeChoices = module.Choices
        self.choosing: MakeChoosing = module.Choosing
        self.operators_known: Callable[[], int] = module.operators_known
        # Operators that are repeated in backward (`cpp/recompute/capturing.hpp`).
        self.name_operator: NameOperator = module.name_operator
        self.settle: Callable[[Sequence[torch.Tensor], bool, bool], None] = module.settle
        # Whether a tensor is plain and its storage has at least n bytes (`cpp/saved/tensors.cpp`).
        self.has_plain_memory: Callable[[object, int], bool] = module.has_plain_memory
        # How many operators this thread has run that fill tensors autograd has already saved.
        self.fills_run: Callable[[], int] = module.fills_run
        size = ctypes.c_size_t
        # Make and drop the owner of a copy (`cpp/memory/copy_owners.hpp`).
        self.new_owner = ctypes.PYFUNCTYPE(size, size)(("swapkit_owner_new", quick))
        self.drop_owner = ctypes.PYFUNCTYPE(None, size)(("swapkit_storage_drop", quick))
        # For a device, by type and index: this thread's stream; the bytes in use and reserved.
        self.current_stream: Callable[[int, int], int] = module.current_stream
        self.device_usage: Callable[[int, int], tuple[int, int]] = module.device_usage
        # Rescues for torch's own allocator on a GPU (`cpp/memory/reclaimable.hpp`).
        self.native_rescue: Callable[[int, int, bool], None] = module.native_rescue
        self.native_rescues: Callable[[int], tuple[int, int]] = module.native_rescues
        self.native_expect: Callable[[int, int], None] = module.native_expect
        self.native_take: Callable[[int, int], int] = module.native_take
        self.native_garbage: Callable[[], int] = module.native_garbage
        # Sets the tag of all saves of this thread; 0: the tracker's current module.
        self.set_coarse_site: Callable[[int], None] = module.set_coarse_site
        self.clock_rings, self.in_range = module.clock_rings, module.in_range
        self._connect(module)

    def _connect(self, module: ModuleType) -> None:
        """Connect the rest of the module."""
        # What a device's framework keeps about a tensor's storage (`cpp/memory/descriptions.hpp`).
        self.storage_description: Callable[[torch.Tensor], tuple[object, ...] | None] = (
            module.storage_description
        )
        # Kernels that announce themselves (`cpp/running/announced_kernels.hpp`).
        self.kernels_listen: Callable[[KernelOwner | None], None] = module.kernels_listen
        self.kernels_name: Callable[[Naming], None] = module.kernels_name
        self.kernels_sweep: Callable[[], None] = module.kernels_sweep
        self.kernel_enter: Callable[[str], int] = module.kernel_enter
        self.kernel_memory: Callable[[int, Sequence[torch.Tensor], bool], None] = (
            module.kernel_memory
        )
        self.kernel_leave: Callable[[int], None] = module.kernel_leave
        wrappers.leave_by(module.is_sealed)
        hook_bypass.connect(module)
        threads.connect(module.stacks, module.receivers)

    @property
    def drop_address(self) -> int:
        """The address of the function that drops a copy's owner; called on any thread."""
        return _address(self._library.swapkit_storage_arrived)

    def install(self, entry: int) -> None:
        """Make the pool of an entry the allocator of torch's CPU tensors.

        Raises:
            Unsupported: other code has registered an allocator with a higher priority.
        """
        install = self._library.swapkit_shim_install
        install.restype = ctypes.c_bool
        if not install(ctypes.c_void_p(entry)):
            raise Unsupported(
                "torch's CPU allocator cannot be replaced: other code in this process has "
                "registered one with a higher priority (c10::SetCPUAllocator)"
            )

    def replace_allocator(self, accelerator: Accelerator, owner: DeviceOwner) -> None:
        """Make our pools the allocator of an accelerator.

        `owner` opens a device when torch first allocates there. It is kept until the process ends.

        Raises:
            RuntimeError: torch already allocates on a device.
        """
        self._device_owner = owner
        library = self._library
        library.swapkit_device_owner.argtypes = [ctypes.py_object]
        library.swapkit_device_owner(owner)

        def find(name: str) -> int:
            return _address(getattr(library, f"swapkit_{accelerator.type}_{name}"))

        allocator: Any = accelerator.new_allocator(find("alloc"), find("free"))
        for setter, name in accelerator.hooks:
            getattr(allocator, setter)(find(name))
        accelerator.use_allocator(allocator)

    @property
    def backward_address(self) -> int:
        """The address of the function that tells whether a thread runs a backward pass."""
        return _address(self._library.swapkit_in_backward)

    @property
    def npu_settle_address(self) -> int:
        """The address of the function that waits for the host queues of an NPU, by its index."""
        return _address(self._library.swapkit_npu_settle)

    def uninstall(self) -> None:
        """Restore torch's former CPU allocator."""
        self._library.swapkit_shim_uninstall()


@untraced
def _is_capturing(number: int) -> bool:
    """Return whether this thread's stream records a graph on the accelerator of this number."""
    accelerator = next(each for each in ACCELERATORS.values() if each.number == number)
    return is_capturing(torch.device(accelerator.type))


@untraced
def _note_failure(error: BaseException) -> bool:
    return note_failure("an operator alarm", error)


def _address(function: Callable[..., object]) -> int:
    return ctypes.cast(function, ctypes.c_void_p).value or 0  # type: ignore[arg-type]


def load_shim() -> Shim:
    """Load the shim for the installed torch; compile it if it is not in the cache.

    Raises:
        NativeBuildError: there is no compiler, or it fails; the message has its output.
    """
    if build.find_cached(build.shim_name()) is None and build.cache_folder() is None:
        # The library stays loaded after its file is gone.
        with tempfile.TemporaryDirectory(prefix="swapkit-") as temporary:
            return Shim(build.compile_shim(Path(temporary), often=""))
    return Shim(build.build_shim().library)


def _load(library: Path) -> ModuleType:
    """Load the shim as a module, and link it to the core and to torch."""
    name = "swapkit._runtime._shim"
    opened = str(library)
    if library.parent not in build.PACKAGED:
        # Never closed: while it is open, its name means no other library.
        opened = str(build.name_of(build.open_own(library)))
    loader = importlib.machinery.ExtensionFileLoader(name, opened)
    spec = importlib.util.spec_from_file_location(name, opened, loader=loader)
    assert spec is not None
    module = importlib.util.module_from_spec(spec)
    module.link(
        {function: address_of(function) for function in module.CORE} | hook_addresses(module.HOOKS),
        {
            "tensor": torch.Tensor,
            "out_of_memory": torch.OutOfMemoryError,
            "is_capturing": _is_capturing,
            "parameter": torch.nn.Parameter,
            "wrap_storage": storage_from_weak,
            "error_of": untraced(error_of),
            "note_failure": _note_failure,
            "note_interruption": untraced(note_interruption),
            "interruptions": interruptions,
            "raise_interruption": untraced(raise_interruption),
            "refuse_modified": refuse_modified,
            "hide": hide,
            "no_function_modes": NoFunctionModes,
            "no_dispatch_modes": NoDispatchModes,
            "no_transforms": NoTransforms,
            "call_of_module": MODULE_CALL,
            "call_around": AROUND_MODULE_CALL,
            **again.FUNCTIONS,
        },
    )
    guards.hide_by(module.Hidden)
    if torch.__version__ >= "2.13":  # 2.10 has Fake above Python, whose fallback hides it
        set_late_modes_of(module.late_modes, module.set_late_modes)
    when_imported(REGIONS, partial(regions.add, module.run_region))
    return module
