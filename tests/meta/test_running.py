"""The suite always ends, and says what it left out: `tests.support.tiers` and `leftovers`."""

from __future__ import annotations

import os
import re
import subprocess
import sys
import textwrap
from typing import TYPE_CHECKING

import pytest

from tests.meta.sources import ROOT

if TYPE_CHECKING:
    from pathlib import Path

XDIST = ("-n", "1")
SHORT_LIMITS = ("-o", "timeout=2", "-o", "faulthandler_timeout=5")  # seconds
HANGS = {
    "Python": "threading.Event().wait()",
    # No signal handler of Python runs while a call of C waits for a lock that it holds.
    "C": """
        c = ctypes.CDLL(None)
        mutex = ctypes.create_string_buffer(64)
        c.pthread_mutex_lock(mutex)
        c.pthread_mutex_lock(mutex)
    """,
}


def run_suite(folder: Path, code: str, *options: str) -> tuple[int, str]:
    """Run tests with the project's settings; return the status and the output."""
    (folder / "test_example.py").write_text(
        "import ctypes, threading, pytest\n" + textwrap.dedent(code), encoding="utf-8"
    )
    done = subprocess.run(
        [
            *(
                sys.executable,
                "-m",
                "pytest",
                "-c",
                str(ROOT / "pyproject.toml"),
                f"--rootdir={folder}",
            ),
            *(
                "-p",
                "tests.support.tiers",
                "-p",
                "tests.support.leftovers",
                "-p",
                "no:cacheprovider",
            ),
            *(*options, str(folder)),
        ],
        cwd=ROOT,
        env={**os.environ, "PYTHONPATH": str(ROOT)},
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
        check=False,
        timeout=60,
    )
    return done.returncode, done.stdout


def write_hanging_test(hang: str) -> str:
    body = textwrap.indent(textwrap.dedent(HANGS[hang]).strip(), "    ")
    return f"def test_hangs():\n{body}\n\ndef test_next():\n    pass\n"


@pytest.mark.parametrize("hang", HANGS)
def test_suite_when_a_test_hangs_then_it_fails_by_name_and_the_next_runs(
    tmp_path: Path, hang: str
) -> None:
    status, output = run_suite(tmp_path, write_hanging_test(hang), *XDIST, *SHORT_LIMITS)
    assert status == 1, output
    assert re.search(r"^FAILED .*test_example.py::test_hangs", output, re.MULTILINE), output
    assert "1 failed, 1 passed" in output


def test_suite_when_a_thread_outlives_its_test_then_that_test_fails_and_the_process_ends(
    tmp_path: Path,
) -> None:
    status, output = run_suite(
        tmp_path,
        """
        from tests.support import leftovers

        leftovers.GRACE_SECONDS = 0.1

        def test_loses_a_thread():
            threading.Thread(target=threading.Event().wait, name="lost").start()

        def test_next():
            pass
        """,
    )
    assert status == 1, output
    assert "threads outlive the test: lost" in output
    assert "2 passed, 1 error" in output
    assert output.endswith("threads still run, the process ends without them: lost\n")


def test_suite_when_a_thread_of_a_test_raises_then_the_test_fails(tmp_path: Path) -> None:
    status, output = run_suite(
        tmp_path,
        """
        def test_raises_on_a_thread():
            thread = threading.Thread(target=lambda: 1 / 0)
            thread.start()
            thread.join()
        """,
    )
    assert status == 1, output
    assert "ZeroDivisionError" in output
    assert "1 failed" in output


def test_suite_when_a_test_leaves_garbage_then_it_is_gone_before_the_next(tmp_path: Path) -> None:
    status, output = run_suite(
        tmp_path,
        """
        import gc, weakref

        class Node:
            pass

        found = []

        def test_leaves_a_cycle():
            gc.disable()
            node = Node()
            node.itself = node
            found.append(weakref.ref(node))

        def test_next():
            assert found[0]() is None
            gc.enable()
        """,
    )
    assert status == 0, output


SLOW = """
    def test_quick():
        pass

    @pytest.mark.slow
    def test_slow():
        pass
"""


@pytest.mark.parametrize("options", [(), XDIST], ids=["alone", "xdist"])
def test_suite_when_a_test_is_slow_then_it_is_left_out_and_named(
    tmp_path: Path, options: tuple[str, ...]
) -> None:
    status, output = run_suite(tmp_path, SLOW, *options)
    assert status == 0, output
    assert "not run 1 (slow, make test-slow): 1 of test_example.py" in output
    assert re.search(r"\b1 passed", output)


def test_suite_when_slow_tests_are_asked_for_then_they_run(tmp_path: Path) -> None:
    status, output = run_suite(tmp_path, SLOW, "-m", "slow")
    assert status == 0, output
    assert "test_slow" not in output
    assert "1 passed, 1 deselected" in output
    assert "not run" not in output


@pytest.mark.parametrize(
    ("options", "names"),
    [((), set()), (("--beside",), {"test_quick"}), (("-m", "slow"), {"test_slow"})],
)
def test_suite_when_it_runs_beside_then_its_slow_tests_run_with_the_others(
    tmp_path: Path, options: tuple[str, ...], names: set[str]
) -> None:
    (tmp_path / "plugin.py").write_text(
        "from tests.support import tiers\ntiers.BESIDE = ('test_example.py',)\n", encoding="utf-8"
    )
    options = ("-o", f"pythonpath={tmp_path}", "-p", "plugin", "-rA", *options)
    _, output = run_suite(tmp_path, SLOW, *options)
    assert set(re.findall(r"^PASSED .*::(\w+)", output, re.MULTILINE)) == names, output


@pytest.mark.parametrize("options", [(), XDIST], ids=["alone", "xdist"])
def test_suite_when_it_has_to_be_fast_then_costly_files_are_left_out_and_named(
    tmp_path: Path, options: tuple[str, ...]
) -> None:
    costs = tmp_path / "costs.json"
    costs.write_text('{"test_example.py": 1000.0, "test_gone.py": 1.0}', encoding="utf-8")
    (tmp_path / "test_other.py").write_text("def test_it():\n    pass\n", encoding="utf-8")
    plugin = f"""
        import pathlib
        from tests.support import tiers
        tiers.COSTS = pathlib.Path({str(costs)!r})
    """
    (tmp_path / "plugin.py").write_text(textwrap.dedent(plugin), encoding="utf-8")
    options = ("-o", f"pythonpath={tmp_path}", "-p", "plugin", *options)
    status, output = run_suite(tmp_path, SLOW, "--fast", *options)
    assert status == 0, output
    assert "not run 1 (costly, make test): 1 of test_example.py" in output
    assert "not run 1 (slow, make test-slow): 1 of test_example.py" in output
    assert re.search(r"\b1 passed", output)


def test_sanitised_suite_when_it_names_files_then_they_are_there() -> None:
    done = subprocess.run(
        ["make", "-pnq"], cwd=ROOT, capture_output=True, text=True, check=False, timeout=60
    )
    (listed,) = re.findall(r"^SHIM_TESTS := (.*)$", done.stdout, re.MULTILINE)
    names = listed.split()
    assert len(names) > 20
    assert [name for name in names if not (ROOT / name).is_file()] == []
