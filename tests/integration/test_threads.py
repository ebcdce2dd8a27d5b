"""Several threads under one pool: nothing hangs, nothing is mixed up, the budget holds."""

from __future__ import annotations

import threading
from functools import partial
from typing import TYPE_CHECKING

import pytest
import torch
from torch import nn

import swapkit
from tests.support import MIB, installed, limit_above_reserved, run_python
from tests.support.threads import on_thread, on_threads

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator

    from swapkit._runtime.allocators.installed_pool import Installation

WIDTH = 128
ROWS = 2048  # one activation is 1 MiB
LAYERS = 6


@pytest.fixture
def installation() -> Iterator[Installation]:
    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    with installed() as installation:
        yield installation
    torch.set_num_threads(threads)


def make_models(count: int) -> list[nn.Module]:
    torch.manual_seed(0)
    return [
        nn.Sequential(*[nn.Sequential(nn.Linear(WIDTH, WIDTH), nn.Tanh()) for _ in range(LAYERS)])
        for _ in range(count)
    ]


def step(model: nn.Module, before_backward: Callable[[], object] = lambda: None) -> float:
    """Train one step; return its loss."""
    generator = torch.Generator().manual_seed(1)
    loss = model(torch.rand(ROWS, WIDTH, generator=generator)).square().mean()
    before_backward()
    loss.backward()
    with torch.no_grad():
        for parameter in model.parameters():
            assert parameter.grad is not None
            parameter.sub_(parameter.grad, alpha=0.1)
            parameter.grad = None
    return float(loss.detach())


def expected_losses(count: int, steps: int) -> list[list[float]]:
    return [[step(model) for _ in range(steps)] for model in make_models(count)]


@pytest.mark.promise("A3")
def test_threads_when_eight_allocate_free_and_train_under_one_budget_then_all_finish(
    installation: Installation,
) -> None:
    expected = expected_losses(1, 3)[0]
    models = [model for _ in range(4) for model in make_models(1)]
    losses: dict[int, list[float]] = {}
    # All saved at once would be 4 models of 12 tensors each; a working set is a few each.
    limit_bytes = limit_above_reserved(installation, 52 * MIB)
    with swapkit.budget(limit_bytes) as session:

        def work(number: int) -> None:
            if number < 4:
                with swapkit.budget(limit_bytes):  # the hooks are a thread's own
                    losses[number] = [step(models[number]) for _ in range(3)]
                return
            generator = torch.Generator().manual_seed(number)
            kept: list[torch.Tensor] = []
            for round_number in range(100):
                kept.append(torch.rand(MIB // 8, generator=generator))
                del kept[: max(0, len(kept) - 1 - round_number % 4)]
                assert float(kept[-1].max()) < 1.0

        on_threads(*[partial(work, number) for number in range(8)])
    assert [losses[number] for number in range(4)] == [expected] * 4
    assert session.stats.peak_bytes <= limit_bytes
    installation.pool.check()
    assert installation.sessions == []


@pytest.mark.promise("A3")
def test_threads_when_each_has_its_model_inside_one_budget_then_the_numbers_stay(
    installation: Installation,
) -> None:
    expected = expected_losses(2, 4)
    models = make_models(2)
    losses: dict[int, list[float]] = {}
    # All that two save at once is 24 MiB: each waits until the other has a graph, too.
    both = threading.Barrier(2, timeout=60)
    with swapkit.budget(limit_above_reserved(installation, 20 * MIB)) as outer:
        limit_bytes = outer.limit_bytes
        stats: dict[int, int] = {}

        def work(number: int) -> None:
            with swapkit.budget(limit_bytes, models[number]) as session:
                losses[number] = [step(models[number], both.wait) for _ in range(4)]
            stats[number] = session.stats.swapped_out_bytes

        on_threads(*[partial(work, number) for number in range(2)])
    assert [losses[0], losses[1]] == expected
    assert outer.stats.swapped_out_bytes == 0  # its own thread saved nothing
    assert sum(stats.values()) > 0
    assert outer.stats.peak_bytes <= limit_bytes


@pytest.mark.promise("A3")
def test_backward_when_on_a_fresh_thread_then_the_gradients_are_the_same(
    installation: Installation,
) -> None:
    (plain,), (model,) = make_models(1), make_models(1)
    x = torch.rand(ROWS, WIDTH)
    plain(x).square().mean().backward()
    with swapkit.budget(limit_above_reserved(installation, 8 * MIB), model) as session:
        loss = model(x).square().mean()
        on_thread(loss.backward)
    assert session.stats.swapped_in_bytes > 0
    pairs = zip(plain.parameters(), model.parameters(), strict=True)
    assert all(
        a.grad is not None and b.grad is not None and torch.equal(a.grad, b.grad) for a, b in pairs
    )


def test_sessions_when_both_bring_back_at_once_then_they_do_not_wait_for_each_other() -> None:
    """Each is asked for bytes by the other's allocation, in the middle of its own unpack."""
    output = run_python(
        """
        import threading, torch, swapkit
        from swapkit._runtime.allocators.installation import require_installation
        swapkit.install()
        installation = require_installation()
        ready = threading.Barrier(2)
        results = []

        def work():
            with swapkit.budget("512MiB") as session:
                x = torch.ones(1 << 20, requires_grad=True)
                loss = (x * 1.0).sin().sin().exp().sum()
                ready.wait()
                session.rescue(1 << 40)
                swapper = session._active.swapper
                has_room = swapper.has_room

                def has_room_late(nbytes):  # asked while another storage is on its way back
                    try:
                        ready.wait(timeout=0.5)  # passes only if both can be here at once
                    except threading.BrokenBarrierError:
                        pass
                    installation._rescue(1 << 40)
                    return has_room(nbytes)

                swapper.has_room = has_room_late
                swapper.mover.pool_address = 0  # which would be asked
                ready.wait()
                loss.backward()
                grad, x.grad = x.grad, None
                (x * 1.0).sin().sin().exp().sum().backward()
                results.append(torch.equal(x.grad, grad))

        threads = [threading.Thread(target=work) for _ in range(2)]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()
        print(results)
        """,
        timeout_s=120,
    )
    assert output == "[True, True]\n"


def test_sessions_when_threads_enter_and_leave_at_once_then_no_error_and_no_limit_stays(
    installation: Installation,
) -> None:
    start = threading.Barrier(3)

    def work(number: int) -> None:
        start.wait()
        for round_number in range(3):
            with swapkit.budget((1 << 40) + number) as session:
                assert session.stats.steps == 0
            assert session.stats.budget_bytes == (1 << 40) + number, round_number

    on_threads(*[partial(work, number) for number in range(3)])
    assert installation.sessions == []
    assert installation.pool.budget_bytes == 0


def test_allocation_when_another_thread_holds_everything_then_only_it_fails(
    installation: Installation,
) -> None:
    limit_bytes = limit_above_reserved(installation, 8 * MIB)
    with swapkit.budget(limit_bytes):
        held = torch.ones(MIB)

        def work(_: int) -> None:
            with pytest.raises(torch.OutOfMemoryError, match=r"8\.00 MiB"):
                torch.ones(2 * MIB)
            assert torch.ones(MIB // 4).sum() == MIB // 4

        on_threads(*[partial(work, number) for number in range(2)])
        assert held.sum() == MIB
