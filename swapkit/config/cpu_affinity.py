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

from swapkit.config.values import read_value, read_variable

if TYPE_CHECKING:
    from collections.abc import Mapping, Sequence

CONF, COUNT = "CPU_AFFINITY_CONF", "CPU_BINDING_NUM"
OFF = 0
TORCH_NPUS_OWN = ("lazy_bind", "npu_affine", "force")
_MODE = re.compile(r"mode(?::(.*))?|([0-9]+)")
_CPUS = re.compile(r"npu([0-9]{1,2}):([0-9]{1,6})(?:-([0-9]{1,6}))?")


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
    parts = [part.strip() for part in text.split(",") if part.strip()]
    mode = _read_mode(text, parts) if text else None
    ranges = _read_ranges(text, parts)
    if mode == OFF and ranges:
        _warn(f"{CONF}={text!r} is off: begin it with the mode, as in {CONF}=1,npu0:0-3")
    count = read_variable(variables, COUNT, "a number of CPUs of at least 1", None)
    return CpuAffinity(mode=mode, ranges=ranges, cpus_per_device=count)


def _read_mode(text: str, parts: Sequence[str]) -> int:
    """Return the first mode of the text, as torch_npu does; none, or an invalid one: off."""
    for found in filter(None, map(_MODE.fullmatch, parts)):
        try:
            return int(read_value("a whole number from 0 to 2", found[1] or found[2] or ""))
        except ValueError:
            _warn(f"{CONF}={text!r}: {found[0]}: expected a number from 0 to 2, as in mode:1")
            return OFF
    return OFF


def _read_ranges(text: str, parts: Sequence[str]) -> dict[int, frozenset[int]]:
    ranges: dict[int, frozenset[int]] = {}
    for part in parts:
        if _MODE.fullmatch(part) or part.partition(":")[0] in TORCH_NPUS_OWN:
            continue
        found = _CPUS.fullmatch(part)
        cpus = range(int(found[2]), int(found[3] or found[2]) + 1) if found else ()
        if found is None or not cpus:
            _warn(f"{CONF}={text!r}: ignoring {part!r}: expected npuN:FIRST-LAST")
            continue
        index = int(found[1])
        ranges[index] = ranges.get(index, frozenset()).union(cpus)
    return ranges


def _warn(text: str) -> None:
    warnings.warn(text, stacklevel=4)
