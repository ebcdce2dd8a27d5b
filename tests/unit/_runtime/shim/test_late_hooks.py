"""The operators with which compiled graphs pack and unpack saved tensors, called by hand."""

from __future__ import annotations

import contextlib
import threading

import pytest
import torch

import swapkit
from swapkit._runtime.session.reports import explain_regions
from tests.support import run_python
from tests.support.sessions import in_use_bytes

ROWS, THREADS, ROUNDS = 4096, 4, 20

pytestmark = pytest.mark.usefixtures("installation")

_ops = torch.ops.swapkit


def pack(made: torch.Tensor, region: str = "") -> torch.Tensor:
    (handle,) = _ops.pack_saved([made], region)
    assert isinstance(handle, torch.Tensor)
    return handle


def unpack(handle: torch.Tensor) -> torch.Tensor:
    (found,) = _ops.unpack_saved([handle])
    assert isinstance(found, torch.Tensor)
    return found


@pytest.mark.parametrize("name", ["pack_saved", "pack_saved_"])
@pytest.mark.parametrize("is_offloaded", [False, True])
def test_tensors_when_packed_then_views_lose_the_memory_and_the_tensors_have_their_bytes_again(
    name: str, *, is_offloaded: bool
) -> None:
    base, other = torch.randn(ROWS, 6), torch.randn(ROWS)
    made = [*base.chunk(3, -1), other]
    view, expected = base[1:], [each.clone() for each in made]
    with swapkit.offload(min_bytes=1) if is_offloaded else contextlib.nullcontext():
        handles = getattr(_ops, name)(made, "")
    assert view.untyped_storage().nbytes() == 0
    for handle, each in zip(handles, made, strict=True):
        assert handle.untyped_storage().nbytes() == 0
        assert (handle.shape, handle.stride()) == (each.shape, each.stride())
    del base, other, made, view
    for _ in range(2):  # outside of a backward nothing says that a use is the last one
        found = _ops.unpack_saved(handles)
        assert all(map(torch.equal, found, expected))
        first, second, third, apart = (each.untyped_storage().data_ptr() for each in found)
        assert first == second == third != apart


def test_tensors_when_they_share_memory_that_was_packed_then_the_error_says_so() -> None:
    base = torch.randn(ROWS, 2)
    first, second = base.unbind(1)
    handle = pack(first)
    with pytest.raises(RuntimeError, match="which the schema of its operator does not say"):
        pack(second)
    assert unpack(handle).untyped_storage().nbytes() == ROWS * 2 * 4


def test_handle_when_its_memory_is_read_then_the_error_says_why_there_is_none() -> None:
    handle = pack(torch.randn(ROWS))
    for read in (torch.Tensor.clone, torch.Tensor.numpy, torch.Tensor.data_ptr, torch.Tensor.zero_):
        with pytest.raises(RuntimeError, match="it has no memory"):
            read(handle)


def test_handle_when_dropped_on_any_thread_then_so_is_the_memory() -> None:
    before = in_use_bytes()
    handles = [pack(torch.randn(ROWS)) for _ in range(8)]
    assert in_use_bytes() > before
    dropping = threading.Thread(target=handles.clear)
    dropping.start()
    dropping.join()
    assert in_use_bytes() == before


def test_threads_when_they_pack_and_unpack_then_each_has_its_own_bytes() -> None:
    wrong: list[int] = []

    def work(number: int) -> None:
        for turn in range(ROUNDS):
            with swapkit.offload(min_bytes=1):
                handles = [pack(torch.full((ROWS,), number + turn)) for _ in "12"]
            for handle in handles:
                found = unpack(handle)
                if not bool((found == number + turn).all()):
                    wrong.append(number)

    threads = [threading.Thread(target=work, args=(100 * number,)) for number in range(THREADS)]
    for each in threads:
        each.start()
    for each in threads:
        each.join()
    assert wrong == []


def test_regions_when_they_run_again_then_each_is_listed_once_in_order() -> None:
    for text in (
        "a region of this test",
        "",
        "another region of this test",
        "a region of this test",
    ):
        pack(torch.randn(ROWS), text)
    ours = [each for each in explain_regions() if "of this test" in each]
    assert ours == ["a region of this test", "another region of this test"]


def test_tensor_when_no_graph_has_packed_it_then_it_is_unpacked_as_it_is() -> None:
    tensor = torch.randn(ROWS)
    assert unpack(tensor).data_ptr() == tensor.data_ptr()


def test_process_when_it_ends_with_handles_then_it_ends_well() -> None:
    run_python(
        "import torch, swapkit; swapkit.install()\n"
        "with swapkit.offload(min_bytes=1):\n"
        "    kept = torch.ops.swapkit.pack_saved([torch.randn(4096)], 'a region')\n"
    )
