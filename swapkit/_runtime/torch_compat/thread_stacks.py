"""Observation of the other threads of the process, as far as this thread may rely on it.

Torch runs operators and backward passes without the GIL. Meanwhile they replace `.grad`, `.grad_fn`
and storages of tensors. Reading one of these from another thread may read freed memory. Listing all
objects of the garbage collector breaks other threads, too: it adds references to tuples that a
thread is about to fill, and Python then refuses to fill them ("bad argument to internal function").
So this thread touches objects of other threads only while every other thread waits.
"""

from __future__ import annotations

import sys
import sysconfig
import threading
from collections.abc import Callable, Iterable, Iterator
from itertools import islice
from pathlib import Path
from types import BuiltinFunctionType, CodeType, FrameType, FunctionType, ModuleType
from typing import Any, TypeAlias, TypeVar

import torch

from swapkit._runtime.torch_compat.internals import NO_TASK, graph_task

_Item = TypeVar("_Item")
_Place: TypeAlias = "tuple[str, str]"  # file, function
_Stack: TypeAlias = "list[tuple[CodeType, dict[str, object]]]"  # with globals; innermost first

_LIBRARY = Path(sysconfig.get_path("stdlib"))
# Of Inductor's processes that compile; its threads stay until the program ends. An absolute path.
_COMPILERS = f"{Path(torch.__file__).parent}/_inductor/compile_worker"
# Functions in which a Python thread waits for another thread, another process or a peer.
_WAITS = frozenset(
    (str(_LIBRARY / file), function)
    for file, functions in {
        "threading.py": ("wait", "join", "_wait_for_tstate_lock"),
        "queue.py": ("get",),
        "selectors.py": ("select",),
        "socket.py": ("accept", "readinto"),
        "subprocess.py": ("_try_wait",),
        "concurrent/futures/thread.py": ("_worker",),
        "multiprocessing/connection.py": ("_recv", "wait"),
        "multiprocessing/queues.py": ("get",),
        "multiprocessing/popen_fork.py": ("poll",),
        f"{_COMPILERS}/subproc_pool.py": ("_recv_msg", "_health_monitor"),
        f"{_COMPILERS}/timer.py": ("check",),
    }.items()
    for function in functions
)


# Items to look at between two checks of the other threads. Few, so that this takes less time than
# the interpreter's switch interval.
LOOKS = 64
_NAMED = (type, FunctionType, BuiltinFunctionType)
_ENGINE = (torch.autograd.graph.__file__, "_engine_run_backward")


# From the shim (`shim/cpp/running/thread_stacks.cpp`): in Python, another thread could run between
# two frames. Recording alone, as of a model without memory, needs no shim.
_read_stacks: Callable[[], list[_Stack]] | None = None
_read_receivers: Callable[[int, CodeType], list[Any]]


def connect(
    read_stacks: Callable[[], list[_Stack]], read_receivers: Callable[[int, CodeType], list[Any]]
) -> None:
    """Use the shim's functions to read stacks. Before this call, other threads are unknown."""
    global _read_stacks, _read_receivers
    _read_stacks, _read_receivers = read_stacks, read_receivers


def stacks() -> list[_Stack]:
    """Return the stacks of all other threads, as far as known. Any thread; no lock."""
    return [] if _read_stacks is None else _read_stacks()


def receivers(thread: int, code: CodeType) -> list[Any]:
    """Return `self` of each call of a function on a thread's stack, innermost first.

    Only for functions that never rebind a local: older values would be freed here.
    """
    return _read_receivers(thread, code)


def others_wait(*, in_backward: bool = False) -> bool:
    """Return whether every other Python thread that uses torch waits in a function of `_WAITS`.

    A thread may wake up right after, so callers repeat the check during long work. Any thread may
    call this; it takes no lock.

    Args:
        in_backward: ignore the thread whose backward pass this autograd thread runs. No other
            thread then runs operators on this device.
    """
    if _read_stacks is None:
        return threading.active_count() == 1
    at_work = [
        place
        for stack in stacks()
        if (place := _place(stack[0][0])) not in _WAITS and _knows_torch(stack)
    ]
    return not at_work or (in_backward and _is_for(at_work))


def backward_runs_elsewhere() -> bool:
    """Return whether another thread runs a backward pass, other than the pass that runs here.

    As for `others_wait`: any thread, no lock, and a pass may begin right after.
    """
    passes = [
        place for stack in stacks() for code, _ in stack if (place := _place(code)) == _ENGINE
    ]
    return bool(passes) and not _is_for(passes)


def take_while(may_go_on: Callable[[], bool], items: Iterable[_Item]) -> Iterator[_Item]:
    """Yield items as long as `may_go_on` allows it; check every `LOOKS` items."""
    remaining = iter(items)
    while some := list(islice(remaining, LOOKS)):
        if not may_go_on():
            return
        yield from some


def _is_for(places: list[_Place]) -> bool:
    """Return whether the only place is the backward pass that this thread runs for another."""
    is_task = graph_task() != NO_TASK
    return places == [_ENGINE] and is_task and not _runs_backward()


def _runs_backward() -> bool:
    """Return whether this thread has started a backward pass; autograd's own threads never do."""
    frame: FrameType | None = sys._getframe(1)  # noqa: SLF001 - 0 would hold itself
    while frame is not None and _place(frame.f_code) != _ENGINE:
        frame = frame.f_back
    return frame is not None


def _knows_torch(stack: _Stack) -> bool:
    """Return whether any code on a thread's stack has an object of torch's among its globals.

    Threads without torch wait in their own code: a notebook kernel, a logger, a debugger.
    """
    return any(
        _is_torchs(value)
        for _, names in stack
        for value in dict.copy(names).values()  # atomic copy: other threads may add names
    )


def _is_torchs(value: object) -> bool:
    # By exact type: reading an attribute of another type may run its code.
    if type(value) is ModuleType:
        name = value.__dict__.get("__name__")
    elif type(value) in _NAMED:
        name = value.__module__
    else:
        return False
    return isinstance(name, str) and name.partition(".")[0] == "torch"


def _place(code: CodeType) -> _Place:
    return code.co_filename, code.co_name
