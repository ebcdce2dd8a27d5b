"""Write C for what a simulated library leaves out: functions that refuse when they are called.

Usage: `generate_stubs.py runtime <libcudart> <libcuda.so.1> <libcaffe2_nvrtc.so> <object>...`
       `generate_stubs.py blas <library> <object>...`, where the first library is the real one
       `generate_stubs.py npu <folder of torch_npu> <folder of torch> <libascendcl.so>`
"""

import subprocess
import sys
from pathlib import Path

NOT_SUPPORTED = 801  # the same number to the driver and to the runtime
BLAS_NOT_SUPPORTED = 15
ACL_NOT_SUPPORTED = 207000
SAYS_ITS_NAME = """#include <stdio.h>
static int refuse(const char *name) {{
    (void)fprintf(stderr, "{machine}: %s is not modelled\\n", name);
    return {code};
}}
"""
# Of CANN: how functions of the runtime begin; those that only report; those that return a pointer.
RUNTIME_OF_CANN = ("acl", "rt", "Msprof")
REPORTS_OF_CANN = ("Msprof", "aclAppLog")
MAKERS_OF_CANN = ("aclCreate", "aclopCreate")


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
    sys.stdout.write(SAYS_ITS_NAME.format(machine="virtual GPU", code=BLAS_NOT_SUPPORTED))
    _write(missing, 'refuse("{name}")')


def write_npu(torch_npu: str, torch: str, simulation: str) -> None:
    """Print the stubs of CANN: what torch_npu is linked against and nobody else defines.

    Reports go nowhere and succeed. What makes an object returns NULL, as without memory.
    """
    needed: set[str] = set()
    defined = _symbols(simulation, "-D", "--defined-only")
    for file in (*Path(torch_npu).glob("_C*.so"), *Path(torch_npu).glob("lib/*.so")):
        needed |= _symbols(str(file), "-D", "--undefined-only")
        defined |= _symbols(str(file), "-D", "--defined-only")
    for file in Path(torch).glob("lib/*.so*"):
        defined |= _symbols(str(file), "-D", "--defined-only")
    missing = {name for name in needed - defined if name.startswith(RUNTIME_OF_CANN)}
    reports = {name for name in missing if name.startswith(REPORTS_OF_CANN)}
    makers = {name for name in missing if name.startswith(MAKERS_OF_CANN)}
    sys.stdout.write(SAYS_ITS_NAME.format(machine="simulated NPU", code=ACL_NOT_SUPPORTED))
    _write(reports, "0")
    for name in sorted(makers):
        result = f'refuse("{name}"), (void *)0'
        sys.stdout.write(f"void *{name}(void);\nvoid *{name}(void) {{ return {result}; }}\n")
    _write(missing - reports - makers, 'refuse("{name}")')


if __name__ == "__main__":
    kind, *files = sys.argv[1:]
    if kind == "runtime":
        write_runtime(*files)
    elif kind == "blas":
        write_blas(*files)
    else:
        write_npu(*files)
