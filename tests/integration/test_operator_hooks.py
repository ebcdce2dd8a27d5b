"""Operators in C and C++ that announce themselves, built as their users build them.

The operator is the grouped matrix product of SmartSwap's document with its hooks
(`examples/operators`). Its kernel, of these tests, waits for random times, while another thread
evicts all that it can and fills the memory with other numbers.
"""

from __future__ import annotations

import contextlib
import ctypes
import functools
import random
import threading
from typing import TYPE_CHECKING, Any

import pytest
import torch
from torch import nn

import swapkit
from swapkit._runtime.allocators.memory_holders import find_holders
from swapkit._runtime.process.runtime import get_runtime
from swapkit.errors import SavedTensorModified
from tests.support.operator_extension import OperatorExtension, build_extension
from tests.support.threads import Worker
from tests.unit._runtime.rig import EVERYTHING

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator

    from swapkit._runtime.allocators.installed_pool import Installation
    from swapkit._runtime.session.session import Session

    Product = Callable[[torch.Tensor, torch.Tensor], torch.Tensor]

TOKENS, WIDTH, GROUPS, DEPTH = 96, 16, 3, 4
ENDS = [32, 40, TOKENS]
MOST_DELAY_US = 2000

pytestmark = [pytest.mark.usefixtures("installation", "steady_machine"), pytest.mark.promise("C14")]


@pytest.fixture(scope="module")
def built(tmp_path_factory: pytest.TempPathFactory) -> OperatorExtension:
    return build_extension(tmp_path_factory.mktemp("operator") / "gmm")


@pytest.fixture
def extension(built: OperatorExtension) -> Iterator[OperatorExtension]:
    built.set_most_delay(0)
    yield built
    get_runtime().shim.kernels_sweep()
    assert hooks().sk_op_depth() == 0


def hooks() -> ctypes.CDLL:
    """Return the library of hooks, as C programs call it."""
    library = ctypes.CDLL(f"{swapkit.library_path()}/libswapkit.so")
    library.sk_op_enter.restype = ctypes.c_uint64
    library.sk_op_depth.restype = ctypes.c_size_t
    library.sk_op_operand.argtypes = [ctypes.c_uint64, ctypes.c_void_p]
    library.sk_op_leave.argtypes = [ctypes.c_uint64]
    return library


class HookedMemory(ctypes.Structure):
    """`sk_op_memory`."""

    _fields_ = (
        ("address", ctypes.c_void_p),
        ("nbytes", ctypes.c_size_t),
        ("storage", ctypes.c_void_p),
        ("is_only_read", ctypes.c_bool),
    )


class GroupedProduct(torch.autograd.Function):
    """The operator with its gradients, as MindSpeed wraps it."""

    @staticmethod
    def forward(ctx: Any, x: torch.Tensor, weight: torch.Tensor, product: Product) -> torch.Tensor:
        ctx.product = product
        ctx.save_for_backward(x, weight)
        return product(x, weight)

    @staticmethod
    def backward(ctx: Any, *grads: Any) -> Any:
        x, weight = ctx.saved_tensors
        (grad,) = grads
        begins = [0, *ENDS[:-1]]
        of_weight = [x[a:b].t() @ grad[a:b] for a, b in zip(begins, ENDS, strict=True)]
        back = ctx.product(grad.contiguous(), weight.transpose(1, 2).contiguous())
        return back, torch.stack(of_weight), None


class Experts(nn.Module):
    """Layers of experts, each a grouped product."""

    def __init__(self, product: Product, numbers: torch.Generator) -> None:
        super().__init__()
        self.layers = nn.ModuleList(Layer(product, numbers) for _ in range(DEPTH))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        for layer in self.layers:
            x = layer(x)
        return x


class Layer(nn.Module):
    """One of them."""

    def __init__(self, product: Product, numbers: torch.Generator) -> None:
        super().__init__()
        self.product = product
        self.weight = nn.Parameter(torch.randn(GROUPS, WIDTH, WIDTH, generator=numbers) * 0.3)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        made: torch.Tensor = GroupedProduct.apply(x * 1.5, self.weight, self.product)
        return torch.tanh(made) * torch.sigmoid(made) + x


def hooked(extension: OperatorExtension) -> Product:
    return lambda x, weight: extension.npu_gmm([x], [weight], ENDS)[0]


def unhooked(extension: OperatorExtension) -> Product:
    def product(x: torch.Tensor, weight: torch.Tensor) -> torch.Tensor:
        made = x.new_empty(x.size(0), weight.size(2))
        ends = (ctypes.c_int64 * GROUPS)(*ENDS)
        sizes = (ctypes.c_int64 * 3)(x.size(0), x.size(1), weight.size(2))
        extension.multiply_unhooked(
            x.data_ptr(), weight.data_ptr(), ends, GROUPS, sizes, made.data_ptr()
        )
        return made

    return product


@contextlib.contextmanager
def storm(session: Session) -> Iterator[None]:
    """Evict everything again and again on another thread, and overwrite what is freed."""
    is_over = threading.Event()

    def run() -> None:
        numbers = random.Random(0)
        while not is_over.is_set():
            session.rescue(EVERYTHING)
            junk = [torch.full((TOKENS, WIDTH), 7.0) for _ in range(8)]
            is_over.wait(numbers.random() * 1e-3)
            del junk

    worker = Worker(run, "storm")
    try:
        yield
    finally:
        is_over.set()
        worker.finish()


def train(
    product: Product, seed: int = 0, prepare: Callable[[nn.Module], object] = id
) -> list[str]:
    """Return losses and gradients of three steps, bit for bit."""
    numbers = torch.Generator().manual_seed(seed)
    model = Experts(product, numbers)
    prepare(model)
    results = []
    for _ in range(3):
        x = torch.randn(TOKENS, WIDTH, generator=numbers, requires_grad=True)
        loss = model(x).square().mean()
        loss.backward()
        grads = [x.grad, *(each.grad for each in model.parameters())]
        results += [float(loss.detach()).hex()] + [bits_of(grad) for grad in grads]
        model.zero_grad()
    return results


def bits_of(tensor: torch.Tensor | None) -> str:
    assert tensor is not None
    return tensor.numpy().tobytes().hex()


@pytest.mark.parametrize("kind", [hooked, unhooked])
def test_operands_when_a_storm_rages_in_the_kernel_then_same_bits(
    extension: OperatorExtension, kind: Callable[[OperatorExtension], Product]
) -> None:
    expected = train(kind(extension))
    extension.set_most_delay(MOST_DELAY_US)
    with swapkit.budget(1 << 40) as session, storm(session):
        assert train(kind(extension)) == expected
    assert session.stats.swapped_in_bytes > 0


def test_operands_when_threads_run_kernels_in_a_storm_then_same_bits(
    extension: OperatorExtension,
) -> None:
    expected = [train(hooked(extension), seed) for seed in range(3)]
    extension.set_most_delay(MOST_DELAY_US)

    def run(seed: int) -> list[str]:
        with swapkit.budget(1 << 40) as session, storm(session):
            found = train(hooked(extension), seed)
        assert session.stats.swapped_in_bytes > 0
        return found

    workers = [Worker(functools.partial(run, seed)) for seed in range(3)]
    assert [worker.finish() for worker in workers] == expected


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
    y = hooked(extension)(x, weight)
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


@pytest.mark.promise("F4")
def test_operand_when_overwritten_in_place_in_a_storm_then_backward_has_the_new_bytes(
    extension: OperatorExtension,
) -> None:
    def run(evict: Callable[[], object]) -> torch.Tensor:
        x = torch.linspace(0, 1, TOKENS * WIDTH).requires_grad_()
        made = x * 2
        loss = made.sin().sum()
        extension.double_at(made.data_ptr(), made.numel())
        del made
        evict()
        loss.backward()
        assert x.grad is not None
        return x.grad

    expected = run(int)
    extension.set_most_delay(MOST_DELAY_US)
    with swapkit.budget(1 << 40) as session, storm(session):
        for _ in range(5):
            assert torch.equal(run(lambda: session.rescue(EVERYTHING)), expected)
    assert session.stats.swapped_in_bytes > 0


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


def test_operand_when_its_memory_was_freed_then_refused(extension: OperatorExtension) -> None:
    with swapkit.budget(1 << 40):
        assert extension.refuses_freed() == 1
        assert extension.refuses_freed_hooked(True) == 1


def test_operand_when_its_memory_was_freed_and_nothing_follows_then_not_looked_at(
    extension: OperatorExtension,
) -> None:
    assert extension.refuses_freed_hooked(False) == 0  # no operator is open
    runtime = get_runtime()
    runtime.shim.kernels_listen(None)  # swapkit does not run
    try:
        assert extension.refuses_freed_hooked(True) == 0
    finally:
        runtime.shim.kernels_listen(runtime._kernels)


def test_python_operator_when_around_one_in_c_then_both_have_names(
    extension: OperatorExtension, installation: Installation
) -> None:
    x, weight = torch.ones(TOKENS, WIDTH), torch.ones(GROUPS, WIDTH, WIDTH)
    with swapkit.budget(1 << 40), swapkit.op("outer", x):
        y = hooked(extension)(x, weight)
        holders = find_holders(installation.device, installation.tracker)
        names = {holder.name: holder.nbytes for holder in holders}
    assert names["made in outer.gmm_forward"] == y.nbytes
