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
