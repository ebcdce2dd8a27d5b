"""Steps that leave the plan because a saved tensor has another size."""

from __future__ import annotations

import pytest

from tests.unit._runtime.plan_rig import TOKENS, Course, plain, swap_all

pytestmark = pytest.mark.usefixtures("installation")


def test_deviation_when_only_a_size_is_another_then_it_says_which() -> None:
    course = Course()
    with course.running():
        trace = course.record()
        with course.following_plan(trace, *swap_all(trace)) as following:
            course.tokens = TOKENS // 2
            course.step()
            course.tokens = TOKENS
            assert following.end_step().resized_bytes == 32 << 10
            course.forward()
            course.end()
            assert following.end_step().resized_bytes == 0
            plain(course)
            assert following.end_step().resized_bytes == 0


@pytest.mark.parametrize(("path", "nbytes"), [("blocks.0.norm", 48), ("blocks.1.norm", 0)])
def test_deviation_when_another_module_saves_then_it_is_not_only_a_size(
    path: str, nbytes: int
) -> None:
    course = Course()
    with course.running():
        trace = course.record()
        sites = [
            None if each.storage is None else trace.storages[each.storage].module
            for each in trace.events
        ]
        with course.following_plan(trace, *swap_all(trace)) as following:
            tag = course.swapper.shared.tracker.tag_named(path)
            following.deviated((sites.index("blocks.0.norm"), True, tag, 48, -1, False))
            assert following.end_step().resized_bytes == nbytes
