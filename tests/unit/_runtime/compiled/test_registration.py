"""Registration with torch's compilers, and what happens with a torch that has other names."""

from __future__ import annotations

import contextlib
import logging
import pickle
from typing import TYPE_CHECKING

import torch
import torch._inductor.config

import swapkit
from swapkit._runtime.compiled import missing_names, registration
from swapkit._runtime.compiled.partitioner import LatePartitioner
from swapkit._runtime.torch_compat import compilers

if TYPE_CHECKING:
    from collections.abc import Callable

    import pytest


def swap_nothing(_tensor: torch.Tensor) -> contextlib.AbstractContextManager[object]:
    return contextlib.nullcontext()


def test_partitioner_when_pickled_then_the_caches_take_it_for_the_same() -> None:
    first, second = LatePartitioner(), pickle.loads(pickle.dumps(LatePartitioner()))
    assert first.uuid() == second.uuid()
    assert vars(second) == {}


def test_inductor_when_it_is_loaded_then_it_has_the_partitioner_unless_the_user_set_one() -> None:
    swapkit.install()
    with torch._inductor.config.patch(custom_partitioner_fn=None):
        compilers.set_partitioner(ours := LatePartitioner())
        assert torch._inductor.config.custom_partitioner_fn is ours
        compilers.set_partitioner(LatePartitioner())
        assert torch._inductor.config.custom_partitioner_fn is ours


def test_registration_when_switched_off_then_no_graph_changes(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    waited: list[str] = []

    def note(name: str, _call: Callable[[], None]) -> None:
        waited.append(name)

    monkeypatch.setattr(registration, "when_imported", note)
    monkeypatch.setenv(registration.SWITCH, "0")
    registration.watch_compilers(swap_nothing)
    assert waited == ["torch._dynamo.eval_frame"]  # recorded steps need that
    waited.clear()
    monkeypatch.delenv(registration.SWITCH)
    registration.watch_compilers(swap_nothing)
    assert waited[1:] == ["torch._inductor.config", "torch._dynamo.backends.common"]


def test_registration_when_torch_lacks_a_name_then_one_warning_says_what_holds(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setattr(missing_names, "reported", [])
    with caplog.at_level(logging.WARNING):
        registration._register("register_another", swap_nothing)
        registration._register("register_another", swap_nothing)
    (record,) = caplog.records
    assert "only between the graphs" in record.message
    assert "register_another" in record.message
