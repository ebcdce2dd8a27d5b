"""`swapkit doctor`: checks what swapkit needs, and says what to do about problems."""

from __future__ import annotations

import contextlib
import enum
import importlib.metadata
import importlib.util
import json
import logging
import os
import platform
import resource
import shutil
import subprocess
import sys
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, replace
from pathlib import Path

import click
from packaging.requirements import Requirement
from packaging.version import Version

from swapkit.cli.base import DONE, FAILED, CliCommand
from swapkit.cli.machine import find_machine
from swapkit.errors import InvalidArgument, NativeBuildError, SwapkitError
from swapkit.reporting.machines import format_speed
from swapkit.texts import waiting
from swapkit.units import format_bytes

# ---- findings ------------------------------------------------------------------------------------
#
# What `swapkit doctor` finds, as plain values.


class Level(enum.Enum):
    """How good a finding is."""

    GOOD = "ok"
    NOTE = "note"  # works, perhaps not as well or not everywhere
    PROBLEM = "problem"  # something does not work


@dataclass(frozen=True, slots=True)
class Finding:
    """The result of one check.

    Args:
        text: what was found.
        level: how good that is.
        remedy: what to do about it; empty: nothing.
        name: of the check, one word; `run_check` fills it in.
    """

    text: str
    level: Level = Level.GOOD
    remedy: str = ""
    name: str = ""


def count_level(findings: Sequence[Finding], level: Level) -> int:
    """Return how many findings have a level."""
    return sum(finding.level is level for finding in findings)


def encode_findings(findings: Sequence[Finding]) -> dict[str, str | int]:
    """Return findings by flat names: `cache`, `cache_text` and `cache_remedy`, and the counts."""
    document: dict[str, str | int] = {
        "problems": count_level(findings, Level.PROBLEM),
        "notes": count_level(findings, Level.NOTE),
    }
    for finding in findings:
        document[finding.name] = finding.level.value
        document[f"{finding.name}_text"] = finding.text
        document[f"{finding.name}_remedy"] = finding.remedy
    return document


# ---- checks --------------------------------------------------------------------------------------
#
# The checks of `swapkit doctor`. Each returns one finding; errors become problems.

LEAST_DISK_BYTES = 64 << 20  # of the cache: a shim is some MB, and temporary files more
SELF_TEST_SECONDS = 120.0
TESTED = ("2.10", "2.11", "2.13", "2.14", "2.15")  # releases of torch


def _note(text: str, remedy: str = "") -> Finding:
    return Finding(text, Level.NOTE, remedy)


def _problem(text: str, remedy: str) -> Finding:
    return Finding(text, Level.PROBLEM, remedy)


def check_python() -> Finding:
    """Check for Python's headers, which the shim needs when it is compiled."""
    from swapkit._runtime.shim.build import find_headers

    text = f"Python {platform.python_version()}"
    try:
        find_headers()
    except NativeBuildError as error:
        return _lacking(f"{text}, without headers", str(error))
    return Finding(f"{text}, with headers")


def check_compiler() -> Finding:
    """Check for a C++ compiler, which the shim needs when it is compiled."""
    from swapkit._runtime.shim.build import find_compiler

    try:
        command = find_compiler()
    except NativeBuildError as error:
        return _lacking("there is no C++ compiler", str(error))
    asked = [*command, "--version"]
    done = subprocess.run(asked, capture_output=True, text=True, check=False)
    if done.returncode != 0 or not done.stdout:
        remedy = "install g++ (Debian: apt-get install g++), or set CXX to a compiler"
        return _problem(f"{' '.join(command)!r} does not run: {done.stderr.strip()}", remedy)
    return Finding(done.stdout.splitlines()[0])


def _lacking(text: str, remedy: str) -> Finding:
    """Return a finding about something that only the compilation of the shim needs."""
    from swapkit._runtime.shim.build import find_cached, shim_name

    if find_cached(shim_name()) is None:
        return _problem(text, remedy)
    remedy = f"another release of torch needs it. {remedy}"
    return _note(f"{text}; the shim is compiled already", remedy)


def check_torch() -> Finding:
    """Check torch's release against the range that swapkit asks for, and those that were tested."""
    import torch

    release = Version(torch.__version__)
    if f"{release.major}.{release.minor}" not in TESTED:
        tested = f"torch {torch.__version__} is untested with this swapkit"
        remedy = f"tested: {', '.join(TESTED)}; with another release, compare a short training"
    else:
        tested = remedy = ""
    try:
        needs = importlib.metadata.requires("swapkit") or ()
    except importlib.metadata.PackageNotFoundError:
        text = f"torch {torch.__version__}; swapkit is imported from a folder, not installed"
        remedy = "pip install -e FOLDER also checks which releases swapkit needs"
        return _note(text, remedy)
    asked = next(each for each in map(Requirement, needs) if each.name == "torch")
    text = f"torch {torch.__version__} (swapkit needs {asked.specifier})"
    if asked.specifier.contains(str(torch.__version__), prereleases=True):
        if tested:
            return _note(tested, remedy)
        return Finding(text)
    return _problem(text, f"pip install '{asked}'")


def check_cache() -> Finding:
    """Compile the shim if the cache lacks it, and check for room on the cache's disk."""
    from swapkit._runtime.shim import build as shim
    from swapkit._runtime.shim.library import load_shim

    if shim.find_cached(shim.shim_name()) is None:
        click.echo(f"compiling the shim for this torch: {shim.COMPILE_TIME} ...", err=True)
    built = shim.build_shim()
    load_shim()
    how = "compiled before" if built.seconds is None else f"compiled in {built.seconds:.1f} s"
    folder = shim.cache_folder() or built.library.parent
    free_bytes = shutil.disk_usage(folder).free
    text = (
        f"{built.library}: the shim for this torch, {how}; "
        f"cache {folder}: {format_bytes(free_bytes)} free"
    )
    if not os.access(folder, os.W_OK):
        remedy = "measurements are made anew each time; set XDG_CACHE_HOME to a folder of yours"
        return _note(f"{text}; not writable", remedy)
    if free_bytes < LEAST_DISK_BYTES:
        return _problem(text, "make room, or set XDG_CACHE_HOME to a folder on another disk")
    return Finding(text)


def check_driver() -> Finding:
    """Name the accelerators that torch sees."""
    from swapkit._runtime.torch_compat.accelerators import present_accelerator

    found = present_accelerator()
    if found is not None:
        names = {found.name_of(index) for index in range(found.count())}
        listed = f"{found.count()} x {', '.join(sorted(names))}"
        return Finding(f"{found.title}: {listed}")
    device = next((each for each in _DRIVERS if Path(each).exists()), None)
    if device is not None:
        what, remedy = _DRIVERS[device]
        return _problem(f"{device} exists, but this torch sees no {what}", remedy)
    return _note("no GPU and no NPU: budgets are for the CPU's memory")


_DRIVERS = {
    "/dev/nvidiactl": (
        "GPU",
        "install a torch built for CUDA, and check that nvidia-smi lists the GPU",
    ),
    "/dev/davinci_manager": ("NPU", "pip install 'swapkit[npu]', and source CANN's set_env.sh"),
}


def check_link() -> Finding:
    """Measure the link to the host, once; later calls read the cache."""
    machine, _ = find_machine(None)
    out, back = machine.out_bytes_per_second, machine.in_bytes_per_second
    text = f"{machine.name or 'device'}: {format_speed(out)} to the host, {format_speed(back)} back"
    return Finding(text)


def check_numa() -> Finding:
    """Say where the device is attached."""
    from swapkit._runtime.affinity.places import list_nodes
    from swapkit._runtime.affinity.system import System, Unknown
    from swapkit._runtime.allocators.installation import choose_device
    from swapkit._runtime.process.runtime import get_runtime
    from swapkit.config.environment import read_environment

    choice = get_runtime().places.choose(choose_device(None), read_environment().cpu_affinity)
    if choice is not None:
        level = Level.NOTE if choice.is_shortfall else Level.GOOD
        return Finding(choice.text, level)
    try:
        nodes = list_nodes(System())
    except Unknown as unknown:
        return _note(str(unknown))
    cpus = sum(map(len, nodes.values()))
    return Finding(f"{len(nodes)} NUMA node(s), {cpus} CPUs")


def check_locked_memory() -> Finding:
    """Check the limit for locked memory: host copies of accelerators are page-locked."""
    from swapkit._runtime.torch_compat.accelerators import present_accelerator

    limit, _ = resource.getrlimit(resource.RLIMIT_MEMLOCK)
    if limit == resource.RLIM_INFINITY:
        return Finding("locked memory: no limit")
    text = f"locked memory: at most {format_bytes(limit)}"
    if present_accelerator() is None:
        return Finding(f"{text}; the CPU needs none")
    remedy = "ulimit -l unlimited; in Docker: --ulimit memlock=-1"
    return _note(f"{text}; drivers that obey the limit refuse larger host copies", remedy)


def check_host() -> Finding:
    """Say how much memory the process may use, and whether a control group limits it."""
    from swapkit._runtime.process.runtime import get_runtime

    usable = get_runtime().host_bytes()
    whole = os.sysconf("SC_PHYS_PAGES") * os.sysconf("SC_PAGE_SIZE")
    if usable >= whole:
        return Finding(f"{format_bytes(usable)} of memory, no limit")
    text = f"{format_bytes(usable)} of {format_bytes(whole)} of memory: a control group's limit"
    remedy = "host copies count there: raise the container's limit, or pass host_limit="
    return _note(text, remedy)


def check_compilers() -> Finding:
    """Check for the names of torch's compilers with which saved tensors move in compiled graphs."""
    from swapkit._runtime.compiled import missing_names, registration
    from swapkit._runtime.process.runtime import get_runtime

    if not registration.is_on():
        remedy = f"unset {registration.SWITCH}"
        return _note("compiled graphs stay as torch makes them, and move nothing inside", remedy)
    get_runtime()
    for name in registration.COMPILERS:
        importlib.import_module(name)
    partitioner = importlib.import_module("swapkit._runtime.compiled.partitioner")
    if partitioner.can_place() and not missing_names.reported:
        return Finding("saved tensors of compiled graphs move while the graphs run")
    missing = ", ".join(missing_names.reported)
    return _note(
        f"saved tensors move only between compiled graphs: this torch has changed ({missing})",
        "compile blocks instead of the whole model, or use a tested torch",
    )


def check_environment() -> Finding:
    """Check the variables of torch's allocators."""
    from swapkit._runtime.allocators.installation import default_device
    from swapkit.config.allocator_settings import COMMON, OWN, read_allocator_settings

    present = [name for name in (COMMON, *OWN.values()) if name in os.environ]
    if not present:
        return Finding("no variable of torch's allocators is set")
    named = ", ".join(f"{name}={os.environ[name]}" for name in present)
    try:
        settings = read_allocator_settings(default_device().type)
    except InvalidArgument as error:
        return _problem(str(error), f"correct or unset {present[0]}")
    if settings.without_effect:
        remedy = "docs/choices.md lists the keys with an effect"
        return _note("; ".join(settings.without_effect), remedy)
    return Finding(named)


def check_training() -> Finding:
    """Train a small model with and without a budget in a child process, and compare the bits."""
    command = [sys.executable, "-m", "swapkit.cli.self_test"]
    done = subprocess.run(
        command, capture_output=True, text=True, check=False, timeout=SELF_TEST_SECONDS
    )
    if done.returncode != 0:
        last = (done.stderr.strip().splitlines() or ["no output"])[-1]
        remedy = f"run {' '.join(command)!r} for the whole output, and report it"
        return _problem(f"the self-test failed with exit code {done.returncode}: {last}", remedy)
    found = json.loads(done.stdout)
    text = (
        f"{found['device']}: {format_bytes(found['plain_peak_bytes'])} plain; "
        f"{format_bytes(found['peak_bytes'])} within a budget of "
        f"{format_bytes(found['budget_bytes'])}; identical bits"
    )
    return Finding(text)


# In this order, with what a terminal shows meanwhile.
CHECKS: Sequence[tuple[str, Callable[[], Finding]]] = (
    ("torch", check_torch),
    ("python", check_python),
    ("compiler", check_compiler),
    ("cache", check_cache),
    ("driver", check_driver),
    ("link", check_link),
    ("numa", check_numa),
    ("locked", check_locked_memory),
    ("host", check_host),
    ("compilers", check_compilers),
    ("environment", check_environment),
    ("training", check_training),
)

# ---- doctor --------------------------------------------------------------------------------------
#
# `swapkit doctor`: checks what swapkit needs, and says what to do about problems.

_COLOURS = {Level.GOOD: "green", Level.NOTE: "yellow", Level.PROBLEM: "red"}
_REMEDY = "       -> "


@click.command(cls=CliCommand)
@click.option("--json", "as_json", is_flag=True, help="Print the findings as JSON.")
def doctor(*, as_json: bool) -> int:
    """Check this machine, and say what to do about each problem.

    Compiler, cache, torch, driver, link to the host, NUMA nodes, limits, variables; and a small
    training with and without a budget, whose bits are compared. Ends with 1 if there is a problem.
    """
    findings = []
    with _silent():
        for name, check in CHECKS:
            with waiting(name):
                findings.append(run_check(name, check))
            if not as_json:
                _show_row(findings[-1])
    if as_json:
        click.echo(json.dumps(encode_findings(findings), indent=2))
    else:
        _show_remedies(findings)
    return FAILED if count_level(findings, Level.PROBLEM) else DONE


@contextlib.contextmanager
def _silent() -> Iterator[None]:
    """Log no warnings inside the context: the findings say the same."""
    logger = logging.getLogger("swapkit")
    level = logger.level
    logger.setLevel(logging.ERROR)
    try:
        yield
    finally:
        logger.setLevel(level)


def run_check(name: str, check: Callable[[], Finding]) -> Finding:
    """Return a check's finding; an exception is a problem."""
    try:
        return replace(check(), name=name)
    except (SwapkitError, ImportError, OSError, RuntimeError, subprocess.SubprocessError) as error:
        remedy = "" if isinstance(error, SwapkitError) else "report it with the whole output"
        return Finding(f"{type(error).__name__}: {error}", Level.PROBLEM, remedy, name)


def _show_row(finding: Finding) -> None:
    row = f"{finding.level.value:7}  {finding.name:11}  {_first_line(finding.text)}"
    click.secho(row, fg=None if os.environ.get("NO_COLOR") else _COLOURS[finding.level])
    sys.stdout.flush()  # a check may take a minute


def _show_remedies(findings: list[Finding]) -> None:
    for each in findings:
        if each.level is not Level.GOOD and (each.remedy or "\n" in each.text):
            click.echo(f"\n{each.level.value}: {each.name}: {each.text}")
            if each.remedy:
                click.echo(f"{_REMEDY}{each.remedy}")
    problems, notes = (count_level(findings, level) for level in (Level.PROBLEM, Level.NOTE))
    click.echo(f"\n{problems} problem(s), {notes} note(s)")


def _first_line(text: str) -> str:
    return text.splitlines()[0] if text else ""
