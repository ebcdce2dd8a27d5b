"""Programs legal in plain autograd give the same bits however saved tensors move.

The programs are in `tests/programs`; their ids name the facts about autograd ("G1" to "G30") that
they are about. Facts without a program:

- G11, G13, G16 and G28 are in part about memory and scopes: `test_scopes.py` and `test_memory.py`.
- G14, G15: that a recompute inside backward packs again costs time, not bits; both orders are run.
- G18: no test on `fullgraph` compilation of a scope itself; only of what runs inside one.
- G22: storages are only resized by their owners here (G6); swapkit never resizes one.
- G24: hooks that are given to a graph after the fact: `test_adoption.py`.
- G25: what a save costs is measured by the benchmarks.
- G30: nothing here depends on `SACEstimator`.

Every program must also be able to fail: it gives other bits, or raises, when what was saved comes
back as zeros, or in another order (`test_sensitivity.py`).
"""

from __future__ import annotations

import pytest
import torch

from tests.conformance.modes import Mode, count_copies, find_mode
from tests.programs import PROGRAMS, Entry, assert_same_bits, leaf, run
from tests.programs.registry import results_of_plain_training

# Programs in which all that autograd saves was given, changed in place, or made by a kernel that
# torch does not run.
UNREPEATED = (
    "double_backward_of_a_function",
    "save_on_cpu_inside-G12",
    "lazily_copied_tensors",
    "in_place_on_tensors_that_are_not_saved",
    "in_place_between_saves_of_one_storage",
    "change_that_does_not_count_as_one-G23",
)
# Programs that take the memory of a weight, or torch's way around the keys of tensors.
BY_ADDRESS = ("weight_without_memory_between", "functional_tensors")


@pytest.mark.promise("A3")
@pytest.mark.promise("B12")
@pytest.mark.parametrize("entry", PROGRAMS, ids=lambda entry: entry.name)
def test_results_when_saved_tensors_move_then_same_bits(entry: Entry, mode: Mode) -> None:
    if mode.name == "hold_everything" and entry.name.startswith(BY_ADDRESS):
        with mode.open() as evict, pytest.raises(RuntimeError, match="leave the device"):
            run(entry.body, evict)
        return
    expected = results_of_plain_training(entry)
    with count_copies() as copied, mode.open() as evict:
        results = run(entry.body, evict)
    assert_same_bits(results, expected)
    if mode.moves_all and entry.moves:
        assert copied.out_bytes > 0, "nothing was moved"
    if mode.drops_all and entry.moves and entry.name not in UNREPEATED:
        assert copied.repeated > 0, "nothing was computed again"


@pytest.mark.parametrize("name", ["hold_everything", "hold_late"])
def test_hold_everything_when_it_evicts_then_a_leaf_has_no_memory(name: str) -> None:
    with find_mode(name).open() as evict:
        x = leaf()
        y = x.exp()
        evict()
        with pytest.raises(RuntimeError, match="leave the device"):
            x.data_ptr()
        y.sum().backward()
        assert torch.equal(x.exp(), y)


def test_programs_when_listed_then_each_name_is_used_once() -> None:
    names = [entry.body.__name__ for entry in PROGRAMS]
    assert len(names) == len(set(names))
    assert len(names) >= 150
