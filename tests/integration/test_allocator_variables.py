"""Keys of torch's allocator variables that change sizes and limits, in processes of their own."""

from __future__ import annotations

import pytest

from tests.support import run_python

MIB = 1 << 20
SIZES = """
import swapkit, torch
swapkit.install()
def taken(nbytes):
    before = swapkit.memory_stats()["allocated_bytes.all.current"]
    tensor = torch.empty(nbytes, dtype=torch.uint8)
    return swapkit.memory_stats()["allocated_bytes.all.current"] - before
print(taken(1200 << 10), taken(5 << 20), taken(33 << 20))
"""
LIMIT = """
import swapkit, torch
from swapkit._runtime.allocators.installation import require_installation
def limit():
    return require_installation().limit_bytes / require_installation().total_bytes
swapkit.install()
usual = limit()
swapkit.install(0.5)
given = limit()
swapkit.install()
print(f"{usual:.3f} {given:.3f} {limit():.3f}")
with swapkit.budget("64MiB") as session:
    print(swapkit.memory_stats()["budget_bytes"] >> 20)
"""


@pytest.mark.promise("A16")
@pytest.mark.parametrize(
    ("variables", "sizes"),
    [
        ({}, [1200 << 10, 5 * MIB, 33 * MIB]),
        ({"PYTORCH_NPU_ALLOC_CONF": "1"}, [1200 << 10, 5 * MIB, 33 * MIB]),
        ({"PYTORCH_NPU_ALLOC_CONF": "4"}, [1280 << 10, 5 * MIB, 40 * MIB]),
        ({"PYTORCH_CUDA_ALLOC_CONF": "2"}, [1536 << 10, 6 * MIB, 48 * MIB]),
        ({"PYTORCH_ALLOC_CONF": "[2:0,8:2,>:8]"}, [1200 << 10, 5 * MIB, 36 * MIB]),
    ],
)
def test_sizes_when_divisions_are_given_then_rounded_as_in_torch(
    variables: dict[str, str], sizes: list[int]
) -> None:
    given = {name: f"roundup_power2_divisions:{value}" for name, value in variables.items()}
    assert list(map(int, run_python(SIZES, timeout_s=60, **given).split())) == sizes


@pytest.mark.promise("A16")
@pytest.mark.parametrize(
    ("key", "printed"),
    [
        ({}, ["0.000", "0.500", "0.000", "64"]),
        ({"PYTORCH_NPU_ALLOC_CONF": "0.25"}, ["0.250", "0.500", "0.250", "64"]),
    ],
)
def test_limit_when_the_environment_has_a_fraction_then_it_holds_unless_another_is_given(
    key: dict[str, str], printed: list[str]
) -> None:
    given = {name: f"per_process_memory_fraction:{value}" for name, value in key.items()}
    assert run_python(LIMIT, timeout_s=60, **given).split() == printed


@pytest.mark.promise("A16")
def test_keys_when_they_have_no_effect_then_reported_once() -> None:
    printed = run_python(
        """
        import logging, sys
        logging.basicConfig(stream=sys.stdout, format="%(message)s")
        import swapkit
        swapkit.install()
        swapkit.uninstall()
        swapkit.install()
        """,
        PYTORCH_NPU_ALLOC_CONF=(
            "default_lc_threshold:1024,open_memory_optimize:1,base_addr_aligned_kb:0,page_size:1g"
        ),
    )
    lines = [line for line in printed.splitlines() if line.startswith("PYTORCH_NPU_ALLOC_CONF")]
    assert [line.split()[1] for line in lines] == [
        "default_lc_threshold",
        "open_memory_optimize",
        "base_addr_aligned_kb",
        "page_size",  # of NPUs; the pool is on the CPU
    ]
    assert lines[0].endswith(
        "no effect: `install(lifetimes=True)` keeps memory apart by its lifetime"
    )
