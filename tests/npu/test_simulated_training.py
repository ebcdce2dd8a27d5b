"""Training under swapkit gives the bits of training without it, in every kind of host queue.

They run inside of `python -m tests.npu.simulated -m pytest tests/npu/test_simulated_training.py`;
`test_simulation.py` starts that, once for each kind of queue. What is expected comes from a process
that has torch_npu's own allocator and no swapkit.
"""

from __future__ import annotations

import contextlib
import functools
import os
from typing import TYPE_CHECKING, Any

import pytest
import torch
from torch_npu import npu

import swapkit
from tests.cuda.control import last_problem
from tests.npu.processes import run
from tests.npu.simulated import INSIDE
from tests.npu.trainings import (
    COMPARABLE,
    LAYERS,
    MODELS,
    State,
    assert_equal,
    largest_difference,
    train,
)

if TYPE_CHECKING:
    from collections.abc import Iterator

pytestmark = pytest.mark.skipif(INSIDE not in os.environ, reason="runs in tests.npu.simulated")

USUAL_QUEUE = os.environ.get("TASK_QUEUE_ENABLE") == "1" and "PER_STREAM_QUEUE" not in os.environ
# Of what a step adds to the peak, left by a budget: a sweep in the usual queue.
SHARES = (0.9, 0.7, 0.5) if USUAL_QUEUE else (0.5,)
TOLERANCE = 1e-5


@pytest.fixture(autouse=True, scope="module")
def _pool() -> None:
    swapkit.install()  # the accelerator that torch reports
    assert npu.get_allocator_backend() == "pluggable"


@pytest.fixture(autouse=True)
def _healthy() -> Iterator[None]:
    yield
    npu.synchronize()
    assert last_problem() == ""


@pytest.fixture(scope="module")
def plain(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Any]:
    """What training gives without swapkit, by model."""
    file = str(tmp_path_factory.mktemp("plain") / "results.pt")
    code = f"""
    import sys
    from tests.npu.trainings import MODELS, train
    found = {{}}
    for name in MODELS:
        state = train(name, "npu")
        found[name] = state.losses, state.tensors
    assert not any(name.startswith("swapkit._") for name in sys.modules)
    torch.save(found, {file!r})
    """
    assert run(code) == []
    loaded: dict[str, Any] = torch.load(file)
    return loaded


def expected_of(plain: dict[str, Any], name: str) -> State:
    losses, tensors = plain[name]
    return State(losses=losses, tensors=tensors)


@pytest.mark.parametrize("name", COMPARABLE)
def test_training_without_swapkit_then_as_on_the_cpu(plain: dict[str, Any], name: str) -> None:
    assert largest_difference(expected_of(plain, name), train(name, "cpu")) < TOLERANCE


# ---- ways to save memory ------------------------------------------------------------------------


@contextlib.contextmanager
def nothing(*_: object) -> Iterator[None]:
    yield


def swap_everything(*_: object) -> Any:
    return swapkit.offload(min_bytes=0)


def swap_with_prefetch(*_: object) -> Any:
    return swapkit.offload(min_bytes=0, prefetch=2)


@contextlib.contextmanager
def optimizer_states(_: object, optimizer: torch.optim.Optimizer) -> Iterator[None]:
    swapkit.offload(optimizer)
    yield


@pytest.mark.parametrize("name", MODELS)
@pytest.mark.parametrize(
    "way",
    [nothing, swap_everything, swap_with_prefetch, optimizer_states],
    ids=lambda way: way.__name__,
)
def test_training_when_tensors_move_then_the_same_bits(
    plain: dict[str, Any], name: str, way: Any
) -> None:
    assert_equal(train(name, "npu", way), expected_of(plain, name))


@pytest.mark.parametrize("name", MODELS)
def test_training_when_layers_are_recomputed_then_the_same_bits(
    plain: dict[str, Any], name: str
) -> None:
    @contextlib.contextmanager
    def recompute(model: torch.nn.Module, _: object) -> Iterator[None]:
        swapkit.checkpoint(model, LAYERS[name])
        yield

    assert_equal(train(name, "npu", recompute), expected_of(plain, name))


@functools.cache
def needed_bytes(name: str) -> tuple[int, int]:
    """Return the bytes of a model with its optimizer, and what a step adds to them."""
    before = npu.memory_allocated()
    npu.reset_peak_memory_stats()
    rest = []

    @contextlib.contextmanager
    def watch(*_: object) -> Iterator[None]:
        yield
        rest.append(npu.memory_allocated() - before)

    train(name, "npu", watch)
    return rest[0], npu.max_memory_allocated() - before - rest[0]


@pytest.mark.promise("A4")
@pytest.mark.parametrize("policy", ["rescue", "swap", "recompute", "auto"])
@pytest.mark.parametrize("share", SHARES)
@pytest.mark.parametrize("name", MODELS)
def test_training_under_a_budget_then_it_holds_and_the_same_bits(
    plain: dict[str, Any], name: str, share: float, policy: str
) -> None:
    rest, step = needed_bytes(name)
    limit = int(npu.memory_allocated() + rest + share * step)
    sessions = []

    @contextlib.contextmanager
    def budget(model: torch.nn.Module, optimizer: torch.optim.Optimizer) -> Iterator[None]:
        npu.empty_cache()
        npu.reset_peak_memory_stats()
        with swapkit.budget(limit, model, optimizer, policy=policy) as session:
            sessions.append(session)
            yield
            assert npu.max_memory_reserved() <= limit

    assert_equal(train(name, "npu", budget), expected_of(plain, name))
    stats = sessions[0].stats
    assert stats.peak_bytes <= limit
    moved = stats.swapped_out_bytes + stats.recomputed_regions + stats.oom_rescues
    assert moved > 0 or share == 0.9
