"""The errors of swapkit.

    SwapkitError
    ├── InvalidArgument          ValueError           what was asked is not possible
    │   ├── InvalidConfiguration ValueError           a value of a configuration document is wrong
    │   │   ├── WrongType        TypeError            ... it is of another kind than its key takes
    │   │   ├── WrongKey         KeyError             ... a key is unknown, or one is missing
    │   │   ├── WrongStage       IndexError           ... it names stages that the pipeline has not
    │   │   └── InvalidPattern   ValueError           ... no regular expression; also a `re.error`
    │   ├── InvalidDocument      ValueError           a trace, machine or plan is malformed
    │   └── InvalidType          TypeError            an argument is of the wrong type
    ├── InfeasibleBudget         ValueError           no plan fits; it names the least budget
    ├── PlanMismatch             ValueError           a plan is for another model or program
    ├── Unsupported              NotImplementedError  not on this device or in this version
    ├── SessionError             RuntimeError         a session is used where it cannot be
    ├── SavedTensorModified      RuntimeError         a tensor needed for backward was changed
    ├── RecomputeMismatch        RuntimeError         recomputed otherwise than it first ran
    ├── OverBudget               MemoryError          it would not fit the budget
    ├── OutOfDeviceMemory        MemoryError          the device has no more
    ├── OutOfHostMemory          MemoryError          the host, or `host_limit`, has no more
    ├── OutOfDisk                OSError              the disk, or `disk_limit`, has no more room
    ├── DiskError                OSError              a file could not be read or written
    ├── BackendError             RuntimeError         a driver reported an error
    ├── CorruptState             RuntimeError         a structure broke its invariants: a bug
    └── NativeBuildError         ImportError          the native part could not be built or loaded

A training step that does not fit raises torch's own `torch.OutOfMemoryError`.
"""

from __future__ import annotations

import re


class SwapkitError(Exception):
    """Root of all errors that swapkit raises itself."""


class InvalidArgument(SwapkitError, ValueError):
    """An argument is wrong; nothing was done."""


class InvalidType(InvalidArgument, TypeError):
    """An argument is of the wrong type; nothing was done."""


class InvalidConfiguration(InvalidArgument):
    """A value of a configuration document is wrong; nothing was configured."""


class WrongType(InvalidConfiguration, TypeError):
    """A value of a configuration document is of another kind than its key takes."""


class WrongKey(InvalidConfiguration, KeyError):
    """A configuration document has an unknown key, or lacks one."""

    __str__ = Exception.__str__  # KeyError prints the repr of its message


class WrongStage(InvalidConfiguration, IndexError):
    """A value of a configuration document does not fit the stages and chunks of the pipeline."""


class InvalidPattern(InvalidConfiguration, re.error):
    """A pattern of a configuration document is no regular expression."""


class InvalidDocument(InvalidArgument):
    """A trace, machine or plan is malformed; the message says where and how."""


class InfeasibleBudget(SwapkitError, ValueError):
    """No plan fits the budget.

    `least_bytes`: the smallest budget for which there is one, the device's use outside of the trace
    included; `operators`: names of those that need so much.
    """

    def __init__(
        self, message: str, *, least_bytes: int = 0, operators: tuple[str, ...] = ()
    ) -> None:
        super().__init__(message)
        self.least_bytes = least_bytes
        self.operators = operators


class PlanMismatch(SwapkitError, ValueError):
    """A plan was made for another model, input or version of the program."""


class Unsupported(SwapkitError, NotImplementedError):
    """The device or this version cannot do that; nothing was done."""


class SessionError(SwapkitError, RuntimeError):
    """A session was used where or when it cannot be."""


class SavedTensorModified(SwapkitError, RuntimeError):
    """A tensor needed for backward was changed in place after it was saved."""


class RecomputeMismatch(SwapkitError, RuntimeError):
    """A region did not do in backward what it did in forward."""


class OverBudget(SwapkitError, MemoryError):
    """The request would pass the budget; the device was not asked."""


class OutOfDeviceMemory(SwapkitError, MemoryError):
    """The device refused the memory."""


class OutOfHostMemory(SwapkitError, MemoryError):
    """The host refused the memory, or `host_limit` would be passed."""


class OutOfDisk(SwapkitError, OSError):
    """The disk tier is full: the file system, or `disk_limit`, has no more room."""


class DiskError(SwapkitError, OSError):
    """A file, such as the disk tier's, could not be read or written."""


class BackendError(SwapkitError, RuntimeError):
    """A driver, or the operating system, reported an error."""


class CorruptState(SwapkitError, RuntimeError):
    """A native structure broke its invariants; please report this."""


class NativeBuildError(SwapkitError, ImportError):
    """The native part could not be built or loaded; the message says what is missing."""
