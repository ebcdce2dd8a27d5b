"""Blocks of the pool that belong to no storage of a trace."""

from __future__ import annotations

from swapkit._runtime.recording.tables.blocks import ALIVE, Blocks, GivenBlock
from swapkit.ir.traces import BEFORE

A, B = 512, 1024  # addresses
CALL = 1


class Course:
    """Blocks, with as many operators as were noted."""

    def __init__(self) -> None:
        self.operators = 0
        self.blocks = Blocks(lambda: self.operators)
        self.blocks.is_whole = True

    def lives(self) -> list[tuple[int, int]]:
        return [(each.birth, each.death) for each in self.blocks.unowned()]


def test_block_when_its_operator_gives_it_back_then_it_is_no_life() -> None:
    course = Course()
    course.blocks.take(A, 512, 500, CALL)
    assert not course.blocks.give(A, 512, CALL)
    course.operators = 2
    assert course.lives() == []


def test_block_when_it_stays_for_more_operators_then_it_lives_from_the_first_to_the_last() -> None:
    course = Course()
    course.blocks.take(A, 512, 500, CALL)
    course.operators = 2
    assert course.blocks.give(A, 512, CALL + 2)  # inside of operator 2
    course.blocks.take(B, 512, 500, 0)  # before operator 2
    course.operators = 4
    assert course.lives() == [(0, 3), (2, ALIVE)]


def test_block_when_it_was_there_before_then_it_lives_until_it_goes() -> None:
    course = Course()
    course.blocks.give(A, 512, 0)
    assert course.blocks.gone_bytes == 512
    course.operators = 3
    course.blocks.give(B, 512, 0)
    assert course.lives() == [(BEFORE, 3)]


def test_block_when_a_session_copies_a_storage_back_into_it_then_it_is_no_life() -> None:
    course = Course()
    course.blocks.take(A, 1024, 1000, 0)
    course.blocks.take(B, 512, 500, 0)
    course.blocks.take_back(1000)
    course.operators = 1
    assert [each.nbytes for each in course.blocks.unowned()] == [512]


def test_block_when_the_recorder_takes_it_then_it_is_no_life() -> None:
    course = Course()
    course.blocks.are_ours = True
    course.blocks.take(A, 512, 500, 0)
    course.operators = 1
    assert course.lives() == []


def test_block_when_a_storage_has_it_then_its_end_is_told() -> None:
    course = Course()
    course.blocks.take(A, 512, 500, 0)
    assert course.blocks.attach(A, 7) == 0
    course.operators = 5
    course.blocks.give(A, 512, 0)
    assert course.blocks.pop_given() == [GivenBlock(7, A, 5)]
    assert course.blocks.pop_given() == []
    assert course.lives() == []


def test_storage_when_its_block_was_there_before_then_it_is_from_before_the_step() -> None:
    course = Course()
    course.operators = 3
    assert course.blocks.attach(A, 7) == BEFORE


def test_storage_when_it_is_a_part_of_a_block_of_the_step_then_its_birth_is_not_known() -> None:
    course = Course()
    course.blocks.take(A, 512, 500, 0)
    assert course.blocks.attach(A + 64, 7) is None
    assert course.blocks.attach(A + 512, 8) == BEFORE


def test_storage_when_events_were_lost_then_its_birth_is_not_known() -> None:
    course = Course()
    course.blocks.is_whole = False
    assert course.blocks.attach(A, 7) is None


def test_blocks_when_events_were_lost_then_none_is_a_life() -> None:
    course = Course()
    course.blocks.take(A, 512, 500, 0)
    course.operators = 1
    course.blocks.is_whole = False
    assert course.lives() == []
