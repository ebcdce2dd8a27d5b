"""Mistakes that an NPU punishes, and allocators, in processes of their own.

They run inside of `python -m tests.npu.simulated -m pytest tests/npu/test_simulated_processes.py`;
`test_simulation.py` starts that.
"""

from __future__ import annotations

import signal

from tests.npu.processes import RAW_ALLOCATOR, run, start


def test_host_that_reads_device_memory_faults() -> None:
    done = start(
        """
        import ctypes
        tensor = torch.ones(4, device="npu")
        torch.npu.synchronize()
        print(ctypes.cast(tensor.data_ptr(), ctypes.POINTER(ctypes.c_float))[0])
        """
    )
    assert done.returncode == -signal.SIGSEGV


def test_mistake_that_only_the_device_sees_is_raised_later() -> None:
    lines = run(
        """
        rows = torch.ones(3, 4, device="npu")
        taken = rows[torch.tensor([7], device="npu")]
        try:
            torch.npu.synchronize()
        except RuntimeError:
            print("raised")
        """
    )
    assert lines == ["raised"]


def test_expandable_segments_map_and_unmap() -> None:
    lines = run(
        """
        before = torch.npu.mem_get_info()[0] >> 20
        x = torch.ones(30 << 20, dtype=torch.uint8, device="npu")
        print(torch.npu.memory_reserved() >> 20, int(x.sum()))
        x = torch.cat((x, x))
        print(torch.npu.memory_reserved() >> 20, int(x.sum()))
        del x
        torch.npu.empty_cache()
        print(torch.npu.memory_reserved() >> 20, before - (torch.npu.mem_get_info()[0] >> 20))
        """,
        PYTORCH_NPU_ALLOC_CONF="expandable_segments:True",
    )
    (first, ones), (second, twice), (reserved, used) = (map(int, line.split()) for line in lines)
    assert first >= 30
    assert ones == 30 << 20
    assert second >= 90
    assert twice == 60 << 20
    assert reserved <= 20
    assert used == reserved


def test_allocator_without_room_for_over_reads_is_refused() -> None:
    lines = run(
        RAW_ALLOCATOR
        + """
results, kept = [], []
for spare in (32, 0):
    x = torch.empty(1024, device="npu")
    x.copy_(torch.ones(1024))  # by the runtime, which reads and writes what it is told
    torch.npu.synchronize()
    results.append(is_refused(lambda: kept.append(x * 2)))
end(*results)
"""
    )
    assert lines == ["False True"]


def test_memory_given_to_the_driver_while_operators_are_queued_is_refused() -> None:
    lines = run(
        RAW_ALLOCATOR
        + """
from tests.npu.control import held_queue
x = torch.ones(1024, device="npu")
torch.npu.synchronize()

def work():
    global x
    with held_queue():
        y = x * 2
        del x

end(is_refused(work))
"""
    )
    assert lines == ["True"]


def test_memory_given_to_the_driver_while_operators_are_in_the_stream_is_a_problem() -> None:
    lines = run(
        RAW_ALLOCATOR
        + """
from tests.npu.control import busy, handle_of
x = torch.ones(1024, device="npu")
torch.npu.synchronize()

def work():
    global x
    with busy(torch.npu.current_stream()):
        y = x * 2
        handle_of(torch.npu.current_stream())
        del x

print(is_refused(work))
end(last_problem())
"""
    )
    assert lines[0] == "True"
    assert lines[1].startswith("cuMemFree")
    assert lines[1].endswith("work uses it")
