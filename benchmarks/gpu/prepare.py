"""Making the project usable by the interpreter at hand, without downloads and without a venv.

    python -m benchmarks.gpu.prepare

compiles the native core in place, beside its sources, with gcc and cffi alone: neither pip nor
setuptools is needed. Wheels are unpacked into a folder of their own that goes on PYTHONPATH.
"""

from __future__ import annotations

import importlib.util
import os
import shlex
import shutil
import subprocess
import sys
import sysconfig
import zipfile
from concurrent.futures import ThreadPoolExecutor
from typing import TYPE_CHECKING

from benchmarks.gpu.context import ROOT
from benchmarks.gpu.process import last_line, python, run_process

if TYPE_CHECKING:
    from pathlib import Path

MODULE = ROOT / "swapkit" / "_native" / "_lib.abi3.so"
NATIVE = ROOT / "swapkit" / "_native"
BUILD_SECONDS = 240
LOAD = "import swapkit._native.lib"
WARM_UP = "import sys, swapkit; swapkit.install(device=sys.argv[1])"


class NotPreparedError(Exception):
    """Something that is needed is missing; the text says what to do."""


def unpack_wheels(wheels: Path, site: Path) -> list[str]:
    """Unpack every wheel of a folder; return their names.

    Raises:
        NotPreparedError: the folder has none.
    """
    found = sorted(wheels.glob("*.whl"))
    if not found:
        raise NotPreparedError(f"WHEELS={wheels}: the folder has no wheels")
    site.mkdir(parents=True, exist_ok=True)
    for wheel in found:
        with zipfile.ZipFile(wheel) as archive:
            archive.extractall(site)
    return [wheel.name for wheel in found]


def prepare_core(log: Path, *, build: bool) -> None:
    """Build the core unless a current one is there or none is to be built, and load it.

    Raises:
        NotPreparedError: that is not possible.
    """
    if build and not is_current(MODULE):
        if importlib.util.find_spec("cffi") is None:
            raise NotPreparedError(
                f"{sys.executable} has no cffi, which the native core needs. Install it, or put "
                "its wheel for this Python into a folder and set WHEELS=folder"
            )
        command = [sys.executable, "-m", "benchmarks.gpu.prepare"]
        if not run_process(command, seconds=BUILD_SECONDS, log=log, cwd=ROOT).ok:
            raise NotPreparedError(f"the native core could not be built: {last_line(log)}")
    done = run_process(python("-c", LOAD), seconds=60, log=log, cwd=ROOT)
    if not done.ok:
        raise NotPreparedError(f"the native core could not be loaded: {last_line(log)}")


def warm_up(device: str, log: Path) -> str | None:
    """Install once, which compiles the shim into the user's cache; return what went wrong."""
    command = python("-c", WARM_UP, device)
    done = run_process(command, seconds=BUILD_SECONDS, log=log, cwd=ROOT)
    return None if done.ok else f"swapkit.install(device={device!r}) failed: {done.describe()}"


def is_current(module: Path) -> bool:
    """Return whether the compiled core is there and newer than everything it is made of."""
    if not (module.exists() and module.with_name("libswapkit_test.so").exists()):
        return False
    sources = [*NATIVE.rglob("*.c"), *NATIVE.rglob("*.h"), ROOT / "build_native.py"]
    sources += (ROOT / "tests/c/instruments").iterdir()
    return module.stat().st_mtime >= max(source.stat().st_mtime for source in sources)


def build_core(module: Path, folder: Path) -> None:
    """Compile the core; `folder` gets what lies in between.

    Raises:
        SystemExit: a tool is missing or fails; the message says which.
    """
    os.chdir(ROOT)
    from build_native import (
        RELEASE_FLAGS,
        build_instruments,
        build_library,
        list_files,
        make_builder,
    )

    compiler = shlex.split(os.environ.get("CC", "gcc"))
    if shutil.which(compiler[0]) is None:
        raise SystemExit(f"no C compiler: {compiler[0]!r} was not found; install gcc or set CC")
    builder = make_builder()
    folder.mkdir(parents=True, exist_ok=True)
    bindings = folder / "_lib.c"
    builder.emit_c_code(str(bindings))
    flags = ["-std=c11", "-D_GNU_SOURCE", "-fPIC", "-fvisibility=hidden", "-pthread"]
    includes = ["swapkit/_native/include", "swapkit/_native/src", sysconfig.get_paths()["include"]]
    flags += [*RELEASE_FLAGS, *(f"-I{include}" for include in includes)]
    sources = {str(bindings): folder / "_lib.o"}
    sources |= {name: folder / f"{name.replace('/', '-')}.o" for name in list_files("*.c")}

    def compile_one(source: str) -> None:
        call([*compiler, *flags, "-c", source, "-o", str(sources[source])])

    with ThreadPoolExecutor(os.cpu_count()) as pool:
        list(pool.map(compile_one, sources))
    temporary = module.with_suffix(f".{os.getpid()}")
    libraries = ["-pthread", "-Wl,-Bsymbolic-functions", "-ldl", "-lm"]
    call([*compiler, "-shared", *map(str, sources.values()), *libraries, "-o", str(temporary)])
    temporary.replace(module)
    build_library(module.parent)
    build_instruments(module)


def call(command: list[str]) -> None:
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    if done.returncode != 0:
        sys.stderr.write(done.stderr)
        raise SystemExit(f"command failed: {shlex.join(command)}")


if __name__ == "__main__":
    build_core(MODULE, ROOT / "build" / "gpu" / "core")
