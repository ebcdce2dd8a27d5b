"""What opens torch's compilers, and what happens with a torch that has other names."""

from __future__ import annotations

import logging
import pickle
from typing import TYPE_CHECKING

import torch._inductor.config

import swapkit
from swapkit._runtime.compiled import doors, missing_names
from swapkit._runtime.compiled.partitioner import LatePartitioner
from swapkit._runtime.torch_compat import compilers

if TYPE_CHECKING:
    from collections.abc import Callable

    import pytest


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


def test_doors_when_switched_off_then_nothing_waits_for_the_compilers(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    waited: list[str] = []

    def note(name: str, _call: Callable[[], None]) -> None:
        waited.append(name)

    monkeypatch.setattr(doors, "when_imported", note)
    monkeypatch.setenv(doors.SWITCH, "0")
    doors.watch_compilers()
    assert waited == []
    monkeypatch.delenv(doors.SWITCH)
    doors.watch_compilers()
    assert waited == ["torch._inductor.config", "torch._dynamo.backends.common"]


def test_door_when_torch_lacks_a_name_then_one_warning_says_what_holds(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setattr(missing_names, "_said", [])
    with caplog.at_level(logging.WARNING):
        doors._open("open_another_compiler")
        doors._open("open_another_compiler")
    (record,) = caplog.records
    assert "only between the graphs" in record.message
    assert "open_another_compiler" in record.message
