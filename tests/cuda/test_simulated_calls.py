"""How often swapkit calls the driver, on the simulation.

Run inside of `python -m tests.cuda.simulated`; `test_simulation.py` starts that.
"""

from __future__ import annotations

import pytest

from tests.cuda.processes import run


@pytest.mark.parametrize("scope", ["swapkit.offload", "lambda: swapkit.offload(prefetch=4)"])
def test_offload_when_it_copies_then_the_driver_is_called_at_most_eight_times_a_copy(
    scope: str,
) -> None:
    lines = run(
        f"""
        import contextlib, ctypes
        from tests.cuda.control import open_driver
        driver = open_driver()
        driver.cusim_calls.restype = ctypes.c_uint64
        copies = b"cuMemcpyDtoHAsync_v2", b"cuMemcpyHtoDAsync_v2"
        # What the runtime below torch asks of the thread alone, where the simulation has no cache.
        asked = b"cuCtxGetCurrent", b"cuCtxGetDevice", b"cuDevicePrimaryCtxGetState"
        swapkit.install(device="cuda")

        def step(scope):
            x = torch.ones(1 << 18, device="cuda", requires_grad=True)
            with scope():
                y = x
                for _ in range(40):
                    y = torch.sin(y)
            torch.cuda.synchronize()
            y.sum().backward()
            torch.cuda.synchronize()

        def counts():
            total = driver.cusim_calls(b"*") - sum(map(driver.cusim_calls, asked))
            return total, sum(map(driver.cusim_calls, copies))

        def count(scope):
            for _ in range(3):
                step(scope)
            before = counts()
            step(scope)
            return [after - other for after, other in zip(counts(), before)]

        plain, moved = count(contextlib.nullcontext), count({scope})
        print(*(one - other for one, other in zip(moved, plain)))
        """,
        CUSIM_LATENCY_NS="200000",
    )
    calls, copies = map(int, lines[0].split())
    assert copies >= 40
    assert copies < calls <= 8 * copies
