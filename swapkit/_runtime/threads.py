"""What the other threads of the process do, as far as this one may rely on it.

Torch runs operators and backward passes without the interpreter's lock. Meanwhile they replace what
tensors point to: `.grad`, `.grad_fn`, storages. Reading one of these from another thread may read
freed memory. So what does not belong to this thread is only touched while every other thread waits.
"""

from __future__ import annotations

import sys
import sysconfig
import threading
from pathlib import Path
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from types import FrameType

_LIBRARY = Path(sysconfig.get_path("stdlib"))
# Where a Python thread is that waits for another thread, another process or a peer.
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
    }.items()
    for function in functions
)


def others_wait() -> bool:
    """Return whether every other Python thread waits in the standard library.

    A thread may wake up right after: whoever relies on this for long asks again. Any thread may
    call this; it takes no lock.
    """
    frames = sys._current_frames()  # noqa: SLF001 - the documented way to see other threads
    frames.pop(threading.get_ident(), None)  # our own, which would hold itself, and all below it
    return all(map(_waits, frames.values()))


def _waits(frame: FrameType) -> bool:
    return (frame.f_code.co_filename, frame.f_code.co_name) in _WAITS
