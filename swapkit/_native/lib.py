"""The only access to the compiled core: the library, its statuses as errors, its callbacks."""

from __future__ import annotations

import functools
import inspect
import signal
import sys
import threading
import traceback
from collections.abc import Callable
from importlib import metadata
from pathlib import Path
from types import CodeType, TracebackType
from typing import TYPE_CHECKING, Any, Protocol, TypeVar

from swapkit import errors
from swapkit.texts import get_logger

# ---- missing -------------------------------------------------------------------------------------
#
# The error text for a missing compiled core.

_HOW = "gcc compiles it when swapkit is installed"


def explain_missing(root: Path, error: ImportError) -> str:
    """Return the reason why the core cannot be loaded, and what to do.

    Args:
        root: the folder that holds the package that was imported.
        error: the error of the core's import.
    """
    head = f"swapkit's compiled core could not be loaded ({error}). {_HOW}"
    if not (root / "build_native.py").exists():
        return f"{head}: run `pip install --force-reinstall swapkit`, with gcc available."
    checkout = f"Python imported swapkit from a checkout, {root}, which has no compiled core"
    elsewhere = _find_installed()
    if elsewhere is not None and elsewhere != root:
        return (
            f"{head}. {checkout}; an installed swapkit with a core is in {elsewhere}. Start Python "
            "in another folder to use it, or run `make setup` (or `pip install -e .`) to compile "
            "the core of the checkout."
        )
    return (
        f"{head}. {checkout}: run `make setup` (or `pip install -e .`) there. `pip install .` "
        "installs a copy elsewhere, for use from any other folder."
    )


def _find_installed() -> Path | None:
    """Return the site-packages folder of a swapkit with its compiled core, if any."""
    for distribution in metadata.distributions(name="swapkit"):
        for file in distribution.files or ():
            if file.name.startswith("_lib.") and file.suffix == ".so":
                return distribution.locate_file("")  # type: ignore[return-value]
    return None


# ---- lib -----------------------------------------------------------------------------------------
#
# The only access to the compiled core: the library, its statuses as errors, its callbacks.
#
# All other modules of this package import `ffi`, `lib` and `check` from here; other packages do
# not.

try:
    from swapkit._native._lib import ffi, lib
except ImportError as error:
    raise errors.NativeBuildError(explain_missing(Path(__file__).parents[2], error)) from error

if TYPE_CHECKING:
    from swapkit._native._lib import CData

_Result = TypeVar("_Result")

__all__ = [
    "EXCEPTIONS",
    "NULL",
    "ExplainOwner",
    "RescueOwner",
    "address_of",
    "call_back",
    "check",
    "defer_interruption",
    "error_of",
    "failure_text",
    "ffi",
    "forget_interruption",
    "interruptions",
    "lib",
    "note_interruption",
    "raise_interruption",
    "text_of",
]

_log = get_logger("memory")

NULL = ffi.NULL

EXCEPTIONS: dict[int, type[errors.SwapkitError]] = {
    lib.SK_INVALID: errors.InvalidArgument,
    lib.SK_UNSUPPORTED: errors.Unsupported,
    lib.SK_OVER_BUDGET: errors.OverBudget,
    lib.SK_OUT_OF_DEVICE_MEMORY: errors.OutOfDeviceMemory,
    lib.SK_OUT_OF_HOST_MEMORY: errors.OutOfHostMemory,
    lib.SK_BACKEND_FAILED: errors.BackendError,
    lib.SK_CORRUPT: errors.CorruptState,
    lib.SK_OUT_OF_DISK: errors.OutOfDisk,
    lib.SK_DISK_FAILED: errors.DiskError,
}


def text_of(text: CData) -> str:
    """Return a C string as text."""
    return bytes(ffi.string(text)).decode(errors="replace")


def address_of(function: str) -> int:
    """Return the address of a function of the core, for the shim."""
    return int(ffi.cast("uintptr_t", ffi.addressof(lib, function)))


def failure_text() -> str:
    """Return the text of this thread's latest failed call."""
    return text_of(lib.sk_error_text())


def error_of(status: int) -> errors.SwapkitError:
    """Return the exception for a failed call's status, with this thread's text."""
    return EXCEPTIONS.get(status, errors.SwapkitError)(failure_text())


def check(status: int) -> None:
    """Raise the exception for a failed call's status."""
    if status != lib.SK_OK:
        raise error_of(status)


class RescueOwner(Protocol):
    """The owner behind the context of `sk_python_rescue`."""

    def on_rescue(self, needed_bytes: int) -> int:
        """Free at least `needed_bytes` if possible; return how many were freed, 0 for none."""


class MakingOwner(Protocol):
    """The owner behind the context of `sk_python_making`."""

    def on_making(self, *, begins: bool) -> None:
        """Note that this thread begins to make memory, or has made it."""


class AllocationWitness(Protocol):
    """Observes what a thread does while it allocates; it must not raise."""

    def stop(self) -> None:
        """Note that this thread begins to make memory: it grows, waits or rescues."""

    def go_on(self) -> None:
        """Note that this thread has ended making memory."""


class ExplainOwner(Protocol):
    """The owner behind the context of `sk_python_explain`."""

    def on_explain(self, nbytes: int) -> str:
        """Return the text for a failed request of `nbytes`."""


# The context of a callback is a handle of a weak reference to its owner, so that neither keeps the
# other alive. A callback runs in the middle of an allocation, below C++ frames: nothing may be
# raised through it. If a signal handler raises there (Ctrl-C, a timeout), the error is kept, the
# callback runs again, and the next Python code that runs for swapkit raises the error. Any other
# error is logged and counts as "nothing freed"; the allocation then fails with its own error.

_MORE_FRAMES = 200
_RETRIES = 8  # of a callback that signal handlers keep interrupting
# What threads have yet to raise, with the identifier of the thread. C++ looks whether there is any.
interruptions: list[tuple[int, BaseException]] = []


def raise_interruption() -> None:
    """Raise an error that was kept for this thread, such as one of a signal handler."""
    here = threading.get_ident()
    for each in tuple(interruptions):  # another thread may change the list
        if each[0] == here and _take(each):
            raise each[1]


def defer_interruption(error: BaseException, thread: int | None = None) -> None:
    """Keep an error for `raise_interruption`, from code that must not raise.

    Args:
        error: to raise.
        thread: the identifier of the thread that raises it; None: of the main thread.
    """
    if thread is None:
        thread = threading.main_thread().ident
    interruptions.append((thread or 0, error))


def forget_interruption(error: BaseException, thread: int) -> None:
    """Drop an error that a thread has yet to raise. Any thread."""
    for each in tuple(interruptions):
        if each[0] == thread and each[1] is error:
            _take(each)


def _take(kept: tuple[int, BaseException]) -> bool:
    """Take an error from the list; return whether no other thread did so meanwhile."""
    try:
        interruptions.remove(kept)
    except ValueError:
        return False
    return True


def call_back(owner: object, call: Callable[[], _Result], otherwise: _Result) -> _Result:
    """Run a callback's body; return its result, or `otherwise` if it fails."""
    for _ in range(_RETRIES):
        try:
            try:
                return call()
            except RecursionError:
                return _call_deeper(call)
        except BaseException as error:  # noqa: BLE001 - see above
            if not note_failure(owner, error):
                break
    return otherwise


def _call_deeper(call: Callable[[], _Result]) -> _Result:
    """Repeat a callback's body with room for more frames.

    A program near the limit of recursion has none for the callback, but would have gone on.
    """
    sys.setrecursionlimit(sys.getrecursionlimit() + _MORE_FRAMES)
    try:
        return call()
    finally:
        # Relative: another thread may have changed it, too.
        sys.setrecursionlimit(sys.getrecursionlimit() - _MORE_FRAMES)


def note_failure(owner: object, error: BaseException) -> bool:
    """Note a callback's error; return whether a signal handler raised it, and a retry may work."""
    if _keep_interruption(error):
        return True
    _log.error("a native callback of %r failed", owner, exc_info=error)
    return False


def note_interruption(error: BaseException, is_foreign: bool) -> bool | None:  # noqa: FBT001 - from C++
    """Note an error from code that must not raise; return who must raise it.

    Args:
        error: a signal handler may have raised it, or another thread may have set it for this one.
        is_foreign: one of these is certain.

    Returns:
        Whether it was kept for `raise_interruption`; None: this thread, not the main one, raises.
    """
    if threading.get_ident() == threading.main_thread().ident:
        return _keep_interruption(error, is_foreign=is_foreign)
    return None if is_foreign or isinstance(error, KeyboardInterrupt) else False


def _keep_interruption(error: BaseException, *, is_foreign: bool = False) -> bool:
    """Keep an error for `raise_interruption` if a signal handler raised it; return whether so."""
    is_one = is_foreign or _is_from_a_handler(error)
    if is_one:
        defer_interruption(error)
    return is_one


def _is_from_a_handler(error: BaseException) -> bool:
    """Return whether a signal handler raised `error`, rather than the interrupted code."""
    if isinstance(error, KeyboardInterrupt):
        return True
    handlers = [_code_of(signal.getsignal(number)) for number in signal.valid_signals()]
    # By identity: code that torch's compiler makes has constants without a hash.
    codes = {id(handler) for handler in handlers if handler is not None}
    return any(id(frame.f_code) in codes for frame, _ in traceback.walk_tb(error.__traceback__))


def _code_of(handler: Any) -> CodeType | None:
    """Return the code that a signal handler runs; None: it has no Python code."""
    while isinstance(handler, functools.partial):
        handler = handler.func
    is_object = callable(handler) and not hasattr(handler, "__code__")
    code: CodeType | None = getattr(
        type(handler).__call__ if is_object else handler, "__code__", None
    )
    return code


def _extern(callback: Callable[..., _Result]) -> Callable[..., _Result]:
    """Let the core call a function, once more if a signal's handler raised as it began."""

    def call_again(_kind: object, error: BaseException, trace: TracebackType) -> _Result | None:
        given = [trace.tb_frame.f_locals[each] for each in inspect.getargs(callback.__code__).args]
        return callback(*given) if note_failure(callback, error) else None

    made: Callable[..., _Result] = ffi.def_extern(onerror=call_again)(callback)
    return made


@_extern
def sk_python_rescue(context: Any, needed_bytes: int) -> int:
    """Forward a rescue to the owner behind `context`."""
    owner: RescueOwner | None = ffi.from_handle(context)()
    if owner is None:
        return 0
    return call_back(owner, lambda: owner.on_rescue(needed_bytes), 0)


@_extern
def sk_python_making(context: Any, begins: bool) -> None:  # noqa: FBT001 - C's
    """Forward the beginning or the end of making memory to the owner behind `context`."""
    owner: MakingOwner | None = ffi.from_handle(context)()
    if owner is not None:
        call_back(owner, lambda: owner.on_making(begins=begins), None)


@_extern
def sk_python_explain(context: Any, nbytes: int, text: Any, capacity: int) -> int:
    """Write the owner's explanation into `text`."""
    owner: ExplainOwner | None = ffi.from_handle(context)()
    words = "" if owner is None else call_back(owner, lambda: owner.on_explain(nbytes), "")
    explanation = words.encode(errors="backslashreplace")[:capacity]
    explanation = explanation.decode(errors="ignore").encode()  # do not cut a character
    ffi.memmove(text, explanation, len(explanation))
    return len(explanation)


# What the core calls, in the middle of operators that the program runs.
CALLBACKS = sk_python_rescue, sk_python_making, sk_python_explain
