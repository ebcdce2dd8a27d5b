"""The statistics table, the list of holders and the words of a failed allocation."""

from __future__ import annotations

import pytest

from swapkit.reporting.text import (
    LARGEST_SHOWN,
    AllocationFailure,
    Holder,
    format_failure,
    format_holders,
    format_stats,
)

KIB = 1024
NAMES = ("allocated_bytes", "requested_bytes", "active_bytes", "reserved_bytes")
MORE_NAMES = ("inactive_split_bytes", "allocation", "segment")


def make_stats(*, budget_bytes: int) -> dict[str, int]:
    """Number every cell, so that each is recognised in the table."""
    fields = ("current", "peak", "allocated", "freed")
    cells = [f"{name}.all.{field}" for name in (*NAMES, *MORE_NAMES) for field in fields]
    stats = {cell: (number + 1) * KIB for number, cell in enumerate(cells)}
    counts = {"num_alloc_retries": 11, "num_rescues": 7, "rescued_bytes": 3 * KIB, "num_ooms": 2}
    return {**stats, **counts, "budget_bytes": budget_bytes}


def make_failure(*, budget: int = 1000 * KIB, where: str = "layers.3.mlp") -> AllocationFailure:
    return AllocationFailure(
        asked=100 * KIB,
        where=where,
        in_use=960 * KIB,
        active=970 * KIB,
        reserved=990 * KIB,
        budget=budget,
        device="the CPU device",
        device_bytes=4000 * KIB,
        holders=[Holder("parameters", 900 * KIB, 12)],
        hints=["a smaller batch", "a larger budget"],
        facts=["2.00 KiB of saved tensors remain."],
    )


def test_failure_when_there_are_other_ranks_then_the_text_names_this_one() -> None:
    alone = format_failure(make_failure())
    ranked = format_failure(make_failure()._replace(rank="rank 1 of 2"))
    assert "out of memory on the CPU device: " in alone
    assert "out of memory on the CPU device (rank 1 of 2): " in ranked


def test_rows_when_few_then_each_has_amount_name_and_count() -> None:
    lines = format_holders([Holder("parameters", 3 * KIB, 2), Holder("buffers", 5, 1)])
    assert lines == ["      3.00 KiB  parameters (2)", "           5 B  buffers (1)"]


def test_rows_when_many_then_the_rest_is_one_line_with_its_sum() -> None:
    rows = [Holder(f"module {number}", KIB, 1) for number in range(LARGEST_SHOWN + 3)]
    lines = format_holders(rows)
    assert len(lines) == LARGEST_SHOWN + 1
    assert lines[-1] == "      3.00 KiB  3 others"


def test_rows_when_exactly_as_many_as_shown_then_there_is_no_rest() -> None:
    assert format_holders([Holder("a", 1, 1), Holder("b", 1, 1)], most=2) == [
        "           1 B  a (1)",
        "           1 B  b (1)",
    ]


def test_rows_when_none_then_no_lines() -> None:
    assert format_holders([]) == []


def test_stats_when_formatted_then_every_number_stands_in_its_row() -> None:
    lines = format_stats(make_stats(budget_bytes=64 * KIB), title="the title").splitlines()
    assert lines[0] == "the title"
    assert lines[2].split() == ["current", "peak", "allocated", "freed"]
    rows = [line[22:].split() for line in lines[3:10]]
    in_bytes = [[f"{4 * row + cell}.00" for cell in (1, 2, 3, 4)] for row in (0, 1, 2, 3, 4)]
    assert [row[::2] for row in rows[:5]] == in_bytes
    assert all(set(row[1::2]) == {"KiB"} for row in rows[:5])
    assert rows[5] == [str(number * KIB) for number in (21, 22, 23, 24)]
    assert rows[6] == [str(number * KIB) for number in (25, 26, 27, 28)]
    assert [line[:22].rstrip() for line in lines[3:10]] == [
        "in use",
        "  requested by torch",
        "in use or awaited",
        "reserved",
        "cached",
        "blocks in use",
        "segments",
    ]


def test_stats_when_formatted_then_the_last_line_has_budget_and_counts() -> None:
    last = format_stats(make_stats(budget_bytes=64 * KIB), title="").splitlines()[-1]
    assert last == (
        "budget 64.00 KiB; allocations that had to wait, trim or rescue: 11; "
        "rescues: 7 (3.00 KiB); out of memory: 2"
    )


def test_stats_when_there_is_no_budget_then_it_says_none() -> None:
    assert "budget none;" in format_stats(make_stats(budget_bytes=0), title="")


@pytest.mark.promise("A6")
def test_failure_when_formatted_then_it_says_asked_possible_held_and_what_to_try() -> None:
    assert format_failure(make_failure()).splitlines() == [
        "swapkit: out of memory on the CPU device: 100.00 KiB (102400 bytes) requested in "
        "layers.3.mlp; the budget is 1000.00 KiB.",
        "Capacity 1000.00 KiB: allocated 960.00 KiB, active 970.00 KiB, reserved 990.00 KiB, "
        "free 10.00 KiB.",
        "Largest holders (number of tensors):",
        "    900.00 KiB  parameters (12)",
        "2.00 KiB of saved tensors remain.",
        "What to try:",
        "  - a smaller batch",
        "  - a larger budget",
        "In the words of torch: DefaultCPUAllocator: can't allocate memory: out of memory.",
    ]


@pytest.mark.parametrize(
    ("device", "words"),
    [
        ("cuda:1", ": CUDA out of memory."),
        ("npu:0", ": NPU out of memory."),
        ("the CPU device", "DefaultCPUAllocator: can't allocate memory: out of memory."),
    ],
)
def test_failure_when_formatted_then_it_has_the_words_of_torch(device: str, words: str) -> None:
    assert format_failure(make_failure()._replace(device=device)).endswith(words)


def test_failure_when_there_is_no_budget_then_the_device_is_the_limit() -> None:
    text = format_failure(make_failure(budget=0))
    assert "there is no budget; the device has 3.91 MiB." in text
    assert "Capacity 3.91 MiB: allocated 960.00 KiB" in text


def test_failure_when_the_request_is_larger_than_the_budget_then_it_says_so() -> None:
    text = format_failure(make_failure()._replace(asked=2000 * KIB))
    assert "the budget is 1000.00 KiB, less than this request alone." in text


def test_failure_when_free_memory_is_in_pieces_then_the_largest_is_named() -> None:
    failure = make_failure()._replace(asked=35 * KIB, pieces=(12 * KIB, 18 * KIB))
    text = format_failure(failure)
    assert "40.00 KiB are not allocated, but in 3 pieces, the largest of 18.00 KiB.\n" in text
    failure = failure._replace(reserved=1000 * KIB, pieces=())
    text = format_failure(failure)
    assert "40.00 KiB are not allocated, but other streams still use them.\n" in text


def test_failure_when_the_free_memory_is_enough_then_the_pools_reason_is_named() -> None:
    cause = "pool: 8 bytes requested; the device refused: cuMemMap: out of memory"
    failure = make_failure()._replace(asked=10 * KIB, cause=cause)
    assert f"\nIt would fit by these figures. It failed with: {cause}.\n" in format_failure(failure)
    assert cause not in format_failure(failure._replace(asked=11 * KIB))


def test_failure_when_the_place_is_unknown_then_none_is_named() -> None:
    assert "requested; the budget" in format_failure(make_failure(where=""))


def test_failure_when_more_is_in_use_than_the_budget_then_nothing_could_be_given() -> None:
    assert "free 0 B." in format_failure(make_failure(budget=KIB))
