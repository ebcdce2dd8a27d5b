"""A torch for CUDA on the simulated device behaves as on a GPU.

They run inside of `python -m tests.cuda.simulated -m pytest tests/cuda/test_simulated_torch.py`;
`test_simulation.py` starts that.
"""

from __future__ import annotations

import ctypes
import threading
from contextlib import contextmanager
from typing import TYPE_CHECKING

import pytest
import torch
from torch.utils.checkpoint import checkpoint

from tests.simulated import small_models
from tests.support import MIB, run_python

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator


@pytest.fixture(autouse=True)
def _finished() -> Iterator[None]:
    yield
    torch.cuda.synchronize()


@contextmanager
def busy(stream: torch.cuda.Stream) -> Iterator[None]:
    """Let a stream do nothing meanwhile: it waits for a semaphore, in a function of the host."""
    semaphore = ctypes.create_string_buffer(64)
    loaded = ctypes.CDLL(None)
    assert loaded.sem_init(semaphore, 0, 0) == 0
    handle = ctypes.c_void_p(stream.cuda_stream)
    assert loaded.cudaLaunchHostFunc(handle, loaded.sem_wait, semaphore) == 0
    try:
        yield
    finally:
        loaded.sem_post(semaphore)
        stream.synchronize()


def test_device_is_there() -> None:
    assert torch.cuda.is_available()
    assert torch.cuda.device_count() == 1
    assert torch.cuda.get_device_properties(0).total_memory == torch.cuda.mem_get_info()[1]
    assert torch.cuda.get_allocator_backend() == "native"


@pytest.mark.parametrize("pinned", [False, True])
def test_copies_there_and_back_are_equal(pinned: bool) -> None:
    tensor = torch.randn(1000, 70)
    source = tensor.pin_memory() if pinned else tensor
    assert source.is_pinned() == pinned
    there = source.to("cuda", non_blocking=True)
    assert torch.equal(there.cpu(), tensor)
    assert torch.equal(there.t().cpu(), tensor.t())
    assert torch.equal(there[::2, 3:].cpu(), tensor[::2, 3:])
    assert torch.equal(there.half().cpu(), tensor.half())
    assert torch.equal(there[:, :5].to("cpu", torch.float64), tensor[:, :5].double())


def test_stream_that_does_not_wait_reads_what_was_there_before() -> None:
    main, other = torch.cuda.current_stream(), torch.cuda.Stream()
    tensor = torch.zeros(1000, device="cuda")
    torch.cuda.synchronize()
    with busy(main):
        tensor.add_(1)
        with torch.cuda.stream(other):
            early = tensor.clone()
        other.synchronize()
        other.wait_stream(main)
        with torch.cuda.stream(other):
            late = tensor.clone()
    other.synchronize()
    assert early.sum().item() == 0
    assert late.sum().item() == 1000


@pytest.mark.parametrize("recorded", [False, True])
def test_memory_freed_early_is_overwritten_unless_its_stream_was_recorded(recorded: bool) -> None:
    side = torch.cuda.Stream()
    tensor = torch.ones(MIB, device="cuda")
    address = tensor.data_ptr()
    torch.cuda.synchronize()
    with busy(side):
        with torch.cuda.stream(side):
            copy = tensor.clone()
        if recorded:
            tensor.record_stream(side)
        del tensor
        other = torch.full((MIB,), 7.0, device="cuda")
        assert (other.data_ptr() == address) != recorded
        torch.cuda.current_stream().synchronize()
    assert copy[0].item() == (1 if recorded else 7)


def test_events_tell_when_work_is_done() -> None:
    first, last = (torch.cuda.Event(enable_timing=True) for _ in range(2))
    first.record()
    with busy(torch.cuda.current_stream()):
        last.record()
        assert not last.query()
    assert last.query()
    assert first.elapsed_time(last) >= 0


def test_statistics_count_what_is_allocated() -> None:
    torch.cuda.empty_cache()
    torch.cuda.reset_peak_memory_stats()
    before = torch.cuda.memory_allocated()
    tensor = torch.empty(32 * MIB, dtype=torch.uint8, device="cuda")
    assert torch.cuda.memory_allocated() == before + 32 * MIB
    reserved = torch.cuda.memory_reserved()
    del tensor
    assert torch.cuda.memory_allocated() == before
    assert torch.cuda.max_memory_allocated() == before + 32 * MIB
    torch.cuda.empty_cache()
    assert torch.cuda.memory_reserved() == reserved - 32 * MIB
    assert torch.cuda.memory_stats()["num_ooms"] == 0


def test_fraction_of_the_memory_is_a_limit() -> None:
    torch.cuda.set_per_process_memory_fraction(0.25)
    try:
        with pytest.raises(torch.OutOfMemoryError, match="CUDA out of memory"):
            torch.empty(300 * MIB, dtype=torch.uint8, device="cuda")
    finally:
        torch.cuda.set_per_process_memory_fraction(1.0)
    torch.empty(300 * MIB, dtype=torch.uint8, device="cuda")
    with pytest.raises(torch.OutOfMemoryError):
        torch.empty(1100 * MIB, dtype=torch.uint8, device="cuda")
    torch.cuda.empty_cache()


@pytest.mark.parametrize(
    ("build", "dtype", "variant"),
    [
        (small_models.perceptron, torch.float32, None),
        (small_models.convolutional, torch.float32, None),
        (small_models.llama, torch.float32, None),
        (small_models.llama, torch.float32, "foreach"),
        (small_models.llama, torch.float32, "fused"),
        (small_models.llama, torch.bfloat16, None),
    ],
)
def test_training_equals_that_on_the_cpu(
    build: Callable[[], torch.nn.Module], dtype: torch.dtype, variant: str | None
) -> None:
    there = small_models.train(build, "cuda", dtype=dtype, variant=variant)
    here = small_models.train(build, "cpu", dtype=dtype, variant=variant)
    assert there.losses == here.losses
    assert all(map(torch.equal, there.weights, here.weights))


def test_backward_runs_on_a_thread_of_autograd() -> None:
    threads = []
    tensor = torch.ones(3, device="cuda", requires_grad=True)
    tensor.register_hook(lambda _: threads.append(threading.get_ident()))
    (tensor * 2).sum().backward()
    assert threads != [threading.get_ident()]
    assert tensor.grad is not None
    assert tensor.grad.tolist() == [2, 2, 2]


def test_random_numbers_follow_the_state_of_the_generator() -> None:
    torch.manual_seed(3)
    first = torch.randn(100, device="cuda")
    state = torch.cuda.get_rng_state()
    second = torch.rand(100, device="cuda")
    torch.cuda.set_rng_state(state)
    assert torch.equal(torch.rand(100, device="cuda"), second)
    torch.manual_seed(3)
    assert torch.equal(torch.randn(100, device="cuda"), first)


def test_checkpoint_repeats_the_same_dropout() -> None:
    def block(tensor: torch.Tensor) -> torch.Tensor:
        return torch.nn.functional.dropout(tensor, 0.5)

    tensor = torch.ones(1000, device="cuda", requires_grad=True)
    result = checkpoint(block, tensor, use_reentrant=False)
    assert isinstance(result, torch.Tensor)
    result.sum().backward()
    assert tensor.grad is not None
    assert torch.equal(tensor.grad, result.detach())
    assert 300 < (result == 0).sum().item() < 700


def test_shapes_may_depend_on_data() -> None:
    tensor = torch.arange(10, device="cuda")
    assert tensor[tensor > 6].tolist() == [7, 8, 9]
    assert (tensor % 3 == 0).nonzero().flatten().tolist() == [0, 3, 6, 9]
    assert (tensor // 4).unique().tolist() == [0, 1, 2]
    tensor[tensor < 8] = 0
    assert tensor.tolist() == [0] * 8 + [8, 9]


def test_mistake_is_explained_where_it_is_made() -> None:
    with pytest.raises(RuntimeError, match="mat1 and mat2 shapes cannot be multiplied"):
        torch.ones(2, 3, device="cuda") @ torch.ones(2, 3, device="cuda")


def run_simulated(code: str) -> str:
    """Run code in a fresh process, after the operators were taken over."""
    return run_python(f"from tests.cuda import operators; operators.install()\n{code}")


def test_mistake_that_only_the_device_sees_breaks_the_context() -> None:
    code = (
        "import torch, sys, os\n"
        "os.dup2(1, 2)\n"
        "rows = torch.ones(3, 4, device='cuda')\n"
        "try:\n"
        "    rows[torch.tensor([7], device='cuda')]\n"
        "    torch.cuda.synchronize()\n"
        "except torch.AcceleratorError as error:\n"
        "    print(type(error).__name__)\n"
    )
    output = run_simulated(code)
    assert "index 7 is out of bounds" in output
    assert output.endswith("AcceleratorError\n")


def test_expandable_segments_map_and_unmap() -> None:
    code = (
        "import torch\n"
        "torch._C._accelerator_setAllocatorSettings('expandable_segments:True')\n"
        "x = torch.ones(30 << 20, dtype=torch.uint8, device='cuda')\n"
        "print(torch.cuda.memory_reserved() >> 20, int(x.sum()))\n"
        "del x; torch.cuda.empty_cache()\n"
        "print(torch.cuda.memory_reserved() >> 20)\n"
    )
    reserved, total, after = map(int, run_simulated(code).split())
    assert reserved >= 30
    assert total == 30 << 20
    assert after <= 4
