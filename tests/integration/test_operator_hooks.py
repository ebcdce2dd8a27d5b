"""Operators in C and C++ that announce themselves, built as their users build them.

The operator is the grouped matrix product of SmartSwap's document with its hooks
(`examples/operators`). Its kernel, of these tests, has only addresses of its operands: when it has
begun, nothing but backward keeps them. It waits for random times, and at least until another thread
has evicted all that it can and filled the memory with other numbers.
"""

from __future__ import annotations

import contextlib
import ctypes
import functools
import threading
from typing import TYPE_CHECKING

import pytest
import torch
from torch import nn

import swapkit
from swapkit._runtime.allocators.memory_holders import find_holders
from swapkit._runtime.process.runtime import get_runtime
from swapkit.errors import SavedTensorModified
from tests.support.grouped_products import ENDS, GROUPS, TOKENS, WIDTH, train
from tests.support.operator_extension import OperatorExtension, build_extension
from tests.support.storms import Storm
from tests.support.threads import PATIENCE_SECONDS, Worker, on_threads
from tests.unit._runtime.rig import EVERYTHING

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator

    from swapkit._runtime.allocators.installed_pool import Installation
    from tests.support.grouped_products import Product

    Kind = Callable[..., Product]

MOST_DELAY_US = 2000

pytestmark = [pytest.mark.usefixtures("installation", "steady_machine"), pytest.mark.promise("C14")]


built = functools.cache(build_extension)


@pytest.fixture
def extension() -> Iterator[OperatorExtension]:
    built().set_most_delay(0)
    yield built()
    get_runtime().shim.kernels_sweep()
    assert hooks().sk_op_depth() == 0


def hooks() -> ctypes.CDLL:
    """Return the library of hooks, as C programs call it."""
    library = ctypes.CDLL(f"{swapkit.library_path()}/libswapkit.so")
    library.sk_op_enter.restype = ctypes.c_uint64
    library.sk_op_depth.restype = ctypes.c_size_t
    library.sk_op_operand.argtypes = [ctypes.c_uint64, ctypes.c_void_p]
    library.sk_op_leave.argtypes = [ctypes.c_uint64]
    library.sk_op_tensor.argtypes = [ctypes.c_void_p, ctypes.c_size_t, ctypes.c_void_p]
    return library


class HookedMemory(ctypes.Structure):
    """`sk_op_memory`."""

    _fields_ = (
        ("address", ctypes.c_void_p),
        ("nbytes", ctypes.c_size_t),
        ("storage", ctypes.c_void_p),
        ("is_only_read", ctypes.c_bool),
    )


def hooked(extension: OperatorExtension, storm: Callable[[], object] = int) -> Product:
    """Return the example's operator; its kernel forgets the operands, then waits for a storm."""

    def product(operands: list[torch.Tensor], weight: torch.Tensor) -> torch.Tensor:
        with extension.forgetting(operands, storm):
            made: torch.Tensor = extension.npu_gmm(operands, [weight], ENDS)[0]
        return made

    return product


def dispatched(extension: OperatorExtension, storm: Callable[[], object] = int) -> Product:
    """Return the same kernel without hooks, as an operator of torch."""

    def product(operands: list[torch.Tensor], weight: torch.Tensor) -> torch.Tensor:
        with extension.forgetting(operands, storm), torch.no_grad():
            made: torch.Tensor = grouped_product(operands[0], weight)
        return made

    return product


@torch.library.custom_op("swapkit_tests::grouped_product", mutates_args=())
def grouped_product(x: torch.Tensor, weight: torch.Tensor) -> torch.Tensor:
    """The kernel without hooks."""
    made = x.new_empty(x.size(0), weight.size(2))
    ends = (ctypes.c_int64 * GROUPS)(*ENDS)
    sizes = (ctypes.c_int64 * 3)(x.size(0), x.size(1), weight.size(2))
    built().multiply_unhooked(x.data_ptr(), weight.data_ptr(), ends, GROUPS, sizes, made.data_ptr())
    return made


@contextlib.contextmanager
def deaf() -> Iterator[None]:
    """Disconnect the runtime from the hooks."""
    runtime = get_runtime()
    runtime.shim.kernels_listen(None)
    try:
        yield
    finally:
        runtime.shim.kernels_listen(runtime._kernels)


def train_in_a_storm(extension: OperatorExtension, kind: Kind, seed: int = 0) -> list[str]:
    with swapkit.budget(1 << 40) as session, Storm(session, TOKENS * WIDTH) as storm:
        found = train(kind(extension, storm.pass_over), seed)
    assert session.stats.swapped_in_bytes > 0
    return found


@pytest.mark.parametrize("kind", [hooked, dispatched])
def test_operands_when_a_storm_rages_in_the_kernel_then_same_bits(
    extension: OperatorExtension, kind: Kind
) -> None:
    expected = train(kind(extension))
    extension.set_most_delay(MOST_DELAY_US)
    assert train_in_a_storm(extension, kind) == expected


def test_operands_when_nothing_listens_to_the_hooks_then_the_storm_takes_them(
    extension: OperatorExtension,
) -> None:
    expected = train(hooked(extension))
    with deaf():
        assert train_in_a_storm(extension, hooked) != expected, "the storm is none"
    assert train_in_a_storm(extension, hooked) == expected


def test_operands_when_threads_run_kernels_in_a_storm_then_same_bits(
    extension: OperatorExtension,
) -> None:
    expected = [train(hooked(extension), seed) for seed in range(3)]
    extension.set_most_delay(MOST_DELAY_US)
    works = [functools.partial(train_in_a_storm, extension, hooked, seed) for seed in range(3)]
    assert on_threads(*works) == expected


def test_outputs_when_their_layers_are_recomputed_or_swapped_by_hand_then_same_bits(
    extension: OperatorExtension,
) -> None:
    expected = train(hooked(extension))

    def prepare(model: nn.Module) -> None:
        swapkit.checkpoint(model, r"layers\.[01]")
        swapkit.offload(model, r"layers\.[23]")

    assert train(hooked(extension), prepare=prepare) == expected
    with swapkit.budget(1 << 40) as session:
        assert train(hooked(extension), prepare=prepare) == expected
    assert session.stats.recomputed_regions > 0
    assert session.stats.swapped_out_bytes > 0


def test_memory_when_made_in_the_kernel_then_has_its_name(
    extension: OperatorExtension, installation: Installation
) -> None:
    x, weight = torch.ones(TOKENS, WIDTH), torch.ones(GROUPS, WIDTH, WIDTH)
    y = hooked(extension)([x], weight)
    holders = find_holders(installation.device, installation.tracker)
    assert {holder.name: holder.nbytes for holder in holders}["made in gmm_forward"] == y.nbytes


# ---- memory that nothing but backward keeps -----------------------------------------------------


def save_and_forget(x: torch.Tensor) -> tuple[torch.Tensor, HookedMemory, torch.Tensor]:
    """Return a loss, memory that only its graph keeps, and what has kept it so far."""
    made = x * 2
    memory = HookedMemory(made.data_ptr(), made.nbytes, None, False)
    return made.sin().sum(), memory, made.detach()


def test_operand_when_only_an_address_is_known_then_held_until_the_end(
    extension: OperatorExtension,
) -> None:
    library = hooks()
    with swapkit.budget(1 << 40) as session:
        x = torch.rand(TOKENS, WIDTH, requires_grad=True)
        loss, memory, kept = save_and_forget(x)
        expected = extension.sum_at(memory.address, kept.numel(), 0)
        token = library.sk_op_enter(b"kernel")
        assert library.sk_op_operand(token, ctypes.byref(memory)) == 0
        count = kept.numel()
        del kept
        session.rescue(EVERYTHING)
        junk = torch.full((TOKENS, WIDTH), 7.0)
        assert extension.sum_at(memory.address, count, 0) == expected
        library.sk_op_leave(token)
        assert session.rescue(EVERYTHING) >= memory.nbytes
        loss.backward()
        assert x.grad is not None
        assert torch.equal(x.grad, 2 * (2 * x.detach()).cos())
        del junk


def double_saved(
    extension: OperatorExtension,
    then: Callable[[], object] = int,
    evict: Callable[[], object] = int,
) -> torch.Tensor:
    """Return a gradient from a tensor that a kernel doubles while only backward keeps it."""
    x = torch.linspace(0, 1, TOKENS * WIDTH).requires_grad_()
    made = [x * 2]
    loss = made[0].sin().sum()
    with extension.forgetting(made, then):
        extension.double_at(made[0].data_ptr(), made[0].numel())
    evict()
    loss.backward()
    assert x.grad is not None
    return x.grad


@pytest.mark.promise("F4")
def test_operand_when_overwritten_in_place_in_a_storm_then_backward_has_the_new_bytes(
    extension: OperatorExtension,
) -> None:
    expected = double_saved(extension)
    extension.set_most_delay(MOST_DELAY_US)
    with swapkit.budget(1 << 40) as session, Storm(session, TOKENS * WIDTH) as storm:
        for _ in range(5):
            found = double_saved(extension, storm.pass_over, storm.pass_over)
            assert torch.equal(found, expected)
    assert session.stats.swapped_in_bytes > 0


@pytest.mark.promise("F4")
def test_operand_when_overwritten_and_nothing_listens_to_the_hooks_then_backward_has_old_bytes(
    extension: OperatorExtension,
) -> None:
    """The kernel writes to what is another tensor's memory by then."""
    expected = double_saved(extension)
    others: list[torch.Tensor] = []
    with swapkit.budget(1 << 40) as session, deaf():

        def take() -> None:
            assert session.rescue(EVERYTHING) >= TOKENS * WIDTH * 4
            others.extend(torch.full((TOKENS * WIDTH,), 7.0) for _ in range(8))

        found = double_saved(extension, take)
    assert not torch.equal(found, expected)
    assert sorted({float(each.sum()) for each in others}) == [
        7.0 * TOKENS * WIDTH,
        14.0 * TOKENS * WIDTH,
    ]


@pytest.mark.promise("F4")
def test_operand_when_overwritten_in_place_and_its_version_counted_then_backward_says_so(
    extension: OperatorExtension,
) -> None:
    with swapkit.budget(1 << 40) as session:
        x = torch.rand(TOKENS, WIDTH, requires_grad=True)
        made = x * 2
        loss = made.sin().sum()
        extension.double_at(made.data_ptr(), made.numel())
        torch.autograd.graph.increment_version(made)
        del made
        session.rescue(EVERYTHING)
        with pytest.raises(SavedTensorModified):
            loss.backward()


# ---- exceptions and nesting ---------------------------------------------------------------------


def test_operators_when_left_by_exceptions_then_the_next_call_further_out_ends_them(
    extension: OperatorExtension,
) -> None:
    with swapkit.budget(1 << 40):
        assert extension.fail_often(20) == 1  # one at a time, and none after the next operator
        assert extension.fail_guarded() == 0
        assert extension.nest() == 3 + 100 * 1


def test_operator_when_left_by_an_exception_then_ends_with_the_step(
    extension: OperatorExtension,
) -> None:
    with swapkit.budget(1 << 40) as session:
        assert extension.fail_once() == 1
        session.mark_step()
        assert hooks().sk_op_depth() == 0
        assert get_runtime().tracker.current() == 0


def test_operator_when_another_thread_ends_a_step_then_holds_its_operands_until_its_end(
    extension: OperatorExtension,
) -> None:
    library = hooks()
    is_begun, is_stepped = threading.Event(), threading.Event()
    with swapkit.budget(1 << 40) as session:
        x = torch.rand(TOKENS, WIDTH, requires_grad=True)
        loss, memory, kept = save_and_forget(x)
        count = kept.numel()
        expected = extension.sum_at(memory.address, count, 0)

        def run() -> tuple[int, int]:
            library.sk_op_begin(b"kernel")
            failed = library.sk_op_tensor(memory.address, memory.nbytes, None)
            is_begun.set()
            assert is_stepped.wait(PATIENCE_SECONDS)
            depth = library.sk_op_depth()
            library.sk_op_end()
            return failed, depth

        worker = Worker(run)
        assert is_begun.wait(PATIENCE_SECONDS)
        del kept
        session.mark_step()
        assert session.rescue(EVERYTHING) < memory.nbytes
        assert extension.sum_at(memory.address, count, 0) == expected
        is_stepped.set()
        assert worker.finish() == (0, 1)
        assert session.rescue(EVERYTHING) >= memory.nbytes
        loss.backward()


def test_operand_when_its_memory_was_freed_then_refused(extension: OperatorExtension) -> None:
    with swapkit.budget(1 << 40):
        assert extension.refuses_freed() == 1
        assert extension.refuses_freed_hooked(True) == 1


def test_operand_when_its_memory_was_freed_and_nothing_follows_then_not_looked_at(
    extension: OperatorExtension,
) -> None:
    assert extension.refuses_freed_hooked(False) == 0  # no operator is open
    with deaf():
        assert extension.refuses_freed_hooked(True) == 0


def test_python_operator_when_around_one_in_c_then_both_have_names(
    extension: OperatorExtension, installation: Installation
) -> None:
    x, weight = torch.ones(TOKENS, WIDTH), torch.ones(GROUPS, WIDTH, WIDTH)
    with swapkit.budget(1 << 40), swapkit.op("outer", x):
        y = hooked(extension)([x], weight)
        holders = find_holders(installation.device, installation.tracker)
        names = {holder.name: holder.nbytes for holder in holders}
    assert names["made in outer.gmm_forward"] == y.nbytes
