"""Installing below torch, and everything torch can do with memory afterwards."""

from __future__ import annotations

from typing import TYPE_CHECKING

import numpy as np
import pytest
import torch

import swapkit
from swapkit._runtime.shim.build import build_shim
from swapkit.errors import OverBudget, SessionError
from tests.support import (
    MIB,
    cache_in,
    finish_python,
    limit_above_reserved,
    run_fresh,
    run_python,
    start_python,
)

if TYPE_CHECKING:
    from pathlib import Path

    from swapkit._runtime.allocators.installed_pool import Installation


def in_pool(installation: Installation, tensor: torch.Tensor) -> bool:
    return installation.pool.owns(tensor.untyped_storage().data_ptr())


# ---- processes of their own --------------------------------------------------------------------


def test_import_when_done_then_torch_is_not_imported() -> None:
    code = """
        import sys, swapkit, swapkit.errors
        dir(swapkit)
        print("torch" in sys.modules, swapkit.__version__ != "", hasattr(swapkit, "nonsense"))
    """
    assert run_fresh(code) == "False True False\n"


COMPILE = """
import torch, swapkit
swapkit.install()
tensor = torch.ones(1 << 20)
print(swapkit.memory_stats()["allocated_bytes.all.current"] >= tensor.nbytes, tensor.sum().item())
"""


def test_install_when_two_processes_are_the_first_then_one_compiles_and_says_so(
    tmp_path: Path,
) -> None:
    compiler = tmp_path / "c++"  # gives what was compiled before, after a while
    compiler.write_text(f"""#!/bin/sh
while [ "$1" != -o ]; do shift; done
sleep 1
case "$2" in *.o) : >"$2";; *) cp {build_shim().library} "$2";; esac
""")
    compiler.chmod(0o700)
    variables = cache_in(tmp_path)
    processes = [start_python(COMPILE, CXX=str(compiler), **variables) for _ in range(2)]
    said = [process.communicate(timeout=240) for process in processes]
    assert [output for output, _ in said] == ["True 1048576.0\n"] * 2
    assert "".join(complaint for _, complaint in said).count("compiling its allocator") == 1
    assert {path.suffix for path in (tmp_path / "swapkit").iterdir()} == {".so", ".lock"}


def test_install_when_there_is_no_compiler_then_torch_still_works(tmp_path: Path) -> None:
    code = """
        import torch, swapkit
        from swapkit.errors import NativeBuildError
        for attempt in range(2):
            try:
                swapkit.install()
            except NativeBuildError as error:
                print("apt-get install g++" in str(error), isinstance(error, ImportError))
        print(torch.ones(1 << 20).sum().item())
    """
    output = finish_python(start_python(code, CXX="/nonexistent", **cache_in(tmp_path)))
    assert output == "True True\nTrue True\n1048576.0\n"


def test_exit_when_tensors_graphs_and_a_session_are_alive_then_it_is_silent() -> None:
    code = """
        import builtins, torch, swapkit
        swapkit.install("90%")
        session = swapkit.budget("1GiB").__enter__()
        x = torch.ones(1 << 20, requires_grad=True)
        loss = (x * 1.0).exp().sum()
        print(session.rescue(1) > 0)
        session.me = session
        builtins.kept = [session, loss]
    """
    assert run_python(code) == "True\n"


def test_collector_when_it_finds_a_session_in_a_cycle_then_the_parts_go_in_order() -> None:
    code = """
        import gc, torch, swapkit
        swapkit.install()
        for _ in range(5):
            try:
                with swapkit.budget("1GiB") as session:
                    x = torch.ones(1 << 18, requires_grad=True)
                    loss = (x * 1.0).exp().sum()
                    session.rescue(1)
                    scheduler = session._active.swapper.scheduler
                    raise KeyError(session)
            except KeyError as error:
                kept = error  # its traceback holds this frame's variables, this variable included
                session.error = error
            del session, scheduler, kept, x, loss
            gc.collect()
        print("alive")
    """
    # Freed memory is overwritten, so that using it is noticed.
    assert run_fresh(code, MALLOC_PERTURB_="165") == "alive\n"


# ---- install, uninstall, install ---------------------------------------------------------------


def test_uninstall_when_tensors_are_in_the_pool_then_they_stay_valid_and_are_freed_later(
    installation: Installation,
) -> None:
    before = installation.pool.in_use_bytes()
    generator = torch.Generator().manual_seed(0)
    inside = torch.rand(MIB, generator=generator)
    copy = inside.tolist()
    swapkit.uninstall()
    outside = inside * 1.0
    assert not in_pool(installation, outside)
    assert inside.tolist() == copy == outside.tolist()
    assert installation.pool.in_use_bytes() == before + 4 * MIB
    del inside
    assert installation.pool.in_use_bytes() == before
    swapkit.install()
    again = outside * 1.0
    assert in_pool(installation, again)
    assert not in_pool(installation, outside)
    installation.pool.check()


def test_limit_when_changed_then_the_new_one_holds(installation: Installation) -> None:
    limit_bytes = limit_above_reserved(installation, 4 * MIB)
    swapkit.install(limit_bytes)
    with pytest.raises(torch.OutOfMemoryError):
        torch.ones(2 * MIB)
    swapkit.install(limit_bytes + 8 * MIB)
    assert torch.ones(2 * MIB).numel() == 2 * MIB
    swapkit.install()
    assert torch.ones(16 * MIB).numel() == 16 * MIB


def test_uninstall_when_inside_a_session_then_refused_and_the_session_goes_on(
    installation: Installation,
) -> None:
    with swapkit.budget(1 << 40) as session:
        with pytest.raises(SessionError):
            swapkit.uninstall()
        x = torch.ones(MIB, requires_grad=True)
        loss = (x * 1.0).exp().sum()
        assert in_pool(installation, loss)
        assert session.rescue(1) > 0
        loss.backward()
    assert x.grad is not None


def test_explain_when_tensors_are_older_than_the_pool_then_they_are_named(
    installation: Installation,
) -> None:
    swapkit.uninstall()
    model = torch.nn.Linear(1024, 1024)
    swapkit.install()
    assert not in_pool(installation, model.weight)
    with swapkit.budget("1TiB", model) as session:
        text = session.explain()
    assert "outside the budget (allocated before swapkit was installed, or not by torch): " in text
    assert " MiB  parameters (" in text


# ---- limits ------------------------------------------------------------------------------------


@pytest.mark.promise("E7")
@pytest.mark.promise("A6")
def test_limit_when_a_fraction_then_respected_and_what_passes_it_fails_or_is_rescued(
    installation: Installation,
) -> None:
    # A fraction of this machine that leaves 24 MiB beside what is in use.
    total_bytes = installation.total_bytes
    limit_bytes = limit_above_reserved(installation, 24 * MIB)
    swapkit.install((limit_bytes + 1) / total_bytes)
    limit_bytes = installation.pool.budget_bytes
    with pytest.raises(torch.OutOfMemoryError, match="requested"):
        torch.ones(8 * MIB)
    with swapkit.budget("1TiB") as session:
        x = torch.ones(MIB, requires_grad=True)
        loss = torch.stack([(x * 1.0).exp().sum() for _ in range(6)]).sum()
        loss.backward()
    assert session.stats.oom_rescues > 0
    assert session.stats.peak_bytes <= limit_bytes


@pytest.mark.promise("C2")
@pytest.mark.promise("A4")
def test_step_when_the_first_one_needs_far_more_than_the_budget_then_it_completes(
    installation: Installation,
) -> None:
    def forward(x: torch.Tensor) -> torch.Tensor:
        return torch.stack([(x + i).sin().sum() for i in range(12)]).sum()

    x = torch.linspace(0, 1, MIB, requires_grad=True)
    forward(x).backward()
    expected, x.grad = x.grad, None
    with swapkit.budget(limit_above_reserved(installation, 24 * MIB)) as session:
        forward(x).backward()
    assert expected is not None
    assert x.grad is not None
    assert torch.equal(x.grad, expected)
    assert session.stats.oom_rescues > 0
    assert session.stats.swapped_in_bytes > 0


@pytest.mark.promise("A6")
def test_allocation_when_nothing_can_be_swapped_then_torchs_error_and_all_still_works(
    installation: Installation,
) -> None:
    with swapkit.budget(limit_above_reserved(installation, 16 * MIB)) as session:
        held = torch.ones(MIB)
        ooms = swapkit.memory_stats()["num_ooms"]
        with pytest.raises(torch.OutOfMemoryError, match=r"64\.00 MiB \(67108864 bytes\)"):
            torch.ones(16 * MIB)
        assert swapkit.memory_stats()["num_ooms"] == ooms + 1
        x = torch.ones(MIB, requires_grad=True)
        (x * held).sum().backward()
    assert x.grad is not None
    assert torch.equal(x.grad, held)
    assert session.stats.oom_rescues == 0
    installation.pool.check()


def test_budget_when_below_what_is_in_use_then_refused_and_nothing_changes(
    installation: Installation,
) -> None:
    held = torch.ones(4 * MIB)
    before = installation.pool.stats()["allocated_bytes.all.current"]
    with pytest.raises(OverBudget, match=r"1\.00 MiB is too small: .* are already in use"):
        swapkit.budget("1MiB").__enter__()
    assert installation.pool.budget_bytes == 0
    assert installation.sessions == []
    assert installation.pool.stats()["allocated_bytes.all.current"] == before
    assert torch.ones(8 * MIB).sum() == 2 * held.sum()


def test_budget_when_above_the_machine_then_it_is_accepted_and_too_much_still_fails(
    installation: Installation,
) -> None:
    with swapkit.budget("900TiB") as session:
        assert torch.ones(MIB).sum() == MIB
        with pytest.raises(torch.OutOfMemoryError, match=r"; the device refused: .*\.\n"):
            torch.empty(1 << 46, dtype=torch.uint8)
        assert torch.ones(MIB).sum() == MIB
    assert session.stats.budget_bytes == 900 << 40
    installation.pool.check()


def test_budgets_when_nested_then_the_tightest_holds_and_each_counts_its_own(
    installation: Installation,
) -> None:
    def work() -> None:
        x = torch.ones(MIB, requires_grad=True)
        torch.stack([(x * 1.0).exp().sum() for _ in range(6)]).sum().backward()

    tight_bytes = limit_above_reserved(installation, 24 * MIB)
    with swapkit.budget(tight_bytes + 64 * MIB) as outer:
        with swapkit.budget(tight_bytes) as inner:
            work()
        peak_bytes = outer.stats.peak_bytes
        work()
    assert inner.stats.oom_rescues > 0
    assert inner.stats.peak_bytes <= tight_bytes
    assert peak_bytes == inner.stats.peak_bytes
    assert outer.stats.oom_rescues == 0
    assert outer.stats.peak_bytes > tight_bytes
    with swapkit.budget(tight_bytes) as outer, swapkit.budget(tight_bytes + 64 * MIB) as inner:
        work()
    assert inner.stats.peak_bytes <= tight_bytes


# ---- what torch does with memory ---------------------------------------------------------------


@pytest.mark.usefixtures("installation")
def test_profiler_when_it_profiles_memory_then_the_pools_tensors_are_in_it() -> None:
    from torch.profiler import ProfilerActivity, profile

    with profile(activities=[ProfilerActivity.CPU], profile_memory=True) as profiler:
        kept = torch.ones(MIB) + 1
        del kept
    events = {event.key: event for event in profiler.key_averages()}
    assert events["aten::add"].cpu_memory_usage == 4 * MIB
    assert sum(event.self_cpu_memory_usage for event in events.values()) == 0


def test_numpy_when_memory_is_shared_then_both_see_changes(installation: Installation) -> None:
    tensor = torch.zeros(1024)
    array = tensor.numpy()
    assert in_pool(installation, tensor)
    array[3] = 7
    tensor[4] = 8
    assert tensor[3] == 7
    assert array[4] == 8
    before = installation.pool.in_use_bytes()
    del tensor
    assert installation.pool.in_use_bytes() == before  # the array keeps the memory
    assert array[3:5].tolist() == [7, 8]
    source = np.arange(1024.0)
    shared = torch.from_numpy(source)
    assert not in_pool(installation, shared)
    shared.add_(1)
    assert source[0] == 1


def test_file_when_saved_and_loaded_then_equal_and_in_the_pool(
    installation: Installation, tmp_path: Path
) -> None:
    tensor = torch.rand(MIB, generator=torch.Generator().manual_seed(0))
    torch.save({"x": tensor}, tmp_path / "x.pt")
    loaded = torch.load(tmp_path / "x.pt")["x"]
    assert torch.equal(loaded, tensor)
    assert in_pool(installation, loaded)
    mapped = torch.load(tmp_path / "x.pt", mmap=True)["x"]
    assert torch.equal(mapped, tensor)
    assert not in_pool(installation, mapped)


def test_storage_when_resized_then_contents_stay_and_memory_follows(
    installation: Installation,
) -> None:
    before = installation.pool.in_use_bytes()
    tensor = torch.arange(1024.0)
    tensor.untyped_storage().resize_(4 * MIB)
    assert tensor.tolist() == list(range(1024))
    assert installation.pool.in_use_bytes() == before + 4 * MIB
    tensor.untyped_storage().resize_(0)
    assert installation.pool.in_use_bytes() == before


def test_shared_memory_when_asked_for_then_the_tensor_leaves_the_pool(
    installation: Installation,
) -> None:
    before = installation.pool.in_use_bytes()
    tensor = torch.arange(float(MIB))
    tensor.share_memory_()
    assert tensor.is_shared()
    assert not in_pool(installation, tensor)
    assert installation.pool.in_use_bytes() == before
    assert tensor[-1] == MIB - 1


def test_session_when_saved_tensors_are_shared_or_foreign_then_training_goes_on(
    installation: Installation,
) -> None:
    foreign = torch.from_numpy(np.ones(MIB, dtype=np.float32))
    shared = torch.ones(MIB).share_memory_()
    with swapkit.budget(limit_above_reserved(installation, 24 * MIB)) as session:
        x = torch.ones(MIB, requires_grad=True)
        (x * foreign * shared).sum().backward()
        assert session.rescue(1 << 50) == 0
    assert x.grad is not None
    assert x.grad.sum() == MIB


def test_install_when_its_limit_is_refused_then_not_installed_and_the_next_uses_the_same_pool() -> (
    None
):
    output = run_python("""
import swapkit
from swapkit._runtime.allocators import installation as allocators
from swapkit.errors import InvalidArgument, SessionError
pools = set()
for _ in range(2):
    try:
        swapkit.install(limit="nonsense")
    except InvalidArgument:
        pools.add(id(allocators._cpu.pool))
try:
    swapkit.memory_stats()
except SessionError:
    print("not installed")
swapkit.install()
pools.add(id(allocators.installed_pool()))
print(len(pools))
""")
    assert output == "not installed\n1\n"
