"""The sources of facts about the machine: files of the kernel, commands, NVIDIA's library."""

from __future__ import annotations

import ctypes
import os
import shutil
import signal
import subprocess
import threading
from collections.abc import Iterator, Mapping
from contextlib import contextmanager, suppress
from pathlib import Path

from swapkit._runtime.affinity.threads import unbound_cpus

COMMAND_SECONDS = 10.0  # npu-smi takes about one second
KILL_SECONDS = 1.0
# What to install for a missing command.
PACKAGES = {
    "npu-smi": "it comes with the Ascend driver",
    "lspci": "install the package pciutils",
    "lscpu": "install the package util-linux",
}
NVML = "libnvidia-ml.so.1"
_MOST_CPUS = 8192  # of Linux
_WORD_BITS = 8 * ctypes.sizeof(ctypes.c_ulong)


class Unknown(Exception):
    """The machine does not tell; the text says why."""


class CommandMissing(Unknown):
    """A command that would tell is not installed."""

    def __init__(self, program: str) -> None:
        super().__init__(f"{program} is missing: {PACKAGES.get(program, 'install it')}")


class CommandHung(Unknown):
    """A command that would tell does not end."""

    def __init__(self, program: str) -> None:
        super().__init__(f"{program} did not answer within {COMMAND_SECONDS:g} seconds")


class System:
    """The machine that the process runs on.

    Any thread may call. Commands run with no lock held here, and callers hold none either: a
    command may take seconds.
    """

    def __init__(self) -> None:
        self._outputs: dict[tuple[str, ...], str] = {}
        self._hung: set[str] = set()

    @property
    def environment(self) -> Mapping[str, str]:
        """The environment variables."""
        return os.environ

    def read(self, path: str) -> str | None:
        """Return the text of a file; None: it cannot be read."""
        try:
            return Path(path).read_text(encoding="utf-8", errors="replace").strip()
        except OSError:
            return None

    def list(self, path: str) -> list[str]:
        """Return the names in a folder; none if it cannot be read."""
        try:
            return sorted(os.listdir(path))
        except OSError:
            return []

    def run(self, *command: str) -> str:
        """Return the output of a command, which runs once; empty: it failed.

        Several threads may run it at the same time; all of them get the same output.

        Raises:
            CommandMissing: it is not installed.
            CommandHung: it takes too long, or an earlier command of the same program did.
        """
        output = self._outputs.get(command)
        if output is not None:
            return output
        if command[0] in self._hung:
            raise CommandHung(command[0])
        try:
            output = self.run_again(*command)
        except CommandHung:
            self._hung.add(command[0])
            raise
        return self._outputs.setdefault(command, output)

    def run_again(self, *command: str) -> str:
        """Return the output of a command, as it is now; empty: it failed.

        Raises:
            CommandMissing: it is not installed.
            CommandHung: it takes too long.
        """
        program = shutil.which(command[0])
        if program is None:
            raise CommandMissing(command[0])
        try:
            process = subprocess.Popen(
                [program, *command[1:]],
                env={**os.environ, "LC_ALL": "C"},  # lscpu translates its labels
                stdin=subprocess.DEVNULL,
                stdout=subprocess.PIPE,
                stderr=subprocess.DEVNULL,
                start_new_session=True,  # `_end` ends its children, too
            )
        except OSError:
            return ""
        try:
            output, _ = process.communicate(timeout=COMMAND_SECONDS)
        except subprocess.TimeoutExpired:
            raise CommandHung(command[0]) from None
        finally:
            _end(process)
        return output.decode(errors="replace") if process.returncode == 0 else ""

    def allowed_cpus(self) -> frozenset[int]:
        """Return the CPUs that this thread may use, those before swapkit's own bindings."""
        return unbound_cpus()

    def nvidia_cpus(self, address: str) -> frozenset[int]:
        """Return the CPUs near an NVIDIA GPU; none: NVIDIA's library does not tell."""
        with _nvml() as library:
            device = ctypes.c_void_p()
            name = address.encode()
            if library is None or library.nvmlDeviceGetHandleByPciBusId_v2(
                name, ctypes.byref(device)
            ):
                return frozenset()
            words = (ctypes.c_ulong * (_MOST_CPUS // _WORD_BITS))()
            if library.nvmlDeviceGetCpuAffinity(device, ctypes.c_uint(len(words)), words):
                return frozenset()
            bits = (
                (n * _WORD_BITS + bit, word >> bit)
                for n, word in enumerate(words)
                for bit in range(_WORD_BITS)
                if word
            )
            return frozenset(cpu for cpu, rest in bits if rest & 1)


def _end(process: subprocess.Popen[bytes]) -> None:
    """Kill a process and its children, unless it has ended. No lock is held."""
    if process.returncode is not None:
        return
    with suppress(OSError):  # another user runs it, or it has just ended
        os.killpg(process.pid, signal.SIGKILL)
    if process.stdout is not None:
        process.stdout.close()
    try:
        process.wait(KILL_SECONDS)
    except subprocess.TimeoutExpired:  # the kernel ends it after a call of a driver, perhaps never
        threading.Thread(target=process.wait, daemon=True).start()


@contextmanager
def _nvml() -> Iterator[ctypes.CDLL | None]:
    """Yield NVIDIA's management library, initialized; None: there is none."""
    library = None
    with suppress(OSError, AttributeError):
        found = ctypes.CDLL(NVML)
        if found.nvmlInit_v2() == 0:
            library = found
    try:
        yield library
    finally:
        if library is not None:
            library.nvmlShutdown()
