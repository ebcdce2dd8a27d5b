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
    from collections.abc import Sequence
    from pathlib import Path

GRACE_SECONDS = 5.0  # between being asked to end and being ended
LAST_LINE = 240  # characters of it that are shown
ERROR = re.compile(r"[\w.]+(?:Error|Exception|Interrupt)\b")


# Set where torch runs on a simulated device; children have to be started likewise.
SIMULATED, LAUNCHER = "SWAPKIT_CUDA_SIMULATED", ("-m", "tests.cuda.simulated")


def python(*arguments: str | Path) -> list[str]:
    """Return the command that runs this interpreter, without its warnings."""
    launcher = LAUNCHER if os.environ.get(SIMULATED) else ()
    return [sys.executable, "-W", "ignore", *launcher, *map(str, arguments)]


@dataclass(frozen=True, slots=True, kw_only=True)
class Finished:
    """How a command ended."""

    status: int  # negative: the signal that ended it
    timed_out: bool
    seconds: float
    log: Path

    @property
    def ok(self) -> bool:
        """Whether it ended by itself, and well."""
        return self.status == 0 and not self.timed_out

    def describe(self) -> str:
        """Return in a few words why it failed."""
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
) -> Finished:
    """Run a command for at most so many seconds; all it says is appended to the log.

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
        timed_out = False
        try:
            process.wait(max(seconds, 0.1))
        except subprocess.TimeoutExpired:
            timed_out = True
        finally:  # also when this process is asked to end
            end_group(process)
    return Finished(
        status=process.returncode,
        timed_out=timed_out,
        seconds=time.monotonic() - begin,
        log=log,
    )


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
    return (errors or said or ["nothing was said"])[-1][:LAST_LINE]
