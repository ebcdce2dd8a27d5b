"""The sources of facts about the machine: files of the kernel, commands, NVIDIA's library."""

from __future__ import annotations

import ctypes
import os
import shutil
import subprocess
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import TYPE_CHECKING

from swapkit._runtime.affinity.threads import unbound_cpus

if TYPE_CHECKING:
    from collections.abc import Iterator, Mapping

COMMAND_SECONDS = 10.0  # npu-smi takes about one second
NVML = "libnvidia-ml.so.1"
_MOST_CPUS = 8192  # of Linux
_WORD_BITS = 8 * ctypes.sizeof(ctypes.c_ulong)


class CommandMissing(Exception):
    """A command that would tell is not installed; its text is the name."""


class System:
    """The machine that the process runs on. Any thread; no lock is held while it waits."""

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
        """Return the output of a command; empty: it failed or took too long.

        Raises:
            CommandMissing: it is not installed.
        """
        program = shutil.which(command[0])
        if program is None:
            raise CommandMissing(command[0])
        try:
            done = subprocess.run(
                [program, *command[1:]],
                env={**os.environ, "LC_ALL": "C"},  # lscpu translates its labels
                stdin=subprocess.DEVNULL,
                capture_output=True,
                check=False,
                timeout=COMMAND_SECONDS,
            )
        except (OSError, subprocess.SubprocessError):
            return ""
        return done.stdout.decode(errors="replace") if done.returncode == 0 else ""

    def allowed_cpus(self) -> frozenset[int]:
        """Return the CPUs that this thread may use, those before swapkit's own bindings."""
        return unbound_cpus()

    def nvidia_address(self, uuid: str) -> str | None:
        """Return the PCI address of an NVIDIA GPU; None: NVIDIA's library does not tell."""
        with _nvml() as library:
            device = ctypes.c_void_p()
            name = f"GPU-{uuid.removeprefix('GPU-')}".encode()
            if library is None or library.nvmlDeviceGetHandleByUUID(name, ctypes.byref(device)):
                return None
            info = _PciInfo()
            if library.nvmlDeviceGetPciInfo_v3(device, ctypes.byref(info)):
                return None
            return f"{info.domain:04x}:{info.bus:02x}:{info.device:02x}.0"

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


class _PciInfo(ctypes.Structure):
    """`nvmlPciInfo_t` of NVML 9 and later."""

    domain: int
    bus: int
    device: int
    _fields_ = (
        ("busIdLegacy", ctypes.c_char * 16),
        ("domain", ctypes.c_uint),
        ("bus", ctypes.c_uint),
        ("device", ctypes.c_uint),
        ("pciDeviceId", ctypes.c_uint),
        ("pciSubSystemId", ctypes.c_uint),
        ("busId", ctypes.c_char * 32),
    )


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
