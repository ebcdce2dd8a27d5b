"""The errors of swapkit.

    SwapkitError
    ├── InvalidArgument      ValueError           what was asked is not possible
    ├── Unsupported          NotImplementedError  not on this device or in this version
    ├── SessionError         RuntimeError         a session is used where it cannot be
    ├── SavedTensorModified  RuntimeError         a tensor needed for backward was changed in place
    ├── OverBudget           MemoryError          it would not fit the budget
    ├── OutOfDeviceMemory    MemoryError          the device has no more
    ├── OutOfHostMemory      MemoryError          the host, or `host_limit`, has no more
    ├── OutOfDisk            OSError              the disk, or `disk_limit`, has no more room
    ├── DiskError            OSError              a file could not be read or written
    ├── BackendError         RuntimeError         a driver reported an error
    ├── CorruptState         RuntimeError         a structure broke its invariants: a bug
    └── NativeBuildError     ImportError          the native part could not be built or loaded

A training step that does not fit raises torch's own `torch.OutOfMemoryError`.
"""

from __future__ import annotations


class SwapkitError(Exception):
    """Root of all errors that swapkit raises itself."""


class InvalidArgument(SwapkitError, ValueError):
    """An argument is wrong; nothing was done."""


class Unsupported(SwapkitError, NotImplementedError):
    """The device or this version cannot do that; nothing was done."""


class SessionError(SwapkitError, RuntimeError):
    """A session was used where or when it cannot be."""


class SavedTensorModified(SwapkitError, RuntimeError):
    """A tensor needed for backward was changed in place after it was saved."""


class OverBudget(SwapkitError, MemoryError):
    """The request would pass the budget; the device was not asked."""


class OutOfDeviceMemory(SwapkitError, MemoryError):
    """The device refused the memory."""


class OutOfHostMemory(SwapkitError, MemoryError):
    """The host refused the memory, or `host_limit` would be passed."""


class OutOfDisk(SwapkitError, OSError):
    """The disk tier is full: the file system, or `disk_limit`, has no more room."""


class DiskError(SwapkitError, OSError):
    """The disk tier could not read or write its file."""


class BackendError(SwapkitError, RuntimeError):
    """A driver, or the operating system, reported an error."""


class CorruptState(SwapkitError, RuntimeError):
    """A native structure broke its invariants; please report this."""


class NativeBuildError(SwapkitError, ImportError):
    """The native part could not be built or loaded; the message says what is missing."""
