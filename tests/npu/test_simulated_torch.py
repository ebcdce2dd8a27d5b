"""torch_npu on the simulated device behaves as on an NPU, whatever its queue of the host is.

They run inside of `python -m tests.npu.simulated -m pytest tests/npu/test_simulated_torch.py`;
`test_simulation.py` starts that, once for each kind of queue.
"""

from __future__ import annotations

import threading
from typing import TYPE_CHECKING

import pytest
import torch
from torch.utils.checkpoint import checkpoint
from torch_npu import npu

from tests.cuda.control import last_problem
from tests.npu.control import busy
from tests.simulated import small_models
from tests.support import MIB

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator

PADDING = 512  # 32 bytes, which kernels may read past a tensor, rounded up


@pytest.fixture(autouse=True)
def _healthy() -> Iterator[None]:
    yield
    npu.synchronize()
    assert last_problem() == ""


def test_device_is_there() -> None:
    assert npu.is_available()
    assert npu.device_count() == 1
    assert npu.get_device_name(0).startswith("Ascend910B")
    assert npu.get_device_properties(0).total_memory == npu.mem_get_info()[1]
    assert npu.get_allocator_backend() == "native"


@pytest.mark.parametrize("non_blocking", [False, True])
@pytest.mark.parametrize("pinned", [False, True])
def test_copies_there_and_back_are_equal(pinned: bool, non_blocking: bool) -> None:
    tensor = torch.randn(1000, 70)
    source = tensor.pin_memory() if pinned else tensor
    assert source.is_pinned() == pinned
    there = source.to("npu", non_blocking=non_blocking)
    assert torch.equal(there.cpu(), tensor)
    assert torch.equal(there.t().cpu(), tensor.t())
    assert torch.equal(there[::2, 3:].cpu(), tensor[::2, 3:])
    assert torch.equal(there.half().cpu(), tensor.half())
    assert torch.equal(there[:, :5].to("cpu", torch.float64), tensor[:, :5].double())
    assert torch.equal(there.t().contiguous().view(-1).cpu(), tensor.t().reshape(-1))
    back = torch.empty_like(tensor, pin_memory=pinned)
    back.copy_(there, non_blocking=non_blocking)
    npu.synchronize()
    assert torch.equal(back, tensor)


def test_storage_that_was_emptied_and_filled_again_has_its_views() -> None:
    tensor = torch.randn(1000, 70)
    there = tensor.to("npu")
    view = there[10:20].t()
    storage = there.untyped_storage()
    before = npu.memory_allocated()
    storage.resize_(0)
    assert npu.memory_allocated() == before - storage_bytes(tensor)
    assert there.data_ptr() == 0
    storage.resize_(tensor.untyped_storage().nbytes())
    assert npu.memory_allocated() == before
    there.copy_(tensor)
    assert torch.equal(view.cpu(), tensor[10:20].t())
    assert torch.equal((there @ there.t()).cpu(), tensor @ tensor.t())


def storage_bytes(tensor: torch.Tensor) -> int:
    """Return what torch_npu takes for a tensor."""
    return (tensor.untyped_storage().nbytes() + 32 + PADDING - 1) // PADDING * PADDING


def test_stream_that_does_not_wait_reads_what_was_there_before() -> None:
    main, other = npu.current_stream(), npu.Stream()
    tensor = torch.zeros(1000, device="npu")
    npu.synchronize()
    with busy(main):
        tensor.add_(1)
        with npu.stream(other):
            early = tensor.clone()
        other.synchronize()
        other.wait_stream(main)
        with npu.stream(other):
            late = tensor.clone()
    other.synchronize()
    assert early.sum().item() == 0
    assert late.sum().item() == 1000


@pytest.mark.parametrize("recorded", [False, True])
def test_memory_freed_early_is_overwritten_unless_its_stream_was_recorded(recorded: bool) -> None:
    side = npu.Stream()
    tensor = torch.ones(MIB, device="npu")
    address = tensor.data_ptr()
    npu.synchronize()
    with busy(side):
        with npu.stream(side):
            copy = tensor.clone()
        if recorded:
            tensor.record_stream(side)
        del tensor
        other = torch.full((MIB,), 7.0, device="npu")
        assert (other.data_ptr() == address) != recorded
        npu.current_stream().synchronize()
    assert copy[0].item() == (1 if recorded else 7)


def test_events_tell_when_work_is_done() -> None:
    first, last = (npu.Event(enable_timing=True) for _ in range(2))
    first.record()
    with busy(npu.current_stream()):
        last.record()
        assert not last.query()
    assert last.query()
    assert first.elapsed_time(last) >= 0


def test_statistics_count_what_is_allocated() -> None:
    npu.empty_cache()
    npu.reset_peak_memory_stats()
    before = npu.memory_allocated()
    held = npu.memory_reserved()
    free = npu.mem_get_info()[0]
    tensor = torch.empty(32 * MIB, dtype=torch.uint8, device="npu")
    assert npu.memory_allocated() == before + 32 * MIB + PADDING
    assert npu.mem_get_info()[0] == free - (npu.memory_reserved() - held)
    del tensor
    assert npu.memory_allocated() == before
    assert npu.max_memory_allocated() == before + 32 * MIB + PADDING
    npu.empty_cache()
    assert npu.memory_reserved() == held
    assert npu.mem_get_info()[0] == free
    assert npu.memory_stats()["num_ooms"] == 0


def test_fraction_of_the_memory_is_a_limit() -> None:
    npu.set_per_process_memory_fraction(0.25)
    try:
        with pytest.raises(torch.OutOfMemoryError, match="NPU out of memory"):
            torch.empty(300 * MIB, dtype=torch.uint8, device="npu")
    finally:
        npu.set_per_process_memory_fraction(1.0)
    torch.empty(300 * MIB, dtype=torch.uint8, device="npu")
    with pytest.raises(torch.OutOfMemoryError):
        torch.empty(1100 * MIB, dtype=torch.uint8, device="npu")
    npu.empty_cache()


@pytest.mark.parametrize(
    ("build", "dtype", "variant"),
    [
        (small_models.perceptron, torch.float32, None),
        (small_models.convolutional, torch.float32, None),
        (small_models.llama, torch.float32, None),
        (small_models.llama, torch.float32, "single"),
        (small_models.llama, torch.bfloat16, None),
        (small_models.transformers_llama, torch.float32, None),
    ],
)
def test_training_equals_that_on_the_cpu(
    build: Callable[[], torch.nn.Module], dtype: torch.dtype, variant: str | None
) -> None:
    there = small_models.train(build, "npu", dtype=dtype, variant=variant)
    here = small_models.train(build, "cpu", dtype=dtype, variant=variant)
    assert there.losses == here.losses
    assert all(map(torch.equal, there.weights, here.weights))


FUNCTIONS: dict[str, Callable[[torch.Tensor], torch.Tensor]] = {
    "attention": lambda x: torch.nn.functional.scaled_dot_product_attention(x, x, x),
    "batch_norm": lambda x: torch.nn.functional.batch_norm(x, None, None, training=True),
    "bce": lambda x: torch.nn.functional.binary_cross_entropy_with_logits(x, x.sigmoid()),
    "gather": lambda x: x.gather(-1, torch.zeros(2, 3, 4, 1, dtype=torch.long, device=x.device)),
    "group_norm": lambda x: torch.nn.functional.group_norm(x, 3),
    "l1_loss": lambda x: torch.nn.functional.l1_loss(x, x * 2),
    "log_sigmoid": torch.nn.functional.logsigmoid,
    "matmul": lambda x: x @ x.transpose(-1, -2),
    "maximum": lambda x: x.max(-1).values,
    "mish": torch.nn.functional.mish,
    "pooling": lambda x: torch.nn.functional.adaptive_avg_pool2d(x, 2),
    "rms_norm": lambda x: torch.nn.functional.rms_norm(x, (5,)),
    "silu": torch.nn.functional.silu,
    "sorted": lambda x: x.sort(-1).values,
    "where": lambda x: torch.where(x > 0, x, x * 2),
}


@pytest.mark.parametrize("name", FUNCTIONS)
def test_gradients_equal_those_on_the_cpu(name: str) -> None:
    results = []
    for device in ("cpu", "npu"):
        x = torch.randn(2, 3, 4, 5, generator=torch.Generator().manual_seed(0))
        x = x.to(device).requires_grad_()
        result = FUNCTIONS[name](x)
        (gradient,) = torch.autograd.grad(result.square().sum(), x)
        results.append([result.detach().cpu(), gradient.cpu()])
    for here, there in zip(*results, strict=True):
        torch.testing.assert_close(there, here, atol=1e-5, rtol=1e-5)


def test_backward_runs_on_a_thread_of_autograd() -> None:
    threads = []
    tensor = torch.ones(3, device="npu", requires_grad=True)
    tensor.register_hook(lambda _: threads.append(threading.get_ident()))
    (tensor * 2).sum().backward()
    assert threads != [threading.get_ident()]
    assert tensor.grad is not None
    assert tensor.grad.tolist() == [2, 2, 2]


def test_random_numbers_follow_the_state_of_the_generator() -> None:
    torch.manual_seed(3)
    first = torch.randn(100, device="npu")
    state = npu.get_rng_state()
    second = torch.rand(100, device="npu")
    npu.set_rng_state(state)
    assert torch.equal(torch.rand(100, device="npu"), second)
    torch.manual_seed(3)
    assert torch.equal(torch.randn(100, device="npu"), first)


def test_checkpoint_repeats_the_same_dropout() -> None:
    def block(tensor: torch.Tensor) -> torch.Tensor:
        return torch.nn.functional.dropout(tensor, 0.5)

    tensor = torch.ones(1000, device="npu", requires_grad=True)
    result = checkpoint(block, tensor, use_reentrant=False)
    assert isinstance(result, torch.Tensor)
    result.sum().backward()
    assert tensor.grad is not None
    assert torch.equal(tensor.grad, result.detach())
    assert 300 < (result == 0).sum().item() < 700


def test_shapes_may_depend_on_data() -> None:
    tensor = torch.arange(10, device="npu")
    assert tensor[tensor > 6].tolist() == [7, 8, 9]
    assert (tensor % 3 == 0).nonzero().flatten().tolist() == [0, 3, 6, 9]
    assert (tensor // 4).unique().tolist() == [0, 1, 2]
    tensor[tensor < 8] = 0
    assert tensor.tolist() == [0] * 8 + [8, 9]


def test_mistake_is_explained_where_it_is_made() -> None:
    with pytest.raises(RuntimeError, match="mat1 and mat2 shapes cannot be multiplied"):
        torch.ones(2, 3, device="npu") @ torch.ones(2, 3, device="npu")
