"""Lives by call site: which blocks live long is known before they are taken, and they lie apart."""

from __future__ import annotations

import enum
import random
from collections import defaultdict
from dataclasses import dataclass, field
from typing import TYPE_CHECKING

import numpy as np
import pytest

from swapkit._native.backend import Backend
from swapkit._native.layout import TAG_BACKWARD, TAG_OPTIMIZER, Lives, LivesMode
from swapkit._native.lib import lib
from swapkit._native.pool import Pool, RingKind, set_tag
from swapkit.planning.layout.steps import LIFE

if TYPE_CHECKING:
    from collections.abc import Iterator

KIB, MIB = 1 << 10, 1 << 20
LAYERS, STEPS = 12, 8


class LifeClass(enum.IntEnum):
    """How long a block lived."""

    UNKNOWN = lib.SK_LIFE_UNKNOWN
    TRANSIENT = lib.SK_LIFE_TRANSIENT  # freed in the phase that took it
    ACTIVATION = lib.SK_LIFE_ACTIVATION  # freed in a later phase of the step
    CROSSING = lib.SK_LIFE_CROSSING  # freed in the next step, before that step's request
    LASTING = lib.SK_LIFE_LASTING  # in use at the next step's request, or not requested again


LONG = {LifeClass.ACTIVATION, LifeClass.CROSSING, LifeClass.LASTING}


@dataclass
class Program:
    """Training steps as a pool sees them, whose blocks are known to live long or not.

    Sizes repeat between kinds of blocks, and some requests come at random: a call site, not a size,
    says how long a block lives.
    """

    pool: Pool
    random: random.Random = field(default_factory=lambda: random.Random(3))
    kept: list[int] = field(default_factory=list)  # weights, gradients, states, what the user keeps
    gradients: list[int] = field(default_factory=list)
    taken: list[tuple[int, bool]] = field(default_factory=list)  # segment and kind, in this step

    def take(self, tag: int, nbytes: int, *, is_long: bool) -> int:
        set_tag(tag)
        address = self.pool.take(nbytes)
        segment = next(
            each.address
            for each in self.pool.segments()
            if each.address <= address < each.address + each.nbytes
        )
        self.taken.append((segment, is_long))
        return address

    def spend(self, tag: int, nbytes: int) -> None:
        """Take and give a transient block."""
        self.pool.give(self.take(tag, nbytes, is_long=False))

    def build(self) -> None:
        self.kept += [self.take(0, 96 * KIB, is_long=True) for _ in range(2 * LAYERS)]

    def step(self, number: int) -> None:
        self.taken.clear()
        for gradient in self.gradients:
            self.pool.give(gradient)
        self.gradients.clear()
        saved = self.forward()
        for layer in reversed(range(1, LAYERS + 1)):
            tag = layer | TAG_BACKWARD
            self.spend(tag, 3 * MIB)
            self.gradients += [self.take(tag, 96 * KIB, is_long=True) for _ in range(2)]
            self.pool.give(saved.pop())
            self.pool.give(saved.pop())
        self.update(is_first=number == 0)
        set_tag(0)
        self.pool.note(RingKind.MARK)

    def forward(self) -> list[int]:
        """Return what is saved for backward."""
        saved = []
        for layer in range(1, LAYERS + 1):
            saved += [self.take(layer, size, is_long=True) for size in (96 * KIB, 3 * MIB)]
            for size in (96 * KIB, 3 * MIB, 5 * KIB):
                self.spend(layer, size)
            if self.random.random() < 0.1:
                self.spend(layer, self.random.randrange(1, 64) * KIB)
        self.kept.append(self.take(LAYERS, 4 * KIB, is_long=True))  # such as a logged loss
        return saved

    def update(self, *, is_first: bool) -> None:
        """Run the optimizer, whose first step makes its states."""
        tag = 1 | TAG_OPTIMIZER
        for _ in range(2 * LAYERS):
            if is_first:
                self.kept += [self.take(tag, 96 * KIB, is_long=True) for _ in range(2)]
            self.spend(tag, 96 * KIB + 512)

    def give_all(self) -> None:
        for address in [*self.kept, *self.gradients]:
            self.pool.give(address)


@pytest.fixture
def pool() -> Iterator[Pool]:
    with Backend.cpu() as backend, Pool(backend) as pool:
        yield pool


def predict(pool: Pool, step: int) -> list[bool]:
    """Return whether each of a step's requests, in order, was predicted to live long."""
    buffer, _ = Lives(pool).read()
    lives = np.frombuffer(buffer, LIFE)
    lives = lives[lives["step"][:, 0] == step]
    lives = lives[np.argsort(lives["taken_at"][:, 0])]
    return [LifeClass(each["predicted"]) in LONG for each in lives]


@pytest.mark.promise("E1")
def test_classes_when_steps_repeat_then_long_lives_are_predicted_from_the_third_step_on(
    pool: Pool,
) -> None:
    Lives(pool).set_mode(LivesMode.SEPARATE)
    program = Program(pool)
    program.build()
    for step in range(STEPS):
        program.step(step)
        if step < 2:
            continue
        pairs = list(zip(predict(pool, step), (kind for _, kind in program.taken), strict=True))
        right = sum(guess and is_long for guess, is_long in pairs)
        assert right >= 0.95 * sum(is_long for _, is_long in pairs)  # recall
        assert right >= 0.95 * sum(guess for guess, _ in pairs)  # precision
    program.give_all()


@pytest.mark.promise("E2")
def test_segments_when_lives_are_known_then_none_serves_long_and_short_ones(pool: Pool) -> None:
    Lives(pool).set_mode(LivesMode.SEPARATE)
    program = Program(pool)
    program.build()
    for step in range(3):
        program.step(step)
    served: dict[int, set[bool]] = defaultdict(set)
    for step in range(3, STEPS):
        program.step(step)
        for segment, is_long in program.taken:
            served[segment].add(is_long)
    mixed = [kinds for kinds in served.values() if len(kinds) > 1]
    assert not mixed
    assert {True} in served.values()
    assert {False} in served.values()
    program.give_all()


@pytest.mark.promise("E2")
def test_segments_when_lives_are_off_then_some_serve_both(pool: Pool) -> None:
    """The program above does mix them, if nothing keeps them apart."""
    program = Program(pool)
    program.build()
    served: dict[int, set[bool]] = defaultdict(set)
    for step in range(3):
        program.step(step)
        for segment, is_long in program.taken:
            served[segment].add(is_long)
    assert {True, False} in served.values()
    program.give_all()
