"""The parent's side of a run: start, command, watch and end the process."""

import os
import select
import subprocess
import sys
import tempfile
import time
from typing import BinaryIO

from swapkit.demo.messages import (
    Command,
    GarbledError,
    Message,
    RunAction,
    RunSpec,
    SegmentRanges,
    decode,
    encode,
)
from swapkit.demo.witness import ResidentWitness, process_peak_bytes

LOOK_SECONDS = 0.03
"""Pause between two looks at a run's memory, where a look is cheap."""
_LOOK_SHARE = 0.5
"""Most of the time that looks may take: the kernel may need 20 ms for one."""
ANSWER_SECONDS = 600.0
# OpenMP threads that spin while they wait make a step up to 30 times slower once another process
# needs a core. All runs get the same policy; a value in the user's environment overrides it.
_PASSIVE = {"OMP_WAIT_POLICY": "PASSIVE"}
_END_SECONDS = 30.0
_READ_BYTES = 1 << 16
_STDERR_BYTES = 8000
_NOISE = b"USDT:"


class RunFailedError(RuntimeError):
    """A run crashed, hung or sent an invalid message."""


class Child:
    """One run in its own process, which ends no later than this process."""

    def __init__(self, spec: RunSpec) -> None:
        """Start the process; it waits for its first command.

        Args:
            spec: specification of the run.
        """
        self.spec = spec
        self._stderr: BinaryIO = tempfile.TemporaryFile()  # noqa: SIM115 - closed by `kill`
        self._process = subprocess.Popen(
            [sys.executable, "-m", "swapkit.demo.training", encode(spec)],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=self._stderr,
            env=_PASSIVE | os.environ | {"OMP_NUM_THREADS": str(spec.threads)},
            start_new_session=True,
            bufsize=0,
        )
        self._unread = b""
        self.witness = ResidentWitness(self._process.pid)

    def ask(self, command: Command) -> Message:
        """Send a command and wait for its answer.

        Args:
            command: the command. During a watched step the kernel is polled for the run's memory,
                and the run is stopped for each poll, so the step takes longer.

        Raises:
            RunFailedError: the run does not answer.
        """
        self._send(command)
        deadline = time.monotonic() + ANSWER_SECONDS
        while True:
            line = self._line(deadline, watched=command.watched)
            try:
                message = decode(line)
            except GarbledError as error:
                raise self._failed(str(error)) from error
            if not isinstance(message, SegmentRanges):
                return message
            self.witness.ranges = message.ranges

    @property
    def pid(self) -> int:
        """Process id of the run."""
        return self._process.pid

    def peak_bytes(self) -> int | None:
        """Return the most resident bytes of the process; None: the kernel does not report it."""
        return process_peak_bytes(self._process.pid)

    def end(self) -> None:
        """Tell the run to end, and check its exit status.

        Raises:
            RunFailedError: the run does not end, or its exit status is not 0.
        """
        self._send(Command(action=RunAction.QUIT))
        try:
            status = self._process.wait(_END_SECONDS)
        except subprocess.TimeoutExpired:
            raise self._failed(f"did not end within {_END_SECONDS:.0f} s") from None
        if status != 0:
            raise self._failed(f"ended with status {status}")
        self.kill()

    def kill(self) -> None:
        """Kill the process if it still runs; may be called repeatedly."""
        self._process.kill()
        self._process.wait()
        for pipe in (self._process.stdin, self._process.stdout, self._stderr):
            if pipe is not None:
                pipe.close()

    def _send(self, command: Command) -> None:
        assert self._process.stdin is not None
        try:
            self._process.stdin.write(encode(command).encode() + b"\n")
        except BrokenPipeError:
            raise self._failed("is gone") from None

    def _line(self, deadline: float, *, watched: bool) -> str:
        """Return the next line that the run writes."""
        assert self._process.stdout is not None
        pipe = self._process.stdout.fileno()
        poll = select.poll()  # takes descriptors above 1023, unlike select()
        poll.register(pipe, select.POLLIN)
        while b"\n" not in self._unread:
            left_seconds = deadline - time.monotonic()
            if left_seconds < 0:
                raise self._failed(f"did not answer within {ANSWER_SECONDS:.0f} s")
            pause_seconds = max(LOOK_SECONDS, self.witness.look_seconds * (1 / _LOOK_SHARE - 1))
            patience = pause_seconds if watched else left_seconds
            if not poll.poll(1000 * patience):
                if watched:
                    self.witness.look()
                continue
            received = os.read(pipe, _READ_BYTES)
            if not received:
                self._process.wait()
                raise self._failed(f"ended with status {self._process.returncode}")
            self._unread += received
        line, _, self._unread = self._unread.partition(b"\n")
        return line.decode()

    def _failed(self, what: str) -> RunFailedError:
        """Return an error that includes the run's stderr."""
        self._stderr.seek(0)
        lines = [line for line in self._stderr.readlines() if not line.startswith(_NOISE)]
        written = b"".join(lines)[-_STDERR_BYTES:].decode(errors="replace").strip()
        return RunFailedError(
            f'the run "{self.spec.label}" {what}; on its stderr:\n{written or "(nothing)"}'
        )
