"""Write C for what the simulated runtime leaves out: functions that refuse when they are called.

Usage: `generate_stubs.py <the real libcudart> <libcuda.so.1> <libcaffe2_nvrtc.so> <object>...`
"""

import subprocess
import sys

NOT_SUPPORTED = 801  # the same number to the driver and to the runtime


def _symbols(file: str, *options: str) -> set[str]:
    output = subprocess.run(["nm", *options, file], capture_output=True, text=True, check=True)
    return {line.split()[-1].split("@")[0] for line in output.stdout.splitlines()}


def main(runtime: str, driver: str, nvrtc: str, *objects: str) -> None:
    """Print the stubs.

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
    for name in sorted(missing):
        if name.isidentifier():  # not the node of the version
            sys.stdout.write(f"int {name}(void);\nint {name}(void) {{ return {NOT_SUPPORTED}; }}\n")


if __name__ == "__main__":
    main(*sys.argv[1:])
