"""What the shim does with arguments that its callers do not give it: no crash, no half object."""

from __future__ import annotations

import gc
from typing import TYPE_CHECKING, Any

import pytest
import torch

from swapkit._runtime.process.runtime import get_runtime
from tests.unit._runtime.rig import AUTO, make_swapper

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator

    from swapkit._runtime.saved.swapper import Swapper

pytestmark = pytest.mark.usefixtures("installation")


class Watcher:
    """Stands in for arguments, and counts the objects of a type whenever it is read."""

    def __init__(self, kind: type) -> None:
        self.kind = kind
        self.counts: set[int] = set()

    def look(self) -> None:
        self.counts.add(sum(type(each) is self.kind for each in gc.get_objects()))

    def __iter__(self) -> Iterator[Any]:
        self.look()
        return iter(())

    def __getattr__(self, name: str) -> Any:
        self.look()
        return getattr(AUTO, name, 0)


def make_region(swapper: Swapper, watcher: Watcher) -> object:
    packer: Any = swapper.mover.packer(AUTO)
    region: Any = get_runtime().shim.region
    return region(packer, None, None, watcher, [])


def make_mover(swapper: Swapper, watcher: Watcher) -> object:
    shim, device = get_runtime().shim, get_runtime().cpu
    scheduler: Any = watcher
    return shim.mover(
        policy=swapper.mover.policy,
        scheduler=scheduler,
        lock=shim.lock(),
        tracker=device.shared.tracker,
        device_type=0,
        device_index=-1,
    )


def make_packer(swapper: Swapper, watcher: Watcher) -> object:
    placement: Any = watcher
    return swapper.mover.packer(placement)


@pytest.mark.parametrize("make", [make_region, make_mover, make_packer])
def test_constructor_when_reading_its_arguments_runs_python_then_nobody_finds_the_object(
    make: Callable[[Swapper, Watcher], object],
) -> None:
    swapper = make_swapper()
    kind = type(make(swapper, Watcher(object)))
    gc.collect()
    watcher = Watcher(kind)
    watcher.look()
    made = make(swapper, watcher)
    assert len(watcher.counts) == 1  # as many as before
    watcher.look()
    assert len(watcher.counts) == 2
    assert type(made) is kind


def test_storage_description_when_the_tensor_has_no_storage_then_there_is_none() -> None:
    assert get_runtime().shim.storage_description(torch.eye(3).to_sparse()) is None
