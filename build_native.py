"""Build description of the native core: `swapkit._native._lib`, a cffi module in API mode.

The public headers are the only source of the bindings: preprocessed with SK_CDEF they are what cffi
parses, and the compiler checks the same files again. setuptools runs this file through
`cffi_modules` (see setup.py); every path given to it is relative to the project, so that a source
distribution builds anywhere. SWAPKIT_DEBUG=1 builds with every assertion of the core.
"""

from __future__ import annotations

import os
import shlex
import subprocess
import sysconfig
from pathlib import Path

from cffi import FFI

ROOT = Path(__file__).resolve().parent
INCLUDE = Path("swapkit/_native/include")
SOURCE = Path("swapkit/_native/src")
HEADERS = (
    "swapkit.h",
    "swapkit_devices.h",
    "swapkit_entry.h",
    "swapkit_plan.h",
    "swapkit_pool.h",
    "swapkit_sched.h",
    "swapkit_testing.h",
)

INCLUDES = "".join(f'#include "{header}"\n' for header in HEADERS)

RELEASE_FLAGS = ["-O2"]
DEBUG_FLAGS = ["-O1", "-g", "-DSK_DEBUG"]


def preprocess_header() -> str:
    """Return the public headers as plain declarations, which is what cffi can parse."""
    compiler = shlex.split(os.environ.get("CC", "cc"))
    command = [*compiler, "-E", "-P", "-DSK_CDEF", f"-I{INCLUDE}", "-x", "c", "-"]
    try:
        done = subprocess.run(
            command, cwd=ROOT, check=True, capture_output=True, text=True, input=INCLUDES
        )
    except FileNotFoundError:
        message = f"swapkit: no C compiler: {compiler[0]!r} not found; install gcc or set CC"
        raise SystemExit(message) from None
    except subprocess.CalledProcessError as error:
        raise SystemExit(f"swapkit: {shlex.join(command)} failed:\n{error.stderr}") from None
    return done.stdout


def require_python_headers() -> None:
    """Stop with a sentence instead of a compiler's page if Python.h is not installed."""
    header = Path(sysconfig.get_paths()["include"]) / "Python.h"
    if not header.exists():
        raise SystemExit(f"swapkit: {header} not found; install Python's headers (python3-dev)")


def list_files(pattern: str) -> list[str]:
    """Return the native core's files that match, relative to the project, in a fixed order."""
    return sorted(str(path.relative_to(ROOT)) for path in (ROOT / SOURCE).rglob(pattern))


def describe_module() -> FFI:
    """Return the cffi builder that setuptools asks for."""
    debug = os.environ.get("SWAPKIT_DEBUG", "") not in {"", "0"}
    ffi = FFI()
    ffi.cdef(preprocess_header())
    ffi.set_source(
        "swapkit._native._lib",
        INCLUDES,
        sources=list_files("*.c"),
        depends=[*(str(INCLUDE / header) for header in HEADERS), *list_files("*.h")],
        include_dirs=[str(INCLUDE), str(SOURCE)],
        define_macros=[("_GNU_SOURCE", None)],
        extra_compile_args=[
            "-std=c11",
            "-fvisibility=hidden",
            "-pthread",
            "-Wall",
            "-Wextra",
            *(DEBUG_FLAGS if debug else RELEASE_FLAGS),
        ],
        extra_link_args=["-pthread"],
    )
    return ffi


def make_builder() -> FFI:
    """Check what building needs, then describe the module; named in setup.py."""
    require_python_headers()
    return describe_module()
