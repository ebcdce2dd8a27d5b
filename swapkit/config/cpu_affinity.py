"""The variables that bind threads to CPUs: CPU_AFFINITY_CONF and CPU_BINDING_NUM.

`CPU_AFFINITY_CONF=MODE,npuN:FIRST-LAST,...` is torch_npu's. Mode 0, or no mode, means off; 1 and 2
mean on. A device may have several ranges, and a range may be a single CPU. `lazy_bind`,
`npu_affine` and `force` are for torch_npu alone. `CPU_BINDING_NUM` is the number of CPUs for each
device; each hardware thread of a core is a CPU. An invalid value or part is ignored with a warning.

Source:
    torch_npu, `NPUAffinityController.cpp`: the grammar. MindSpeed, `cpu_binder.py`:
    CPU_BINDING_NUM.
"""

from __future__ import annotations

import re
import warnings
from dataclasses import dataclass, field
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from collections.abc import Mapping

CONF, COUNT = "CPU_AFFINITY_CONF", "CPU_BINDING_NUM"
OFF = 0
MODES = 3
TORCH_NPUS_OWN = ("lazy_bind", "npu_affine", "force")
_DEVICE = re.compile(r"npu([0-9]{1,2})")
_CPUS = re.compile(r"([0-9]{1,6})(?:-([0-9]{1,6}))?")


@dataclass(frozen=True, slots=True, kw_only=True)
class CpuAffinity:
    """The requested binding.

    Args:
        mode: of CPU_AFFINITY_CONF; None: the variable is not set.
        ranges: the CPUs that CPU_AFFINITY_CONF names for devices, by index.
        cpus_per_device: CPU_BINDING_NUM; None: not set.
    """

    mode: int | None = None
    ranges: Mapping[int, frozenset[int]] = field(default_factory=dict)
    cpus_per_device: int | None = None

    @property
    def is_asked(self) -> bool:
        """Whether a variable asks for threads to be bound."""
        return not self.is_refused and (bool(self.mode) or self.cpus_per_device is not None)

    @property
    def is_refused(self) -> bool:
        """Whether CPU_AFFINITY_CONF says that threads are not to be bound."""
        return self.mode == OFF


NO_AFFINITY = CpuAffinity()


def read_cpu_affinity(variables: Mapping[str, str]) -> CpuAffinity:
    """Return the binding that the environment requests.

    Example:
        >>> asked = read_cpu_affinity({"CPU_AFFINITY_CONF": "1,npu0:0-2,npu0:8"})
        >>> asked.mode, sorted(asked.ranges[0]), asked.is_asked
        (1, [0, 1, 2, 8], True)
    """
    text = variables.get(CONF, "").strip()
    mode = _read_mode(text) if text else None
    ranges = _read_ranges(text)
    if mode == OFF and ranges:
        _warn(f"{CONF}={text!r} is off: begin it with the mode, as in {CONF}=1,npu0:0-3")
    return CpuAffinity(mode=mode, ranges=ranges, cpus_per_device=_read_count(variables))


def _read_mode(text: str) -> int:
    """Return the first mode of the text, as torch_npu does; none, or an invalid one: off."""
    for part in text.split(","):
        name, colon, value = part.strip().partition(":")
        mode = value if name == "mode" else name
        if name != "mode" and (colon or not _is_number(name)):
            continue
        if _is_number(mode) and int(mode) < MODES:
            return int(mode)
        _warn(f"{CONF}={text!r}: {part.strip()}: expected a number from 0 to 2, as in mode:1")
        return OFF
    return OFF


def _read_ranges(text: str) -> dict[int, frozenset[int]]:
    ranges: dict[int, frozenset[int]] = {}
    for part in text.split(","):
        name, colon, value = part.strip().partition(":")
        is_mode = name == "mode" or (not colon and _is_number(name))
        if not part.strip() or is_mode or name in TORCH_NPUS_OWN:
            continue
        device, cpus = _DEVICE.fullmatch(name), _read_range(value)
        if device is None or not cpus:
            _warn(f"{CONF}={text!r}: ignoring {part.strip()!r}: expected npuN:FIRST-LAST")
            continue
        index = int(device[1])
        ranges[index] = ranges.get(index, frozenset()) | cpus
    return ranges


def _read_range(text: str) -> frozenset[int]:
    """Return the CPUs of a range; none: it is invalid, or ends before it begins."""
    found = _CPUS.fullmatch(text)
    if found is None:
        return frozenset()
    return frozenset(range(int(found[1]), int(found[2] or found[1]) + 1))


def _read_count(variables: Mapping[str, str]) -> int | None:
    text = variables.get(COUNT, "").strip()
    if not text:
        return None
    if not _is_number(text) or int(text) == 0:
        _warn(f"{COUNT}={text!r}: expected a number of CPUs of at least 1; ignoring it")
        return None
    return int(text)


def _is_number(text: str) -> bool:
    return text.isascii() and text.isdecimal()


def _warn(text: str) -> None:
    warnings.warn(text, stacklevel=4)
