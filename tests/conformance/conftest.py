"""The modes as a fixture, and the warnings that torch's own rarer parts give."""

from __future__ import annotations

from typing import TYPE_CHECKING

import pytest

from tests.conformance.modes import MODES, Mode, frozen_objects
from tests.conformance.rivals import expected_of
from tests.programs.registry import results_of_plain_training
from tests.support.place import make_default

if TYPE_CHECKING:
    from collections.abc import Iterable, Iterator

WARNINGS = (
    "ignore:.*nested tensors:UserWarning",
    "ignore:.*sparse CSR tensor support is in beta state:UserWarning",
    "ignore:.*Sparse invariant checks are implicitly disabled:UserWarning",
    "ignore:torch.quantize_per_:UserWarning",
    "ignore:.*quantized:UserWarning",
    "ignore:.*use_reentrant:UserWarning",
    "ignore:The .grad attribute of a Tensor that is not a leaf:UserWarning",
    "ignore:Attempted to insert a get_attr Node:UserWarning",
    "ignore:None of the inputs have requires_grad=True:UserWarning",
    "ignore:Attempting to run cuBLAS, but there was no current CUDA context:UserWarning",
)


def pytest_collection_modifyitems(items: Iterable[pytest.Item]) -> None:
    for item in items:
        if "conformance" in item.path.parts:
            for warning in WARNINGS:
                item.add_marker(pytest.mark.filterwarnings(warning))
            entry = item.callspec.params.get("entry") if hasattr(item, "callspec") else None
            obstacle = None if entry is None else entry.obstacle
            if obstacle is not None:
                item.add_marker(pytest.mark.skip(reason=obstacle))


@pytest.fixture(autouse=True, scope="session")
def on_the_device() -> None:
    """Make every tensor on the device that is tested."""
    make_default()


@pytest.fixture(autouse=True, scope="module")
def few_objects() -> Iterator[None]:
    """Make sessions quick; and leave no results behind, which would lie in the pool."""
    with frozen_objects():
        yield
    results_of_plain_training.cache_clear()
    expected_of.cache_clear()


@pytest.fixture(params=MODES, ids=lambda mode: mode.name)
def mode(request: pytest.FixtureRequest) -> Mode:
    """Every mode of the table."""
    found: Mode = request.param
    return found
