"""Running a command with a time limit; what it starts ends with it."""

from __future__ import annotations

import contextlib
import os
import re
import signal
import subprocess
import sys
import time
from dataclasses import dataclass
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence
    from pathlib import Path

GRACE_SECONDS = 5.0  # between being asked to end and being ended
LAST_LINE = 240  # characters of it that are shown
LOOK_SECONDS = 0.25  # between two looks at a process that is watched
ERROR = re.compile(r"[\w.]+(?:Error|Exception|Interrupt)\b")

# Set where torch runs on a device that is not there; children have to be started likewise. The
# virtual GPU, on which nothing is computed, is a simulated one, too.
LAUNCHERS = {
    "SWAPKIT_CUDA_TIMED": ("-m", "tests.cuda.timed"),
    "SWAPKIT_CUDA_SIMULATED": ("-m", "tests.cuda.simulated"),
}


def python(*arguments: str | Path) -> list[str]:
    """Return the command that runs this interpreter, without its warnings."""
    launchers = (words for name, words in LAUNCHERS.items() if os.environ.get(name))
    return [sys.executable, "-W", "ignore", *next(launchers, ()), *map(str, arguments)]


@dataclass(frozen=True, slots=True, kw_only=True)
class Finished:
    """How a command ended."""

    status: int  # negative: the signal that ended it
    timed_out: bool
    seconds: float
    log: Path
    stopped: str = ""  # why, if whoever watched it wanted that

    @property
    def ok(self) -> bool:
        """Whether it ended by itself, and well."""
        return self.status == 0 and not self.timed_out and not self.stopped

    def describe(self) -> str:
        """Return in a few words why it failed."""
        if self.stopped:
            return f"stopped: {self.stopped}"
        if self.timed_out:
            return f"stopped after {self.seconds:.0f} s"
        if self.status < 0:
            return f"ended by signal {signal.Signals(-self.status).name}"
        return f"status {self.status}: {last_line(self.log)}"


def run_process(
    command: Sequence[str | Path],
    *,
    seconds: float,
    log: Path,
    cwd: Path,
    environment: dict[str, str] | None = None,
    watch: Callable[[int], str] | None = None,
) -> Finished:
    """Run a command for at most so many seconds; all it says is appended to the log.

    Args:
        command: its words.
        seconds: after which it is ended.
        log: the file.
        cwd: where it runs.
        environment: variables beside those of this process.
        watch: is given the number of the process now and then; returns why it is to be ended.

    Raises:
        FileNotFoundError: there is no such command.
    """
    begin = time.monotonic()
    words = [str(word) for word in command]
    with log.open("a", encoding="utf-8") as file:
        file.write(f"$ {' '.join(words)}\n")
        file.flush()
        process = subprocess.Popen(
            words,
            stdin=subprocess.DEVNULL,
            stdout=file,
            stderr=subprocess.STDOUT,
            cwd=cwd,
            env=os.environ | (environment or {}),
            start_new_session=True,
        )
        timed_out, stopped = False, ""
        try:
            stopped = wait_for(process, max(seconds, 0.1), watch)
        except subprocess.TimeoutExpired:
            timed_out = True
        finally:  # also when this process is asked to end
            end_group(process)
    return Finished(
        status=process.returncode,
        timed_out=timed_out,
        seconds=time.monotonic() - begin,
        log=log,
        stopped=stopped,
    )


def wait_for(
    process: subprocess.Popen[bytes], seconds: float, watch: Callable[[int], str] | None
) -> str:
    """Wait until a process has ended; return why it is to be ended before, if it is.

    Raises:
        subprocess.TimeoutExpired: the time is up.
    """
    if watch is None:
        process.wait(seconds)
        return ""
    deadline = time.monotonic() + seconds
    while time.monotonic() < deadline:
        with contextlib.suppress(subprocess.TimeoutExpired):
            process.wait(LOOK_SECONDS)
            return ""
        reason = watch(process.pid)
        if reason:
            return reason
    raise subprocess.TimeoutExpired(process.args, seconds)


def end_group(process: subprocess.Popen[bytes]) -> None:
    """End a process, if it still runs, and what is left of its group."""
    if process.poll() is None:
        signal_group(process.pid, signal.SIGTERM)
        with contextlib.suppress(subprocess.TimeoutExpired):
            process.wait(GRACE_SECONDS)
    signal_group(process.pid, signal.SIGKILL)
    process.wait()


def signal_group(group: int, number: signal.Signals) -> None:
    """Send a signal to a group that may be gone."""
    with contextlib.suppress(ProcessLookupError, PermissionError):
        os.killpg(group, number)


def last_line(log: Path) -> str:
    """Return the line of a log that says most: of the last error in Python, else its last."""
    lines = log.read_text(encoding="utf-8", errors="replace").splitlines()
    said = [line.rstrip() for line in lines if line.strip()]
    errors = [line for line in said if ERROR.match(line)]
    return (errors or said or ["no output"])[-1][:LAST_LINE]
