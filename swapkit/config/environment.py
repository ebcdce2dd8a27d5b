"""The environment variables that swapkit reads.

`MIN_SWAP_TENSOR_SIZE`: smaller saved storages (in bytes) never move; minimum and default 1024.
`SWAP_SIZE_MULTIPLE`: a rescue frees this multiple of the missing bytes; minimum and default 1.
`MEMORY_FRAGMENTATION`: 1 keeps memory that lives unequally long apart. `SWAP_LOG_LEVEL`, from 0
(all) to 4, and `SWAP_LOG_RANK`, one rank or -1 for all: which messages are logged, and by which
process; to standard error unless the program has set up `logging` itself. `SWAPKIT_LOGS`: topics of
which everything is logged, such as `plan,rescue`. An invalid value is replaced by the default, or
by the minimum, with a warning.

Other variables of MindSpeed and MindSpore are accepted and have no effect. `ADAPTIVE_RECOMPUTING`
installed the original's allocator: call `swapkit.install()`. `vmmDefragment`, `reuseLimit`,
`fragLimit`, `reAlloc`, `defragLevel`, `autoGC` and `gc_thresh` tune how free blocks are stitched
together, which virtual memory makes unnecessary. `TORCH_EXTENSIONS_DIR` and `LD_LIBRARY_PATH` led
custom operators to the original's library; swapkit's need only its headers. `GLOG_v` and
`ENABLE_LAZY_INLINE_NO_PIPELINE` belong to MindSpore, and so does `MS_MEMORY_STATISTIC`: print
`swapkit.memory_summary()` instead.

From launchers: `RANK` and `LOCAL_WORLD_SIZE` (torchrun), and where SLURM's `srun` started the ranks
itself, its numbers of tasks.

`allocator_settings.py` reads torch's variables for the allocator.

Source:
    MindSpeed, adaptive selective recomputation, memory fragmentation and SmartSwap: the names,
    defaults and least values.
"""

from __future__ import annotations

import logging
import os
import re
import sys
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from functools import partial

from swapkit.config.values import is_digits, read_value, read_variable
from swapkit.errors import warn
from swapkit.units import parse_bytes

# Smaller storages are never moved: a transfer costs more than the memory is worth.
MIN_SWAP_BYTES = 1024
# Indexed by SWAP_LOG_LEVEL.
LOG_LEVELS = (logging.DEBUG, logging.INFO, logging.WARNING, logging.ERROR, logging.CRITICAL)
_TASKS = re.compile(r"(\d{1,9})(?:\(x(\d{1,9})\))?")
ALL_RANKS = -1
# MindSpore prints its statistics if this is set.
MEMORY_STATISTIC = "MS_MEMORY_STATISTIC"


# ---- affinity of CPUs ----------------------------------------------------------------------------
#
# The variables that bind threads to CPUs: CPU_AFFINITY_CONF and CPU_BINDING_NUM.
#
# `CPU_AFFINITY_CONF=MODE,npuN:FIRST-LAST,...` is torch_npu's. Mode 0, or no mode, means off; 1 and
# 2 mean on. A device may have several ranges, and a range may be a single CPU. `lazy_bind`,
# `npu_affine` and `force` are for torch_npu alone. `CPU_BINDING_NUM` is the number of CPUs for each
# device; each hardware thread of a core is a CPU. An invalid value or part is ignored with a
# warning.
#
# Source:
#   torch_npu, `NPUAffinityController.cpp`: the grammar. MindSpeed, `cpu_binder.py`:
#   CPU_BINDING_NUM.

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
    count = read_variable(variables, COUNT, "a number of CPUs of at least 1", None, _read_digits)
    return CpuAffinity(mode=mode, ranges=ranges, cpus_per_device=count)


def _read_digits(text: str) -> int:
    if not is_digits(text):
        raise ValueError(text)
    return int(text)


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
    warn(text, stacklevel=4)


# ---- environment ---------------------------------------------------------------------------------


@dataclass(frozen=True, slots=True, kw_only=True)
class Environment:
    """The settings from the environment.

    `memory_fragmentation`: pools keep activations, what the next step frees, and other memory apart
    from each other until addresses are planned, also outside of sessions. In a session, what lasts
    over steps is apart in any case.
    """

    min_swap_bytes: int = MIN_SWAP_BYTES
    swap_size_multiple: int = 1
    memory_fragmentation: bool = False
    log_level: int | None = None  # of `logging`; None: as the program set it
    log_rank: int = ALL_RANKS
    logs: tuple[str, ...] = ()  # topics of which everything is logged
    rank: int = 0  # of this process, from torchrun's RANK
    local_processes: int = 1  # that train on this machine, from torchrun's LOCAL_WORLD_SIZE
    node_processes: int = 0  # likewise, also from SLURM; 0: no launcher says so
    cpu_affinity: CpuAffinity = NO_AFFINITY


def read_environment(variables: Mapping[str, str] = os.environ) -> Environment:
    """Return the settings in force now."""
    read = partial(read_variable, variables)
    of_least = partial(parse_bytes, name="MIN_SWAP_TENSOR_SIZE")
    least = f"a number of at least {MIN_SWAP_BYTES}"
    level = read("SWAP_LOG_LEVEL", "a number from 0 to 4", None)
    local = _number(variables, "LOCAL_WORLD_SIZE")
    return Environment(
        min_swap_bytes=read("MIN_SWAP_TENSOR_SIZE", least, MIN_SWAP_BYTES, of_least),
        swap_size_multiple=read("SWAP_SIZE_MULTIPLE", "a number of at least 1", 1),
        memory_fragmentation=read("MEMORY_FRAGMENTATION", "a number from 0 to 1", 0) == 1,
        log_level=None if level is None else LOG_LEVELS[level],
        log_rank=read("SWAP_LOG_RANK", "a number from -1 to 1048575", ALL_RANKS),
        logs=tuple(variables.get("SWAPKIT_LOGS", "").replace(",", " ").split()),
        rank=_number(variables, "RANK"),
        local_processes=max(1, local),
        node_processes=local or _read_slurm(variables),
        cpu_affinity=read_cpu_affinity(variables),
    )


def list_without_effect(variables: Mapping[str, str] = os.environ) -> Iterator[str]:
    """Yield a warning for the variable that asks MindSpore to print memory statistics."""
    value = variables.get(MEMORY_STATISTIC, "0").strip()
    if value not in {"", "0"}:
        instead = "it belongs to MindSpore; print swapkit.memory_summary() instead"
        yield f"{MEMORY_STATISTIC}={variables[MEMORY_STATISTIC]} has no effect: {instead}"


def _number(variables: Mapping[str, str], name: str) -> int:
    """Return a number that a launcher set; 0: it did not."""
    text = variables.get(name, "")
    return int(text) if text.isdecimal() else 0


def _read_slurm(variables: Mapping[str, str]) -> int:
    """Return how many tasks of this job step `srun` started on this machine; 0: it did not say.

    `"4(x2),3"`: 4 tasks on each of two machines, 3 on the last one. A batch script has the job's
    numbers as well, but is one process: only tasks of a step have a step's identifier.
    """
    if not any(name in variables for name in ("SLURM_STEP_ID", "SLURM_STEPID")):
        return 0
    node = _number(variables, "SLURM_NODEID")
    for name in ("SLURM_STEP_TASKS_PER_NODE", "SLURM_NTASKS_PER_NODE", "SLURM_TASKS_PER_NODE"):
        texts = variables.get(name, "").split(",")
        nodes = 0
        for part in map(_TASKS.fullmatch, texts):
            if part is None:  # of another form: do not guess
                break
            nodes += int(part[2] or 1)
            if node < nodes or len(texts) == 1:
                return int(part[1])
    return 0


class _OwnHandler(logging.Handler):
    """Handler that writes to standard error while the program has no handlers of its own."""

    def emit(self, record: logging.LogRecord) -> None:
        if not logging.getLogger().handlers:
            handler = logging.StreamHandler(sys.stderr)  # as it is now
            handler.setFormatter(logging.Formatter("swapkit %(levelname)s: %(message)s"))
            handler.emit(record)


def apply_log_level(environment: Environment) -> None:
    """Set the levels of swapkit's loggers from the environment, if it specifies any.

    Also adds a handler: without one, Python prints only warnings, whatever the level.
    """
    is_meant = environment.log_rank in {ALL_RANKS, environment.rank}
    logger = logging.getLogger("swapkit")
    if environment.log_level is not None:
        logger.setLevel(environment.log_level if is_meant else logging.CRITICAL + 1)
    elif not environment.logs:
        return
    for topic in environment.logs if is_meant else ():
        logging.getLogger(f"swapkit.{topic}").setLevel(logging.DEBUG)
    if not any(isinstance(handler, _OwnHandler) for handler in logger.handlers):
        logger.addHandler(_OwnHandler())
