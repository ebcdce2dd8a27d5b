"""Start programs on a simulated device: what the kinds of devices share."""

from __future__ import annotations

import fcntl
import os
import runpy
import subprocess
import sys
from pathlib import Path
from typing import TYPE_CHECKING, NamedTuple, NoReturn

if TYPE_CHECKING:
    from collections.abc import Callable, Mapping

ROOT = Path(__file__).parent.parent.parent


class Machine(NamedTuple):
    """A simulated device, and how a program is started on it."""

    module: str  # which a program is started with: python -m module
    wheel: str  # what the interpreter must have
    python: str  # the variable that names the interpreter
    inside: str  # the variable that says that the simulation is loaded
    prepare: Callable[[], Mapping[str, str]]  # builds what is missing; changes of the environment
    install: Callable[[], int]  # takes over the operators


def make(build: Path, folder: str, *targets: str) -> None:
    """Build what is missing. One process at a time: tests of several files begin at once.

    Args:
        build: where the results and the lock are.
        folder: the one that has the Makefile, relative to the project's.
        targets: of that Makefile; by default its first one.
    """
    build.mkdir(parents=True, exist_ok=True)
    with (build / "lock").open("w") as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)
        subprocess.run(["make", "-s", "-C", str(ROOT / folder), *targets], check=True)


def version_of(package: str, python: str) -> str:
    """Return "package-version" of what an interpreter has; its results are in a folder named so."""
    code = f"import importlib.metadata as m; print('{package}-' + m.version('{package}'))"
    done = subprocess.run([python, "-c", code], check=True, capture_output=True, text=True)
    return done.stdout.strip()


def prepend(variable: str, *first: object, separator: str = os.pathsep) -> str:
    """Return the value of a variable with something in front of it."""
    rest = os.environ.get(variable)
    return separator.join([*map(str, first), *([rest] if rest else [])])


def run_program(program: list[str]) -> None:
    """Run a program in this interpreter: a file, -m module or -c code, with its arguments."""
    kind, *rest = program
    if kind == "-m":
        sys.argv = rest
        runpy.run_module(rest[0], run_name="__main__", alter_sys=True)
    elif kind == "-c":
        sys.argv = [kind, *rest[1:]]
        exec(compile(rest[0], "<code>", "exec"), {"__name__": "__main__"})
    else:
        sys.argv = program
        sys.path.insert(0, str(Path(kind).resolve().parent))
        runpy.run_path(kind, run_name="__main__")


def start(machine: Machine, program: list[str]) -> NoReturn:
    """Replace this process by the interpreter that meets the simulation."""
    if machine.python not in os.environ:
        raise SystemExit(f"{machine.python} names no interpreter that has {machine.wheel}")
    command = [os.environ[machine.python], "-m", machine.module, *program]
    changed = {"PYTHONPATH": prepend("PYTHONPATH", ROOT), machine.inside: "1"}
    os.execve(command[0], command, {**os.environ, **changed, **machine.prepare()})


def main(machine: Machine, usage: str | None) -> None:
    """Start the program, or run it if this is the interpreter that was started."""
    if len(sys.argv) < 2:
        raise SystemExit(usage)
    if not os.environ.get(machine.inside):
        start(machine, sys.argv[1:])
    machine.install()
    run_program(sys.argv[1:])
