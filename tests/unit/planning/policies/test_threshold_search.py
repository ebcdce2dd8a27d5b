"""The search for a memory threshold, over devices that run out of memory at a known size."""

from __future__ import annotations

import math

import pytest

from swapkit.errors import InvalidArgument
from swapkit.planning.policies.adaptive_recompute import StepOutcome, Threshold, ThresholdSearch

MIB = 1 << 20
OUT_OF_MEMORY = StepOutcome(swapped_bytes=MIB)
FINE = StepOutcome()


def run_search(
    search: ThresholdSearch, capacity: int, most_steps: int = 100
) -> tuple[Threshold, list[int]]:
    """Run steps, of which those above the capacity run out; return what is found, all probes."""
    answer = search.next()
    probes: list[int] = []
    while not answer.is_found:
        assert len(probes) < most_steps
        probes.append(answer.nbytes)
        answer = search.next(OUT_OF_MEMORY if answer.nbytes > capacity else FINE)
    return answer, probes


@pytest.mark.promise("A5")
@pytest.mark.parametrize("most", [2, 3, 1000, 24_576, 65_536])
@pytest.mark.parametrize("share", [0.0, 0.3, 0.77, 0.999])
def test_search_when_capacity_is_fixed_then_found_in_so_many_probes(
    most: int, share: float
) -> None:
    capacity = int(share * most)
    search = ThresholdSearch(most * MIB, solve=lambda nbytes: nbytes)
    found, probes = run_search(search, capacity * MIB)
    assert found.nbytes == capacity * MIB
    assert len(probes) <= math.ceil(math.log2(most)) + 2
    assert probes[0] == most * MIB


@pytest.mark.promise("A5")
def test_search_when_the_most_is_enough_then_found_at_once() -> None:
    search = ThresholdSearch(1000 * MIB, solve=lambda nbytes: nbytes)
    found, probes = run_search(search, 2000 * MIB)
    assert found == Threshold(nbytes=1000 * MIB, is_found=True)
    assert len(probes) == 1


def test_search_when_policies_repeat_then_no_step_is_spent_twice() -> None:
    layers = 7

    def solve(nbytes: int) -> int:
        return nbytes * layers // (1024 * MIB)  # layers that are not recomputed

    ran: list[int] = []
    search = ThresholdSearch(1024 * MIB, solve=solve)
    answer = search.next()
    while not answer.is_found:
        ran.append(solve(answer.nbytes))
        answer = search.next(OUT_OF_MEMORY if ran[-1] > 4 else FINE)
    assert solve(answer.nbytes) == 4
    assert len(ran) == len(set(ran))


def test_search_when_one_allocation_was_retried_then_the_threshold_is_tried_again() -> None:
    search = ThresholdSearch(1000 * MIB, solve=lambda nbytes: nbytes)
    first = search.next()
    again = search.next(StepOutcome(retries=1))
    assert again == first
    assert search.next(FINE) == Threshold(nbytes=1000 * MIB, is_found=True)


@pytest.mark.parametrize("retries", [1, 2])
def test_search_when_retried_too_often_then_as_out_of_memory(retries: int) -> None:
    search = ThresholdSearch(1000 * MIB, solve=lambda nbytes: nbytes)
    search.next()
    answer = search.next(StepOutcome(retries=retries))
    if retries == 1:
        answer = search.next(StepOutcome(retries=1))
    assert answer == Threshold(nbytes=500 * MIB, is_found=False)


@pytest.mark.promise("A5")
def test_search_when_found_and_then_out_of_memory_then_goes_on_below() -> None:
    search = ThresholdSearch(1000 * MIB, solve=lambda nbytes: nbytes)
    found, _ = run_search(search, 700 * MIB)
    assert search.next(FINE) == found
    answer = search.next(OUT_OF_MEMORY)
    assert answer.nbytes < found.nbytes
    while not (answer.is_found and answer.nbytes <= 600 * MIB):
        answer = search.next(OUT_OF_MEMORY if answer.nbytes > 600 * MIB else FINE)
    assert answer.nbytes == 600 * MIB


def test_search_when_found_and_watched_for_long_then_stays() -> None:
    search = ThresholdSearch(1000 * MIB, solve=lambda nbytes: nbytes)
    found, _ = run_search(search, 700 * MIB)
    for _ in range(10):
        assert search.next(FINE) == found
    assert search.next(OUT_OF_MEMORY) == found


def test_search_when_sizes_are_wrong_then_error() -> None:
    with pytest.raises(InvalidArgument, match="most_bytes"):
        ThresholdSearch(0, solve=lambda nbytes: nbytes)
