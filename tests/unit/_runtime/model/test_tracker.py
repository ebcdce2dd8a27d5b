"""Modules that run have names, on every thread and in every order."""

from __future__ import annotations

import contextlib
from typing import TYPE_CHECKING

import pytest
import torch
from torch import nn

from swapkit._native.pool import set_tag
from swapkit._runtime.model.tracker import (
    BACKWARD,
    NAMED_STEPS,
    NO_MODULE,
    ModuleTracker,
    NamesIfShort,
    Need,
)
from tests.support.threads import on_thread

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator

ONE = torch.ones(1)


class Probe(nn.Module):
    """Notes which module the tracker, and the label of new blocks, name while it runs."""

    def __init__(self, tracker: ModuleTracker) -> None:
        super().__init__()
        self.tracker = tracker
        self.seen: list[str] = []

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        label = set_tag(NO_MODULE)
        set_tag(label)
        assert label == self.tracker.current()
        self.seen.append(self.tracker.name(label))
        return x


class Failing(nn.Module):
    def forward(self, _x: torch.Tensor) -> torch.Tensor:
        raise ValueError("inside")


@pytest.fixture
def tracker() -> Iterator[ModuleTracker]:
    tracker = ModuleTracker()
    tracker.start("test")
    yield tracker
    tracker.stop("test")
    set_tag(NO_MODULE)


def test_module_when_it_runs_then_its_path_is_current(tracker: ModuleTracker) -> None:
    probe = Probe(tracker)
    model = nn.ModuleDict({"block": nn.Sequential(nn.Identity(), probe)})
    tracker.add_model(model)
    model["block"](ONE)
    assert probe.seen == ["block.1"]


def test_module_when_no_model_was_named_then_the_outermost_gives_the_paths(
    tracker: ModuleTracker,
) -> None:
    probe = Probe(tracker)
    nn.Sequential(nn.Sequential(probe))(ONE)
    probe(ONE)
    assert probe.seen == ["0.0", "0.0"]


def test_module_when_it_is_in_no_known_model_then_named_after_the_one_that_calls_it(
    tracker: ModuleTracker,
) -> None:
    class Caller(nn.Module):
        def forward(self, x: torch.Tensor) -> torch.Tensor:
            result: torch.Tensor = hidden[0](x)
            return result

    probe = Probe(tracker)
    hidden = [probe]
    Caller()(ONE)
    assert probe.seen == ["Caller.Probe"]


def test_graph_when_compiled_for_several_modules_then_each_calls_it_by_its_own_name(
    tracker: ModuleTracker,
) -> None:
    names: list[str] = []

    def note(x: torch.Tensor) -> torch.Tensor:
        names.append(tracker.name(tracker.current()))
        return x

    graph = torch.fx.Graph()
    graph.output(graph.call_function(note, (graph.placeholder("x"),)))
    compiled = torch.fx.GraphModule({}, graph)

    class Caller(nn.Module):
        def forward(self, x: torch.Tensor) -> torch.Tensor:
            result: torch.Tensor = compiled(x)
            return result

    tracker.add_model(model := nn.Sequential(Caller(), Caller()))
    model(ONE)
    assert names == ["0.GraphModule", "1.GraphModule"]


def test_module_when_shared_then_keeps_its_first_path(tracker: ModuleTracker) -> None:
    probe = Probe(tracker)
    nn.Sequential(probe, nn.Sequential(probe))(ONE)
    assert probe.seen == ["0", "0"]


def test_root_when_named_then_it_has_the_name_of_its_class(tracker: ModuleTracker) -> None:
    tracker.add_model(nn.Linear(1, 1))
    assert tracker.modules() == []  # it is gone already
    model = nn.Linear(1, 1)
    tracker.add_model(model)
    assert tracker.modules() == [model]
    assert tracker.name(1) == "Linear"


def test_names_when_modules_are_made_anew_each_step_then_do_not_grow(
    tracker: ModuleTracker,
) -> None:
    for _ in range(3):
        tracker.add_model(nn.Sequential(nn.Linear(1, 1)))
    assert tracker.name(2) == "0"
    assert tracker.name(3) == ""


def test_current_when_a_module_is_left_then_the_outer_one_again(tracker: ModuleTracker) -> None:
    probe = Probe(tracker)

    class Outer(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.inner = nn.Identity()

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            x = self.inner(x)
            probe.forward(x)  # not a call of a module: the outer one still runs
            return x

    Outer()(ONE)
    assert probe.seen == ["Outer"]
    assert tracker.current() == NO_MODULE
    assert set_tag(NO_MODULE) == NO_MODULE


def test_current_when_forward_raises_then_nothing_is_left(tracker: ModuleTracker) -> None:
    with pytest.raises(ValueError, match="inside"):
        nn.Sequential(nn.Identity(), Failing())(ONE)
    assert tracker.current() == NO_MODULE
    assert set_tag(NO_MODULE) == NO_MODULE


def test_current_when_another_thread_runs_a_module_then_unaffected(tracker: ModuleTracker) -> None:
    probe = Probe(tracker)

    class Outer(nn.Module):
        def forward(self, x: torch.Tensor) -> torch.Tensor:
            on_thread(lambda: nn.Sequential(probe)(x))
            other.append(tracker.name(tracker.current()))
            return x

    other: list[str] = []
    Outer()(ONE)
    assert probe.seen == ["0"]
    assert other == ["Outer"]


def test_tracking_when_it_begins_inside_a_module_then_the_end_of_it_is_fine() -> None:
    tracker = ModuleTracker()

    class Starter(nn.Module):
        def forward(self, x: torch.Tensor) -> torch.Tensor:
            tracker.start("test")
            return x

    Starter()(ONE)
    tracker.stop("test")
    assert tracker.current() == NO_MODULE


def test_tracking_when_its_last_user_stops_then_modules_are_not_seen() -> None:
    tracker = ModuleTracker()
    probe = Probe(tracker)
    model = nn.Sequential(probe)
    for user in ("first", "second", "second"):
        tracker.start(user)
    for _ in range(2):
        tracker.stop("second")
    model(ONE)
    tracker.stop("first")
    model(ONE)
    assert probe.seen == ["0", ""]


def test_names_when_a_step_ends_after_the_session_then_modules_stay_unseen() -> None:
    """A finalizer may end a session while its step ends."""
    tracker = ModuleTracker()
    names = NamesIfShort(tracker)
    tracker.start(names, Need.NAMES)
    tracker.stop(names)
    for is_short in (*[False] * NAMED_STEPS, True):
        names.end_step(1, is_short=is_short)
        assert not tracker.is_on


def test_name_when_the_tag_is_of_backward_or_unknown_then_the_module_or_nothing(
    tracker: ModuleTracker,
) -> None:
    model = nn.Sequential(nn.Identity())
    tracker.add_model(model)
    assert tracker.name(2 | BACKWARD) == tracker.name(2) == "0"
    assert tracker.name(NO_MODULE) == tracker.name(BACKWARD) == ""
    assert tracker.name(99) == ""


# ---- sites --------------------------------------------------------------------------------------


def test_site_when_a_module_is_called_again_then_its_saves_count_from_the_start(
    tracker: ModuleTracker,
) -> None:
    seen: list[tuple[str, int]] = []

    class Saver(nn.Module):
        def forward(self, x: torch.Tensor) -> torch.Tensor:
            for _ in range(2):
                tag, index = tracker.site()
                seen.append((tracker.name(tag), index))
            return x

    model = nn.Sequential(Saver())
    for _ in range(2):
        model(ONE)
    assert seen == [("0", 0), ("0", 1)] * 2


def test_site_when_outside_of_modules_then_steps_count_from_the_start(
    tracker: ModuleTracker,
) -> None:
    seen = []
    for _ in range(3):
        seen.append([tracker.site() for _ in range(3)])
        tracker.end_step()
    assert seen == [[(NO_MODULE, 0), (NO_MODULE, 1), (NO_MODULE, 2)]] * 3


def test_site_when_an_operator_runs_then_it_counts_its_own(tracker: ModuleTracker) -> None:
    tracker.site()
    kernel = tracker.enter_operator("kernel")
    assert [tracker.site(), tracker.site()] == [(kernel.tag, 0), (kernel.tag, 1)]
    assert tracker.leave_operator(kernel) is None
    assert tracker.site() == (NO_MODULE, 1)
    assert tracker.leave_operator(kernel) == NO_MODULE  # once more: it is gone
    assert tracker.name(kernel.tag) == "kernel"


def test_operator_when_it_ends_before_one_inside_it_then_only_its_own_entry_goes(
    tracker: ModuleTracker,
) -> None:
    outer = tracker.enter_operator("outer")
    middle = tracker.enter_operator("middle")
    inner = tracker.enter_operator("inner")
    assert tracker.leave_operator(outer) == inner.tag
    assert tracker.leave_operator(middle) == inner.tag
    assert tracker.name(tracker.current()) == "outer.middle.inner"
    assert tracker.leave_operator(inner) is None
    assert tracker.current() == NO_MODULE


def test_operator_when_a_module_around_it_fails_then_it_ends_with_the_module(
    tracker: ModuleTracker,
) -> None:
    left = []

    class Leaving(nn.Module):
        def forward(self, _x: torch.Tensor) -> torch.Tensor:
            left.extend([tracker.enter_operator("first"), tracker.enter_operator("second")])
            raise ValueError("inside")

    class Catching(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.deep = nn.Sequential(nn.Sequential(Leaving()))
            self.probe = Probe(tracker)

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            with contextlib.suppress(ValueError):
                self.deep(x)
            around = tracker.enter_operator("kernel")
            assert tracker.leave_operator(left[0]) == around.tag
            x = self.probe(x)
            assert tracker.leave_operator(around) is None
            assert tracker.leave_operator(left[1]) == tracker.current()
            assert tracker.name(tracker.current()) == "Catching"
            return torch.as_tensor(self.probe(x))

    model = Catching()
    model(ONE)
    assert model.probe.seen == ["probe", "probe"]
    assert tracker.current() == set_tag(NO_MODULE) == NO_MODULE


# ---- parameters and buffers ---------------------------------------------------------------------


def storage_of(tensor: torch.Tensor | None) -> int:
    assert tensor is not None
    return int(tensor.untyped_storage()._cdata)


def test_state_when_a_model_is_known_then_parameters_and_buffers_are_its_state(
    tracker: ModuleTracker,
) -> None:
    model = nn.BatchNorm1d(8)
    assert not tracker.is_state(storage_of(model.weight))
    tracker.add_model(model)
    assert tracker.is_state(storage_of(model.weight))
    assert tracker.is_state(storage_of(model.running_mean))
    assert not tracker.is_state(storage_of(ONE))


def test_state_when_another_model_of_the_same_size_comes_then_it_is_looked_at(
    tracker: ModuleTracker,
) -> None:
    model = nn.Linear(2, 2)
    tracker.add_model(model)
    assert tracker.is_state(storage_of(model.weight))
    other = nn.Linear(2, 2)
    del model
    tracker.add_model(other)
    assert len(tracker.modules()) == 1
    assert tracker.is_state(storage_of(other.weight))


def move(model: nn.BatchNorm1d) -> torch.Tensor:
    model.weight.data = torch.ones(8)
    return model.weight


def resize(model: nn.BatchNorm1d) -> torch.Tensor:
    model.weight.data.untyped_storage().resize_(1024)
    return model.weight


def replace(model: nn.BatchNorm1d) -> torch.Tensor:
    model.weight = nn.Parameter(torch.ones(8))
    return model.weight


def replace_in_the_table(model: nn.BatchNorm1d) -> torch.Tensor:
    weight = model._parameters["weight"] = nn.Parameter(torch.ones(8))
    return weight


def add(model: nn.BatchNorm1d) -> torch.Tensor:
    model.register_parameter("scale", nn.Parameter(torch.ones(8)))
    return model.get_parameter("scale")


def assign_a_buffer(model: nn.BatchNorm1d) -> torch.Tensor:
    model.running_mean = torch.ones(8)
    return model.running_mean


def add_a_buffer(model: nn.BatchNorm1d) -> torch.Tensor:
    model.register_buffer("count", torch.ones(8))
    return model.get_buffer("count")


@pytest.mark.parametrize(
    "change",
    [move, resize, replace, replace_in_the_table, add, assign_a_buffer, add_a_buffer],
    ids=lambda change: change.__name__,
)
def test_state_when_it_was_changed_then_a_step_later_it_is_found(
    tracker: ModuleTracker, change: Callable[[nn.BatchNorm1d], torch.Tensor]
) -> None:
    model = nn.BatchNorm1d(8)
    tracker.add_model(model)
    assert tracker.is_state(storage_of(model.weight))
    changed = change(model)
    tracker.end_step()
    assert tracker.is_state(storage_of(changed))


def test_state_when_removed_then_a_step_later_it_is_none(tracker: ModuleTracker) -> None:
    model = nn.BatchNorm1d(8)
    tracker.add_model(model)
    weight = model.weight
    assert tracker.is_state(storage_of(weight))
    del model.weight
    tracker.end_step()
    assert not tracker.is_state(storage_of(weight))


def test_state_when_a_module_is_added_then_it_is_found_where_that_runs(
    tracker: ModuleTracker,
) -> None:
    first, added = nn.Linear(1, 1), nn.Linear(1, 1)
    model = nn.Sequential(first)
    model(ONE)
    assert tracker.is_state(storage_of(first.weight))
    model.append(added)
    model(ONE)
    assert tracker.is_state(storage_of(added.weight))


def test_state_when_nobody_asks_then_steps_do_not_look_for_it(
    tracker: ModuleTracker, monkeypatch: pytest.MonkeyPatch
) -> None:
    looks: list[int] = []
    model = nn.Linear(1, 1)
    tracker.add_model(model)
    look = tracker.modules

    def count() -> list[nn.Module]:
        looks.append(1)
        return look()

    monkeypatch.setattr(tracker, "modules", count)
    for _ in range(3):
        tracker.end_step()
    assert looks == []
    assert tracker.is_state(storage_of(model.weight))
    assert tracker.is_state(storage_of(model.bias))
    assert looks == [1]  # once a step
