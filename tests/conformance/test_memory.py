"""What moving saved tensors does to memory: it is freed, it comes back, and none of it leaks."""

from __future__ import annotations

import gc
import time
import weakref
from typing import Any

import pytest
import torch
from torch import nn

from tests.conformance.modes import (
    Mode,
    allocated_bytes,
    count_copies,
    find_mode,
    forget_captured,
    settle,
)
from tests.programs import PROGRAMS, SIDE, Entry, gradients, leaf, run
from tests.support.place import DEVICE

MATRIX = SIDE * SIDE * 4

# They fill caches of torch's own: compiled code and its constants.
KEEPS = {
    "blocks_compiled_by_inductor", "compiled_blocks", "graph_break_inside_a_compiled_function",
    "whole_function_compiled_without_graph_breaks",
}  # fmt: skip


class Token:
    """Something to hold a weak reference to."""


class HoldsToken(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: torch.Tensor, token: Token) -> torch.Tensor:
        y = x.exp()
        ctx.save_for_backward(x, y)
        ctx.token = token
        return y

    @staticmethod
    def backward(ctx: Any, grad: torch.Tensor) -> Any:
        return grad * ctx.saved_tensors[1], None


def falls_to(nbytes: int) -> bool:
    """Return whether memory falls so far; a GPU's autograd thread ends a moment after backward."""
    deadline = time.monotonic() + 2
    while allocated_bytes() > nbytes and time.monotonic() < deadline:
        time.sleep(0.001)
    return allocated_bytes() <= nbytes


@pytest.mark.parametrize("name", ["swap_everything", "rescue_everything"])
@pytest.mark.parametrize("entry", PROGRAMS, ids=lambda entry: entry.name)
def test_memory_when_a_program_has_ended_then_all_of_it_is_given_back(
    entry: Entry, name: str
) -> None:
    if entry.body.__name__ in KEEPS:
        pytest.skip("torch keeps compiled code and its constants")
    mode = find_mode(name)
    with mode.open() as evict:
        run(entry.body, evict)  # what torch itself keeps from a first run
        gc.collect()
        settle()  # a copy under way still reads from what it was made of
        before = allocated_bytes()
        run(entry.body, evict)
        gc.collect()
        settle()
        assert falls_to(before)


@pytest.mark.usefixtures("no_collector")
def test_graph_when_dropped_without_backward_then_freed_at_once(mode: Mode) -> None:
    """G7, G11: an output that is kept for backward must not keep its own graph alive."""
    with mode.open() as evict:
        before = allocated_bytes()
        token = Token()
        watched = weakref.ref(token)
        x = leaf()
        y: Any = HoldsToken.apply(x * 2, token)
        loss = y.exp().sum()
        evict()
        del token, x, y, loss
        assert watched() is None
        settle()  # a copy under way still reads from what it was made of
        forget_captured()
        assert allocated_bytes() == before


@pytest.mark.parametrize("name", ["swap_everything", "rescue_everything"])
def test_device_memory_when_saved_tensors_were_moved_then_it_was_freed(name: str) -> None:
    """G29: the copy is a real one, and what was copied is let go."""
    with find_mode(name).open() as evict, count_copies() as copied:
        x = leaf()
        y = x
        before = allocated_bytes()
        for _ in range(10):
            y = y.sin()
        loss = y.sum()
        del y
        evict()
        assert copied.out_bytes >= 8 * MATRIX
        assert allocated_bytes() - before <= 2 * MATRIX
        gradients(loss, x)


@pytest.mark.parametrize("name", ["swap_everything", "rescue_everything"])
def test_views_when_many_share_a_storage_then_it_is_copied_once(name: str) -> None:
    with find_mode(name).open() as evict, count_copies() as copied:
        x = leaf(8 * SIDE, SIDE)
        y = x * 2
        parts = y.chunk(8)
        loss = sum((part * part.t()).sum() for part in parts)
        del y, parts
        evict()
        gradients(loss, x)  # type: ignore[arg-type]
    assert copied.out_bytes == 8 * MATRIX
    assert copied.in_bytes == 8 * MATRIX


@pytest.mark.parametrize("name", ["swap_everything", "rescue_everything"])
def test_expanded_tensor_when_moved_then_only_its_storage_is_copied(name: str) -> None:
    """G28."""
    with find_mode(name).open() as evict, count_copies() as copied:
        x = leaf(SIDE)
        row = (x * 2).repeat(8)
        wide = row.expand(1000, -1)
        loss = (wide * wide).sum()
        del row, wide
        evict()
        gradients(loss, x)
    assert copied.out_bytes <= 16 * SIDE * 4


@pytest.mark.parametrize("name", ["swap_everything", "rescue_everything"])
@pytest.mark.parametrize("low_precision", [False, True], ids=["float32", "autocast"])
def test_weights_when_saved_by_layers_then_not_copied(name: str, low_precision: bool) -> None:
    """G4, G5: parameters and buffers are held by their module, so moving them frees nothing."""
    model = nn.Sequential(*[nn.Linear(512, 512, bias=False) for _ in range(3)])
    model.register_buffer("scale", torch.randn(512))
    x = torch.randn(1, 512, requires_grad=True)
    weights = sum(parameter.numel() * 4 for parameter in model.parameters())
    with find_mode(name).open() as evict, count_copies() as copied:
        with torch.autocast(DEVICE, dtype=torch.bfloat16, enabled=low_precision):
            loss = (model(x) * model.scale).float().sum()
            evict()  # autocast's cache still holds the casts
            assert copied.out_bytes < weights / 10
        loss.backward()


@pytest.mark.promise("A14")
def test_small_tensors_when_below_the_minimum_then_never_copied(mode: Mode) -> None:
    with mode.open() as evict, count_copies() as copied:
        x = leaf(8, 16)  # 512 bytes
        loss = (x * 2).exp().sin().tanh().sum()
        evict()
        gradients(loss, x)
    assert copied.out_bytes == 0


def test_saved_tensor_when_read_again_and_again_then_memory_does_not_grow(mode: Mode) -> None:
    """G10: `_saved_*` outside backward brings a tensor back, and lets it go again."""
    with mode.open() as evict:
        x = leaf()
        y = (x * 2).exp()
        node: Any = y.grad_fn
        expected = y.detach().clone()
        loss = y.sum()
        del y
        evict()
        for turn in range(20):
            assert torch.equal(node._saved_result, expected)
            evict()
            if turn == 1:
                reached = allocated_bytes()
        assert allocated_bytes() <= reached
        gradients(loss, x)


def test_memory_when_backward_runs_then_it_is_given_back_as_nodes_execute(mode: Mode) -> None:
    """G11: what a node saved dies with it, not with the whole graph."""
    with mode.open() as evict:
        x = leaf()
        y = x
        seen: list[int] = []
        for _ in range(12):
            y = y.sin()
            y.register_hook(lambda _grad: seen.append(allocated_bytes()))
        loss = y.sum()
        del y
        evict()
        before = allocated_bytes()
        loss.backward()
    assert len(seen) == 12
    # The leaf stays; the 11 others that were saved may all be back, beside two gradients.
    assert max(seen) - before <= 13 * MATRIX
    assert seen[-1] - before <= 5 * MATRIX
