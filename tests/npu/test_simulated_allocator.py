"""swapkit's pool below torch_npu when its queue stands still, fails, or is another device's.

Torch takes one allocator a process, so each test runs its program in one of its own. All run inside
of `python -m tests.npu.simulated`; `test_simulation.py` starts that.
"""

from __future__ import annotations

import os

import pytest

from tests.npu.processes import run
from tests.npu.simulated import INSIDE

pytestmark = pytest.mark.skipif(INSIDE not in os.environ, reason="runs in tests.npu.simulated")

# A deadlock ends the program, with the stacks of all threads.
INSTALL = """
import faulthandler
faulthandler.dump_traceback_later(120, exit=True)
import threading, time
import swapkit
from swapkit._runtime.allocators.installation import installed_pool
from tests.npu.control import busy, held_queue, runtime
MIB = 1 << 20
swapkit.install("64MiB", device="npu")
pool = installed_pool("npu:0")

def take(nbytes):
    return torch.empty(nbytes, dtype=torch.uint8, device="npu")

def active():
    torch.npu.synchronize()
    return torch.npu.memory_stats()["active.all.current"]

# A block that is parked: another stream used it.
def park(nbytes):
    block = take(nbytes)
    torch.npu.synchronize()
    block.record_stream(side)
    del block

side = torch.npu.Stream()
x = torch.ones(1000, device="npu")
torch.npu.synchronize()
"""
HAS_QUEUE = pytest.mark.skipif(
    os.environ.get("TASK_QUEUE_ENABLE", "1") == "0", reason="nothing is queued"
)

# ---- operators that fail in the queue ------------------------------------------------------------

FAILING = """
DEVICE_ERROR = 507899  # ACL_ERROR_RT_DRV_INTERNAL_ERROR
host = torch.zeros(1000, pin_memory=True)
runtime().aclsim_fail(b"aclrtMemcpyAsync", 1, DEVICE_ERROR)
host.copy_(x, non_blocking=True)
"""


@HAS_QUEUE
@pytest.mark.parametrize(
    "call",
    ["take(32 * MIB)", "swapkit.install('48MiB', device='npu')", "torch.npu.empty_cache()"],
    ids=["allocation", "limit", "empty_cache"],
)
def test_operator_when_it_fails_in_the_queue_then_the_program_gets_the_error_once(
    call: str,
) -> None:
    lines = run(
        f"""{INSTALL}
park(4 * MIB)
before = active()
{FAILING}
errors = []
for _ in range(200):  # the queue is empty a moment before torch_npu knows that it failed
    try:
        {call}
        torch.npu.synchronize()
    except RuntimeError as error:
        errors.append(error)
        break
    time.sleep(0.01)
print([isinstance(error, torch.OutOfMemoryError) for error in errors])
text = str(errors[0])
print("queued on the host failed" in text or "MemcpyAsync" in text or text)
{call}
swapkit.install("48MiB", device="npu")
held = take(44 * MIB)  # so the parked block is free
del held
pool.check()
print(active() - before)
"""
    )
    assert lines == ["[False]", "True", "-1"]  # the parked block is free


# ---- the queue stands still ----------------------------------------------------------------------


@HAS_QUEUE
@pytest.mark.parametrize(
    "call",
    [
        "storage.resize_(6 * MIB)",
        "torch.npu.caching_allocator_alloc(6 * MIB, stream=handle)",
        "take(6 * MIB)",
    ],
    ids=["resize", "raw", "empty"],
)
def test_allocation_when_it_waits_for_the_queue_then_other_threads_have_the_interpreter(
    call: str,
) -> None:
    lines = run(
        f"""{INSTALL}
from tests.npu.control import handle_without_draining
storage = torch.ones(1, device="npu").untyped_storage()
handle = handle_without_draining()  # `Stream.npu_stream` waits for the queue with the interpreter
full = take(56 * MIB)
torch.npu.synchronize()
waits = threading.Event()

def allocate():
    waits.set()
    {call}

with held_queue():
    x.add_(1)
    full.record_stream(side)
    del full  # it is parked, and its memory is needed
    thread = threading.Thread(target=allocate)
    thread.start()
    waits.wait()
    time.sleep(0.3)
    print(thread.is_alive())  # and this thread runs
thread.join()
print((x == 2).all().item())
"""
    )
    assert lines == ["True", "True"]


@HAS_QUEUE
def test_two_threads_when_both_wait_for_parked_blocks_then_neither_waits_for_the_other() -> None:
    lines = run(
        f"""{INSTALL}
storages = [torch.ones(1, device="npu").untyped_storage() for _ in range(2)]
for _ in range(3):
    park(40 * MIB)
    with held_queue():
        x.add_(1)
        threads = [
            threading.Thread(target=storage.resize_, args=(size * MIB,))
            for storage, size in zip(storages, (6, 50))
        ]
        for thread in threads:
            thread.start()
            time.sleep(0.2)
    for thread in threads:
        thread.join()
    print([storage.nbytes() // MIB for storage in storages])
    for storage in storages:
        storage.resize_(0)
"""
    )
    assert lines == ["[6, 50]"] * 3


@HAS_QUEUE
def test_fork_when_blocks_are_parked_then_the_child_ends_and_the_parent_goes_on() -> None:
    lines = run(
        f"""{INSTALL}
import os
park(40 * MIB)
with held_queue():
    x.add_(1)
    child = os.fork()
    if child == 0:
        torch.ones(8).sum()
        os._exit(7)
    print(os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]))
block = take(50 * MIB)
pool.check()
print((x == 2).all().item(), block.numel() // MIB)
"""
    )
    assert lines == ["7", "True 50"]


# ---- streams -------------------------------------------------------------------------------------


@HAS_QUEUE
@pytest.mark.parametrize("queue", ["0", "1"], ids=["one queue", "a queue a stream"])
def test_block_when_it_is_taken_for_another_stream_then_that_streams_queue_is_waited_for(
    queue: str,
) -> None:
    """The first request for `side` comes from a thread whose current stream is another one."""
    lines = run(
        f"""{INSTALL}
import os
raw = torch.npu.caching_allocator_alloc(4096, stream=side)
with torch.npu.stream(side):
    z = torch.ones(1000, device="npu")
torch.npu.synchronize()
full = take(50 * MIB)
torch.npu.synchronize()
with torch.npu.stream(side):
    held = held_queue()
    held.__enter__()
    z.add_(1)
full.record_stream(side)
del full
thread = threading.Thread(target=take, args=(40 * MIB,))
thread.start()
thread.join(0.5)
print(thread.is_alive())
held.__exit__(None, None, None)
thread.join()
print((z == 2).all().item())
torch.npu.caching_allocator_delete(raw)
""",
        PER_STREAM_QUEUE=queue,
    )
    assert lines == ["True", "True"]


def test_use_when_erased_after_another_streams_wait_then_the_block_is_not_given_again() -> None:
    lines = run(
        f"""{INSTALL}
import torch_npu
communication, other = torch.npu.Stream(), torch.npu.Stream()
tensor = torch.ones(1 << 20, device="npu")  # on the default stream
address = tensor.data_ptr()
torch.npu.synchronize()
with busy(communication):
    tensor.record_stream(communication)
    with torch.npu.stream(other):
        event = torch.npu.Event()
        event.record(communication)
        other.wait_event(event)
        torch_npu.npu.utils._erase_stream(tensor, communication)
    del tensor
    print(torch.empty(1 << 20, device="npu").data_ptr() == address)
torch.npu.synchronize()
pool.check()
"""
    )
    assert lines == ["False"]


@HAS_QUEUE
def test_block_when_a_stream_of_another_device_used_it_then_that_devices_queue_is_waited_for() -> (
    None
):
    lines = run(
        f"""{INSTALL}
with torch.npu.device(1):
    far = torch.npu.Stream(device=1)
    with torch.npu.stream(far):
        y = torch.ones(1000, device="npu:1")
    torch.npu.synchronize()
block = take(50 * MIB)
block.record_stream(far)
torch.npu.synchronize()
with torch.npu.device(1), torch.npu.stream(far):
    held = held_queue()
    held.__enter__()
    y.add_(1)
del block
thread = threading.Thread(target=take, args=(40 * MIB,))
thread.start()
thread.join(0.5)
print(thread.is_alive())
held.__exit__(None, None, None)
thread.join()
torch.npu.synchronize(1)
print((y == 2).all().item())
""",
        CUSIM_DEVICES="2",
    )
    assert lines == ["True", "True"]


# ---- settings, and drivers that refuse -----------------------------------------------------------


@pytest.mark.promise("A16")
def test_garbage_collection_threshold_when_passed_then_cached_memory_is_given_back_first() -> None:
    program = f"""{INSTALL}
def lives():
    held = [take(8 * MIB) for _ in range(6)]
    del held
    torch.npu.synchronize()
    before = torch.npu.memory_stats()["num_device_free"]
    large = take(20 * MIB)  # no cached segment holds it
    return torch.npu.memory_stats()["num_device_free"] - before

print(lives() > 0, torch.npu.memory_stats()["num_alloc_retries"])
"""
    segments = "expandable_segments:False,max_split_size_mb:21"
    early = f"{segments},garbage_collection_threshold:0.5"
    assert run(program, PYTORCH_NPU_ALLOC_CONF=early) == ["True 0"]
    assert run(program, PYTORCH_NPU_ALLOC_CONF=segments) == ["True 1"]


@pytest.mark.promise("A4")
@pytest.mark.promise("E7")
def test_limit_when_a_session_holds_more_then_it_evicts_half_and_counts_rescues() -> None:
    lines = run(
        f"""{INSTALL}
swapkit.install(device="npu")  # no limit
torch.npu.set_per_process_memory_fraction(64 * MIB / torch.npu.mem_get_info()[1])
model = torch.nn.Sequential(*[torch.nn.Tanh() for _ in range(12)]).npu()
inputs = torch.linspace(-1, 1, MIB, device="npu", requires_grad=True)  # 4 MiB each
with swapkit.budget("64MiB", model, policy="rescue") as session:
    loss = model(inputs).sum()  # holds 12 results of 4 MiB
    torch.npu.synchronize()
    full = torch.npu.memory_reserved()
    torch.npu.set_per_process_memory_fraction(32 * MIB / torch.npu.mem_get_info()[1])
    print(full > 40 * MIB, torch.npu.memory_reserved() <= 32 * MIB)
    loss.backward()
    print(torch.npu.max_memory_reserved() // MIB <= 64, session.stats.oom_rescues > 0)
    print(torch.npu.memory_stats()["num_ooms"])
expected = torch.linspace(-1, 1, MIB, requires_grad=True)
model.cpu()(expected).sum().backward()
print(torch.equal(inputs.grad.cpu(), expected.grad))
"""
    )
    assert lines == ["True True", "True True", "0", "True"]


def test_out_of_memory_when_pieces_do_not_fit_then_the_suggested_limit_is_larger() -> None:
    lines = run(
        f"""{INSTALL}
try:
    take(63 * MIB)  # with room for reads behind it 64 MiB, in pieces of 2 MiB; x needs 2 MiB
except torch.OutOfMemoryError as error:
    print(str(error).partition("a limit of at least ")[2].partition(",")[0])
"""
    )
    assert lines == ["65MiB"]


def test_peers_when_the_driver_refuses_access_then_each_device_has_its_own_memory() -> None:
    lines = run(
        f"""
from tests.npu.control import runtime
runtime().aclsim_fail(b"aclrtMemSetAccess", 0, 507899)
{INSTALL}
big = take(32 * MIB)
pool.check()
print(big.numel() // MIB)
""",
        CUSIM_DEVICES="2",
    )
    assert lines == ["32"]


def test_install_when_another_accelerator_is_asked_for_then_refused() -> None:
    lines = run(
        f"""{INSTALL}
from swapkit._runtime.allocators import installation
try:
    installation._install_accelerator(None, torch.device("cuda"), "swapkit")
except swapkit.SwapkitError as error:
    print(str(error).partition(";")[0])
"""
    )
    assert lines == [
        "device='cuda': swapkit already serves Ascend in this process, and serves one type of "
        "accelerator. Train on the other in a process of its own"
    ]
