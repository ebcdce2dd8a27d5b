"""swapkit on an Ascend NPU: the pool below torch_npu, its statistics, errors and host queue.

Torch takes one allocator a process, so each test runs its program in one of its own. All run inside
of `python -m tests.npu.simulated`; `test_simulation.py` starts that.
"""

from __future__ import annotations

import os

import pytest

from tests.npu.processes import run
from tests.npu.simulated import INSIDE

pytestmark = pytest.mark.skipif(INSIDE not in os.environ, reason="runs in tests.npu.simulated")

INSTALL = """
import swapkit
swapkit.install(device="npu")
"""


# ---- torch's functions --------------------------------------------------------------------------


def test_install_without_a_device_then_it_takes_the_npu_that_torch_reports() -> None:
    lines = run(
        """
        import swapkit
        swapkit.install()
        print(torch.npu.get_allocator_backend(), torch.npu.is_initialized())
        x = torch.ones(1 << 20, device="npu")
        print(swapkit.memory_stats()["allocated_bytes.all.current"] >> 20, x.sum().item())
        """
    )
    assert lines == ["pluggable False", "4 1048576.0"]


def test_statistics_of_torch_npu_when_installed_then_they_tell_of_the_pool() -> None:
    lines = run(
        f"""{INSTALL}
print(torch.npu.memory_allocated(), torch.npu.is_initialized())
x = torch.empty(3 << 20, dtype=torch.uint8, device="npu")
y = torch.empty(1000, device="npu")
ours, theirs = swapkit.memory_stats(), torch.npu.memory_stats()
print(theirs["allocated_bytes.all.current"], theirs["allocation.small_pool.current"])
print(all(theirs[name] == value for name, value in ours.items() if name in theirs))
print(torch.npu.memory_reserved() >> 20, "Allocated memory" in torch.npu.memory_summary())
del x
print(torch.npu.max_memory_allocated() >> 20, torch.accelerator.memory_allocated())
torch.npu.reset_peak_memory_stats()
torch.npu.reset_accumulated_memory_stats()
print(torch.npu.max_memory_allocated(), torch.accelerator.max_memory_allocated())
segments = torch.npu.memory_snapshot()
print(sum(segment["allocated_size"] for segment in segments))
print(sorted({{block["state"] for segment in segments for block in segment["blocks"]}}))
print(len(torch.npu.memory._snapshot()["segments"]) == len(segments))
del y
torch.npu.empty_cache()
print(torch.npu.memory_reserved(), torch.npu.mem_get_info()[1] >> 20)
"""
    )
    large, small = (3 << 20) + 512, 4096  # with room for what kernels read past a tensor
    assert lines == [
        "0 False",
        f"{large + small} 1",
        "True",
        "6 True",
        f"3 {small}",
        f"{small} {small}",
        f"{small}",
        "['active_allocated', 'inactive']",
        "True",
        "0 1024",
    ]


def test_statistics_in_cpp_when_torch_npu_asks_itself_then_the_process_goes_on() -> None:
    """Torch_npu's own functions for these end the process; its profiler asks for them."""
    lines = run(
        f"""{INSTALL}
from swapkit._runtime.process.runtime import get_runtime
x = torch.empty(1 << 20, device="npu")
stats = get_runtime().shim.device_usage(20, 0)
print(stats == (torch.npu.memory_allocated(), torch.npu.memory_reserved()))
"""
    )
    assert lines == ["True"]


@pytest.mark.promise("E7")
def test_fraction_when_set_by_torch_npu_then_it_is_the_limit() -> None:
    lines = run(
        f"""{INSTALL}
import torch_npu
total = torch.npu.mem_get_info()[1]
torch_npu.npu.set_per_process_memory_fraction(0.25)
print(torch.npu.get_per_process_memory_fraction())
print(swapkit.memory_stats()["budget_bytes"] == total // 4)
try:
    torch.empty(total // 2, dtype=torch.uint8, device="npu")
except torch.OutOfMemoryError as error:
    print(str(error).splitlines()[0].split(" requested")[0])
held = torch.empty(total // 5, dtype=torch.uint8, device="npu")
try:
    torch_npu.npu.set_per_process_memory_fraction(0.1)
except RuntimeError as error:
    print("is too small" in str(error))
print(torch.npu.get_per_process_memory_fraction())
"""
    )
    first = "swapkit: out of memory on npu:0: 512.00 MiB (536870912 bytes)"
    assert lines == ["0.25", "True", first, "True", "0.25"]


@pytest.mark.promise("A16")
def test_settings_when_the_environment_has_them_then_the_pool_obeys() -> None:
    program = """
        import swapkit
        try:
            swapkit.install(device="npu")
        except swapkit.SwapkitError as error:
            print(str(error).split(";")[0])
            raise SystemExit from None
        block = torch.ones(40 << 20, dtype=torch.uint8, device="npu")
        del block
        part = torch.ones(4 << 20, dtype=torch.uint8, device="npu")
        stats = torch.npu.memory_stats()
        print(stats["max_split_size"] >> 20, stats["segment.all.current"])
        """
    whole = "expandable_segments:False,max_split_size_mb:32"
    assert run(program, PYTORCH_NPU_ALLOC_CONF=whole) == ["32 2"]
    assert run(program, PYTORCH_NPU_ALLOC_CONF="expandable_segments:True") == ["-1 1"]
    assert run(program, PYTORCH_NPU_ALLOC_CONF="bogus:1") == [
        "PYTORCH_NPU_ALLOC_CONF: unknown key 'bogus'"
    ]


@pytest.mark.promise("A16")
def test_settings_when_they_change_sizes_then_the_pool_has_them() -> None:
    program = f"""{INSTALL}
x = torch.empty(5 << 20, dtype=torch.uint8, device="npu")
print(torch.npu.memory_reserved() >> 20, torch.npu.memory_allocated() >> 20)
print(swapkit.memory_stats()["budget_bytes"] >> 20)
"""
    assert run(program) == ["6 5", "0"]
    giant = {"PYTORCH_NPU_ALLOC_CONF": "page_size:1g", "CUSIM_CAPACITY": "4G"}
    assert run(program, **giant) == ["1024 5", "0"]
    divided = {"PYTORCH_NPU_ALLOC_CONF": "roundup_power2_divisions:4"}
    assert run(program, **divided) == ["6 6", "0"]
    share = {"PYTORCH_NPU_ALLOC_CONF": "per_process_memory_fraction:0.5"}
    assert run(program, **share) == ["6 5", "512"]


# ---- the host queue -----------------------------------------------------------------------------

# Memory of a side stream that another stream gets. A step is queued on the side stream before; with
# `before`, `between` and `after` come what a test does to the queue and to the stream.
ACROSS_STREAMS = """
from tests.cuda.control import delay_stream, last_problem
from tests.npu.control import handle_without_draining, held_queue
side = torch.npu.Stream()
torch.npu.set_per_process_memory_fraction(1 / 51)  # 20 MiB: memory has to change streams
with torch.npu.stream(side):
    x = torch.ones(2 << 20, device="npu")
    handle = handle_without_draining()
torch.npu.synchronize()
{before}
with torch.npu.stream(side):
    y = x * 2
    total = y.sum()
{between}
del x, y
z = torch.full((2 << 20,), 7.0, device="npu")
{after}
torch.npu.synchronize()
print(total.item() == 4 << 20, (z == 7).all().item(), last_problem() == "")
"""
QUEUES = (
    {"TASK_QUEUE_ENABLE": "0"},
    {"TASK_QUEUE_ENABLE": "1"},
    {"TASK_QUEUE_ENABLE": "2"},
    {"TASK_QUEUE_ENABLE": "1", "PER_STREAM_QUEUE": "1"},
)


@pytest.mark.parametrize("queue", QUEUES, ids=lambda queue: "-".join(queue.values()))
@pytest.mark.parametrize("between", ["", "y.record_stream(torch.npu.current_stream())"])
def test_memory_when_it_changes_streams_then_queued_work_comes_first(
    between: str, queue: dict[str, str]
) -> None:
    busy = "delay_stream(handle, 50)"
    code = ACROSS_STREAMS.format(before=busy, between=between, after="")
    assert run(INSTALL + code, **queue) == ["True True True"]


def test_settle_when_it_is_removed_then_memory_leaves_its_stream_before_its_last_work() -> None:
    """The test above can fail: this is what the wait for the queue prevents."""
    without = """
import ctypes
from swapkit._runtime.shim.library import Shim
Shim.npu_settle_address = ctypes.cast(ctypes.CDLL(None).abs, ctypes.c_void_p).value
"""
    before = "held = held_queue(); held.__enter__()"
    after = "delay_stream(handle, 200); held.__exit__(None, None, None)"
    code = ACROSS_STREAMS.format(before=before, between="", after=after)
    assert run(without + INSTALL + code) == ["False True True"]


def test_record_and_erase_stream_when_called_then_the_block_waits_or_not() -> None:
    lines = run(
        f"""{INSTALL}
import torch_npu
from tests.npu.control import busy
side = torch.npu.Stream()
for erased in (False, True):
    tensor = torch.ones(1 << 20, device="npu")
    address = tensor.data_ptr()
    torch.npu.synchronize()
    with busy(side):
        tensor.record_stream(side)
        if erased:
            torch_npu.npu.utils._erase_stream(tensor, side)
        del tensor
        other = torch.full((1 << 20,), 7.0, device="npu")
        print(other.data_ptr() == address)
    torch.npu.synchronize()
    del other
"""
    )
    assert lines == ["False", "True"]


# ---- errors -------------------------------------------------------------------------------------


@pytest.mark.promise("A6")
def test_out_of_memory_when_it_is_caught_then_training_goes_on() -> None:
    lines = run(
        """
        import swapkit
        swapkit.install("64MiB", device="npu")
        x = torch.ones(8 << 20, dtype=torch.uint8, device="npu")
        storage = torch.ones(1 << 20, device="npu").untyped_storage()
        for ask in (lambda: torch.empty(80 << 20, dtype=torch.uint8, device="npu"),
                    lambda: torch.ones(80 << 20, dtype=torch.uint8).npu(),
                    lambda: storage.resize_(80 << 20),
                    lambda: torch.npu.caching_allocator_alloc(80 << 20)):
            try:
                ask()
            except torch.OutOfMemoryError as error:
                text = str(error)
                print(text.split(" requested")[0], "Largest holders" in text)
        print(x.sum().item() == 8 << 20, storage.nbytes() >> 20)
        print(torch.npu.memory_stats()["num_ooms"])
        """
    )
    first = "swapkit: out of memory on npu:0: 80.00 MiB (83886080 bytes) True"
    assert lines == [*[first] * 4, "True 4", "4"]


def test_install_when_torch_uses_the_npu_already_then_the_error_says_how_to_be_in_time() -> None:
    lines = run(
        """
        import swapkit
        from swapkit.errors import SessionError, Unsupported
        try:
            swapkit.install(device="npu", allocator="torch")
        except Unsupported as error:
            print("only for CUDA" in str(error))
        x = torch.ones(10, device="npu")
        for attempt in (lambda: swapkit.install(device="npu"), lambda: swapkit.install(),
                        lambda: swapkit.budget("1GiB", device="npu")):
            try:
                attempt()
            except SessionError as error:
                print("was called too late" in str(error), "NPU" in str(error))
        try:
            swapkit.install(device="npu:3")
        except Unsupported as error:
            print("has 1 NPUs" in str(error))
        """
    )
    assert lines == ["True", *["True True"] * 3, "True"]


def test_what_the_pool_cannot_do_when_asked_then_a_clear_error_and_no_harm() -> None:
    lines = run(
        f"""{INSTALL}
x = torch.ones(10, device="npu")
try:
    torch.npu.MemPool()
except RuntimeError as error:
    print("not yet support" in str(error) or "private pools" in str(error))
print((x + 1).sum().item())
"""
    )
    assert lines == ["True", "20.0"]


def test_exit_when_tensors_and_sessions_are_alive_then_the_process_ends_well() -> None:
    lines = run(
        f"""{INSTALL}
keep = [torch.ones(1 << 20, device="npu", requires_grad=True)]
session = swapkit.budget("512MiB", device="npu").__enter__()
with swapkit.offload():
    keep.append((keep[0] * 2).exp())
torch.npu.synchronize()
print("ends")
"""
    )
    assert lines == ["ends"]


# ---- several devices ----------------------------------------------------------------------------


def test_install_when_there_are_two_devices_then_each_has_its_pool_and_limit() -> None:
    lines = run(
        """
        import swapkit
        swapkit.install("100MiB", device="npu")
        swapkit.install("50MiB", device="npu:1")
        x = torch.ones(1 << 20, device="npu:0")
        y = x.to("npu:1") * 2
        for index in (0, 1):
            stats = swapkit.memory_stats(f"npu:{index}")
            print(stats["budget_bytes"] >> 20, stats["allocated_bytes.all.current"] >> 20)
            print(torch.npu.memory_allocated(index) >> 20)
        print(y.sum().item() == 2 << 20)
        try:
            torch.empty(60 << 20, dtype=torch.uint8, device="npu:1")
        except torch.OutOfMemoryError as error:
            print(str(error).split(":")[1])
        """,
        CUSIM_DEVICES="2",
    )
    assert lines == ["100 4", "4", "50 4", "4", "True", " out of memory on npu"]
