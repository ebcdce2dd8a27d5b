"""Limits, sessions and the words of a failure, around the one pool of the process."""

from __future__ import annotations

import gc
import threading
import weakref
from typing import TYPE_CHECKING, Any, ClassVar

import pytest
import torch
from torch import nn
from torch.utils._python_dispatch import TorchDispatchMode

import swapkit
from swapkit._runtime.allocators import installation as module
from swapkit._runtime.allocators.installation import parse_device, require_installation
from swapkit._runtime.model.tracker import Need
from swapkit._runtime.saved.device import CPU
from swapkit.errors import InvalidArgument, OverBudget, SessionError, Unsupported
from tests.support import MIB, limit_above_reserved

if TYPE_CHECKING:
    from swapkit._runtime.allocators.installed_pool import Installation


class FakeSession:
    """A session that frees what it was told to, and remembers that it was asked."""

    is_settled = True

    def __init__(self, limit_bytes: int, frees: tuple[int, ...] = ()) -> None:
        self.limit_bytes = limit_bytes
        self.thread = threading.current_thread()
        self.frees = list(frees)
        self.asked: list[int] = []
        self.held: list[torch.Tensor] = []

    def facts(self) -> list[str]:
        return []

    def rescue(self, needed_bytes: int) -> int:
        self.asked.append(needed_bytes)
        self.held.clear()
        return self.frees.pop(0) if self.frees else 0

    def hints(self, _needed_bytes: int) -> list[str]:
        return [f"ask less than {self.limit_bytes}"]

    def note_peak(self) -> None:
        pass

    def close(self) -> list[BaseException]:
        return []

    def add_peak(self, peak_bytes: int) -> None:
        pass


def budget_of(installation: Installation) -> int:
    return installation.pool.budget_bytes


# ---- install and uninstall ---------------------------------------------------------------------


def test_install_when_done_then_tensors_come_from_the_pool(installation: Installation) -> None:
    before = installation.pool.in_use_bytes()
    tensor = torch.ones(MIB)
    assert installation.pool.owns(tensor.data_ptr())
    assert installation.pool.in_use_bytes() == before + 4 * MIB
    del tensor
    assert installation.pool.in_use_bytes() == before


def test_install_when_done_again_then_the_same_pool_stays(installation: Installation) -> None:
    swapkit.install()
    assert require_installation() is installation


@pytest.mark.promise("E7")
@pytest.mark.parametrize(("limit", "share"), [(0.5, 0.5), ("50%", 0.5), ("12.5%", 0.125)])
def test_install_when_given_a_share_then_of_the_machines_memory(
    installation: Installation, limit: float | str, share: float
) -> None:
    total_bytes = installation.total_bytes
    swapkit.install(limit)
    assert budget_of(installation) == int(total_bytes * share)
    swapkit.install()
    assert budget_of(installation) == 0


@pytest.mark.promise("E7")
@pytest.mark.promise("A6")
def test_install_when_a_limit_would_be_passed_then_torchs_own_error(
    installation: Installation,
) -> None:
    limit_bytes = limit_above_reserved(installation, 8 * MIB)
    swapkit.install(limit_bytes)
    fits = torch.ones(MIB)
    with pytest.raises(torch.OutOfMemoryError) as caught:
        torch.ones(2 * MIB)
    text = str(caught.value)
    assert text.startswith("swapkit: out of memory on the CPU device: 8.00 MiB (8388608 bytes)")
    assert "requested in test_installed_pool.py:" in text
    assert "test_install_when_a_limit_would_be_passed" in text
    assert "Largest holders (number of tensors):" in text
    assert "train inside `with swapkit.budget(" in text
    assert installation.pool.stats()["reserved_bytes.all.current"] <= limit_bytes
    assert torch.ones(MIB // 2).sum() == MIB // 2
    assert fits.numel() == MIB


def test_install_when_the_limit_is_less_than_in_use_then_refused_and_unchanged(
    installation: Installation,
) -> None:
    held = torch.ones(4 * MIB)
    with pytest.raises(OverBudget, match=r"a budget of 1\.00 MiB is too small: .* in use"):
        swapkit.install("1MiB")
    assert budget_of(installation) == 0
    assert installation.limit_bytes == 0
    assert held.sum() == 4 * MIB


def test_install_when_a_limit_is_wrong_then_refused_and_unchanged(
    installation: Installation,
) -> None:
    with pytest.raises(InvalidArgument, match="limit='lots'"):
        swapkit.install("lots")
    assert budget_of(installation) == 0


def test_uninstall_when_done_then_new_tensors_go_elsewhere(installation: Installation) -> None:
    inside = torch.ones(MIB)
    swapkit.uninstall()
    outside = torch.ones(MIB)
    assert not installation.pool.owns(outside.data_ptr())
    assert inside.sum() == MIB
    with pytest.raises(SessionError, match=r"call swapkit\.install\(\) first"):
        require_installation()
    swapkit.uninstall()  # twice is fine
    swapkit.install()


def test_uninstall_when_a_session_is_active_then_refused(installation: Installation) -> None:
    session = FakeSession(1 << 40)
    installation.enter(session)
    try:
        with pytest.raises(SessionError, match=r"inside `with swapkit\.budget"):
            swapkit.uninstall()
        assert installation.pool.owns(torch.ones(MIB).data_ptr())
    finally:
        installation.leave(session)


def test_limit_when_set_then_modules_are_tracked_until_it_is_gone(
    installation: Installation,
) -> None:
    users = installation.tracker._users
    for limit in ("50%", "40%"):
        swapkit.install(limit)
        assert installation.tracker._users == {**users, installation: Need.MODULES}
    swapkit.install()
    assert installation.tracker._users == users


@pytest.mark.parametrize("device", ["meta", "xpu:1", torch.device("mps")])
def test_device_when_not_served_then_unsupported(device: str | torch.device) -> None:
    with pytest.raises(Unsupported, match="swapkit supports cpu, cuda, npu"):
        parse_device(device)


def test_device_when_not_understood_then_invalid() -> None:
    with pytest.raises(InvalidArgument, match="device='toaster' is not understood"):
        parse_device("toaster")
    assert parse_device("cpu") == parse_device(torch.device("cpu", 0)) == CPU


def test_ensure_when_not_installed_then_it_installs(installation: Installation) -> None:
    swapkit.uninstall()
    assert module.ensure_installation() is installation
    assert require_installation() is installation


# ---- sessions ----------------------------------------------------------------------------------


def test_sessions_when_nested_then_the_tightest_limit_holds(installation: Installation) -> None:
    swapkit.install(400 << 30)
    wide, tight = FakeSession(300 << 30), FakeSession(200 << 30)
    budgets = []
    for session in (wide, tight):
        installation.enter(session)
        budgets.append(budget_of(installation) >> 30)
    for session in (wide, tight):  # not in the order of nesting: threads need not keep it
        installation.leave(session)
        budgets.append(budget_of(installation) >> 30)
    assert budgets == [300, 200, 200, 400]
    swapkit.install()


def test_session_when_its_limit_is_too_low_then_nothing_changes(
    installation: Installation,
) -> None:
    held = torch.ones(2 * MIB)
    session = FakeSession(MIB)
    with pytest.raises(OverBudget, match="Pass a larger budget, or free tensors first"):
        installation.enter(session)
    assert installation.sessions == []
    assert budget_of(installation) == 0
    assert held.numel() == 2 * MIB


def test_session_when_an_outer_one_can_free_bytes_then_a_tight_one_may_enter(
    installation: Installation,
) -> None:
    limit_bytes = limit_above_reserved(installation, 4 * MIB)
    outer = FakeSession(1 << 40, frees=(8 * MIB,))
    outer.held.append(torch.ones(2 * MIB))
    inner = FakeSession(limit_bytes)
    installation.enter(outer)
    installation.enter(inner)
    assert len(outer.asked) == 1
    assert budget_of(installation) == limit_bytes
    installation.leave(inner)
    installation.leave(outer)


@pytest.mark.promise("A4")
def test_rescue_when_needed_then_the_innermost_is_asked_first(installation: Installation) -> None:
    outer, inner = FakeSession(1 << 40, (5,)), FakeSession(1 << 40, (7, 0))
    for session in (outer, inner):
        installation.enter(session)
    assert installation._rescue(100) == 7
    assert (outer.asked, inner.asked) == ([], [100])
    assert installation._rescue(200) == 5
    assert (outer.asked, inner.asked) == ([200], [100, 200])
    gc.collect()  # the last resort
    assert installation._rescue(300) == 0
    for session in (outer, inner):
        installation.leave(session)


@pytest.mark.promise("A4")
def test_rescue_when_an_allocation_fails_then_it_is_retried_and_succeeds(
    installation: Installation,
) -> None:
    session = FakeSession(limit_above_reserved(installation, 12 * MIB), frees=(8 * MIB,))
    session.held.append(torch.ones(2 * MIB))
    installation.enter(session)
    try:
        tensor = torch.ones(2 * MIB)
    finally:
        installation.leave(session)
    assert tensor.sum() == 2 * MIB
    assert len(session.asked) == 1
    assert session.asked[0] >= 4 * MIB


@pytest.mark.promise("A6")
def test_failure_when_in_a_module_then_place_holders_and_hints_are_named(
    installation: Installation,
) -> None:
    class Grow(nn.Module):
        def forward(self, x: torch.Tensor) -> torch.Tensor:
            return x.repeat(64)

    gc.collect()
    model = nn.Sequential(nn.Tanh(), Grow())
    session = FakeSession(limit_above_reserved(installation, 16 * MIB))
    installation.tracker.start("test")
    installation.enter(session)
    try:
        with pytest.raises(torch.OutOfMemoryError) as caught:
            model(torch.ones(MIB))
    finally:
        installation.leave(session)
        installation.tracker.stop("test")
    text = str(caught.value)
    assert "256.00 MiB (268435456 bytes) requested in 1, test_installed_pool.py:" in text
    assert "(forward)" in text
    assert "4.00 MiB  made in 0 (1)" in text
    assert f"ask less than {session.limit_bytes}" in text


def test_failure_when_in_backward_then_the_operator_is_named(installation: Installation) -> None:
    loss = torch.ones(MIB, requires_grad=True).exp().sum()
    swapkit.install(limit_above_reserved(installation, 2 * MIB))
    try:
        with pytest.raises(
            torch.OutOfMemoryError, match=r"requested in ExpBackward0, test_installed_pool\.py:"
        ):
            loss.backward()
    finally:
        swapkit.install()


@pytest.mark.promise("A6")
@pytest.mark.parametrize(
    "name", ["ж" * 9000, "x" + "ж" * 9000, "\udce9"], ids=["even", "uneven", "odd"]
)
def test_failure_when_a_name_is_long_or_odd_then_still_torchs_error(
    installation: Installation, name: str
) -> None:
    model = nn.ModuleDict({name: nn.Tanh()})
    installation.tracker.add_model(model)
    installation.tracker.start("test")
    kept = model[name](torch.ones(MIB))
    swapkit.install(limit_above_reserved(installation, MIB))
    try:
        with pytest.raises(torch.OutOfMemoryError, match="Largest holders"):
            torch.ones(4 * MIB)
    finally:
        swapkit.install()
        installation.tracker.stop("test")
    assert kept.numel() == MIB


# ---- the last resort ----------------------------------------------------------------------------


class Cycle:
    """Memory that only the garbage collector frees."""

    def __init__(self, nbytes: int) -> None:
        self.memory = torch.ones(nbytes, dtype=torch.uint8)
        self.itself = self
        self.finalized = weakref.finalize(self, Cycle.end, threading.get_ident())

    ended: ClassVar[list[bool]] = []

    @staticmethod
    def end(thread: int) -> None:
        """Run an operator, as a finalizer may."""
        torch.ones(4).sum()
        Cycle.ended.append(thread == threading.get_ident())


class CountOperators(TorchDispatchMode):
    """Counts the operators that a user's mode sees."""

    def __init__(self) -> None:
        super().__init__()
        self.count = 0

    def __torch_dispatch__(self, func: Any, _types: Any, args: Any = (), kwargs: Any = None) -> Any:
        self.count += 1
        return func(*args, **(kwargs or {}))


@pytest.mark.usefixtures("no_collector")
@pytest.mark.parametrize("asks", [1, 3])
def test_rescue_when_garbage_holds_the_memory_then_it_is_collected_before_failing(
    installation: Installation, asks: int
) -> None:
    Cycle.ended.clear()
    with swapkit.budget(limit_above_reserved(installation, 8 * MIB)):
        for _ in range(asks):
            Cycle(6 * MIB)
            with CountOperators() as seen:
                big = torch.ones(6 * MIB, dtype=torch.uint8)
            assert seen.count <= 2  # `empty` and `fill_`, not the finalizer's
            del big
    assert Cycle.ended == [True] * asks


@pytest.mark.usefixtures("no_collector")
def test_rescue_when_there_is_memory_then_nothing_is_collected(
    installation: Installation, monkeypatch: pytest.MonkeyPatch
) -> None:
    limit_bytes = limit_above_reserved(installation, 16 * MIB)
    monkeypatch.setattr(gc, "collect", lambda: 1 / 0)
    with swapkit.budget(limit_bytes) as session:
        x = torch.ones(MIB, requires_grad=True)
        loss = x
        for _ in range(6):  # 4 MiB each: the budget takes four
            loss = loss.exp()
        assert session.stats.oom_rescues + session.stats.swapped_out_bytes > 0


@pytest.mark.usefixtures("no_collector")
def test_rescue_when_the_thread_holds_the_lock_then_no_finalizer_runs(
    installation: Installation,
) -> None:
    Cycle.ended.clear()
    with swapkit.budget(limit_above_reserved(installation, 8 * MIB)):
        Cycle(6 * MIB)
        with installation.lock, pytest.raises(torch.OutOfMemoryError):
            torch.ones(6 * MIB, dtype=torch.uint8)
        assert Cycle.ended == []
    gc.collect()
