"""A session whose recorded step is interrupted while it ends: nothing of it stays."""

from __future__ import annotations

import gc
import weakref

import pytest
import torch
from torch._C import _len_torch_dispatch_stack

import swapkit
from swapkit._runtime.model import global_hooks
from swapkit._runtime.model.listeners import Listeners
from swapkit._runtime.model.tracker import ModuleTracker
from swapkit._runtime.recording.recorder import Recorder
from swapkit._runtime.saved.lent_hooks import Lending
from tests.support.sessions import make_training, train_plainly

pytestmark = [pytest.mark.usefixtures("installation", "steady_machine"), pytest.mark.promise("C5")]

PARTS = ("calls", "workspaces", "optimizers", "savings", "bytes", "storages")


@pytest.mark.parametrize("part", PARTS)
def test_recording_when_its_end_is_interrupted_then_the_rest_of_it_ends(
    part: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    start = Recorder.start

    def start_doomed(recorder: Recorder) -> None:
        def interrupt() -> None:
            stop()
            raise KeyboardInterrupt

        owner = getattr(recorder, part)
        stop = owner.stop
        owner.stop = interrupt
        start(recorder)

    monkeypatch.setattr(Recorder, "start", start_doomed)
    limit = train_plainly(make_training, 1).budget(2.0)
    listeners = len(global_hooks.calls.now), len(global_hooks.steps.now)
    training = make_training()
    with swapkit.budget(limit, training.model, training.optimizer):
        training.step()
        with pytest.raises(KeyboardInterrupt):
            training.step()
    assert (len(global_hooks.calls.now), len(global_hooks.steps.now)) == listeners
    assert _len_torch_dispatch_stack() == 0
    model = weakref.ref(training.model)
    del training
    gc.collect()
    assert model() is None
    assert torch.ones(2, requires_grad=True).exp().sum().requires_grad


@pytest.mark.parametrize(
    ("owner", "name"),
    [(Lending, "start"), (Listeners, "add")],
    ids=["hooks", "calls"],
)
def test_session_when_interrupted_as_it_begins_then_no_listener_of_it_is_left(
    owner: type, name: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    begin = getattr(owner, name)
    training = make_training()
    listeners = global_hooks.calls.now, global_hooks.steps.now

    def begin_and_stop(*args: object) -> None:
        begin(*args)
        if not isinstance(args[-1], ModuleTracker):
            raise KeyboardInterrupt

    with monkeypatch.context() as patch:
        patch.setattr(owner, name, begin_and_stop)
        with (
            pytest.raises(KeyboardInterrupt),
            swapkit.budget("1GiB", training.model, training.optimizer),
        ):
            pass
    assert (global_hooks.calls.now, global_hooks.steps.now) == listeners
    training.step()
