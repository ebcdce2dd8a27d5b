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
    from collections.abc import Iterable
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
END_SECONDS = 4.0  # left when a part's time is up, to end what runs
FIRST_SCENARIOS = ("budget", "offload")
NO_TIME = "not run: out of time"


def run_suite(context: Context, suite: str, most_seconds: float) -> None:
    """Run a folder of tests on the device."""
    folder = ROOT / "tests" / suite
    if not folder.is_dir():
        show(context, suite, "not run: the suite does not exist")
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
    limit = seconds_for(context, most_seconds)
    done = run_process(command, seconds=limit, log=log, cwd=ROOT, environment=environment)
    counts = read_counts(results) if results.exists() else {}
    outcome = "passed" if done.ok else done.describe()
    show(context, suite, outcome, **counts)
    text = f"tests/{suite}: passes"
    check(context, suite, text, passed=has_passed(done, limit, most_seconds))


def seconds_for(context: Context, most_seconds: float) -> float:
    """Return for how long a process may run: so that the part ends in time.

    In a dry run it may have all of that: what simulates the device is slow, and slower beside other
    programs.
    """
    left = context.seconds_left() - END_SECONDS
    return left if context.dry else min(most_seconds, left)


def has_passed(done: Finished, limit: float, most_seconds: float) -> bool | None:
    """Return whether a process ended well; None: the part's time was up before it had its own."""
    return None if done.timed_out and limit < most_seconds else done.ok


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
    limit = seconds_for(context, C_SECONDS)
    done = run_logged(context, "c_tests", command, seconds=limit)
    show(context, "c_tests", "passed" if done.ok else done.describe())
    passed = has_passed(done, limit, C_SECONDS)
    check(context, "c_tests", "tests/c on the device: passes", passed=passed)
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


def run_delays(context: Context, scenarios: Iterable[str]) -> None:
    """Run programs whose kernels are late, so that a wait that is missing shows."""
    for scenario in scenarios:
        name = f"delay_{scenario}"
        if context.seconds_left() < LEAST_SECONDS:
            show(context, name, NO_TIME)
            continue
        size = ["tiny"] if context.dry else []
        command = python("-m", "benchmarks.gpu.delays", scenario, context.device, *size)
        limit = seconds_for(context, DELAY_SECONDS)
        done = run_logged(context, name, command, seconds=limit)
        outcome = "passed" if done.ok else done.describe()
        show(context, name, outcome)
        text = f"delayed kernels, {scenario}: the same bits"
        check(context, name, text, passed=has_passed(done, limit, DELAY_SECONDS))


def run_logged(
    context: Context, name: str, command: list[str], seconds: float = C_SECONDS
) -> Finished:
    log = context.output / f"{name}.log"
    log.unlink(missing_ok=True)
    limit = seconds_for(context, seconds)
    # Of `make gpu` above; and the driver that there is, not the simulated one.
    environment = {"MAKEFLAGS": "", "MAKELEVEL": "", "SWAPKIT_CUDA_DRIVER": LIBRARY}
    return run_process(command, seconds=limit, log=log, cwd=ROOT, environment=environment)


def show(context: Context, name: str, outcome: str, **counts: int | None) -> None:
    values: dict[str, Value] = {"outcome": outcome}
    values |= {key: counts.get(key) for key in ("passed", "failed", "skipped")}
    context.report.row(TABLE, name, values)


def check(context: Context, name: str, text: str, *, passed: bool | None) -> None:
    value = None if passed is None else float(passed)
    context.report.check(Check(name=name, text=text, value=value, at_least=1, promise=True))


def reason_to_skip(context: Context, suite: str) -> str | None:
    """Return why a suite is not run, if it is not."""
    if importlib.util.find_spec("pytest") is None:
        return "not run: pytest not found"
    if context.quick and suite not in QUICK_SUITES:
        return "not run: --quick"
    if context.dry and suite not in QUICK_SUITES:
        return "not run: a dry run"
    if context.seconds_left() < LEAST_SECONDS:
        return NO_TIME
    return None


def run(context: Context) -> None:
    """Run everything that there is, what takes long last; or what is worth most at first."""
    if context.first:
        run_suites(context, QUICK_SUITES)
        run_delays(context, FIRST_SCENARIOS)
        return
    run_delays(context, SCENARIOS)
    if is_cuda(context.device):
        run_c_tests(context)
    run_suites(context, SUITES)


def run_suites(context: Context, suites: Iterable[str]) -> None:
    """Run folders of tests on the device, as far as that is possible."""
    if importlib.util.find_spec("pytest") is None:
        context.report.note(
            f"{sys.executable} has no pytest, so no suite ran; pass its wheels in WHEELS"
        )
    for suite in suites:
        reason = reason_to_skip(context, suite)
        if reason is None:
            run_suite(context, suite, SUITES[suite])
        else:
            show(context, suite, reason)
