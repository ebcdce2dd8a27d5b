"""Building with the interpreter at hand, what the contract part reads, and the driver's ABI."""

from __future__ import annotations

import ctypes
import importlib.machinery
import importlib.util
import shutil
import zipfile
from typing import TYPE_CHECKING

import pytest

from benchmarks.gpu import driver, machine, prepare
from benchmarks.gpu.configurations import KEPT, LIBRARIES
from benchmarks.gpu.contract import count_errors, read_counts
from benchmarks.gpu.delays import SCENARIOS
from benchmarks.gpu.pool import compile_library
from tests.meta.sources import ROOT

if TYPE_CHECKING:
    from pathlib import Path

JUNIT = """<?xml version="1.0"?>
<testsuites><testsuite name="pytest" errors="1" failures="2" skipped="3" tests="20"/></testsuites>
"""


def test_core_when_built_without_setuptools_then_loads(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(ROOT)
    module = tmp_path / "_lib.abi3.so"
    prepare.build_core(module, tmp_path / "objects")
    name = "swapkit._native._lib"
    loader = importlib.machinery.ExtensionFileLoader(name, str(module))
    spec = importlib.util.spec_from_file_location(name, module, loader=loader)
    assert spec is not None
    loaded = importlib.util.module_from_spec(spec)
    loader.exec_module(loaded)
    assert loaded.lib.SK_OK == 0
    assert prepare.is_current(module)
    assert not prepare.is_current(tmp_path / "nothing.so")


def test_core_when_the_compiler_is_missing_then_says_so(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(ROOT)
    monkeypatch.setenv("CC", "a-compiler-that-is-not-there")
    with pytest.raises(SystemExit, match="no C compiler"):
        prepare.build_core(tmp_path / "x.so", tmp_path)


def test_core_when_cffi_is_missing_then_the_sentence_says_what_to_do(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(prepare, "is_current", lambda _module: False)
    monkeypatch.setattr(importlib.util, "find_spec", lambda _name: None)
    with pytest.raises(prepare.NotPreparedError, match=r"has no cffi.*WHEELS"):
        prepare.prepare_core(tmp_path / "log", build=True)


def test_wheels_when_unpacked_then_their_modules_are_there(tmp_path: Path) -> None:
    wheels, site = tmp_path / "wheels", tmp_path / "site"
    wheels.mkdir()
    with pytest.raises(prepare.NotPreparedError, match="no wheels"):
        prepare.unpack_wheels(wheels, site)
    with zipfile.ZipFile(wheels / "thing-1.0-py3-none-any.whl", "w") as archive:
        archive.writestr("thing/__init__.py", "value = 1\n")
    assert prepare.unpack_wheels(wheels, site) == ["thing-1.0-py3-none-any.whl"]
    assert (site / "thing" / "__init__.py").exists()


def test_allocations_when_called_from_c_then_nanoseconds(tmp_path: Path) -> None:
    import torch

    library = ctypes.CDLL(str(compile_library(tmp_path)))
    library.pair_ns.restype = ctypes.c_double
    library.pair_ns.argtypes = (ctypes.c_size_t, ctypes.c_size_t, ctypes.c_long, ctypes.c_long)
    storage = torch.empty(1024).untyped_storage()
    assert library.pair_ns(storage._cdata, 4096, 100, 4) > 0


def test_suites_when_counted_then_passed_failed_skipped(tmp_path: Path) -> None:
    path = tmp_path / "x.xml"
    path.write_text(JUNIT, encoding="utf-8")
    assert read_counts(path) == {"passed": 14, "failed": 3, "skipped": 3}


def test_memory_checker_when_it_saw_several_processes_then_errors_are_added(
    tmp_path: Path,
) -> None:
    log = tmp_path / "log"
    log.write_text("no device code\n", encoding="utf-8")
    assert count_errors(log) is None
    log.write_text(
        "========= ERROR SUMMARY: 0 errors\n========= ERROR SUMMARY: 1 error\n", encoding="utf-8"
    )
    assert count_errors(log) == 1


def test_structures_when_laid_out_then_as_the_driver_expects() -> None:
    assert ctypes.sizeof(driver.AllocationProperties) == 32
    assert driver.AllocationProperties.location.offset == 8
    assert driver.AllocationProperties.win32_metadata.offset == 16
    assert driver.AllocationProperties.compression.offset == 24
    assert ctypes.sizeof(driver.AccessDescription) == 12


def test_machine_when_described_then_names_versions() -> None:
    found = machine.describe("cpu")
    assert {"python", "torch", "device", "compiler"} <= set(found)
    assert machine.first_line("a-program-that-is-not-there") == ""


def test_names_when_used_then_exist() -> None:
    import torch

    assert any(hasattr(torch.ops.aten, name) for name in KEPT)
    assert set(LIBRARIES) == {"torchtune", "trl"}
    assert {"offload", "budget"} <= set(SCENARIOS)
    assert shutil.which("make") is not None
