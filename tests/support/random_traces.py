"""Steps at random: operators that read what is recent, and storages that go at odd moments."""

from __future__ import annotations

from dataclasses import dataclass, field

import numpy as np

from swapkit.ir.traces import BEFORE, WAIT, Kind, Operator, Phase, Storage, Trace

__all__ = ["random_trace"]

RECENT = 3


@dataclass
class _Steps:
    """A step as it is drawn."""

    rng: np.random.Generator
    transfers: float
    operators: list[Operator] = field(default_factory=list)
    storages: list[Storage] = field(default_factory=list)
    deaths: list[int] = field(default_factory=list)

    def add(self, kind: Kind, birth: int) -> int:
        nbytes = int(10 ** self.rng.uniform(1, 3.5))
        self.storages.append(Storage(nbytes=nbytes, kind=kind, birth=birth))
        self.deaths.append(birth + 1)
        return len(self.storages) - 1

    def run(self, phase: Phase, reads: set[int], writes: list[int]) -> None:
        is_heavy = self.rng.random() < 0.3
        self.operators.append(
            Operator(
                name="op",
                seconds=float(self.rng.uniform(0.5, 2)),
                phase=phase,
                reads=tuple(sorted(reads)),
                writes=tuple(writes),
                workspace_bytes=int(10 ** self.rng.uniform(0, 3)) if is_heavy else 0,
                is_repeatable=phase is Phase.FORWARD and self.rng.random() < 0.95,
            )
        )
        for storage in {*reads, *writes}:
            self.deaths[storage] = len(self.operators)
        if self.transfers and self.rng.random() < self.transfers:
            name = str(self.rng.choice(["c10d.send.default", WAIT]))
            seconds = float(self.rng.uniform(0.0, 2))
            self.operators.append(Operator(name=name, seconds=seconds, phase=phase))

    def pick(self, numbers: list[int], most: int) -> set[int]:
        count = min(len(numbers), int(self.rng.integers(1, most + 1)))
        return set(self.rng.choice(numbers, count, replace=False).tolist())

    def finish(self, saved: list[int]) -> Trace:
        count = len(self.operators)
        lives = []
        for number, storage in enumerate(self.storages):
            stays = storage.birth == BEFORE
            longer = int(self.rng.integers(1, 8)) if self.rng.random() < 0.25 else 0
            death = count if stays else min(count, self.deaths[number] + longer)
            lives.append(
                Storage(
                    nbytes=storage.nbytes,
                    kind=storage.kind,
                    birth=storage.birth,
                    death=death,
                    is_saved=number in saved,
                )
            )
        return Trace(operators=tuple(self.operators), storages=tuple(lives), base_bytes=10)


def random_trace(seed: int, *, transfers: float = 0.0) -> Trace:
    """Return a step with one forward and one backward.

    A parameter, an input that backward may read, and one that it does not; operators that make one
    or two storages, some of which change one in place or cannot be repeated. After an operator,
    with the probability `transfers`, a transfer between ranks begins or is waited for.
    """
    steps = _Steps(np.random.default_rng(seed), transfers)
    before = [steps.add(kind, BEFORE) for kind in (Kind.STATE, Kind.INPUT, Kind.INPUT)]
    made: list[int] = []
    for _ in range(int(steps.rng.integers(3, 24))):
        _run_forward(steps, before, made)
    saved = [storage for storage in made if steps.rng.random() < 0.6]
    order = sorted(saved, key=lambda storage: storage + int(steps.rng.integers(-1, 2)))
    gradient = steps.add(Kind.GRADIENT, len(steps.operators))
    steps.run(Phase.BACKWARD, set(), [gradient])
    for storage in reversed(order):
        reads = {storage, gradient}
        if steps.rng.random() < 0.3:
            reads.add(int(steps.rng.choice(saved)))
        if steps.rng.random() < 0.5:
            reads.add(before[1])
        gradient = steps.add(Kind.GRADIENT, len(steps.operators))
        steps.run(Phase.BACKWARD, reads, [gradient])
    return steps.finish(saved)


def _run_forward(steps: _Steps, before: list[int], made: list[int]) -> None:
    """Draw an operator of forward; what it makes comes to `made`."""
    rng = steps.rng
    recent = made[-RECENT:] if rng.random() < 0.8 else made
    reads = steps.pick(recent, 2) if recent and rng.random() < 0.9 else {before[1]}
    if rng.random() < 0.4:
        reads.add(int(rng.choice(before)))
    birth = len(steps.operators)
    fresh = [steps.add(Kind.ACTIVATION, birth) for _ in range(1 + (rng.random() < 0.25))]
    changed = [int(rng.choice(made))] if made and rng.random() < 0.05 else []
    steps.run(Phase.FORWARD, reads, fresh + changed)
    made += fresh
