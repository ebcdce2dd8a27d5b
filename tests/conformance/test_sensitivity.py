"""The programs notice what swapping could do wrong: they run under hooks with planted faults."""

from __future__ import annotations

from contextlib import contextmanager
from typing import TYPE_CHECKING, Any

import pytest
import torch
from torch.autograd.graph import saved_tensors_hooks

from tests.conformance.modes import MIN_BYTES
from tests.programs import ILLEGAL, PROGRAMS, Entry, is_same, run
from tests.programs.kinds import Pair
from tests.programs.registry import results_of_plain_training
from tests.support.place import ON_CPU

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator

pytestmark = pytest.mark.skipif(not ON_CPU, reason="wrong indices break a GPU's context for good")

# Only programs about the layout can notice that it is wrong.
NOTICES_STRIDES = {
    "transposes_of_square_matrices", "strides_of_every_sort", "views_of_one_storage",
    "small_view_of_a_large_base", "overlapping_views_with_and_without_their_base",
    "fused_qkv_with_attention", "linear_layers", "conj_and_neg_bits_are_kept",
    "output_that_is_a_view_of_the_input", "scalar_view_of_a_large_storage",
}  # fmt: skip
NOTICES_OFFSETS = {
    "views_of_one_storage", "small_view_of_a_large_base", "fused_qkv_with_attention",
    "overlapping_views_with_and_without_their_base", "expanded_and_offset",
    "strides_of_every_sort", "conj_and_neg_bits_are_kept",
}  # fmt: skip
NOTICES_LOST_BITS = {"complex_conjugate_and_negative", "conj_and_neg_bits_are_kept"}


def is_plain(tensor: torch.Tensor) -> bool:
    return (
        type(tensor) in {torch.Tensor, torch.nn.Parameter}
        and tensor.layout is torch.strided
        and not tensor.is_nested
        and not tensor.is_quantized
    )


def zeros(tensor: Any) -> Any:
    if isinstance(tensor, Pair):
        return Pair(zeros(tensor.one), zeros(tensor.two))
    if not is_plain(tensor) or tensor.untyped_storage().nbytes() < MIN_BYTES:
        return tensor.detach()
    return torch.zeros_like(tensor)


def without_strides(tensor: torch.Tensor) -> torch.Tensor:
    """Read the storage row by row, as if the tensor were contiguous."""
    if not is_plain(tensor) or tensor.is_contiguous():
        return tensor.detach()
    size = tensor.untyped_storage().nbytes() // tensor.element_size()
    room = size - int(tensor.storage_offset()) >= tensor.numel()
    flat = tensor.detach().as_strided((tensor.numel(),), (1,)) if room else tensor.detach().clone()
    return flat.reshape(tensor.shape).clone()


def without_offset(tensor: torch.Tensor) -> torch.Tensor:
    if not is_plain(tensor):
        return tensor.detach()
    return tensor.detach().as_strided(tensor.size(), tensor.stride(), 0)


def without_bits(tensor: torch.Tensor) -> torch.Tensor:
    if not is_plain(tensor):
        return tensor.detach()
    same = tensor.detach()
    if same.is_conj():
        same = torch.view_as_complex(torch.view_as_real(same.conj()).clone())
    return same._neg_view().clone() if same.is_neg() else same


@contextmanager
def planted(fault: Callable[[torch.Tensor], torch.Tensor]) -> Iterator[None]:
    with saved_tensors_hooks(lambda tensor: tensor.detach(), fault):
        yield


def notices(entry: Entry, fault: Callable[[torch.Tensor], torch.Tensor]) -> bool:
    expected = results_of_plain_training(entry)
    try:
        with planted(fault):
            results = run(entry.body, lambda: None)
    except Exception:  # noqa: BLE001 - whatever it raises, it has noticed
        return True
    return not all(map(is_same, results, expected)) or len(results) != len(expected)


def named(names: set[str]) -> list[Entry]:
    found = [entry for entry in PROGRAMS if entry.body.__name__ in names]
    assert {entry.body.__name__ for entry in found} == names
    return found


MOVING = [entry for entry in PROGRAMS if entry.moves]


@pytest.mark.parametrize("entry", MOVING, ids=lambda entry: entry.name)
def test_program_when_unpack_returns_zeros_then_noticed(entry: Entry) -> None:
    assert notices(entry, zeros)


@pytest.mark.parametrize("entry", named(NOTICES_STRIDES), ids=lambda entry: entry.name)
def test_program_when_unpack_forgets_strides_then_noticed(entry: Entry) -> None:
    assert notices(entry, without_strides)


@pytest.mark.parametrize("entry", named(NOTICES_OFFSETS), ids=lambda entry: entry.name)
def test_program_when_unpack_forgets_the_offset_then_noticed(entry: Entry) -> None:
    assert notices(entry, without_offset)


@pytest.mark.parametrize("entry", named(NOTICES_LOST_BITS), ids=lambda entry: entry.name)
def test_program_when_unpack_forgets_conj_and_neg_then_noticed(entry: Entry) -> None:
    assert notices(entry, without_bits)


@pytest.mark.parametrize(
    "entry",
    [entry for entry in ILLEGAL if entry.gotchas],
    ids=lambda entry: entry.name,
)
def test_illegal_program_when_hooks_do_not_compare_versions_then_it_passes(entry: Entry) -> None:
    """So nothing but the comparison of versions can make these tests pass."""
    with saved_tensors_hooks(lambda tensor: tensor.detach(), lambda tensor: tensor.detach()):
        run(entry.body, lambda: None)
