"""Which tests run, in which order, and what the summary says of the others: a pytest plugin.

    slow tier   tests marked `slow`, which run only with `-m slow` or when they are named
    --beside    runs the suites of `BESIDE` alone; otherwise they run only when they are named
    --fast      leaves out files that cost more than FAST_SECONDS, by `tests/costs.json`
    --record-costs   writes that file: seconds of CPU time by file, with those of child processes

Under pytest-xdist the costliest files come first, so that no worker ends long after the others.
Each worker selects and runs tests; the controller, which collects none, prints the summary.
"""

from __future__ import annotations

import importlib.util
import json
import math
import os
from collections import Counter
from pathlib import Path
from typing import TYPE_CHECKING, Any, TypeAlias

import pytest

from tests.support import warm

if TYPE_CHECKING:
    from collections.abc import Iterator

# Suites of documents, packages, commands, benchmarks, C and a browser, of other libraries and of
# torch's databases: a change of the library seldom breaks one of these alone.
BESIDE = (
    "tests/browser/",
    "tests/conformance/test_databases.py",
    "tests/conformance/test_effects.py",
    "tests/integration/test_demo.py",
    "tests/integration/test_run_command.py",
    "tests/integration/test_run_files.py",
    "tests/integrations/",
    "tests/meta/test_c_suite.py",
    "tests/meta/test_docs.py",
    "tests/meta/test_packaging.py",
    "tests/meta/test_running.py",
    "tests/meta/test_site.py",
    "tests/tutorials/",
    "tests/unit/benchmarks_",
)
COSTS = Path(__file__).parent.parent / "costs.json"
FAST_SECONDS = 5.0
# Settings of pyproject.toml that a pytest without the plugin, or an older one, does not know.
# `make gpu` runs suites with whatever pytest the machine has.
FOREIGN_SETTINGS = {
    "timeout": importlib.util.find_spec("pytest_timeout") is not None,
    "timeout_method": importlib.util.find_spec("pytest_timeout") is not None,
    "faulthandler_exit_on_timeout": pytest.version_tuple >= (9, 0),
}

Counts: TypeAlias = dict[str, int]  # of tests, by file
LEFT_OUT = pytest.StashKey[dict[str, Counts]]()  # by the reason
SPENT = pytest.StashKey[dict[str, float]]()  # seconds, by file


def pytest_addoption(parser: pytest.Parser) -> None:
    parser.addoption("--beside", action="store_true", help="run the suites beside the tests")
    parser.addoption("--fast", action="store_true", help="leave costly files out")
    parser.addoption("--record-costs", action="store_true", help=f"write {COSTS.name}")
    for name, is_known in FOREIGN_SETTINGS.items():
        if not is_known:
            parser.addini(name, "belongs to a plugin that is not installed")


def pytest_configure(config: pytest.Config) -> None:
    config.stash[LEFT_OUT] = {}
    config.stash[SPENT] = {}


def read_costs() -> dict[str, float]:
    """Return seconds by file; none where they were not recorded."""
    if not COSTS.is_file():
        return {}
    costs: dict[str, float] = json.loads(COSTS.read_text(encoding="utf-8"))
    return costs


def file_of(item: pytest.Item) -> str:
    return item.nodeid.partition("::")[0]


# ---- what is left out ----------------------------------------------------------------------------


@pytest.hookimpl(trylast=True)
def pytest_collection_modifyitems(config: pytest.Config, items: list[pytest.Item]) -> None:
    for item in items:
        if " at 0x" in item.nodeid:  # workers would not agree on the names of tests
            raise pytest.UsageError(f"{item.nodeid}: give `ids` that hold no address")
    costs = read_costs()
    leave_beside(config, items)
    named = [each for each in config.args if "::" in each]
    if not config.option.markexpr:
        slow = [item for item in items if item.get_closest_marker("slow") is not None]
        leave_out(config, items, "slow, make test-slow", slow, named)
    if config.option.fast:
        costly = [item for item in items if costs.get(file_of(item), 0.0) > FAST_SECONDS]
        leave_out(config, items, "costly, make test", costly, named)
    is_worker = hasattr(config, "workerinput")
    if is_worker and not config.pluginmanager.hasplugin("randomly"):
        # Files of unknown cost come first. Files stay together: sorting is stable.
        items.sort(key=lambda item: -costs.get(file_of(item), math.inf))


def leave_beside(config: pytest.Config, items: list[pytest.Item]) -> None:
    """Take out the suites of `BESIDE`, unless they are named; or all others."""
    beside = [item for item in items if item.nodeid.startswith(BESIDE)]
    if config.option.beside:
        items[:] = beside
    elif not config.option.markexpr:  # `-m slow` takes those of all suites
        named = [each for each in config.args if "::" in each or each.endswith(".py")]
        leave_out(config, items, "beside, make test-beside", beside, named)


def leave_out(
    config: pytest.Config,
    items: list[pytest.Item],
    reason: str,
    unwanted: list[pytest.Item],
    named: list[str],
) -> None:
    """Take tests out, unless they are named on the command line, and note how many."""
    gone = {item for item in unwanted if not any(item.nodeid.startswith(each) for each in named)}
    if gone:
        config.hook.pytest_deselected(items=list(gone))
        config.stash[LEFT_OUT][reason] = dict(Counter(map(file_of, gone)))
        items[:] = [item for item in items if item not in gone]


# ---- costs ---------------------------------------------------------------------------------------


def cpu_seconds() -> float:
    times = os.times()
    own = times.user + times.system + times.children_user + times.children_system
    return own + warm.cpu_seconds


@pytest.hookimpl(wrapper=True, tryfirst=True)
def pytest_runtest_protocol(item: pytest.Item) -> Iterator[None]:
    before = cpu_seconds()
    try:
        return (yield)
    finally:
        spent = item.config.stash[SPENT]
        spent[file_of(item)] = spent.get(file_of(item), 0.0) + cpu_seconds() - before


def write_costs(spent: dict[str, float]) -> None:
    """Write the costs of the files that ran; those of others stay, while the files are there."""
    costs = {**read_costs(), **{file: round(seconds, 1) for file, seconds in spent.items()}}
    root = COSTS.parent.parent
    kept = {file: seconds for file, seconds in sorted(costs.items()) if (root / file).is_file()}
    COSTS.write_text(json.dumps(kept, indent=2) + "\n", encoding="utf-8")


# ---- the summary ---------------------------------------------------------------------------------


@pytest.hookimpl(tryfirst=True)
def pytest_sessionfinish(session: pytest.Session) -> None:
    config = session.config
    output: dict[str, Any] | None = getattr(config, "workeroutput", None)
    if output is not None:
        output["left_out"], output["spent"] = config.stash[LEFT_OUT], config.stash[SPENT]


@pytest.hookimpl(optionalhook=True)
def pytest_testnodedown(node: Any) -> None:
    """Take over what a worker notes. All workers collect the same tests, each runs some."""
    output: dict[str, Any] = getattr(node, "workeroutput", {})
    node.config.stash[LEFT_OUT].update(output.get("left_out", {}))
    node.config.stash[SPENT].update(output.get("spent", {}))


def pytest_terminal_summary(
    terminalreporter: pytest.TerminalReporter, config: pytest.Config
) -> None:
    """Print how many tests were skipped, by reason, and which were left out."""
    reasons: Counter[str] = Counter()
    for report in terminalreporter.stats.get("skipped", []):
        _, _, text = report.longrepr
        reasons[text.removeprefix("Skipped: ")] += 1
    for reason, count in sorted(reasons.items()):
        terminalreporter.write_line(f"skipped {count}: {reason}")
    for reason, counts in sorted(config.stash[LEFT_OUT].items()):
        files = ", ".join(f"{count} of {file}" for file, count in sorted(counts.items()))
        terminalreporter.write_line(f"not run {sum(counts.values())} ({reason}): {files}")
    if config.option.record_costs:
        write_costs(config.stash[SPENT])
