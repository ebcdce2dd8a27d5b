"""The one door to the compiled core: the library, its statuses as errors, its callbacks.

Every other module of this package uses `ffi`, `lib` and `check` from here; none outside it does.
"""

from __future__ import annotations

import _thread
import logging
from typing import TYPE_CHECKING, Any, Protocol

from swapkit import errors

try:
    from swapkit._native._lib import ffi, lib
except ImportError as error:  # pragma: no cover - an installation without its compiled part
    raise errors.NativeBuildError(
        f"swapkit's compiled core could not be loaded ({error}). It is built when swapkit is "
        "installed: run `pip install .` (or `make setup` in a checkout) with gcc available."
    ) from error

if TYPE_CHECKING:
    from swapkit._native._lib import CData

__all__ = [
    "EXCEPTIONS",
    "NULL",
    "ExplainOwner",
    "RescueOwner",
    "check",
    "error_of",
    "ffi",
    "lib",
    "text_of",
]

_log = logging.getLogger(__name__)

NULL = ffi.NULL

EXCEPTIONS: dict[int, type[errors.SwapkitError]] = {
    lib.SK_INVALID: errors.InvalidArgument,
    lib.SK_UNSUPPORTED: errors.Unsupported,
    lib.SK_OVER_BUDGET: errors.OverBudget,
    lib.SK_OUT_OF_DEVICE_MEMORY: errors.OutOfDeviceMemory,
    lib.SK_OUT_OF_HOST_MEMORY: errors.OutOfHostMemory,
    lib.SK_BACKEND_FAILED: errors.BackendError,
    lib.SK_CORRUPT: errors.CorruptState,
}


def text_of(text: CData) -> str:
    """Return a C string as text."""
    return bytes(ffi.string(text)).decode(errors="replace")


def error_of(status: int) -> errors.SwapkitError:
    """Return the exception that a failed call's status stands for, with this thread's text."""
    return EXCEPTIONS.get(status, errors.SwapkitError)(text_of(lib.sk_error_text()))


def check(status: int) -> None:
    """Raise the exception that a failed call's status stands for."""
    if status != lib.SK_OK:
        raise error_of(status)


class RescueOwner(Protocol):
    """What `sk_python_rescue` finds behind its context."""

    def on_rescue(self, needed_bytes: int) -> int:
        """Free at least `needed_bytes` if possible; return how many were freed, 0 for none."""


class ExplainOwner(Protocol):
    """What `sk_python_explain` finds behind its context."""

    def on_explain(self, nbytes: int) -> str:
        """Return what a failed request for `nbytes` should say."""


# The context of a callback is a handle of a weak reference to its owner, so that neither keeps the
# other alive. A callback runs in the middle of an allocation, below C++ frames: nothing may be
# raised through it. An interrupt is delivered again to the main thread; everything else is logged
# and counts as "nothing freed", upon which the allocation fails with its own error.


@ffi.def_extern()
def sk_python_rescue(context: Any, needed_bytes: int) -> int:
    """Forward a rescue to the owner behind `context`."""
    try:
        owner: RescueOwner | None = ffi.from_handle(context)()
        return 0 if owner is None else owner.on_rescue(needed_bytes)
    except KeyboardInterrupt:
        _thread.interrupt_main()
    except BaseException:  # noqa: BLE001 - see above
        _log.exception("a rescue failed")
    return 0


@ffi.def_extern()
def sk_python_explain(context: Any, nbytes: int, text: Any, capacity: int) -> int:
    """Write the owner's explanation into `text`."""
    try:
        owner: ExplainOwner | None = ffi.from_handle(context)()
        words = "" if owner is None else owner.on_explain(nbytes)
        explanation = words.encode(errors="backslashreplace")[:capacity]
        explanation = explanation.decode(errors="ignore").encode()  # no character cut in two
        ffi.memmove(text, explanation, len(explanation))
        return len(explanation)
    except KeyboardInterrupt:
        _thread.interrupt_main()
    except BaseException:  # noqa: BLE001 - see above
        _log.exception("the explanation of a failed allocation failed")
    return 0
