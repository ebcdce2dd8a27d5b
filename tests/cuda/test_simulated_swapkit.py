"""swapkit on CUDA: the pool below torch, budgets, scopes, statistics and errors, on the simulation.

Torch takes one allocator a process, so most tests run their program in one of their own. All run
inside of `python -m tests.cuda.simulated`; `test_simulation.py` starts that.
"""

from __future__ import annotations

import textwrap

import pytest

from tests.cuda.processes import TRAIN, run

# The same without swapkit, on torch's own allocator: the kernels, and so the numbers, are the same.
PLAIN_PEAK_MIB = 70


@pytest.fixture(scope="module")
def plain(tmp_path_factory: pytest.TempPathFactory) -> str:
    """The file with what training gives without swapkit, whose peak is known."""
    file = str(tmp_path_factory.mktemp("plain") / "results.pt")
    code = f"{TRAIN}\ntorch.save(train(), {file!r})\nprint(torch.cuda.max_memory_allocated() >> 20)"
    assert int(run(code)[0]) > PLAIN_PEAK_MIB
    return file


# ---- training ----------------------------------------------------------------------------------


@pytest.mark.promise("A4")
@pytest.mark.parametrize("latency_ns", [0, 3_000_000])
def test_budget_when_half_would_not_fit_then_it_holds_and_gradients_are_equal(
    plain: str, latency_ns: int
) -> None:
    lines = run(
        f"""
        {textwrap.indent(TRAIN, " " * 8).strip()}
        swapkit.install(device="cuda")
        limit = 48 << 20
        with swapkit.budget(limit, device="cuda", policy="rescue") as session:
            results = train()
            free, total = torch.cuda.mem_get_info()
        stats = session.stats
        print(equal(results, torch.load({plain!r})))
        print(stats.peak_bytes <= limit, stats.oom_rescues > 0, stats.swapped_in_bytes > 0)
        print(torch.cuda.max_memory_reserved() <= limit, total - free <= limit)
        del session
        print(swapkit.memory_stats()["allocated_bytes.all.current"] < 10 << 20)
        """,
        CUSIM_LATENCY_NS=str(latency_ns),
    )
    assert lines == ["True", "True True True", "True True", "True"]


WEIGHTS = """
def make(layers):
    torch.manual_seed(0)
    frozen = [torch.nn.Linear(256, 256).requires_grad_(False) for _ in range(layers)]
    model = torch.nn.Sequential(*frozen, torch.nn.Linear(256, 256)).cuda()
    return model, torch.optim.SGD(model[-1].parameters(), lr=0.1)

def train(model, optimizer):
    found = []
    for step in range(4):
        torch.manual_seed(step)
        loss = model(torch.randn(16, 256).cuda()).square().mean()
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        found.append(loss.item())
    return found

def spread(model):
    x, found = torch.ones(16, 256).cuda(), []
    for number in range(12):
        stream = streams[number % 3]
        stream.wait_stream(torch.cuda.current_stream())
        with torch.no_grad(), torch.cuda.stream(stream):
            found.append(model(x * number).sum())
    torch.cuda.synchronize()
    return [each.item() for each in found]
"""


@pytest.mark.promise("A3")
@pytest.mark.parametrize("latency_ns", [0, 2_000_000])
def test_budget_when_below_the_weights_then_they_come_in_the_order_of_each_stream(
    latency_ns: int,
) -> None:
    lines = run(
        f"""
        {textwrap.indent(WEIGHTS, " " * 8).strip()}
        swapkit.install(device="cuda")
        streams = [torch.cuda.Stream() for _ in range(3)]
        model, optimizer = make(40)
        expected = train(model, optimizer), spread(model)
        weights = sum(each.nbytes for each in model.parameters())
        del model, optimizer
        model, optimizer = make(40)
        with swapkit.budget(int(weights * 0.4), model, optimizer, policy="rescue") as session:
            print((train(model, optimizer), spread(model)) == expected)
            free, total = torch.cuda.mem_get_info()
        stats = session.stats
        print(stats.peak_bytes <= weights * 0.4, stats.swapped_in_bytes > 4 * weights)
        print(total - free <= weights * 0.4)
        """,
        CUSIM_LATENCY_NS=str(latency_ns),
    )
    assert lines == ["True", "True True", "True"]


@pytest.mark.parametrize("scope", ["offload", "lambda: swapkit.offload(prefetch=2)"])
def test_offload_when_it_swaps_then_the_peak_falls_and_gradients_are_equal(
    plain: str, scope: str
) -> None:
    scope = scope if "lambda" in scope else f"swapkit.{scope}"
    equal, peak = run(
        f"""
        {textwrap.indent(TRAIN, " " * 8).strip()}
        swapkit.install(device="cuda")
        results = train({scope})
        print(equal(results, torch.load({plain!r})))
        print(torch.cuda.max_memory_allocated() >> 20)
        """
    )
    assert equal == "True"
    assert int(peak) < PLAIN_PEAK_MIB


def test_offload_when_swapkit_is_not_installed_then_torchs_allocator_gives_the_memory(
    plain: str,
) -> None:
    lines = run(
        f"""
        {textwrap.indent(TRAIN, " " * 8).strip()}
        torch.cuda.init()
        results = train(swapkit.offload)
        print(equal(results, torch.load({plain!r})), torch.cuda.get_allocator_backend())
        """
    )
    assert lines == ["True native"]


def test_offload_when_given_an_optimizer_then_its_states_live_on_the_host() -> None:
    lines = run(
        """
        swapkit.install(device="cuda")
        def train(offloads):
            torch.manual_seed(0)
            model = torch.nn.Linear(1024, 1024).cuda()
            optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)
            for step in range(4):
                model(torch.full((8, 1024), 0.1 * step).cuda()).square().mean().backward()
                optimizer.step()
                optimizer.zero_grad()
                if offloads and step == 0:
                    swapkit.offload(optimizer)
            torch.cuda.synchronize()
            held = torch.cuda.memory_allocated()
            states = [s.cpu() for state in optimizer.state.values() for s in state.values()]
            return [*(p.detach().cpu() for p in model.parameters()), *states], held
        plain, held = train(False)
        hosted, less = train(True)
        print(all(map(torch.equal, plain, hosted)), (held - less) >> 20)
        """
    )
    assert lines == ["True 8"]


# ---- torch's functions -------------------------------------------------------------------------


def test_statistics_of_torch_when_installed_then_they_tell_of_the_pool() -> None:
    lines = run(
        """
        swapkit.install(device="cuda")
        print(torch.cuda.memory_allocated(), torch.cuda.is_initialized())
        x = torch.empty(3 << 20, dtype=torch.uint8, device="cuda")
        y = torch.empty(1000, device="cuda")
        ours = swapkit.memory_stats()
        theirs = torch.cuda.memory_stats()
        print(theirs["allocated_bytes.all.current"], theirs["allocation.small_pool.current"])
        print(all(theirs[name] == value for name, value in ours.items() if name in theirs))
        print(torch.cuda.get_allocator_backend(), torch.cuda.memory_reserved() >> 20)
        print("Allocated memory" in torch.cuda.memory_summary())
        del x
        print(torch.cuda.max_memory_allocated() >> 20, torch.accelerator.memory_allocated())
        torch.cuda.reset_peak_memory_stats()
        torch.accelerator.reset_accumulated_memory_stats()
        print(torch.cuda.max_memory_allocated(), torch.accelerator.max_memory_allocated())
        print(torch.cuda.memory_stats()["allocated_bytes.all.allocated"])
        segments = torch.cuda.memory_snapshot()
        print(sum(segment["allocated_size"] for segment in segments))
        print(sorted({block["state"] for segment in segments for block in segment["blocks"]}))
        del y
        torch.accelerator.empty_cache()
        print(torch.cuda.memory_reserved())
        """
    )
    assert lines == [
        "0 False",
        f"{(3 << 20) + 4096} 1",
        "True",
        "pluggable 6",
        "True",
        "3 4096",
        "4096 4096",
        "0",
        "4096",
        "['active_allocated', 'inactive']",
        "0",
    ]


@pytest.mark.promise("A16")
def test_settings_when_the_environment_has_them_then_the_pool_obeys() -> None:
    program = """
        try:
            swapkit.install(device="cuda")
        except swapkit.SwapkitError as error:
            print(str(error).split(";")[0])
            raise SystemExit from None
        block = torch.ones(40 << 20, dtype=torch.uint8, device="cuda")
        del block
        part = torch.ones(4 << 20, dtype=torch.uint8, device="cuda")
        stats = torch.cuda.memory_stats()
        print(stats["max_split_size"] >> 20, stats["segment.all.current"])
        """
    whole = "expandable_segments:False,max_split_size_mb:32"
    assert run(program, PYTORCH_CUDA_ALLOC_CONF=whole) == ["32 2"]
    assert run(program, PYTORCH_CUDA_ALLOC_CONF="backend:native") == ["-1 1"]
    assert run(program, PYTORCH_CUDA_ALLOC_CONF="bogus:1") == [
        "PYTORCH_CUDA_ALLOC_CONF: unknown key 'bogus'"
    ]


@pytest.mark.promise("E7")
def test_fraction_when_set_by_torch_then_it_is_the_limit() -> None:
    lines = run(
        """
        swapkit.install(device="cuda")
        total = torch.cuda.mem_get_info()[1]
        torch.cuda.set_per_process_memory_fraction(0.25)
        print(torch.cuda.get_per_process_memory_fraction())
        print(swapkit.memory_stats()["budget_bytes"] == total // 4)
        try:
            torch.empty(total // 2, dtype=torch.uint8, device="cuda")
        except torch.OutOfMemoryError as error:
            print(str(error).splitlines()[0].split(" requested")[0])
        held = torch.empty(total // 5, dtype=torch.uint8, device="cuda")
        try:
            torch.cuda.set_per_process_memory_fraction(0.1)
        except RuntimeError as error:
            print("is too small" in str(error))
        print(torch.cuda.get_per_process_memory_fraction())
        """
    )
    assert lines == [
        "0.25",
        "True",
        "swapkit: out of memory on cuda:0: 512.00 MiB (536870912 bytes)",
        "True",
        "0.25",
    ]


def test_record_stream_when_the_tensor_goes_early_then_its_memory_waits() -> None:
    lines = run(
        """
        import ctypes
        swapkit.install(device="cuda")
        loaded, semaphore = ctypes.CDLL(None), ctypes.create_string_buffer(64)
        loaded.sem_init(semaphore, 0, 0)
        side = torch.cuda.Stream()
        for recorded in (False, True):
            tensor = torch.ones(1 << 20, device="cuda")
            address = tensor.data_ptr()
            torch.cuda.synchronize()
            loaded.cudaLaunchHostFunc(ctypes.c_void_p(side.cuda_stream), loaded.sem_wait, semaphore)
            if recorded:
                tensor.record_stream(side)
            del tensor
            other = torch.full((1 << 20,), 7.0, device="cuda")
            print(other.data_ptr() == address)
            loaded.sem_post(semaphore)
            side.synchronize()
            del other
        """
    )
    assert lines == ["True", "False"]


# ---- errors ------------------------------------------------------------------------------------


@pytest.mark.promise("A6")
def test_out_of_memory_when_it_is_caught_then_training_goes_on() -> None:
    lines = run(
        """
        swapkit.install("64MiB", device="cuda")
        x = torch.ones(8 << 20, dtype=torch.uint8, device="cuda")
        for ask in (lambda: torch.empty(80 << 20, dtype=torch.uint8, device="cuda"),
                    lambda: torch.ones(80 << 20, dtype=torch.uint8).cuda(),
                    lambda: torch.cuda.caching_allocator_alloc(80 << 20)):
            try:
                ask()
            except torch.OutOfMemoryError as error:
                text = str(error)
                print(text.split(" requested")[0], "Largest holders" in text)
        print(x.sum().item() == 8 << 20, torch.cuda.memory_stats()["num_ooms"])
        """
    )
    first = "swapkit: out of memory on cuda:0: 80.00 MiB (83886080 bytes) True"
    assert lines == [*[first] * 3, "True 3"]


def test_install_when_torch_uses_the_gpu_already_then_the_error_says_how_to_be_in_time() -> None:
    lines = run(
        """
        from swapkit.errors import SessionError
        x = torch.ones(10, device="cuda")
        for attempt in (lambda: swapkit.install(device="cuda"),
                        lambda: swapkit.budget("1GiB", device="cuda")):
            try:
                attempt()
            except SessionError as error:
                print("was called too late" in str(error), "allocator='torch'" in str(error))
        print(torch.cuda.get_allocator_backend(), torch.cuda.memory_allocated())
        swapkit.install(device="cuda", allocator="torch")
        try:
            swapkit.install(device="cuda")
        except SessionError as error:
            print("which cannot change in this process" in str(error))
        """
    )
    assert lines == ["True True", "True True", "native 512", "True"]


def test_what_the_pool_cannot_do_when_asked_then_a_clear_error_and_no_harm() -> None:
    lines = run(
        """
        swapkit.install(device="cuda")
        x = torch.ones(10, device="cuda")
        graph = torch.cuda.CUDAGraph()
        for ask in (lambda: torch.cuda.graph(graph).__enter__(), torch.cuda.MemPool,
                    lambda: x.untyped_storage()._share_cuda_()):
            try:
                ask()
            except RuntimeError as error:
                print("allocator=\\"torch\\"" in str(error) or "not yet support" in str(error))
        print((x + 1).sum().item())
        """
    )
    assert lines == ["True", "True", "True", "20.0"]


def test_cudnn_benchmark_when_switched_on_then_a_warning_and_it_stays_off() -> None:
    lines = run(
        """
        import warnings
        swapkit.install("512MiB", device="cuda")
        with warnings.catch_warnings(record=True) as caught:
            warnings.simplefilter("always")
            torch.backends.cudnn.benchmark = True
            with torch.backends.cudnn.flags(enabled=False, benchmark=True):
                print(torch.backends.cudnn.benchmark)
        print(torch.backends.cudnn.benchmark, ["stays off" in str(w.message) for w in caught])
        y = torch.nn.Conv2d(3, 8, 3).cuda()(torch.ones(2, 3, 16, 16, device="cuda"))
        y.sum().backward()
        print(list(y.shape))
        """
    )
    assert lines == ["False", "False [True, True]", "[2, 8, 14, 14]"]


def test_device_when_it_breaks_then_its_own_error_and_not_out_of_memory() -> None:
    lines = run(
        """
        import ctypes, os
        swapkit.install(device="cuda")
        x = torch.ones(10, device="cuda")
        torch.cuda.synchronize()
        driver = ctypes.CDLL("libcuda.so.1")
        driver.cusim_fail(b"cuMemCreate", 1, 700)
        try:
            torch.empty(200 << 20, dtype=torch.uint8, device="cuda")
        except torch.OutOfMemoryError:
            print("out of memory")
        except RuntimeError as error:
            print("700" in str(error), "restart the process" in str(error))
        """
    )
    assert lines == ["True True"]


def test_exit_when_tensors_and_sessions_are_alive_then_no_call_of_the_driver_is_ours() -> None:
    lines = run(
        """
        swapkit.install(device="cuda")
        keep = [torch.ones(1 << 20, device="cuda", requires_grad=True)]
        session = swapkit.budget("512MiB", device="cuda").__enter__()
        with swapkit.offload():
            keep.append((keep[0] * 2).exp())
        torch.cuda.synchronize()
        print("ends")
        """,
        CUSIM_STRICT_EXIT="1",
    )
    assert lines == ["ends"]


# The size of a device is known only once it is used.
def test_install_when_more_is_reserved_than_the_device_has_then_each_use_says_so() -> None:
    lines = run(
        """
        swapkit.install(device="cuda", reserve="100GiB")
        for _ in range(2):
            try:
                torch.ones(1 << 10, device="cuda")
            except RuntimeError as error:
                print("expected less than the device's memory" in str(error))
        swapkit.install(device="cuda", reserve="25%")
        torch.ones(1 << 10, device="cuda")
        print(swapkit.memory_stats("cuda")["budget_bytes"] / torch.cuda.mem_get_info()[1])
        """
    )
    assert lines == ["True", "True", "0.75"]


# ---- several devices ---------------------------------------------------------------------------


def test_install_when_there_are_two_devices_then_each_has_its_pool_and_limit() -> None:
    lines = run(
        """
        swapkit.install("100MiB", device="cuda")
        swapkit.install("50MiB", device="cuda:1")
        x = torch.ones(1 << 20, device="cuda:0")
        y = x.to("cuda:1") * 2
        for index in (0, 1):
            stats = swapkit.memory_stats(f"cuda:{index}")
            print(stats["budget_bytes"] >> 20, stats["allocated_bytes.all.current"] >> 20)
            print(torch.cuda.memory_allocated(index) >> 20)
        print(y.sum().item() == 2 << 20)
        try:
            torch.empty(60 << 20, dtype=torch.uint8, device="cuda:1")
        except torch.OutOfMemoryError as error:
            print(str(error).split(":")[1])
        """,
        CUSIM_DEVICES="2",
    )
    assert lines == ["100 4", "4", "50 4", "4", "True", " out of memory on cuda"]
