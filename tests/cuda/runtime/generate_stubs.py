"""Write C for what a simulated library leaves out: functions that refuse when they are called.

Usage: `generate_stubs.py runtime <libcudart> <libcuda.so.1> <libcaffe2_nvrtc.so> <object>...`
       `generate_stubs.py blas <library> <object>...`, where the first library is the real one
"""

import subprocess
import sys

NOT_SUPPORTED = 801  # the same number to the driver and to the runtime
BLAS_NOT_SUPPORTED = 15
SAYS_ITS_NAME = """#include <stdio.h>
static int refuse(const char *name) {{
    (void)fprintf(stderr, "virtual GPU: %s is not modelled\\n", name);
    return {code};
}}
"""


def _symbols(file: str, *options: str) -> set[str]:
    output = subprocess.run(["nm", *options, file], capture_output=True, text=True, check=True)
    return {line.split()[-1].split("@")[0] for line in output.stdout.splitlines()}


def _write(names: set[str], answer: str) -> None:
    for name in sorted(names):
        if name.isidentifier():  # not the node of the version
            result = answer.format(name=name)
            sys.stdout.write(f"int {name}(void);\nint {name}(void) {{ return {result}; }}\n")


def write_runtime(runtime: str, driver: str, nvrtc: str, *objects: str) -> None:
    """Print the stubs of the runtime.

    Args:
        runtime: its exported functions must all be there.
        driver: what it exports is not made a stub.
        nvrtc: torch's stub of the driver; it is loaded only if all it needs is there.
        objects: what the simulation defines itself.
    """
    missing = {name for name in _symbols(runtime, "-D", "--defined-only") if "cuda" in name}
    for file in objects:
        missing -= _symbols(file, "--defined-only")
    needed = {name for name in _symbols(nvrtc, "-D", "--undefined-only") if name.startswith("cu")}
    missing |= needed - _symbols(driver, "-D", "--defined-only")
    _write(missing, str(NOT_SUPPORTED))


def write_blas(library: str, *objects: str) -> None:
    """Print the stubs of a library of products: what is not modelled must not pass unseen."""
    missing = _symbols(library, "-D", "--defined-only")
    for file in objects:
        missing -= _symbols(file, "--defined-only")
    sys.stdout.write(SAYS_ITS_NAME.format(code=BLAS_NOT_SUPPORTED))
    _write(missing, 'refuse("{name}")')


if __name__ == "__main__":
    if sys.argv[1] == "blas":
        write_blas(*sys.argv[2:])
    else:
        write_runtime(*sys.argv[2:])
