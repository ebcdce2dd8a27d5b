"""Planned addresses of a pool's steps: when they are made, kept, and given up."""

from __future__ import annotations

import itertools
import logging
import random
import threading
from dataclasses import dataclass, field
from typing import TYPE_CHECKING

import pytest

from swapkit._native.backend import Backend
from swapkit._native.layout import TAG_BACKWARD, Lives, LivesMode
from swapkit._native.pool import Pool, RingKind, set_tag
from swapkit._runtime.allocators import pool_layout
from swapkit._runtime.allocators.pool_layout import (
    MOST_DRIFT,
    MOVING_STEPS,
    QUIET_STEPS,
    PoolLayout,
)
from swapkit.planning.beside import THREAD_NAME, at_once
from tests.support import MIB
from tests.support.threads import on_thread

if TYPE_CHECKING:
    from collections.abc import Iterator

KIB = 1024
SIZES = (64 * KIB, 3 * MIB, 20 * KIB, 1 * MIB, 300 * KIB)


@dataclass
class Steps:
    """Steps that take memory as a forward and a backward do, without torch."""

    pool: Pool
    layout: PoolLayout
    kept: list[int] = field(default_factory=list)

    def take(self, tag: int, nbytes: int) -> int:
        set_tag(tag)
        return self.pool.take(nbytes)

    def run(self, sizes: tuple[int, ...] = SIZES, *, is_settled: bool = True) -> None:
        """Run one step. A size of 0: the module requests nothing."""
        saved = []
        for module, nbytes in enumerate(sizes, start=1):
            if nbytes:
                saved.append(self.take(module, nbytes))
                self.pool.give(self.take(module, nbytes + 4 * KIB))
        for module in reversed([each for each, nbytes in enumerate(sizes, 1) if nbytes]):
            gradient = self.take(module | TAG_BACKWARD, sizes[module - 1])
            self.pool.give(saved.pop())
            self.pool.give(gradient)
        set_tag(0)
        self.pool.note(RingKind.MARK)
        self.layout.end_step(is_settled=is_settled)
        self.pool.check()

    def reserved_bytes(self) -> int:
        return self.pool.stats()["reserved_bytes.all.peak"]


@pytest.fixture
def steps() -> Iterator[Steps]:
    backend = Backend.cpu()
    pool = Pool(backend)
    layout = PoolLayout(pool)
    layout.start("test")
    with at_once():
        yield Steps(pool, layout)
    layout.stop("test")
    pool.close()
    backend.close()


def run(steps: Steps, count: int) -> None:
    for _ in range(count):
        steps.run()


def test_layout_when_steps_repeat_then_they_lie_as_planned_and_nothing_more_is_reserved(
    steps: Steps,
) -> None:
    run(steps, QUIET_STEPS + 1)
    stats = steps.layout.stats()
    assert stats.places == 3 * len(SIZES)
    assert stats.hit_share == 1.0
    steps.pool.reset_peak()
    maps = steps.pool.stats()["maps"]
    run(steps, 3)
    figures = steps.pool.stats()
    assert figures["maps"] == maps
    assert figures["reserved_bytes.all.peak"] <= 1.01 * figures["requested_bytes.all.peak"]


class StoppedLayout(PoolLayout):
    """A layout whose last user stops, on another thread, right after a step looks at the job."""

    is_armed = False

    def __getattribute__(self, name: str) -> object:
        value = super().__getattribute__(name)
        if name == "_job" and value is not None and self.is_armed:
            self.is_armed = False
            on_thread(lambda: self.stop("test"))
        return value


@pytest.mark.parametrize("is_settled", [True, False])
def test_step_when_the_last_user_stops_meanwhile_then_it_ends_without_a_layout(
    *, is_settled: bool
) -> None:
    backend = Backend.cpu()
    pool = Pool(backend)
    layout = StoppedLayout(pool)
    layout.start("test")
    steps = Steps(pool, layout)
    with at_once(value=False):
        run(steps, QUIET_STEPS)  # the last one begins a layout
        layout.is_armed = True
        steps.run(is_settled=is_settled)
    assert not layout.is_armed
    assert layout.stats().height_bytes == 0
    layout.start("test")
    run(steps, QUIET_STEPS + 1)
    assert layout.stats().hit_share == 1.0
    layout.stop("test")
    pool.close()
    backend.close()


def test_layout_when_steps_are_not_settled_then_there_is_none(steps: Steps) -> None:
    run(steps, QUIET_STEPS + 1)
    steps.run(is_settled=False)
    assert steps.layout.stats().height_bytes == 0
    for _ in range(2 * QUIET_STEPS):
        steps.run(is_settled=False)
    assert steps.layout.stats().height_bytes == 0


def test_layout_when_steps_differ_from_each_other_then_there_is_none(steps: Steps) -> None:
    for index in range(3 * QUIET_STEPS):
        steps.run(SIZES * (index % 3 + 1))
    assert steps.layout.stats().height_bytes == 0


def test_layout_when_sizes_vary_then_nearly_all_bytes_lie_as_planned(steps: Steps) -> None:
    """As with experts: each gets other tokens in each step, all together always as many."""
    rng = random.Random(1)
    rows, width, experts = 4096, 2 * KIB, 8
    hits = served = 0
    for index in range(60):
        cuts = sorted(rng.gauss(rows * each / experts, 40) for each in range(1, experts))
        edges = [0, *(round(each) for each in cuts), rows]
        before = steps.layout.stats()
        steps.run((*SIZES, *((b - a) * width for a, b in itertools.pairwise(edges))))
        after = steps.layout.stats()
        if index >= 20:
            assert after.height_bytes > 0
            hits += after.planned_bytes - before.planned_bytes
            served += after.served_bytes - before.served_bytes
    assert hits >= 0.95 * served


def test_layout_when_steps_change_for_good_then_it_goes_and_a_new_one_comes(
    steps: Steps, caplog: pytest.LogCaptureFixture
) -> None:
    run(steps, QUIET_STEPS + 1)
    other = tuple(2 * each for each in SIZES)
    with caplog.at_level(logging.DEBUG, "swapkit.memory"):
        for _ in range(MOST_DRIFT):
            steps.run(other)
        assert steps.layout.stats().height_bytes == 0
        assert "do not lie as planned any more" in caplog.text
        for _ in range(4 * QUIET_STEPS):
            steps.run(other)
    assert steps.layout.stats().hit_share == 1.0
    assert steps.layout.stats().height_bytes > 0


def test_layout_when_it_comes_or_goes_then_the_next_steps_move_memory(steps: Steps) -> None:
    run(steps, QUIET_STEPS - 1)
    moving = [steps.layout.is_moving]
    for is_settled in [*[True] * (MOVING_STEPS + 2), *[False] * (MOVING_STEPS + 1)]:
        steps.run(is_settled=is_settled)
        moving.append(steps.layout.is_moving)
    after = [*[True] * MOVING_STEPS, False]
    assert moving == [False, *after, False, *after]


def test_layout_when_one_step_differs_then_it_stays(steps: Steps) -> None:
    run(steps, QUIET_STEPS + 1)
    steps.run(tuple(2 * each for each in SIZES))
    run(steps, MOST_DRIFT)
    assert steps.layout.stats().height_bytes > 0


def test_layout_when_a_request_is_added_or_missing_then_nearly_all_lies_as_planned(
    steps: Steps,
) -> None:
    run(steps, QUIET_STEPS + 1)
    before = steps.layout.stats()
    steps.pool.give(steps.take(1, 20 * KIB + 512))
    steps.run(SIZES[:-1])
    after = steps.layout.stats()
    assert after.holes + after.unplanned == before.holes + before.unplanned + 1
    assert after.misses == before.misses


def test_layout_when_each_step_has_other_additional_and_missing_requests_then_it_is_made(
    steps: Steps,
) -> None:
    rng = random.Random(1)
    sizes = SIZES * 12
    hits = served = 0
    for index in range(40):
        before = steps.layout.stats()
        others = [steps.take(rng.randrange(1, 40), rng.randrange(4 * KIB, 64 * KIB))]
        left_out = rng.randrange(len(sizes))
        steps.run((*sizes[:left_out], 0, *sizes[left_out + 1 :]))
        for each in others:
            steps.pool.give(each)
        after = steps.layout.stats()
        if index >= 20:
            hits += after.planned_bytes - before.planned_bytes
            served += after.served_bytes - before.served_bytes
    assert hits >= 0.99 * served


def test_layout_when_its_last_user_stops_then_lives_are_forgotten(steps: Steps) -> None:
    run(steps, QUIET_STEPS + 1)
    steps.layout.start("other", LivesMode.SEPARATE)
    steps.layout.stop("test")
    assert steps.layout.stats().height_bytes > 0
    steps.layout.stop("other")
    steps.layout.stop("other")
    assert steps.layout.stats().height_bytes == 0
    steps.layout.start("test")
    run(steps, QUIET_STEPS + 1)
    assert steps.layout.stats().hit_share == 1.0


def test_layout_when_the_pool_has_whole_segments_then_there_is_none() -> None:
    backend = Backend.cpu()
    pool = Pool(backend, whole_segments=True)
    steps = Steps(pool, PoolLayout(pool))
    steps.layout.start("test")
    with at_once():
        run(steps, 3 * QUIET_STEPS)
    assert steps.layout.stats().height_bytes == 0
    steps.layout.stop("test")
    pool.close()
    backend.close()


def test_layout_when_planning_fails_then_steps_go_on_and_the_log_says_why(
    steps: Steps, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    def fail(*_args: object, **_options: object) -> None:
        raise RuntimeError("no such luck")

    monkeypatch.setattr(pool_layout, "place", fail)
    run(steps, 2 * QUIET_STEPS)
    assert steps.layout.stats().height_bytes == 0
    (record,) = caplog.records
    assert "no addresses could be planned" in record.message
    assert "no such luck" in caplog.text


def test_steps_when_they_end_on_several_threads_at_once_then_the_layout_is_sound(
    steps: Steps,
) -> None:
    run(steps, QUIET_STEPS + 1)
    stop = threading.Event()

    def end_steps() -> None:
        while not stop.is_set():
            steps.layout.end_step(is_settled=random.random() < 0.8)

    threads = [threading.Thread(target=end_steps) for _ in range(3)]
    for thread in threads:
        thread.start()
    run(steps, 10)
    stop.set()
    for thread in threads:
        thread.join()
    steps.pool.check()


def test_layout_when_much_lives_over_steps_then_none_is_made_again_and_again(
    steps: Steps, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A batch that a loader makes before the last one is given back: no layout can place it."""
    made = []
    set_layout = Lives.set_layout

    def note(lives: Lives, places: object, count: int, height_bytes: int) -> None:
        made.append(count)
        set_layout(lives, places, count, height_bytes)

    monkeypatch.setattr(Lives, "set_layout", note)
    batch = steps.take(9, 3 * MIB)
    for _ in range(10 * QUIET_STEPS):
        following = steps.take(9, 3 * MIB)
        steps.run()
        steps.pool.give(batch)
        batch = following
    steps.pool.give(batch)
    assert not any(made)


def test_layout_when_every_few_steps_are_of_another_kind_then_it_is_made_less_and_less_often(
    steps: Steps, caplog: pytest.LogCaptureFixture
) -> None:
    with caplog.at_level(logging.INFO, pool_layout.__name__):
        for index in range(60):
            steps.run(is_settled=index % 6 != 5)
    assert caplog.text.count("planned addresses") <= 2


def test_layout_when_its_user_stopped_elsewhere_then_the_next_user_gets_one(steps: Steps) -> None:
    run(steps, QUIET_STEPS + 1)
    Lives(steps.pool).set_mode(LivesMode.OFF)  # as another thread does, in the middle of a step
    Lives(steps.pool).set_mode(LivesMode.NOTED)
    run(steps, 2 * QUIET_STEPS + 2)
    assert steps.layout.stats().height_bytes > 0


def test_stop_when_a_plan_is_done_then_the_next_user_does_not_get_it(steps: Steps) -> None:
    with at_once(value=False):
        run(steps, QUIET_STEPS)
        job = steps.layout._job
        assert job is not None
        job.wait()
        steps.layout.stop("test")
        steps.layout.start("test")
        run(steps, 1)
    assert steps.layout.stats().height_bytes == 0


def test_stop_when_interrupted_then_the_next_call_ends_the_lives(
    steps: Steps, monkeypatch: pytest.MonkeyPatch
) -> None:
    run(steps, 1)
    with monkeypatch.context() as patch:

        def interrupt(*_args: object) -> None:
            raise KeyboardInterrupt

        patch.setattr(Lives, "set_mode", interrupt)
        with pytest.raises(KeyboardInterrupt):
            steps.layout.stop("test")
    steps.layout.stop("test")
    assert not Lives(steps.pool).read()[0]


def stop_meanwhile(
    layout: PoolLayout, monkeypatch: pytest.MonkeyPatch, owner: object, name: str
) -> None:
    """Let the last user stop on another thread, once, right after a call, and another start."""
    call = getattr(owner, name)

    def called(*arguments: object) -> object:
        result = call(*arguments)
        monkeypatch.setattr(owner, name, call)
        on_thread(lambda: layout.stop("test"))
        on_thread(lambda: layout.start("next"))
        return result

    monkeypatch.setattr(owner, name, called)


def test_stop_when_a_job_is_about_to_begin_then_the_next_user_does_not_get_its_plan(
    steps: Steps, monkeypatch: pytest.MonkeyPatch
) -> None:
    stop_meanwhile(steps.layout, monkeypatch, pool_layout, "repeated_share")
    with at_once(value=False):
        run(steps, QUIET_STEPS)
        assert all(each.name != THREAD_NAME for each in threading.enumerate())
        run(steps, QUIET_STEPS - 1)
    assert steps.layout.stats().height_bytes == 0
    steps.layout.stop("next")


@pytest.mark.parametrize(("owner", "name"), [(Pool, "trim"), (Lives, "set_layout")])
def test_stop_when_a_layout_is_being_set_then_the_next_user_does_not_get_it(
    steps: Steps, monkeypatch: pytest.MonkeyPatch, owner: object, name: str
) -> None:
    stop_meanwhile(steps.layout, monkeypatch, owner, name)
    run(steps, QUIET_STEPS)
    assert not steps.layout.is_moving
    assert steps.layout.stats().height_bytes == 0
    run(steps, QUIET_STEPS + 1)
    assert steps.layout.stats().hit_share == 1.0
    steps.layout.stop("next")
