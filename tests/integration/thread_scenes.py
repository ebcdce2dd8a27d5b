"""Scenes of several threads in one process, as a program: each loops until it is told to end.

`python -m tests.integration.thread_scenes SCENE (--rounds N | --seconds S) [--restless]`

Every thread trains a model of its own and compares its losses with those of plain training. A crash
ends the process; `faulthandler` says where. `--restless` lets the interpreter change threads as
often as it can.
"""

from __future__ import annotations

import argparse
import faulthandler
import sys
import threading
import time
from typing import TYPE_CHECKING

import torch
from torch import nn

import swapkit

if TYPE_CHECKING:
    from collections.abc import Callable

WIDTH = 32
LAYERS = 8
FEW = 64  # rows: one activation is 8 KiB, most of the time goes by between operators
MANY = 4096  # one is 512 KiB
TIGHT = "12MiB"  # three models with many rows keep 24 MiB
STEPS = 6  # of a round
RESTLESS = 1e-5  # seconds that a thread runs before another one may
FAR_TOO_MUCH = 1 << 40


def make_model(number: int) -> nn.Module:
    generator = torch.Generator().manual_seed(number)
    model = nn.Sequential(
        *[nn.Sequential(nn.Linear(WIDTH, WIDTH), nn.Tanh()) for _ in range(LAYERS)]
    )
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.copy_(torch.rand(parameter.shape, generator=generator) - 0.5)
    return model


class Training:
    """One model with its optimizer, trained on the same numbers each time."""

    def __init__(self, number: int, rows: int = FEW) -> None:
        self.model = make_model(number)
        self.optimizer = torch.optim.AdamW(self.model.parameters(), lr=1e-3)
        self.x = torch.rand(rows, WIDTH, generator=torch.Generator().manual_seed(number))

    def step(self) -> float:
        loss = self.model(self.x).square().mean()
        loss.backward()
        self.optimizer.step()
        self.optimizer.zero_grad()
        return float(loss.detach())

    def steps(self) -> list[float]:
        return [self.step() for _ in range(STEPS)]


def train_plainly(number: int, rows: int = FEW) -> list[float]:
    return Training(number, rows).steps()


def train_in_session(number: int, rows: int = FEW, limit: str = "200MiB") -> list[float]:
    training = Training(number, rows)
    with swapkit.budget(limit, training.model, training.optimizer, search_steps=1):
        return training.steps()


def train_in_scope(number: int) -> list[float]:
    training = Training(number)
    losses = []
    for _ in range(STEPS):
        with swapkit.offload(min_bytes=1):
            losses.append(training.step())
    return losses


def train_under_pressure(number: int) -> list[float]:
    return train_in_session(number, MANY, TIGHT)


def look_around(number: int) -> list[float]:
    """Enter a session, ask what there is, and run out of memory in it."""
    training = Training(number)
    with swapkit.budget("200MiB", training.model, training.optimizer) as session:
        losses = [training.step()]
        assert "budget" in session.explain()
        try:
            torch.empty(FAR_TOO_MUCH, dtype=torch.uint8)
        except torch.OutOfMemoryError as error:
            assert "requested" in str(error)  # noqa: PT017
    return losses


SCENES: dict[str, tuple[Callable[[int], list[float]], ...]] = {
    "sessions": (train_in_session, train_in_session, train_in_session),
    "entering": (look_around, train_plainly, train_plainly),
    "scopes": (train_in_session, train_in_scope, train_in_scope),
    "pressure": (train_under_pressure, train_under_pressure, train_under_pressure),
}


class Loop:
    """Runs rounds on threads until there were enough."""

    def __init__(self, rounds: int, seconds: float) -> None:
        self.rounds = rounds
        self.end = time.monotonic() + seconds
        self.errors: list[BaseException] = []
        self.done: list[int] = []

    def goes_on(self, done: int) -> bool:
        return not self.errors and (done < self.rounds or time.monotonic() < self.end)

    def run(self, work: Callable[[int], list[float]], number: int, expected: list[float]) -> None:
        done = 0
        try:
            while self.goes_on(done):
                losses = work(number)
                assert losses == expected[: len(losses)], (
                    f"thread {number}: {losses} instead of {expected}"
                )
                done += 1
        except BaseException as error:  # noqa: BLE001 - raised again by `play`
            self.errors.append(error)
        self.done.append(done)


def play(scene: str, loop: Loop) -> list[int]:
    """Let the threads of a scene run; return how many rounds each has done."""
    works = SCENES[scene]
    rows = MANY if scene == "pressure" else FEW
    expected = [train_plainly(number, rows) for number in range(len(works))]
    threads = [
        threading.Thread(target=loop.run, args=(work, number, expected[number]))
        for number, work in enumerate(works)
    ]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    if loop.errors:
        raise loop.errors[0]
    return loop.done


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("scene", choices=SCENES)
    parser.add_argument("--rounds", type=int, default=0)
    parser.add_argument("--seconds", type=float, default=0)
    parser.add_argument("--restless", action="store_true")
    options = parser.parse_args()
    faulthandler.enable()
    torch.set_num_threads(1)
    swapkit.install()
    if options.restless:
        sys.setswitchinterval(RESTLESS)
    done = play(options.scene, Loop(options.rounds, options.seconds))
    sys.stdout.write(f"{options.scene}: {sum(done)} rounds on {len(done)} threads\n")


if __name__ == "__main__":
    main()
