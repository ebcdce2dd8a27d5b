"""What tests of the torch-bound floors share: child processes, and the pool for one test."""

from __future__ import annotations

import functools
import gc
import os
import re
import signal
import subprocess
import sys
import textwrap
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING

from tests.support import warm

if TYPE_CHECKING:
    from collections.abc import Iterator

    from swapkit._runtime.allocators.installed_pool import Installation

ROOT = Path(__file__).parent.parent.parent
MIB = 1 << 20
# What a slow machine adds to stderr: `swapkit.texts.waiting`.
PROGRESS = re.compile(r"^swapkit: planning for other budgets.*\.\.\.\n", re.MULTILINE)


@functools.cache
def _compile_shim() -> None:
    """Compile the shim before a process that is to be silent would, and say so."""
    from swapkit._runtime.shim.build import build_shim

    build_shim()


def cache_in(folder: Path) -> dict[str, str]:
    """Return the environment of a process whose cache is `swapkit` in a folder, and only there."""
    return dict.fromkeys(("XDG_CACHE_HOME", "TMPDIR"), str(folder))


def start_python(code: str, **environment: str) -> subprocess.Popen[str]:
    """Start a fresh interpreter on `code`; warnings are errors there too."""
    if "XDG_CACHE_HOME" not in environment:
        _compile_shim()
    return subprocess.Popen(
        [sys.executable, "-W", "error", "-c", textwrap.dedent(code)],
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
        start_new_session=True,
        env={**os.environ, "PYTHONPATH": str(ROOT), "OMP_NUM_THREADS": "1", **environment},
    )


def finish_python(process: subprocess.Popen[str], *, timeout_s: float = 60) -> str:
    """Return what the process printed; it must end well, in time, and without complaint."""
    try:
        output, complaint = process.communicate(timeout=timeout_s)
    except subprocess.TimeoutExpired:
        os.killpg(process.pid, signal.SIGKILL)  # with the children it forked
        output, complaint = process.communicate()
        raise AssertionError(f"still running after {timeout_s} s:\n{output}{complaint}") from None
    assert process.returncode == 0, f"status {process.returncode}:\n{output}{complaint}"
    assert not PROGRESS.sub("", complaint), complaint
    return output


def run_fresh(code: str, *, timeout_s: float = 60, **environment: str) -> str:
    """Run `code` in a fresh interpreter and return what it printed."""
    return finish_python(start_python(code, **environment), timeout_s=timeout_s)


def run_python(code: str, *, timeout_s: float = 60, **environment: str) -> str:
    """Run `code` in a process of its own that has loaded torch, as `run_fresh` does."""
    _compile_shim()
    job = warm.Job(textwrap.dedent(code), environment={**os.environ, **environment}, is_strict=True)
    (done,) = warm.run(job, timeout_s=timeout_s)
    assert done.returncode == 0, f"status {done.returncode}:\n{done.stdout}{done.stderr}"
    assert not PROGRESS.sub("", done.stderr), done.stderr
    return done.stdout


@contextmanager
def installed() -> Iterator[Installation]:
    """Put the pool below torch for a while; afterwards everything is as it was before."""
    import swapkit
    from swapkit._runtime.allocators.installation import require_installation
    from swapkit.errors import SessionError

    try:
        limit_bytes = require_installation().limit_bytes
    except SessionError:
        limit_bytes = None
    swapkit.install(device="cpu")
    try:
        yield require_installation()
    finally:
        if limit_bytes is None:
            swapkit.uninstall()
        else:
            swapkit.install(limit_bytes or None, device="cpu")


def limit_above_reserved(installation: Installation, nbytes: int) -> int:
    """Return a limit that leaves `nbytes` beside what other tests may have left behind."""
    gc.collect()  # what would go in the middle of the test makes room that it does not count on
    installation.pool.trim()
    return installation.pool.stats()["reserved_bytes.all.current"] + nbytes
