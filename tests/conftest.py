"""What every test shares: markers that need hardware or a network, and the pool as it was."""

from __future__ import annotations

import contextlib
import gc
import os
import sys
import tempfile
from typing import TYPE_CHECKING

import pytest

from tests.support import cache_in, installed

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator
    from pathlib import Path

    from swapkit._runtime.allocators.installed_pool import Installation

# Before torch is loaded: the tensors of tests are small, and threads that share them out only wait.
os.environ.setdefault("OMP_NUM_THREADS", "1")

pytest_plugins = ["tests.support.tiers", "tests.support.leftovers", "tests.golden.summary"]


def pytest_addoption(parser: pytest.Parser) -> None:
    parser.addoption("--download", action="store_true", help="run tests that fetch something")


def has_gpu() -> bool:
    import torch

    return torch.cuda.is_available()


def has_npu() -> bool:
    import torch

    return bool(getattr(getattr(torch, "npu", None), "is_available", bool)())


def has_chromium() -> bool:
    from tests.support.chromium import why_no_chromium

    return not why_no_chromium()


def is_pool_installed() -> bool:
    allocators = sys.modules.get("swapkit._runtime.allocators.installation")
    cpu = None if allocators is None else allocators._cpu
    return cpu is not None and cpu.active


@contextlib.contextmanager
def keep_pool() -> Iterator[None]:
    """Take the pool away again if it is installed inside."""
    was_installed = is_pool_installed()
    yield
    if is_pool_installed() and not was_installed:
        import swapkit

        swapkit.uninstall()


@pytest.fixture(autouse=True, scope="module")
def _pool_as_before_module() -> Iterator[None]:
    """A fixture of a module may install the pool."""
    with keep_pool():
        yield


@pytest.fixture(autouse=True)
def _pool_as_before() -> Iterator[None]:
    """A session installs the pool where that was not done."""
    with keep_pool():
        yield


@pytest.fixture(autouse=True)
def _plans_at_once() -> Iterator[None]:
    """Steps are counted until a plan is tried; how long planning takes must not matter."""
    from swapkit.planning.beside import at_once

    with at_once():
        yield


@pytest.fixture
def installation() -> Iterator[Installation]:
    """The pool below torch; as it was before when the test ends."""
    with installed() as installation:
        yield installation


@pytest.fixture
def user_cache(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """The folder of an empty cache, which is not made yet: for this test and its children."""
    for name, value in cache_in(tmp_path).items():
        monkeypatch.setenv(name, value)
    monkeypatch.setattr(tempfile, "tempdir", None)  # what was read before
    return tmp_path / "swapkit"


@pytest.fixture
def late_modes(monkeypatch: pytest.MonkeyPatch) -> None:
    """Let dispatch modes be late, although other tests have compiled code."""
    import torch

    from swapkit._runtime.torch_compat import dispatch_modes

    if torch.__version__ < "2.13":
        pytest.skip("modes are late from torch 2.13 on")
    monkeypatch.setattr(dispatch_modes, "may_compile", lambda: False)


@pytest.fixture
def no_collector() -> Iterator[None]:
    """Let only reference counts free anything."""
    gc.collect()
    gc.disable()
    yield
    gc.enable()


def pytest_runtest_setup(item: pytest.Item) -> None:
    needs: dict[str, tuple[Callable[[], bool], str]] = {
        "gpu": (has_gpu, "no NVIDIA GPU"),
        "npu": (has_npu, "no Ascend NPU"),
        "chromium": (has_chromium, "no Chromium with chromedriver and selenium"),
        "download": (lambda: bool(item.config.getoption("--download")), "without --download"),
    }
    for marker, (available, reason) in needs.items():
        if item.get_closest_marker(marker) and not available():
            pytest.skip(reason)


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    for item in items:
        for marker in item.iter_markers("promise"):
            if len(marker.args) != 1 or not isinstance(marker.args[0], str):
                message = f"{item.nodeid}: write @pytest.mark.promise('A3')"
                raise pytest.UsageError(message)
