"""The errors of swapkit.

    SwapkitError
    ├── InvalidArgument          ValueError           an argument is wrong
    │   ├── InvalidConfiguration ValueError           a value of a configuration document is wrong
    │   │   ├── WrongType        TypeError            ... its type is not one that its key accepts
    │   │   ├── WrongKey         KeyError             ... a key is unknown or missing
    │   │   ├── WrongStage       IndexError           ... it does not match the pipeline's stages
    │   │   └── InvalidPattern   ValueError           ... no valid regular expression; a `re.error`
    │   ├── InvalidDocument      ValueError           a trace, machine or plan is malformed
    │   └── InvalidType          TypeError            an argument is of the wrong type
    ├── InfeasibleBudget         ValueError           no plan fits; it names the least budget
    ├── PlanMismatch             ValueError           a plan is for another model or program
    ├── Unsupported              NotImplementedError  not on this device or in this version
    ├── SessionError             RuntimeError         a session is used where it cannot be
    ├── SavedTensorModified      RuntimeError         a tensor needed for backward was changed
    ├── RecomputeMismatch        RuntimeError         recomputation differs from the first run
    ├── RankOutOfMemory          RuntimeError         another rank ran out of memory (`on_oom`)
    ├── OverBudget               MemoryError          an allocation would exceed the budget
    ├── OutOfDeviceMemory        MemoryError          the device is out of memory
    ├── OutOfHostMemory          MemoryError          the host, or `host_limit`, is exhausted
    ├── OutOfDisk                OSError              the disk, or `disk_limit`, is full
    ├── DiskError                OSError              a file could not be read or written
    ├── BackendError             RuntimeError         a driver reported an error
    ├── CorruptState             RuntimeError         a structure broke its invariants: a bug
    └── NativeBuildError         ImportError          the native part could not be built or loaded

A training step that does not fit raises torch's own `torch.OutOfMemoryError`. Warnings are of the
category `SwapkitWarning`, a `UserWarning`.
"""

from __future__ import annotations

import re
import warnings

from swapkit.texts import printable_lines


class SwapkitError(Exception):
    """Root of all errors that swapkit raises itself. Their texts are safe to show."""

    def __init__(self, *args: object, **named: str) -> None:
        """Keep the arguments, with escapes for control characters of texts."""
        shown = (printable_lines(each) if isinstance(each, str) else each for each in args)
        super().__init__(*shown, **named)


class SwapkitWarning(UserWarning):
    """Category of all warnings that swapkit gives."""


def warn(text: str, stacklevel: int) -> None:
    """Give a warning. `stacklevel`: 1 is the caller's line."""
    warnings.warn(text, SwapkitWarning, stacklevel=stacklevel + 1)


class InvalidArgument(SwapkitError, ValueError):
    """An argument is wrong; nothing was done."""


class InvalidType(InvalidArgument, TypeError):
    """An argument is of the wrong type; nothing was done."""


class InvalidConfiguration(InvalidArgument):
    """A value of a configuration document is wrong; nothing was configured."""


class WrongType(InvalidConfiguration, TypeError):
    """A value of a configuration document is of a type that its key does not accept."""


class WrongKey(InvalidConfiguration, KeyError):
    """A configuration document has an unknown key, or lacks a required one."""

    __str__ = Exception.__str__  # KeyError prints the repr of its message


class WrongStage(InvalidConfiguration, IndexError):
    """A value of a configuration document does not fit the stages and chunks of the pipeline."""


class InvalidPattern(InvalidConfiguration, re.error):
    """A pattern of a configuration document is not a valid regular expression."""


class InvalidDocument(InvalidArgument):
    """A trace, machine or plan is malformed; the message says where and how."""


class InfeasibleBudget(SwapkitError, ValueError):
    """No plan fits the budget.

    `least_bytes`: the smallest budget for which a plan exists, including device memory used outside
    of the trace; `operators`: names of the operators that need that much.
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
    """The device or this version does not support the operation; nothing was done."""


class SessionError(SwapkitError, RuntimeError):
    """A session was used where or when it cannot be."""


class SavedTensorModified(SwapkitError, RuntimeError):
    """A tensor needed for backward was changed in place after it was saved."""


class RecomputeMismatch(SwapkitError, RuntimeError):
    """Recomputation of a region in backward differs from its forward run."""


class RankOutOfMemory(SwapkitError, RuntimeError):
    """A rank ran out of memory, so this one stops too: `swapkit.budget(..., on_oom="all")`.

    No `torch.OutOfMemoryError`: its process groups are broken, so a loop that skips a batch which
    does not fit must not go on.

    `rank`: the one that ran out of memory; `budget_bytes`: its budget; `text`: of its error.
    """

    def __init__(
        self, message: str, *, rank: int = 0, budget_bytes: int = 0, text: str = ""
    ) -> None:
        super().__init__(message)
        self.rank = rank
        self.budget_bytes = budget_bytes
        self.text = text


class OverBudget(SwapkitError, MemoryError):
    """The request would exceed the budget; no memory was requested from the device."""


class OutOfDeviceMemory(SwapkitError, MemoryError):
    """The device refused the memory."""


class OutOfHostMemory(SwapkitError, MemoryError):
    """The host refused the memory, or the request would exceed `host_limit`."""


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
