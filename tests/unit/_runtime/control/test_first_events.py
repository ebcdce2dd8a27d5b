"""What begins a step whose model is not called as a whole."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import torch
from torch import nn

from swapkit._runtime.control.steps import FirstEvent

TENSOR = torch.zeros(1)


class Log:
    """The begins that were seen; or the tensors that an observer was told of."""

    def __init__(self) -> None:
        self.seen: list[Any] = []

    def begin(self) -> None:
        self.seen.append("begin")

    def saved(self, tensor: torch.Tensor, packed: object) -> None:
        self.seen.append((tensor, packed))


def wait_for(
    model: nn.Module | None, begin: Any, *, is_here: bool = True
) -> tuple[FirstEvent, Any]:
    """Return what waits for a step, and the packer whose saved tensors it sees."""
    packer: Any = SimpleNamespace(observer=None)
    first = FirstEvent(packer, lambda: model, lambda: is_here)
    first.wait(begin)
    return first, packer


def test_call_when_of_a_module_inside_the_model_then_it_is_the_first_event() -> None:
    model = nn.ModuleList([nn.Sequential(nn.Linear(1, 1)), nn.Linear(1, 1)])
    first, _ = wait_for(model, Log().begin)
    assert first.is_call(model[1])
    assert first.is_call(next(model[0].children()))
    assert not first.is_call(nn.Linear(1, 1))


def test_call_when_of_the_compiled_form_of_a_part_then_it_is_the_first_event() -> None:
    model = nn.ModuleList([nn.Linear(1, 1)])
    first, _ = wait_for(model, Log().begin)
    compiled = nn.Module()
    compiled._orig_mod = model[0]
    assert first.is_call(compiled)


def test_call_when_there_is_no_model_then_that_of_any_module_is_the_first_event() -> None:
    first, _ = wait_for(None, Log().begin)
    assert first.is_call(nn.Linear(1, 1))


def test_call_when_nothing_trains_there_then_it_is_not_the_first_event() -> None:
    model = nn.ModuleList([nn.Linear(1, 1)])
    first, _ = wait_for(model, Log().begin)
    with torch.no_grad():
        assert not first.is_call(model[0])
    calls = []
    leaf = torch.ones(1, requires_grad=True)
    leaf.register_hook(lambda _: calls.append(first.is_call(model[0])))
    leaf.sum().backward()
    assert calls == [False]
    first.end()
    assert not first.is_call(model[0])


def test_call_when_on_another_thread_then_it_is_not_the_first_event() -> None:
    model = nn.ModuleList([nn.Linear(1, 1)])
    first, _ = wait_for(model, Log().begin, is_here=False)
    assert not first.is_call(model[0])


def test_call_when_another_thread_ends_the_session_meanwhile_then_no_error() -> None:
    class Ending(nn.Module):
        @property
        def _orig_mod(self) -> None:
            first.end()

    model = nn.ModuleList([nn.Linear(1, 1)])
    first, _ = wait_for(model, Log().begin)
    assert not first.is_call(Ending())


def test_tensor_when_it_is_saved_first_then_the_step_begins_once_and_the_recorder_hears_of_it() -> (
    None
):
    log, recorder = Log(), Log()

    def begin() -> None:
        log.begin()
        first.end()
        packer.observer = recorder

    first, packer = wait_for(None, begin)
    for packed in (1, 2):
        first.saved(TENSOR, packed)
    assert log.seen == ["begin"]
    assert recorder.seen == [(TENSOR, 1)]
    first.used(1, TENSOR)
    first.end()
    assert packer.observer is recorder


def test_tensor_when_it_is_saved_elsewhere_or_in_backward_then_no_step_begins() -> None:
    log = Log()
    first, _ = wait_for(None, log.begin, is_here=False)
    first.saved(TENSOR, 1)
    first, _ = wait_for(None, log.begin)
    leaf = torch.ones(1, requires_grad=True)
    leaf.register_hook(lambda _: first.saved(TENSOR, 1))
    leaf.sum().backward()
    assert log.seen == []


def test_packer_when_no_step_is_waited_for_then_it_has_no_observer() -> None:
    first, packer = wait_for(None, Log().begin)
    assert packer.observer is first
    first.end()
    assert packer.observer is None
