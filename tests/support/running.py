"""How the suite runs: the slow tier, garbage of other tests, lost threads.

A pytest plugin, loaded by `tests/conftest.py`. Under pytest-xdist each worker selects and runs
tests, and the controller, which collects none, prints the summary.
"""

from __future__ import annotations

import gc
import importlib.util
import os
import sys
import threading
from collections import Counter
from typing import TYPE_CHECKING, Any

import pytest

if TYPE_CHECKING:
    from collections.abc import Iterator

# Settings of pyproject.toml that a pytest without the plugin, or an older one, does not know.
# `make gpu` runs suites with whatever pytest the machine has.
FOREIGN_SETTINGS = {
    "timeout": importlib.util.find_spec("pytest_timeout") is not None,
    "timeout_method": importlib.util.find_spec("pytest_timeout") is not None,
    "faulthandler_exit_on_timeout": pytest.version_tuple >= (9, 0),
}
GRACE_SECONDS = 10.0  # for a thread that is about to end when its test has ended
NOT_RUN = pytest.StashKey[dict[str, int]]()  # by file
STATUS = pytest.StashKey[int]()


def pytest_addoption(parser: pytest.Parser) -> None:
    for name, is_known in FOREIGN_SETTINGS.items():
        if not is_known:
            parser.addini(name, "belongs to a plugin that is not installed")


def pytest_configure(config: pytest.Config) -> None:
    config.stash[NOT_RUN] = {}


# ---- the slow tier -------------------------------------------------------------------------------


def is_asked_for_by_name(config: pytest.Config, item: pytest.Item) -> bool:
    return any(item.nodeid.startswith(each) for each in config.args if "::" in each)


@pytest.hookimpl(trylast=True)
def pytest_collection_modifyitems(config: pytest.Config, items: list[pytest.Item]) -> None:
    """Leave slow tests out, unless -m is given or the test is named; note which."""
    if config.option.markexpr:
        return
    left_out = [
        item
        for item in items
        if item.get_closest_marker("slow") and not is_asked_for_by_name(config, item)
    ]
    if left_out:
        config.hook.pytest_deselected(items=left_out)
        files = Counter(item.nodeid.partition("::")[0] for item in left_out)
        config.stash[NOT_RUN] = dict(files)
        items[:] = [item for item in items if item not in set(left_out)]


def pytest_sessionfinish(session: pytest.Session, exitstatus: int) -> None:
    session.config.stash[STATUS] = int(exitstatus)
    output: dict[str, Any] | None = getattr(session.config, "workeroutput", None)
    if output is not None:
        output["not_run"] = session.config.stash[NOT_RUN]


@pytest.hookimpl(optionalhook=True)
def pytest_testnodedown(node: Any) -> None:
    """Take over what a worker left out. All workers collect the same tests."""
    not_run = getattr(node, "workeroutput", {}).get("not_run")
    if not_run is not None:
        node.config.stash[NOT_RUN] = not_run


def pytest_terminal_summary(terminalreporter: pytest.TerminalReporter) -> None:
    """Print how many tests were skipped, by reason, and what the slow tier would run."""
    reasons: Counter[str] = Counter()
    for report in terminalreporter.stats.get("skipped", []):
        _, _, text = report.longrepr
        reasons[text.removeprefix("Skipped: ")] += 1
    for reason, count in sorted(reasons.items()):
        terminalreporter.write_line(f"skipped {count}: {reason}")
    not_run = terminalreporter.config.stash[NOT_RUN]
    if not_run:
        files = ", ".join(f"{count} of {file}" for file, count in sorted(not_run.items()))
        terminalreporter.write_line(
            f"not run, slow ({sum(not_run.values())}; make test-slow): {files}"
        )


# ---- garbage -------------------------------------------------------------------------------------
# A collection in the middle of a test would free what earlier tests left in cycles: memory of the
# pool, marks, hooks. So what is left is freed before each test; and all that lives on, modules
# above all, is frozen, which makes a collection cost microseconds instead of a tenth of a second.


def collect_and_freeze() -> None:
    gc.collect()
    gc.freeze()


def pytest_collection_finish() -> None:
    collect_and_freeze()


@pytest.fixture(autouse=True, scope="module")
def _few_objects() -> None:
    """Freeze what the module before imported, too."""
    collect_and_freeze()


@pytest.fixture(autouse=True)
def _no_garbage_of_others() -> None:
    gc.collect()


# ---- lost threads --------------------------------------------------------------------------------


def list_blocking_threads() -> set[threading.Thread]:
    """Return the threads that the interpreter waits for when it exits."""
    return {
        thread
        for thread in threading.enumerate()
        if not thread.daemon and thread is not threading.main_thread()
    }


@pytest.fixture(autouse=True)
def _no_thread_left_behind() -> Iterator[None]:
    """A thread that outlives its test fails the test, which is named; not the one after it."""
    before = list_blocking_threads()
    yield
    lost = list_blocking_threads() - before
    for thread in lost:
        thread.join(GRACE_SECONDS)
    names = sorted(thread.name for thread in lost if thread.is_alive())
    if names:
        pytest.fail(f"threads outlive the test: {', '.join(names)}")


@pytest.hookimpl(trylast=True)
def pytest_unconfigure(config: pytest.Config) -> None:
    """End the process though a thread is lost: the interpreter would wait for it for ever."""
    lost = [thread for thread in list_blocking_threads() if thread.is_alive()]
    is_worker = hasattr(config, "workerinput")  # which its controller ends
    if lost and not is_worker:
        names = ", ".join(sorted(thread.name for thread in lost))
        sys.stderr.write(f"threads still run, the process ends without them: {names}\n")
        sys.stdout.flush()
        sys.stderr.flush()
        os._exit(config.stash.get(STATUS, 1))
