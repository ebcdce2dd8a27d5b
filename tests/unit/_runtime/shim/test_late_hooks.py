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


def unpack(handle: torch.Tensor, like: torch.Tensor) -> torch.Tensor:
    result: torch.Tensor = _ops.unpack_saved(
        handle, like.shape, like.stride(), like.dtype, like.device
    )
    return result


@pytest.mark.parametrize("name", ["pack_saved", "pack_saved_"])
@pytest.mark.parametrize("is_offloaded", [False, True])
def test_tensor_when_packed_then_its_views_lose_the_memory_and_it_has_its_bytes_again(
    name: str, *, is_offloaded: bool
) -> None:
    made = torch.randn(ROWS, 4).t()
    view, expected = made[1:], made.clone()
    with swapkit.offload(min_bytes=1) if is_offloaded else contextlib.nullcontext():
        handle = getattr(_ops, name)(made, "")
        assert view.untyped_storage().nbytes() == 0
        assert handle.nbytes == 8
    found = unpack(handle, expected.t().contiguous().t())
    assert found.stride() == (1, 4)
    assert torch.equal(found, expected)
    found.zero_()  # outside of a backward nothing says that this is the last use
    assert torch.equal(unpack(handle, expected.t().contiguous().t()), expected)


def test_handle_when_dropped_on_any_thread_then_so_is_the_memory() -> None:
    before = in_use_bytes()
    handles = [_ops.pack_saved(torch.randn(ROWS), "") for _ in range(8)]
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
                handles = [_ops.pack_saved(torch.full((ROWS,), number + turn), "") for _ in "12"]
            for handle in handles:
                found = _ops.unpack_saved(handle, [ROWS], [1], torch.int64, torch.device("cpu"))
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
        _ops.pack_saved(torch.randn(ROWS), text)
    ours = [each for each in explain_regions() if "of this test" in each]
    assert ours == ["a region of this test", "another region of this test"]


def test_hooks_of_others_when_they_copy_a_handle_then_the_error_says_so() -> None:
    handle = _ops.pack_saved(torch.randn(ROWS), "")
    with pytest.raises(RuntimeError, match="was copied by other code's saved-tensor hooks"):
        unpack(handle.clone(), torch.empty(ROWS))


def test_process_when_it_ends_with_handles_then_it_ends_well() -> None:
    run_python(
        "import torch, swapkit; swapkit.install()\n"
        "with swapkit.offload(min_bytes=1):\n"
        "    kept = torch.ops.swapkit.pack_saved(torch.randn(4096), 'a region')\n"
    )
