"""Cost of the hooks of operators in C and C++, in nanoseconds per call.

An operator with two operands and one output announces itself; a loop in C++ makes its calls, in
three forms: MindSpeed's (`seed`), a guard (`guard`), and C with addresses (`c`). Medians over
rounds, in these states of the process:

- absent: swapkit was not imported;
- loaded: its runtime runs, nothing is installed;
- installed: a pool serves torch, there is no session: memory gets the operators' names;
- session: a session is active, and thousands of tensors are saved.

The goal, without a session, is 100 ns per call. `--json FILE` writes one flat object:
`absent_seed_ns`, ...
"""

from __future__ import annotations

import argparse
import ctypes
import json
import os
import statistics
import subprocess
import sys
import tempfile
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

import torch

from swapkit._native import hooks

SOURCE = Path(__file__).parent / "native" / "hook_calls.cpp"
FORMS = ("seed", "guard", "c")
GOAL_NS = 100.0
CALLS = 20_000
SAVED = 2_000
FREE = ("absent", "loaded", "installed")  # of a session


def compile_library(folder: Path) -> ctypes.CDLL:
    torch_folder = Path(torch.__file__).parent
    library = folder / "hook_calls.so"
    abi = int(torch._C._GLIBCXX_USE_CXX11_ABI)  # noqa: SLF001 - torch has no public name for it
    command = [
        *os.environ.get("CXX", "g++").split(),
        *("-std=c++20", "-O2", "-shared", "-fPIC", "-w", f"-D_GLIBCXX_USE_CXX11_ABI={abi}"),
        *(f"-I{torch_folder / 'include'}", f"-I{hooks.INCLUDE}", str(SOURCE)),
        *("-o", str(library), f"-L{torch_folder / 'lib'}", "-lc10", "-ltorch_cpu"),
        *(f"-L{hooks.FOLDER}", "-lswapkit", f"-Wl,-rpath,{hooks.FOLDER}"),
    ]
    subprocess.run(command, check=True)
    return ctypes.CDLL(str(library))


def measure_state(library: ctypes.CDLL, state: str, rounds: int) -> dict[str, float]:
    found = {}
    for form in FORMS:
        function = ctypes.PYFUNCTYPE(ctypes.c_double, ctypes.c_int)((f"{form}_ns", library))
        function(CALLS // 10)
        found[f"{state}_{form}_ns"] = statistics.median(function(CALLS) for _ in range(rounds))
    return found


def measure(rounds: int) -> dict[str, float]:
    """Return the figures; the order of the states is the order in which a process meets them."""
    with tempfile.TemporaryDirectory() as folder:
        library = compile_library(Path(folder))
        found = measure_state(library, "absent", rounds)
        import swapkit
        from swapkit._runtime.process.runtime import get_runtime

        get_runtime()
        found |= measure_state(library, "loaded", rounds)
        swapkit.install(device="cpu")
        found |= measure_state(library, "installed", rounds)
        with swapkit.budget(1 << 40):
            x = torch.ones(1024, requires_grad=True)
            made = [(x * 1).sin() for _ in range(SAVED)]
            found |= measure_state(library, "session", max(1, rounds // 10))
            del made
    return found


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--rounds", type=int, default=21)
    parser.add_argument("--json", type=Path, metavar="FILE")
    options = parser.parse_args()
    found = measure(options.rounds)
    for name, ns in found.items():
        is_free = name.partition("_")[0] in FREE
        goal = f"  goal {GOAL_NS:.0f}: {'met' if ns <= GOAL_NS else 'missed'}" if is_free else ""
        print(f"{name:20} {ns:8.1f}{goal}")
    if options.json is not None:
        options.json.write_text(json.dumps(found, indent=2) + "\n", encoding="utf-8")


if __name__ == "__main__":
    main()
