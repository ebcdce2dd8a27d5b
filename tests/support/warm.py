"""Child processes that start with torch and swapkit loaded: forks of a process that has only them.

A fresh interpreter needs 3 s of CPU time before its first line, and `torchrun` one more. A test
whose subject is neither the start of a process nor a variable read there starts its children here:
`run` returns what `subprocess.run` would. Each worker of pytest has one server, which ends with it.

The server has one thread, so a fork of it is as good as a new process. A child leaves the server's
loop and runs to the end of the interpreter: its `atexit` functions and finalizers run as usual.
"""

from __future__ import annotations

import atexit
import contextlib
import functools
import importlib
import json
import math
import os
import select
import selectors
import signal
import socket
import subprocess
import sys
import tempfile
import time
import types
import warnings
from pathlib import Path
from typing import TYPE_CHECKING, Any, NamedTuple

if TYPE_CHECKING:
    from collections.abc import Mapping, Sequence

ROOT = Path(__file__).parent.parent.parent
# What a session loads at the latest with its first optimizer. No thread may start here.
LOADED = (
    "torch._dynamo",
    "torch.distributed.fsdp",
    "torch.distributed.tensor",
    "swapkit._runtime.allocators.installation",
    "swapkit._runtime.control.plan_controller",
    "swapkit._runtime.session.session",
)
MOST_BYTES = 1 << 20  # of a request


class Job(NamedTuple):
    """What a child runs: a file, or else code, with arguments and all of its environment.

    `is_strict`: warnings are errors, as with `python -W error`.
    """

    code: str = ""
    path: str = ""
    arguments: Sequence[str] = ()
    environment: Mapping[str, str] = {}
    is_strict: bool = False


cpu_seconds = 0.0  # of all children that have ended, with those that these waited for

# ---- in the tests' process -----------------------------------------------------------------------


class Child:
    """A running child."""

    def __init__(self, job: Job) -> None:
        self.job = job
        self._output, self._complaint = (tempfile.TemporaryFile("w+") for _ in range(2))  # noqa: SIM115
        self.line = socket.socket(socket.AF_UNIX, socket.SOCK_SEQPACKET)
        self.line.connect(_start_server())
        files = [self._output.fileno(), self._complaint.fileno()]
        socket.send_fds(self.line, [json.dumps(job).encode()], files)
        self.pid = int(self.line.recv(64))
        self.status: int | None = None  # None: it runs

    def kill(self) -> None:
        """End the child, if it runs, with the children it has forked."""
        if self.status is None:
            os.killpg(self.pid, signal.SIGKILL)
            self.finish()

    def finish(self) -> None:
        """Note the exit status, and the CPU time, which is not of a child of this process."""
        global cpu_seconds  # noqa: PLW0603 - of all children
        status, seconds = self.line.recv(64).split()
        self.status = int(status)
        cpu_seconds += float(seconds)

    def read(self) -> tuple[str, str]:
        """Return what it has printed, and its complaints. The last call."""
        self.line.close()
        texts = []
        for file in self._output, self._complaint:
            with file:
                file.seek(0)
                texts.append(file.read())
        return texts[0], texts[1]


def run(*jobs: Job, timeout_s: float | None = None) -> list[subprocess.CompletedProcess[str]]:
    """Run children beside each other to their ends; if one fails, or time is up, kill the rest.

    Raises:
        subprocess.TimeoutExpired: time was up.
    """
    children = [Child(job) for job in jobs]
    is_late = _wait(children, timeout_s)
    for child in children:
        child.kill()
    done = [
        subprocess.CompletedProcess([child.job.path or "-c"], child.status or 0, *child.read())
        for child in children
    ]
    if is_late:
        texts = ("".join(each.stdout for each in done), "".join(each.stderr for each in done))
        raise subprocess.TimeoutExpired(done[0].args, timeout_s or 0, *texts)
    return done


def _wait(children: Sequence[Child], timeout_s: float | None) -> bool:
    """Wait until all children have ended, one has failed, or time is up; return whether it is."""
    running = {child.line: child for child in children}
    end = math.inf if timeout_s is None else time.monotonic() + timeout_s
    while running and not any(child.status for child in children):
        left = max(0.0, end - time.monotonic())
        ready = select.select(running, (), (), None if left == math.inf else left)[0]
        for line in ready:
            running.pop(line).finish()
        if not ready:
            return True
    return False


@functools.cache
def _start_server() -> str:
    """Start this worker's server; return the address at which it listens."""
    listener = socket.socket(socket.AF_UNIX, socket.SOCK_SEQPACKET)
    address = f"\0swapkit-tests-{os.getpid()}-{id(listener)}"
    listener.bind(address)
    listener.listen(64)
    own, other = socket.socketpair()
    numbers = [str(each.fileno()) for each in (listener, other)]
    start = f"from {__name__} import main; main()"
    server = subprocess.Popen(
        [sys.executable, "-W", "error", "-c", start, *numbers],
        pass_fds=(listener.fileno(), other.fileno()),
        env={**os.environ, "PYTHONPATH": str(ROOT), "OMP_NUM_THREADS": "1"},
        start_new_session=True,
    )
    listener.close()
    other.close()
    # The server ends when its end of `own` closes: with this process, however that ends.
    atexit.register(server.wait)
    atexit.register(own.close)
    return address


# ---- in the server -------------------------------------------------------------------------------


def serve(listener: socket.socket, life: socket.socket) -> Job:
    """Fork a child for each request. Returns in each child, with its job."""
    running: dict[int, tuple[int, socket.socket]] = {}  # by the descriptor of a process
    with selectors.DefaultSelector() as selector:
        selector.register(listener, selectors.EVENT_READ)
        selector.register(life, selectors.EVENT_READ)
        while True:
            for key, _ in selector.select():
                if key.fileobj is life:
                    sys.exit()
                elif key.fileobj is listener:
                    line = listener.accept()[0]
                    request, files, _, _ = socket.recv_fds(line, MOST_BYTES, 2)
                    pid = os.fork()
                    if pid == 0:
                        os.setsid()
                        for number, file in enumerate(files, start=1):
                            os.dup2(file, number)
                        _close(files, selector.fileno(), listener, life, line, running)
                        return Job(*json.loads(request))
                    for file in files:
                        os.close(file)
                    line.send(str(pid).encode())
                    process = os.pidfd_open(pid)
                    running[process] = pid, line
                    selector.register(process, selectors.EVENT_READ)
                else:
                    _finish(selector, key.fd, *running.pop(key.fd))


def _close(files: Sequence[int], *others: Any) -> None:
    """Close what belongs to the server, in a child."""
    *sockets, running = others
    for each in (*files, sockets[0], *running):
        os.close(each)
    for each in (*sockets[1:], *(line for _, line in running.values())):
        each.close()


def _finish(selector: selectors.BaseSelector, process: int, pid: int, line: socket.socket) -> None:
    """Report the status of a child that has ended."""
    selector.unregister(process)
    os.close(process)
    _, code, usage = os.wait4(pid, 0)
    status, seconds = os.waitstatus_to_exitcode(code), usage.ru_utime + usage.ru_stime
    with line, contextlib.suppress(OSError):  # the test may have given up
        line.send(f"{status} {seconds}".encode())


def run_job(job: Job) -> None:
    """Run a job as the main program of this process."""
    os.environ.clear()
    os.environ.update(job.environment)
    if not job.is_strict:  # the filter of the server's own `-W error`
        warnings.filters.remove(("error", None, Warning, None, 0))  # type: ignore[attr-defined]
        sys.warnoptions.clear()
    main = types.ModuleType("__main__")
    sys.modules["__main__"] = main
    sys.argv = [job.path or "-c", *job.arguments]
    code = job.code
    if job.path:
        main.__file__ = job.path
        sys.path[0] = str(Path(job.path).parent)
        code = Path(job.path).read_text(encoding="utf-8")
    exec(compile(code, job.path or "<string>", "exec"), vars(main))


def main() -> None:
    for name in LOADED:
        importlib.import_module(name)
    tasks = list(Path("/proc/self/task").iterdir())
    assert len(tasks) == 1, "a thread was started: forks would lack it"
    listener, life = (socket.socket(fileno=int(number)) for number in sys.argv[1:])
    run_job(serve(listener, life))
