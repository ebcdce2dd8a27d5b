"""The contracts on the device: the test suites, the C tests, delayed kernels, a memory checker.

Suites run under pytest with `SWAPKIT_TEST_DEVICE=cuda`; without pytest that is said, and the rest
runs. `compute-sanitizer --tool memcheck` watches the C tests where it is on PATH.
"""

from __future__ import annotations

import importlib.util
import re
import shutil
import sys
from typing import TYPE_CHECKING
from xml.etree import ElementTree

from benchmarks.gpu.context import ROOT
from benchmarks.gpu.delays import SCENARIOS
from benchmarks.gpu.machine import LIBRARY
from benchmarks.gpu.measure import is_cuda
from benchmarks.gpu.process import Finished, python, run_process
from benchmarks.gpu.report import Check, Value

if TYPE_CHECKING:
    from pathlib import Path

    from benchmarks.gpu.context import Context

# The folders of `tests/`, and how long each may take at most.
SUITES = {"contract": 120.0, "fault": 90.0, "conformance": 400.0}
QUICK_SUITES = ("contract",)
TABLE = "suites and programs on the device"
C_TESTS = ROOT / "tests" / "c"
SANITIZER = "compute-sanitizer"
SANITIZER_ERRORS = re.compile(r"ERROR SUMMARY: (\d+) error")
C_FAILURE = 99  # a status that no test has
C_SECONDS = 120.0
DELAY_SECONDS = 90.0
LEAST_SECONDS = 10.0


def run_suite(context: Context, suite: str, most_seconds: float) -> None:
    """Run a folder of tests on the device."""
    folder = ROOT / "tests" / suite
    if not folder.is_dir():
        show(context, suite, "not run: there is no such suite")
        return
    results = context.output / f"{suite}.xml"
    results.unlink(missing_ok=True)
    command = python(
        *("-m", "pytest", "-q", "-x" if context.quick else "--tb=short"),
        *("-p", "no:cacheprovider", "-o", "minversion=7", f"--junitxml={results}", folder),
    )
    on_device = {"SWAPKIT_TEST_DEVICE": "cuda", "SWAPKIT_CUDA_DRIVER": LIBRARY}
    environment = on_device if is_cuda(context.device) else {}
    log = context.output / f"{suite}.log"
    done = run_process(
        command,
        seconds=min(most_seconds, context.seconds_left() - 2),
        log=log,
        cwd=ROOT,
        environment=environment,
    )
    counts = read_counts(results) if results.exists() else {}
    outcome = "passed" if done.ok else done.describe()
    show(context, suite, outcome, **counts)
    check(context, suite, f"tests/{suite}: passes", passed=done.ok)


def read_counts(results: Path) -> dict[str, int]:
    """Return how many tests passed, failed and were skipped."""
    root = ElementTree.parse(results).getroot()
    suite = root if root.tag == "testsuite" else root.find("testsuite")
    if suite is None:
        return {}
    tests, skipped = int(suite.get("tests", 0)), int(suite.get("skipped", 0))
    failed = int(suite.get("failures", 0)) + int(suite.get("errors", 0))
    return {"passed": tests - failed - skipped, "failed": failed, "skipped": skipped}


def run_c_tests(context: Context) -> None:
    """Run the C tests on the device, and again under the memory checker."""
    makefile = (C_TESTS / "Makefile").read_text(encoding="utf-8")
    if not re.search(r"\bDEVICE\b", makefile):
        show(context, "c_tests", "not run: tests/c has no variant for a device")
        return
    command = ["make", "-C", str(C_TESTS), "test", "DEVICE=cuda"]
    done = run_logged(context, "c_tests", command)
    show(context, "c_tests", "passed" if done.ok else done.describe())
    check(context, "c_tests", "tests/c on the device: passes", passed=done.ok)
    if not done.ok:
        show(context, "memcheck", "not run: the C tests fail without it")
        return
    if shutil.which(SANITIZER) is None:
        show(context, "memcheck", f"not run: {SANITIZER} not found")
        return
    watched = [
        *(SANITIZER, "--tool", "memcheck", "--target-processes", "all"),
        # The driver refuses what it is asked about memory of the host, which is an answer, too.
        *("--report-api-errors", "no", "--error-exitcode", str(C_FAILURE)),
        *command,
    ]
    done = run_logged(context, "memcheck", watched)
    errors = count_errors(done.log)
    outcome = "passed" if done.ok else done.describe()
    show(context, "memcheck", outcome, failed=errors)
    found = done.ok and errors == 0
    check(context, "memcheck", f"{SANITIZER} memcheck of the C tests: no error", passed=found)


def count_errors(log: Path) -> int | None:
    """Return how many errors the memory checker found in all processes; None: it says nothing."""
    counts = SANITIZER_ERRORS.findall(log.read_text(encoding="utf-8", errors="replace"))
    return sum(map(int, counts)) if counts else None


def run_delays(context: Context) -> None:
    """Run programs whose kernels are late, so that a wait that is missing shows."""
    for scenario in SCENARIOS:
        command = python("-m", "benchmarks.gpu.delays", scenario, context.device)
        done = run_logged(context, f"delay_{scenario}", command, seconds=DELAY_SECONDS)
        outcome = "passed" if done.ok else done.describe()
        show(context, f"delay_{scenario}", outcome)
        text = f"delayed kernels, {scenario}: the same bits"
        check(context, f"delay_{scenario}", text, passed=done.ok)


def run_logged(
    context: Context, name: str, command: list[str], seconds: float = C_SECONDS
) -> Finished:
    log = context.output / f"{name}.log"
    log.unlink(missing_ok=True)
    limit = min(seconds, context.seconds_left() - 2)
    # Of `make gpu` above; and the driver that there is, not the simulated one.
    environment = {"MAKEFLAGS": "", "MAKELEVEL": "", "SWAPKIT_CUDA_DRIVER": LIBRARY}
    return run_process(command, seconds=limit, log=log, cwd=ROOT, environment=environment)


def show(context: Context, name: str, outcome: str, **counts: int | None) -> None:
    values: dict[str, Value] = {"outcome": outcome}
    values |= {key: counts.get(key) for key in ("passed", "failed", "skipped")}
    context.report.row(TABLE, name, values)


def check(context: Context, name: str, text: str, *, passed: bool) -> None:
    context.report.check(Check(name=name, text=text, value=float(passed), at_least=1, promise=True))


def reason_to_skip(context: Context, suite: str) -> str | None:
    """Return why a suite is not run, if it is not."""
    if importlib.util.find_spec("pytest") is None:
        return "not run: pytest not found"
    if context.quick and suite not in QUICK_SUITES:
        return "not run: --quick"
    if context.dry and suite not in QUICK_SUITES:
        return "not run: a dry run"
    if context.seconds_left() < LEAST_SECONDS:
        return "not run: out of time"
    return None


def run(context: Context) -> None:
    """Run everything that there is, what takes long last."""
    run_delays(context)
    if is_cuda(context.device):
        run_c_tests(context)
    if importlib.util.find_spec("pytest") is None:
        context.report.note(
            f"{sys.executable} has no pytest: the suites were not run; give its wheels in WHEELS"
        )
    for suite, seconds in SUITES.items():
        reason = reason_to_skip(context, suite)
        if reason is None:
            run_suite(context, suite, seconds)
        else:
            show(context, suite, reason)
