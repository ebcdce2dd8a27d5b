"""Build description of the native core: `swapkit._native._lib`, a cffi module in API mode.

The public headers are the only source of the bindings: preprocessed with SK_CDEF they are what cffi
parses, and the compiler checks the same files again. setuptools runs this file through
`cffi_modules` (see setup.py); every path given to it is relative to the project, so that a source
distribution builds anywhere. SWAPKIT_DEBUG=1 builds with every assertion of the core.

The hooks of operators are a library of their own, which setup.py builds with `build_library`; in a
checkout it also builds the instruments of tests, with `build_instruments`.
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
HOOKS = SOURCE / "hooks"
HEADERS = (  # of the core; those of the hooks are of no concern to cffi
    "swapkit.h",
    "swapkit_devices.h",
    "swapkit_entry.h",
    "swapkit_layout.h",
    "swapkit_lives.h",
    "swapkit_plan.h",
    "swapkit_pool.h",
    "swapkit_sched.h",
)

LIBRARY = "libswapkit.so"
INSTRUMENTS = Path("tests/c/instruments")  # absent from a source distribution
TEST_LIBRARY = "libswapkit_test.so"

INCLUDES = "".join(f'#include "{header}"\n' for header in HEADERS)

RELEASE_FLAGS = ["-O2"]
DEBUG_FLAGS = ["-O1", "-g", "-DSK_DEBUG"]
FLAG_VARIABLES = ("LDFLAGS", "CFLAGS", "CPPFLAGS")


def preprocess_header(includes: str = INCLUDES) -> str:
    """Return the public headers as plain declarations, which is what cffi can parse."""
    compiler = shlex.split(os.environ.get("CC", "cc"))
    command = [*compiler, "-E", "-P", "-DSK_CDEF", f"-I{INCLUDE}", "-x", "c", "-"]
    try:
        done = subprocess.run(
            command, cwd=ROOT, check=True, capture_output=True, text=True, input=includes
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
    """Return the native core's files that match, relative to the project, in a fixed order.

    Without those of the hooks, which are a library of their own: `build_library`.
    """
    paths = (path.relative_to(ROOT) for path in (ROOT / SOURCE).rglob(pattern))
    return sorted(str(path) for path in paths if path.parent != HOOKS)


def build_library(folder: Path) -> Path:
    """Compile the hooks of operators into a folder: `libswapkit.so`, which extensions link with.

    It needs neither Python nor the core. A process has one copy, whoever loads it first. It is
    never unloaded: threads end its operators when they end.
    """
    return link_shared(folder / LIBRARY, HOOKS, f"-Wl,-soname,{LIBRARY},-z,nodelete")


def build_instruments(core: Path) -> Path:
    """Compile what only tests use into a library beside the core, `libswapkit_test.so`.

    Its backends wrap another one. They use names of the core, which a process has once.
    """
    beside = (f"-L{core.parent}", f"-l:{core.name}", "-Wl,-rpath,$ORIGIN")
    folders = (f"-I{SOURCE}", f"-I{INSTRUMENTS.parent}")
    return link_shared(core.with_name(TEST_LIBRARY), INSTRUMENTS, *folders, *beside)


def link_shared(library: Path, sources: Path, *options: str) -> Path:
    """Compile a folder of sources into a library.

    Flags of the environment go before ours, as setuptools does for the core.
    """
    library.parent.mkdir(parents=True, exist_ok=True)
    temporary = library.with_suffix(f".{os.getpid()}")
    command = [
        *shlex.split(os.environ.get("CC", "cc")),
        *(flag for name in FLAG_VARIABLES for flag in shlex.split(os.environ.get(name, ""))),
        *("-shared", "-fPIC", "-std=c11", "-D_GNU_SOURCE", "-fvisibility=hidden", "-pthread"),
        *("-Wall", "-Wextra", "-O2", f"-I{INCLUDE}"),
        *sorted(str(path.relative_to(ROOT)) for path in (ROOT / sources).glob("*.c")),
        *(*options, "-o", str(temporary.absolute())),
    ]
    done = subprocess.run(command, cwd=ROOT, check=False, capture_output=True, text=True)
    if done.returncode != 0:
        raise SystemExit(f"swapkit: {shlex.join(command)} failed:\n{done.stderr}")
    temporary.replace(library)
    return library


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
        # Calls from inside the core are direct, also of functions that others may call.
        extra_link_args=["-pthread", "-Wl,-Bsymbolic-functions"],
    )
    return ffi


def make_builder() -> FFI:
    """Check what building needs, then describe the module; named in setup.py."""
    require_python_headers()
    return describe_module()
