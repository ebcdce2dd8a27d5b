"""Where a session's steps end, by which optimizers step."""

from __future__ import annotations

import warnings
import weakref
from typing import TYPE_CHECKING, Any

import pytest
import torch
from torch import nn

from swapkit._native.pool import set_tag
from swapkit._runtime.model.step_counter import MOST_AHEAD
from swapkit._runtime.optimizer.wrapped import list_optimizers, unwrap
from swapkit.errors import InvalidArgument
from tests.unit._runtime.counting_rig import TAG, Counted, counting, sgd

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator


@pytest.fixture
def count() -> Iterator[Callable[..., Counted]]:
    with counting() as make:
        yield make


def test_step_when_the_optimizer_is_given_then_only_its_own_count(count: Any) -> None:
    model = nn.Linear(2, 2)
    given, other = sgd(model), sgd(nn.Linear(2, 2))
    counted = count(model, given)
    for optimizer in (given, other, given):
        optimizer.step()
    assert counted.ended == 2


def test_step_when_none_is_given_then_whoever_holds_the_models_parameters_counts(
    count: Any,
) -> None:
    model = nn.Linear(2, 2)
    counted = count(model)
    later = sgd(model)
    later.step()
    sgd(nn.Linear(2, 2)).step()
    later.step()
    assert counted.ended == 2


def test_step_when_parameters_join_later_then_it_counts_from_then_on(count: Any) -> None:
    model = nn.Linear(2, 2)
    optimizer = sgd(nn.Linear(2, 2))
    counted = count(model)
    optimizer.step()
    optimizer.add_param_group({"params": list(model.parameters())})
    optimizer.step()
    assert counted.ended == 1


@pytest.mark.parametrize(("is_here", "ended"), [(True, 1), (False, 0)])
def test_step_when_neither_is_given_then_those_of_the_thread_count(
    count: Any, is_here: bool, ended: int
) -> None:
    counted = count(None, is_here=is_here)
    sgd(nn.Linear(2, 2)).step()
    assert counted.ended == ended


@pytest.mark.parametrize(
    ("order", "ends"),
    [
        ("dgdgdg", "010101"),
        ("gdgdgd", "010101"),
        ("dddddgdddddg", "000001000001"),  # a critic's five steps
        ("gdddddgddddd", "010000100000"),
    ],
)
def test_step_when_several_are_given_then_it_ends_when_each_has_stepped(
    count: Any, order: str, ends: str
) -> None:
    first, second = nn.Linear(2, 2), nn.Linear(2, 2)
    optimizers = {"d": sgd(first), "g": sgd(second)}
    counted = count(None, *optimizers.values())
    found = ""
    for which in order:
        before = counted.ended
        optimizers[which].step()
        found += str(counted.ended - before)
    assert found == ends


def test_step_when_one_of_several_never_steps_then_it_is_not_waited_for(count: Any) -> None:
    idle, busy = sgd(nn.Linear(2, 2)), sgd(nn.Linear(2, 2))
    counted = count(None, idle, busy)
    for _ in range(MOST_AHEAD + 3):
        busy.step()
    assert counted.ended == 4
    idle.step()
    assert counted.ended == 4  # again one of two
    busy.step()
    assert counted.ended == 5


def test_step_when_an_optimizer_is_gone_then_nobody_waits_for_it(count: Any) -> None:
    gone, here = sgd(nn.Linear(2, 2)), sgd(nn.Linear(2, 2))
    counted = count(None, gone, here)
    here.step()
    assert counted.ended == 0
    del gone
    here.step()
    assert counted.ended == 1


def test_step_when_the_model_is_stepped_by_another_than_given_then_that_one_counts(
    count: Any,
) -> None:
    model = nn.Linear(2, 2)
    counted = count(model, sgd(model))
    made_again = sgd(model)
    for _ in range(5):
        made_again.step()
    assert counted.ended == 3  # from the third on: the one given might have come later


@pytest.mark.parametrize("forwards", ["each", "one"])
@pytest.mark.parametrize(
    ("order", "ends"),
    [
        ("dgdgdg", "100101"),
        ("dddddgdddddg", "111110000001"),
        ("abcabcabc", "100001001"),
    ],
)
def test_step_when_several_of_the_model_are_found_then_the_last_of_a_cycle_ends_it(
    count: Any, order: str, ends: str, forwards: str
) -> None:
    names = sorted(set(order))
    model = nn.ModuleDict({name: nn.Linear(2, 2) for name in names})
    optimizers = {name: sgd(model[name]) for name in names}
    counted = count(model)
    found = ""
    for which in order:
        before = counted.ended
        if forwards == "each" or which == order[0]:
            model[which](torch.ones(1, 2))
        optimizers[which].step()
        found += str(counted.ended - before)
    assert found == ends


@pytest.mark.parametrize("order", ["th", "ht"])
def test_step_when_another_of_the_model_is_found_later_then_the_last_of_both_ends_it(
    count: Any, order: str
) -> None:
    model = nn.ModuleDict({name: nn.Linear(2, 2) for name in order})
    optimizers = {name: sgd(model[name]) for name in order}
    counted = count(model)
    found = ""
    for which in ("h", "h", *[order] * 3):  # the trunk is trained later
        model["h"](torch.ones(1, 2))
        for name in which:
            before = counted.ended
            optimizers[name].step()
            found += str(counted.ended - before)
    assert found == {"th": "11010101", "ht": "11100101"}[order]


def test_step_when_the_given_one_gives_way_to_another_then_that_one_counts(count: Any) -> None:
    model = nn.Sequential(nn.Linear(2, 2), nn.Linear(2, 2))
    head, trunk = sgd(model[1]), sgd(model[0])
    counted = count(model, head)
    for _ in range(3):
        head.step()
    assert counted.ended == 3
    for _ in range(MOST_AHEAD + 3):
        trunk.step()
    assert counted.ended == 3 + 3
    for _ in range(3):  # both: the step ends with the last of them
        head.step()
        trunk.step()
    assert counted.ended == 3 + 3 + 3


def test_step_when_another_of_the_model_steps_in_between_then_only_the_given_one_counts(
    count: Any,
) -> None:
    model = nn.ModuleDict({"critic": nn.Linear(2, 2), "generator": nn.Linear(2, 2)})
    critic, generator = sgd(model["critic"]), sgd(model["generator"])
    counted = count(model, generator)
    for step in range(MOST_AHEAD):
        generator.step()
        for _ in range(5):
            critic.step()
        assert counted.ended == step + 1


class Lookahead(torch.optim.Optimizer):
    """Runs another optimizer in its step."""

    def __init__(self, inner: torch.optim.Optimizer) -> None:
        self.optimizer = inner
        super().__init__(inner.param_groups, {})

    def step(self, closure: Any = None) -> Any:
        return self.optimizer.step(closure)


@pytest.mark.parametrize("gives", ["outer", "inner", "nothing"])
def test_step_when_one_optimizer_runs_another_then_it_is_one_step(count: Any, gives: str) -> None:
    model = nn.Linear(2, 2)
    inner = sgd(model)
    outer = Lookahead(inner)
    given = {"outer": list_optimizers(outer), "inner": (inner,), "nothing": ()}[gives]
    counted = count(model, *given)
    for _ in range(3):
        outer.step()
    assert counted.ended == 3


def test_step_when_it_has_a_closure_then_it_is_one_step(count: Any) -> None:
    model = nn.Linear(2, 1)
    optimizer = torch.optim.LBFGS(model.parameters(), max_iter=4)
    counted = count(model, optimizer)
    calls = []

    def closure() -> torch.Tensor:
        calls.append(counted.ended)
        optimizer.zero_grad()
        loss: torch.Tensor = (model(torch.ones(3, 2)) - 2).square().sum()
        loss.backward()
        return loss

    for _ in range(2):
        optimizer.step(closure)
    assert len(calls) > 2
    assert counted.ended == 2


def test_step_when_one_raised_then_the_next_is_counted_again(count: Any) -> None:
    model = nn.Linear(2, 2)
    optimizer = sgd(model)
    counted = count(model)

    def fail() -> float:
        raise KeyError("in the closure")

    for _ in range(2):
        with pytest.raises(KeyError):
            optimizer.step(fail)
    assert counted.ended == 0
    optimizer.step()
    assert counted.ended == 1


def test_step_when_one_was_interrupted_then_those_of_a_new_optimizer_count(count: Any) -> None:
    model = nn.Linear(2, 2)
    first = sgd(model)
    counted = count(model)

    def interrupt() -> float:
        raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        first.step(interrupt)
    gone = weakref.ref(first)
    del first
    later = sgd(model)
    for _ in range(2):
        later.step()
    assert counted.ended == 2
    assert gone() is None


def test_step_when_a_class_calls_that_of_its_base_then_it_is_one_step(count: Any) -> None:
    class Own(torch.optim.SGD):
        def step(self, closure: Any = None) -> Any:
            return super().step(closure)

    model = nn.Linear(2, 2)
    sgd(nn.Linear(2, 2))  # from now on torch calls its hooks for the base's step, too
    counted = count(model)
    optimizer = Own(model.parameters(), lr=0.1)
    for _ in range(2):
        optimizer.step()
    assert counted.ended == 2


def test_step_when_it_runs_then_what_it_allocates_has_its_label(count: Any) -> None:
    model = nn.Linear(2, 2)
    count(model)
    optimizer = sgd(model)
    labels = []

    def look() -> float:
        labels.append(set_tag(5))
        return 0.0

    optimizer.step(look)
    assert labels == [TAG]
    assert set_tag(0) == 0


def test_mark_when_optimizers_were_given_then_both_count(count: Any) -> None:
    model = nn.Linear(2, 2)
    optimizer = sgd(model)
    counted = count(model, optimizer)
    optimizer.step()
    assert counted.counter.mark()
    optimizer.step()
    assert counted.ended == 2


def test_mark_when_none_was_given_then_only_marks_count(count: Any) -> None:
    model = nn.Linear(2, 2)
    optimizer = sgd(model)
    counted = count(model)
    optimizer.step()
    assert not counted.counter.mark()  # the step that the optimizer has ended
    optimizer.step()
    assert counted.counter.mark()
    assert counted.ended == 1


def test_steps_when_none_counts_then_one_warning_says_why(count: Any) -> None:
    model = nn.Linear(2, 2)
    counted = count(model)
    foreign = sgd(nn.Linear(3, 3))
    foreign.step()
    foreign.step()
    with pytest.warns(
        UserWarning, match="SGD holds no parameter of the session's model, a Linear.*mark_s"
    ):
        foreign.step()
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        foreign.step()
    assert counted.ended == 0


@pytest.mark.parametrize("is_here", [True, False])
def test_steps_when_they_are_others_business_then_no_warning(count: Any, is_here: bool) -> None:
    model = nn.Linear(2, 2)
    counted = count(model, is_here=is_here)
    if is_here:
        sgd(model).step()
    foreign = sgd(nn.Linear(3, 3))
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        for _ in range(5):
            foreign.step()
    assert counted.ended == is_here


def test_step_when_counting_stops_in_the_middle_of_it_then_nothing_is_counted(count: Any) -> None:
    model = nn.Linear(2, 2)
    counted = count(model)
    optimizer = sgd(model)
    optimizer.step(lambda: counted.counter.stop() or 0.0)
    optimizer.step()
    assert counted.ended == 0


# ---- what users give ---------------------------------------------------------------------------


class Holder:
    """A wrapper that is no optimizer."""

    def __init__(self, optimizer: object) -> None:
        self._optimizer = optimizer


def test_given_when_wrapped_or_several_then_the_innermost_of_each() -> None:
    first, second = sgd(nn.Linear(2, 2)), sgd(nn.Linear(2, 2))
    assert list_optimizers(None) == ()
    assert list_optimizers(first) == (first,)
    assert list_optimizers(Holder(Holder(first))) == (first,)
    assert list_optimizers([Holder(first), second]) == (first, second)
    assert list_optimizers((first, Holder(first))) == (first,)
    outer = Lookahead(first)
    assert list(unwrap(outer)) == [outer, first]


@pytest.mark.parametrize("given", ["sgd", 5, [None], Holder(None), nn.Linear(1, 1)])
def test_given_when_there_is_no_optimizer_then_refused(given: object) -> None:
    with pytest.raises(InvalidArgument, match=r"optimizer=.*: expected a torch\.optim\.Optimizer"):
        list_optimizers(given)
