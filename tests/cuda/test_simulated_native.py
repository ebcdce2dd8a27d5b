"""swapkit over torch's own CUDA allocator: limits, rescues and errors, on the simulation."""

from __future__ import annotations

import textwrap

from tests.cuda.processes import TRAIN, run


def test_native_mode_when_memory_is_short_then_rescues_and_equal_gradients() -> None:
    lines = run(
        f"""
        {textwrap.indent(TRAIN, " " * 8).strip()}
        plain = train(rows=4096)  # it is never too late
        peak, limit = torch.cuda.max_memory_reserved(), 192 << 20
        torch.cuda.empty_cache()
        torch.cuda.reset_peak_memory_stats()
        swapkit.install(device="cuda", allocator="torch")
        with swapkit.budget(limit, device="cuda") as session:
            print(equal(train(rows=4096), plain), torch.cuda.get_allocator_backend())
        print(session.stats.oom_rescues > 0, session.stats.peak_bytes <= limit < peak)
        print(torch.cuda.max_memory_reserved() <= limit)
        print(swapkit.memory_stats()["num_rescues"] > 0)
        print(torch.cuda.get_per_process_memory_fraction())
        """
    )
    assert lines == ["True native", "True True", "True", "True", "1.0"]


def test_native_mode_when_nothing_can_be_freed_then_torchs_own_error() -> None:
    lines = run(
        """
        swapkit.install("64MiB", device="cuda", allocator="torch")
        held = torch.ones(8 << 20, dtype=torch.uint8, device="cuda")
        try:
            torch.empty(80 << 20, dtype=torch.uint8, device="cuda")
        except torch.OutOfMemoryError as error:
            print(str(error).split(".")[0], "64.00 MiB allowed" in str(error))
        print(held.sum().item() == 8 << 20)
        """
    )
    assert lines == ["CUDA out of memory True", "True"]


def test_native_mode_when_the_user_set_a_fraction_then_it_is_kept() -> None:
    lines = run(
        """
        torch.cuda.set_per_process_memory_fraction(0.25)
        swapkit.install(device="cuda", allocator="torch")
        print(torch.cuda.get_per_process_memory_fraction())
        with swapkit.budget("100MiB", device="cuda"):
            print(torch.cuda.get_per_process_memory_fraction() < 0.25)
        with swapkit.budget("500MiB", device="cuda"):
            print(torch.cuda.get_per_process_memory_fraction())
        print(torch.cuda.get_per_process_memory_fraction())
        """
    )
    assert lines == ["0.25", "True", "0.25", "0.25"]


def test_native_mode_when_a_request_was_hopeless_then_memory_still_comes_back_early() -> None:
    lines = run(
        """
        from swapkit._runtime.process.runtime import get_runtime
        swapkit.install(device="cuda", allocator="torch")
        device = get_runtime().device(torch.device("cuda", 0))
        with swapkit.budget("200MiB", device="cuda"):
            print(device.has_room(1 << 20))
            try:
                torch.empty(700 << 20, dtype=torch.uint8, device="cuda")
            except torch.OutOfMemoryError:
                print(device.has_room(1 << 20))
        """
    )
    assert lines == ["True", "True"]


def test_native_mode_when_the_allocator_is_not_torchs_then_refused() -> None:
    lines = run(
        """
        from unittest import mock
        from swapkit.errors import Unsupported
        with mock.patch("torch.cuda.get_allocator_backend", lambda: "cudaMallocAsync"):
            for attempt in (1, 2):
                try:
                    swapkit.install(device="cuda", allocator="torch")
                except Unsupported as error:
                    print("cudaMallocAsync" in str(error))
        swapkit.install(device="cuda")
        """
    )
    assert lines == ["True", "True"]


def test_native_mode_when_memory_is_of_another_library_then_it_stays_where_it_is() -> None:
    lines = run(
        """
        class Foreign:
            def __init__(self, tensor):
                self.tensor = tensor
                self.__cuda_array_interface__ = tensor.__cuda_array_interface__
        swapkit.install(device="cuda", allocator="torch")
        with swapkit.budget("64MiB", device="cuda") as session:
            x = torch.ones(4 << 20, device="cuda", requires_grad=True)
            foreign = torch.as_tensor(Foreign(torch.full((4 << 20,), 2.0, device="cuda")))
            y = (x * foreign).sum()
            del foreign
            mover = session._active.swapper.mover
            print(len(mover.resident), len(mover.out))
            y.backward()
            print(x.grad.sum().item() == 8 << 20)
        """
    )
    assert lines == ["0 0", "True"]


def test_native_mode_when_memory_is_taken_while_copies_end_then_nobody_waits_for_ever() -> None:
    lines = run(
        """
        import threading, time
        from swapkit._runtime.process.runtime import get_runtime
        swapkit.install(device="cuda", allocator="torch")
        take = get_runtime().shim.native_take
        end = time.monotonic() + 5
        taken = 0
        def take_all():
            global taken
            while time.monotonic() < end:
                taken += take(0, 1 << 40) > 0
        thread = threading.Thread(target=take_all)
        w = torch.ones(1, device="cuda", requires_grad=True)
        with swapkit.budget("100MiB", device="cuda") as session:
            held = torch.empty(60 << 20, dtype=torch.uint8, device="cuda")
            thread.start()
            while time.monotonic() < end:
                x, loss = torch.ones(300, device="cuda"), 0
                for _ in range(60):
                    x = x * w
                    loss = loss + x.sum()
                loss.backward()
                assert w.grad.item() == 300 * 60 * 61 / 2
                w.grad = None
                session.mark_step()
            thread.join()
        print(taken > 0)
        time.sleep(0.5)  # autograd's thread drops the last graph a moment after backward
        """
    )
    assert lines == ["True"]
