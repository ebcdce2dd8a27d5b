"""Steps in which a forward raises: they begin again, or go on, and the plans hold."""

from __future__ import annotations

from typing import TYPE_CHECKING

import pytest
import torch
from torch import nn

import swapkit
from swapkit.ir.traces import EventKind
from swapkit.planning.selection.learner import Learner

if TYPE_CHECKING:
    from collections.abc import Callable

    from swapkit._runtime.session.session import Session
    from swapkit.ir.traces import Trace
    from swapkit.planning.selection.cases import Outcome

WIDTH, TOKENS, BLOCKS = 64, 512, 6
STEPS = 6
MICROBATCHES = 3
RECORDED = 1  # the step that is, where no forward raises

pytestmark = [pytest.mark.promise("C5"), pytest.mark.usefixtures("installation", "steady_machine")]


class Exit(Exception):
    """Ends a forward early, with what it has computed."""

    def __init__(self, features: torch.Tensor) -> None:
        super().__init__()
        self.features = features


class Model(nn.Module):
    """Blocks, which may be left in the middle."""

    def __init__(self) -> None:
        super().__init__()
        blocks = [
            nn.Sequential(nn.Linear(WIDTH, 4 * WIDTH), nn.GELU(), nn.Linear(4 * WIDTH, WIDTH))
            for _ in range(BLOCKS)
        ]
        self.exits = False
        self.front, self.back = nn.Sequential(*blocks[:3]), nn.Sequential(*blocks[3:])

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        features = self.front(x)
        if self.exits:
            raise Exit(features)
        result: torch.Tensor = self.back(features).square().mean()
        return result


def batch() -> torch.Tensor:
    return torch.ones(TOKENS, WIDTH)


def leave_early(model: Model) -> torch.Tensor:
    model.exits = True
    with pytest.raises(Exit) as raised:
        model(batch())
    model.exits = False
    features: torch.Tensor = raised.value.features
    return features


def nothing(_model: Model, _step: int, _microbatch: int) -> None:
    """Let the step go as it goes."""


def train(before: Callable[[Model, int, int], object], limit: str = "64MiB") -> Session:
    """Return a session that has trained; `before`: called before each microbatch."""
    torch.manual_seed(0)
    model = Model()
    optimizer = torch.optim.SGD(model.parameters(), lr=1e-3)
    with swapkit.budget(limit, model, optimizer, search_steps=1) as session:
        for step in range(STEPS):
            for microbatch in range(MICROBATCHES):
                before(model, step, microbatch)
                model(batch()).backward()
            optimizer.step()
            optimizer.zero_grad()
    return session


def describe(trace: Trace | None) -> tuple[int, int, int]:
    """Return the microbatches of a trace, and what autograd saved and used."""
    assert trace is not None
    kinds = [each.kind for each in trace.events]
    microbatches = {each.microbatch for each in trace.operators}
    return len(microbatches), kinds.count(EventKind.SAVE), kinds.count(EventKind.USE)


def test_step_when_an_evaluation_raises_between_microbatches_then_it_is_recorded_whole() -> None:
    def look(model: Model, _step: int, microbatch: int) -> None:
        if microbatch == 1:
            with torch.no_grad():
                leave_early(model)

    plain, session = train(nothing), train(look)
    assert describe(session.trace)[1:] == describe(plain.trace)[1:]
    assert session.stats.replans == 0


def test_step_when_a_later_forward_raises_in_the_recorded_one_then_the_next_is_recorded() -> None:
    def fail(model: Model, step: int, microbatch: int) -> None:
        if (step, microbatch) == (RECORDED, 1):
            leave_early(model)

    plain, session = train(nothing), train(fail)
    assert describe(session.trace) == describe(plain.trace)
    assert session.stats.replans == 0


def test_step_when_a_later_forward_raises_in_each_then_it_is_planned_with_that() -> None:
    def fail(model: Model, _step: int, microbatch: int) -> None:
        if microbatch == 1:
            leave_early(model)

    session = train(fail)
    _, saves, uses = describe(session.trace)
    assert saves > uses
    assert session.stage == "stable"
    assert session.stats.replans == 0


@pytest.mark.parametrize("step", [RECORDED, STEPS - 2])
def test_step_when_its_first_forward_raises_then_it_begins_again(step: int) -> None:
    def fail(model: Model, now: int, microbatch: int) -> None:
        if (now, microbatch) == (step, 0):
            leave_early(model)

    plain, session = train(nothing), train(fail)
    assert describe(session.trace) == describe(plain.trace)
    assert session.stats.replans == 0


def test_step_when_it_begins_again_then_the_rescues_before_count(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    outcomes: list[Outcome] = []
    monkeypatch.setattr(Learner, "end", lambda _learner, outcome: outcomes.append(outcome))

    def fail(model: Model, step: int, microbatch: int) -> None:
        if (step, microbatch) == (RECORDED, 0):
            features = leave_early(model)
            (session,) = swapkit.sessions()
            assert session.rescue(1) > 0
            del features

    train(fail)
    assert [each.rescues for each in outcomes] == [0, 1, *[0] * (STEPS - 2)]


def test_step_when_what_its_first_forward_raised_is_used_then_it_goes_on() -> None:
    def use(model: Model, _step: int, microbatch: int) -> None:
        if microbatch == 0:
            leave_early(model).square().mean().backward()

    plain, session = train(nothing), train(use)
    assert describe(session.trace)[2] > describe(plain.trace)[2]
    assert session.stage == "stable"
    assert session.stats.replans == 0


def test_step_when_its_forwards_return_nothing_where_an_error_is_handled_then_it_is_whole() -> None:
    class Training(Model):
        def forward(self, x: torch.Tensor) -> None:  # type: ignore[override]
            super().forward(x).backward()

    model = Training()
    optimizer = torch.optim.SGD(model.parameters(), lr=1e-3)
    with swapkit.budget("64MiB", model, optimizer, search_steps=1) as session:
        for _ in range(STEPS):
            for _ in range(MICROBATCHES):
                try:
                    int("no number")
                except ValueError:
                    model(batch())
            optimizer.step()
            optimizer.zero_grad()
    assert describe(session.trace)[0] == MICROBATCHES
