"""The environment variables that swapkit reads.

`MIN_SWAP_TENSOR_SIZE`: smaller saved storages (in bytes) never move; minimum and default 1024.
`SWAP_SIZE_MULTIPLE`: a rescue frees this multiple of the missing bytes; minimum and default 1.
`MEMORY_FRAGMENTATION`: 1 keeps memory that lives unequally long apart. `SWAP_LOG_LEVEL`, from 0
(all) to 4, and `SWAP_LOG_RANK`, one rank or -1 for all: which messages are logged, and by which
process; to standard error unless the program has set up `logging` itself. An invalid value is
replaced by the default, or by the minimum, with a warning.

From launchers: `RANK` and `LOCAL_WORLD_SIZE` (torchrun), and where SLURM's `srun` started the ranks
itself, its numbers of tasks.

`allocator_settings.py` reads torch's variables for the allocator, `cpu_affinity.py` those that bind
threads to CPUs.

Source:
    MindSpeed, adaptive selective recomputation, memory fragmentation and SmartSwap: the names,
    defaults and least values.
"""

from __future__ import annotations

import logging
import os
import re
import sys
import warnings
from dataclasses import dataclass
from typing import TYPE_CHECKING, TextIO

from swapkit.config.cpu_affinity import NO_AFFINITY, CpuAffinity, read_cpu_affinity
from swapkit.texts import get_logger
from swapkit.units import parse_bytes

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator, Mapping

    _StreamHandler = logging.StreamHandler[TextIO]
else:
    _StreamHandler = logging.StreamHandler  # has no type arguments in Python 3.10

_log = get_logger(__name__)
# Smaller storages are never moved: a transfer costs more than the memory is worth.
MIN_SWAP_BYTES = 1024
# Indexed by SWAP_LOG_LEVEL.
LOG_LEVELS = (logging.DEBUG, logging.INFO, logging.WARNING, logging.ERROR, logging.CRITICAL)
_TASKS = re.compile(r"(\d{1,9})(?:\(x(\d{1,9})\))?")
ALL_RANKS = -1
MOST_RANKS = 1 << 20
# Variables of MindSpeed and MindSpore that are accepted but have no effect, and the reason.
WITHOUT_MEANING = {
    "ADAPTIVE_RECOMPUTING": "it installed the original's allocator; call swapkit.install()",
    **dict.fromkeys(
        (
            *("vmmDefragment", "reuseLimit", "fragLimit", "reAlloc"),
            *("defragLevel", "autoGC", "gc_thresh"),
        ),
        "they tune how free blocks are stitched together, which virtual memory makes unnecessary",
    ),
    **dict.fromkeys(
        ("TORCH_EXTENSIONS_DIR", "LD_LIBRARY_PATH"),
        "custom operators needed the original's library; swapkit's need only its headers",
    ),
    **dict.fromkeys(("ENABLE_LAZY_INLINE_NO_PIPELINE", "GLOG_v"), "they belong to MindSpore"),
    "MS_MEMORY_STATISTIC": "it belongs to MindSpore; print swapkit.memory_summary() instead",
}


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
    rank: int = 0  # of this process, from torchrun's RANK
    local_processes: int = 1  # that train on this machine, from torchrun's LOCAL_WORLD_SIZE
    node_processes: int = 0  # likewise, also from SLURM; 0: no launcher says so
    cpu_affinity: CpuAffinity = NO_AFFINITY


def read_environment(variables: Mapping[str, str] = os.environ) -> Environment:
    """Return the settings in force now."""
    level = _choose(variables, "SWAP_LOG_LEVEL", range(len(LOG_LEVELS)), None)
    rank = _choose(variables, "SWAP_LOG_RANK", range(ALL_RANKS, MOST_RANKS), ALL_RANKS)
    return Environment(
        min_swap_bytes=_read(variables, "MIN_SWAP_TENSOR_SIZE", _bytes, MIN_SWAP_BYTES),
        swap_size_multiple=_read(variables, "SWAP_SIZE_MULTIPLE", int, 1),
        memory_fragmentation=_choose(variables, "MEMORY_FRAGMENTATION", range(2), 0) == 1,
        log_level=None if level is None else LOG_LEVELS[level],
        log_rank=ALL_RANKS if rank is None else rank,
        rank=_number(variables, "RANK"),
        local_processes=max(1, _number(variables, "LOCAL_WORLD_SIZE")),
        node_processes=_number(variables, "LOCAL_WORLD_SIZE") or _read_slurm(variables),
        cpu_affinity=read_cpu_affinity(variables),
    )


def list_without_effect(variables: Mapping[str, str] = os.environ) -> Iterator[str]:
    """Yield a warning for the variable that asks MindSpore to print memory statistics."""
    name = "MS_MEMORY_STATISTIC"
    if variables.get(name, "0").strip() not in {"", "0"}:
        yield f"{name}={variables[name]} has no effect: {WITHOUT_MEANING[name]}"


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
        parts = [_TASKS.fullmatch(part) for part in variables.get(name, "").split(",")]
        nodes = 0
        for part in parts:
            if part is None:  # of another form: do not guess
                break
            nodes += int(part[2] or 1)
            if node < nodes or len(parts) == 1:
                return int(part[1])
    return 0


class _OwnHandler(_StreamHandler):
    """Handler that writes to standard error while the program has no handlers of its own."""

    def __init__(self) -> None:
        super().__init__()
        self.setFormatter(logging.Formatter("swapkit %(levelname)s: %(message)s"))

    def emit(self, record: logging.LogRecord) -> None:
        if not logging.getLogger().handlers:
            self.stream = sys.stderr  # may have been replaced since the last record
            super().emit(record)


def apply_log_level(environment: Environment) -> None:
    """Set the level of swapkit's logger from the environment, if it specifies one.

    Also adds a handler: without one, Python prints only warnings, whatever the level.
    """
    if environment.log_level is None:
        return
    is_meant = environment.log_rank in {ALL_RANKS, environment.rank}
    level = environment.log_level if is_meant else logging.CRITICAL + 1
    logger = logging.getLogger("swapkit")
    logger.setLevel(level)
    if not any(isinstance(handler, _OwnHandler) for handler in logger.handlers):
        logger.addHandler(_OwnHandler())


def _bytes(text: str) -> int:
    return parse_bytes(text, name="MIN_SWAP_TENSOR_SIZE")


def _read(variables: Mapping[str, str], name: str, parse: Callable[[str], int], least: int) -> int:
    text = variables.get(name, "").strip()
    if not text:
        return least
    try:
        value = parse(text)
    except ValueError:  # InvalidArgument is one
        value = 0
    if value < least:
        warnings.warn(
            f"{name}={text!r}: expected a number of at least {least}; using {least}", stacklevel=3
        )
    return max(value, least)


def _choose(
    variables: Mapping[str, str], name: str, accepted: range, default: int | None
) -> int | None:
    text = variables.get(name, "").strip()
    if not text:
        return default
    try:
        value = int(text)
    except ValueError:
        value = accepted.stop
    if value not in accepted:
        least, most = accepted.start, accepted.stop - 1
        instead = "ignoring it" if default is None else f"using {default}"
        warnings.warn(
            f"{name}={text!r}: expected a number from {least} to {most}; {instead}", stacklevel=3
        )
        return default
    return value
