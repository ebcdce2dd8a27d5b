"""Kernels that announce themselves: what they hold, and copies that have outdated bytes."""

from __future__ import annotations

import contextlib
import ctypes
from typing import TYPE_CHECKING

import pytest
import torch
from torch import nn

import swapkit
from swapkit._native.hooks import LIBRARY
from swapkit._native.pool import set_tag
from swapkit._native.sched import State
from swapkit._runtime.model.tracker import NO_MODULE
from swapkit._runtime.process.runtime import get_runtime
from swapkit._runtime.torch_compat.internals import storage_address
from swapkit.registry import Recompute
from tests.support import MIB
from tests.support.operators import Calls, choose
from tests.support.threads import on_thread
from tests.unit._runtime.rig import EVERYTHING, group_of, make_swapper, numbers, save, state_of

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator

    from swapkit._runtime.saved.swapper import Swapper
    from swapkit._runtime.shim.types import SavedTensor

pytestmark = pytest.mark.usefixtures("installation")


@pytest.fixture
def swapper() -> Iterator[Swapper]:
    swapper = make_swapper()
    yield swapper
    swapper.evictor.resume()


def unpacked(handle: SavedTensor) -> torch.Tensor:
    return get_runtime().shim.unpack(handle)


def write(tensor: torch.Tensor) -> None:
    """Write as a kernel does that torch does not run: no version counts it."""
    tensor.detach().numpy()[:] = 3.0


def copied(swapper: Swapper, tensor: torch.Tensor) -> SavedTensor:
    """Save a tensor that others hold, and copy it at once, as plans do."""
    handle = save(swapper, tensor)
    assert swapper.mover.copy_out(group_of(handle))
    assert swapper.mover.finish_out(group_of(handle))
    assert state_of(handle) is State.CLEAN
    return handle


@pytest.mark.promise("F4")
def test_copy_when_a_kernel_overwrites_the_operand_then_made_anew(swapper: Swapper) -> None:
    tensor = numbers(MIB)
    handle = copied(swapper, tensor)
    with swapkit.op("kernel", tensor):
        write(tensor)
    del tensor
    assert swapper.rescue_bytes(EVERYTHING) == MIB
    assert state_of(handle) is State.OUT
    assert torch.equal(unpacked(handle), torch.full((MIB // 4,), 3.0))


@pytest.mark.promise("F4")
def test_copy_when_made_while_the_kernel_runs_then_made_anew(swapper: Swapper) -> None:
    tensor = numbers(MIB)
    with swapkit.op("kernel", tensor):
        handle = copied(swapper, tensor)
        write(tensor)
    del tensor
    assert swapper.rescue_bytes(EVERYTHING) == MIB
    assert torch.equal(unpacked(handle), torch.full((MIB // 4,), 3.0))


@pytest.mark.promise("F4")
@pytest.mark.parametrize("is_released_inside", [False, True])
def test_released_group_when_a_kernel_overwrites_the_storage_then_has_the_new_bytes(
    swapper: Swapper, is_released_inside: bool
) -> None:
    tensor = numbers(MIB)
    handle = copied(swapper, tensor)
    if not is_released_inside:
        swapper.mover.release(group_of(handle))  # the program keeps the storage
    with swapkit.op("kernel", tensor):
        if is_released_inside:
            swapper.mover.release(group_of(handle))
        write(tensor)
    del tensor
    swapper.rescue_bytes(EVERYTHING)
    assert torch.equal(unpacked(handle), torch.full((MIB // 4,), 3.0))


def test_copy_when_the_operand_is_an_output_only_then_made_anew(swapper: Swapper) -> None:
    tensor = numbers(MIB)
    handle = copied(swapper, tensor)
    with swapkit.op("kernel") as kernel:
        write(tensor)
        kernel.outputs(tensor)
    del tensor
    assert swapper.rescue_bytes(EVERYTHING) == MIB
    assert torch.equal(unpacked(handle), torch.full((MIB // 4,), 3.0))


def test_operand_when_nothing_else_holds_it_then_no_rescue_takes_it(swapper: Swapper) -> None:
    tensor = numbers(MIB)
    handle = save(swapper, tensor)
    shim = get_runtime().shim
    token = shim.kernel_enter("kernel")
    shim.kernel_memory(token, [tensor], False)
    del tensor
    assert swapper.rescue_bytes(EVERYTHING) == 0
    assert state_of(handle) is State.RESIDENT
    shim.kernel_leave(token)
    assert swapper.rescue_bytes(EVERYTHING) == MIB


def test_operand_when_kernels_nest_then_held_until_the_last_of_them_ends(swapper: Swapper) -> None:
    tensor = numbers(MIB)
    save_handle = save(swapper, tensor)
    shim = get_runtime().shim
    outer = shim.kernel_enter("outer")
    shim.kernel_memory(outer, [tensor], False)
    inner = shim.kernel_enter("inner")
    shim.kernel_memory(inner, [tensor], False)
    del tensor
    shim.kernel_leave(inner)
    assert swapper.rescue_bytes(EVERYTHING) == 0
    shim.kernel_leave(outer)
    assert swapper.rescue_bytes(EVERYTHING) == MIB
    assert state_of(save_handle) is State.OUT


class Refusing:
    """The runtime's side, when a result that a kernel may overwrite cannot be kept."""

    def __init__(self, error: BaseException) -> None:
        self._error = error

    @property
    def is_planned(self) -> bool:
        raise self._error

    def label(self, _outer: int, _name: str) -> int:
        return 0

    def begin(self, _name: str) -> tuple[int, None]:
        return 0, None

    def end(self, _begun: None, _nbytes: int) -> None:
        """Nothing was begun."""


@pytest.fixture
def refuse() -> Iterator[Callable[[BaseException], None]]:
    shim = get_runtime().shim
    yield lambda error: shim.kernels_listen(Refusing(error))
    shim.kernels_listen(get_runtime()._kernels)


def call_hooks(tensor: torch.Tensor) -> tuple[int, str]:
    """Announce an operand as an operator in C does; return the result and the text."""
    library = ctypes.CDLL(str(LIBRARY))
    library.sk_op_begin(b"kernel")
    storage = storage_address(tensor.untyped_storage())
    result = library.sk_op_tensor(
        *(ctypes.c_void_p(tensor.data_ptr()), ctypes.c_size_t(tensor.nbytes)),
        ctypes.c_void_p(storage),
    )
    library.sk_op_end()
    library.sk_op_error.restype = ctypes.c_char_p
    return result, library.sk_op_error().decode()


@pytest.mark.parametrize(
    ("error", "result"),
    [
        (RuntimeError("no answer"), 1),
        (RuntimeError(), 1),
        (torch.OutOfMemoryError("no room"), 2),
    ],
)
def test_operand_when_its_results_cannot_be_kept_then_refused_with_the_reason(
    refuse: Callable[[BaseException], None], error: Exception, result: int
) -> None:
    found: list[tuple[int, str]] = []

    def body(x: torch.Tensor) -> torch.Tensor:
        made = x.mul(2)
        read = made.mul(3).sin()
        refuse(error)
        found.append(call_hooks(made))
        with pytest.raises(type(error), match=f"^{error}$"), swapkit.op("kernel", made):
            pytest.fail("the kernel runs")
        return read

    model = choose(Calls(body), {"mul": Recompute()})
    model(torch.ones(1024, requires_grad=True)).sum().backward()
    assert found == [(result, str(error) or "RuntimeError")]


def begin_in_c(name: bytes) -> None:
    ctypes.PyDLL(str(LIBRARY)).sk_op_begin(name)


def end_in_c() -> None:
    ctypes.PyDLL(str(LIBRARY)).sk_op_end()


def place() -> tuple[str, str]:
    """Return this thread's names: where the tracker is, and what new memory belongs to."""
    tracker = get_runtime().tracker
    label = set_tag(NO_MODULE)
    set_tag(label)
    return tracker.name(tracker.current()), tracker.name(label)


def leave_in_c() -> None:
    begin_in_c(b"bad")
    raise ValueError("the kernel failed")


_left: list[int] = []  # tokens of kernels that are open, for the end of a test


def leave_in_python() -> None:
    _left.append(get_runtime().shim.kernel_enter("bad"))
    raise ValueError("the kernel failed")


class Leaving(nn.Module):
    """Modules around a kernel that an exception leaves open."""

    def __init__(self, leave: Callable[[], None], depth: int) -> None:
        super().__init__()
        self.inner = Leaving(leave, depth - 1) if depth > 0 else None
        self.leave = leave

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        if self.inner is None:
            self.leave()
        else:
            x = self.inner(x)
        return x


@pytest.mark.parametrize("leave", [leave_in_c, leave_in_python])
def test_kernel_when_left_inside_nested_modules_then_the_next_names_are_without_it(
    leave: Callable[[], None],
) -> None:
    seen = []

    class Good(nn.Module):
        def forward(self, x: torch.Tensor) -> torch.Tensor:
            seen.append(place())
            begin_in_c(b"kernel")
            seen.append(place())
            end_in_c()
            seen.append(place())
            with swapkit.op("other"):
                seen.append(place())
            seen.append(place())
            return x * 1

    class Catching(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.bad, self.good = Leaving(leave, 5), Good()

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            with contextlib.suppress(ValueError):
                self.bad(x)
            seen.append(place())
            x = self.good(x)
            seen.append(place())
            return x

    model = Catching()
    with swapkit.budget(1 << 40, model):
        model(torch.ones(8, requires_grad=True)).sum().backward()
        seen.append(place())
    get_runtime().shim.kernels_sweep()
    while _left:  # no sweep ends what Python has begun
        get_runtime().shim.kernel_leave(_left.pop())
    names = ["Catching", "good", "good.kernel", "good", "good.other", "good", "Catching", ""]
    assert seen == [(name, name) for name in names]


@pytest.mark.parametrize("is_named", [False, True])
def test_kernels_when_the_outer_ends_first_then_the_label_before_both_comes_back(
    is_named: bool,
) -> None:
    runtime = get_runtime()
    if is_named:
        runtime.tracker.start("test")
    before = runtime.tracker.tag_named("before")
    set_tag(before)
    outer, inner = runtime.shim.kernel_enter("outer"), runtime.shim.kernel_enter("inner")
    runtime.shim.kernel_leave(outer)
    label = set_tag(before)
    set_tag(label)
    assert runtime.tracker.name(label).endswith("outer.inner")
    runtime.shim.kernel_leave(inner)
    assert set_tag(NO_MODULE) == before
    runtime.tracker.stop("test")


class _Allocated(ctypes.Structure):
    """glibc's `struct mallinfo2`: `hblkhd` is its fifth member, `uordblks` its eighth."""

    _fields_ = (("members", ctypes.c_size_t * 10),)


def allocated_bytes() -> int:
    """Return the bytes that the process has of the C library."""
    mallinfo = ctypes.CDLL(None).mallinfo2
    mallinfo.restype = _Allocated
    found = mallinfo().members
    return int(found[7] + found[4])


def test_kernel_when_it_ends_with_its_thread_then_its_memory_is_freed() -> None:
    shim = get_runtime().shim
    tensor = torch.ones(8)
    count = 4096  # operands: 64 KiB of the kernel's own

    def run() -> None:
        shim.kernel_leave(shim.kernel_enter("first"))
        shim.kernel_memory(shim.kernel_enter("open"), [tensor] * count, False)

    on_thread(run)
    before = allocated_bytes()
    for _ in range(16):
        on_thread(run)
    assert allocated_bytes() - before < 4 * 16 * count


def test_label_when_python_has_failed_to_give_one_then_asked_again(
    refuse: Callable[[BaseException], None],
) -> None:
    refuse(RuntimeError("no answer"))
    shim = get_runtime().shim
    name = "labelled only once Python answers"
    on_thread(lambda: shim.kernel_leave(shim.kernel_enter(name)))
    shim.kernels_listen(get_runtime()._kernels)
    token = shim.kernel_enter(name)
    label = set_tag(NO_MODULE)
    set_tag(label)
    shim.kernel_leave(token)
    assert get_runtime().tracker.name(label) == name


def test_naming_when_unknown_then_refused() -> None:
    with pytest.raises(ValueError, match="expected 0, 1 or 2, not 7"):
        get_runtime().shim.kernels_name(7)  # type: ignore[arg-type]
