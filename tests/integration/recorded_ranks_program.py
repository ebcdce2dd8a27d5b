"""Steps of two ranks, recorded; run by `test_recorded_ranks.py`.

    python -m torch.distributed.run --nproc-per-node=2 tests/integration/recorded_ranks_program.py

Rank 0 prints, as one line of JSON, what each rank has in its traces.
"""

from __future__ import annotations

import datetime
import time
from collections import Counter
from concurrent.futures import ThreadPoolExecutor
from typing import TYPE_CHECKING, Any

import pytest
import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.fsdp import fully_shard
from torch.distributed.pipelining import PipelineStage, ScheduleInterleaved1F1B
from torch.nn.parallel import DistributedDataParallel

import swapkit
from swapkit._runtime.process.runtime import get_runtime
from swapkit._runtime.torch_compat.internals import default_store
from swapkit.ir.traces import WAIT
from swapkit.testing import slow_link
from tests.support.ranks import publish_and_exit

if TYPE_CHECKING:
    from collections.abc import Callable

    from swapkit.ir.traces import Trace

WIDTH, LAYERS = 64, 3
MICROBATCHES = 8
LATE_SECONDS = 0.4
SWAPPED = 16  # tensors
LINK_BYTES_PER_SECOND = 4 * SWAPPED * WIDTH * WIDTH / (LATE_SECONDS / 2)


def methods() -> list[Any]:
    """Return torch's methods that a recorder replaces."""
    return [
        dist.distributed_c10d.Work.wait,
        PipelineStage.forward_one_chunk,
        PipelineStage.backward_one_chunk,
        PipelineStage.backward_weight_one_chunk,
    ]


PLAIN = methods()


def meet_late(name: str, start: Callable[[], Any]) -> None:
    """Start a collective; rank 1 does it only some time after rank 0 began to wait."""
    store = default_store()
    if dist.get_rank() == 1:
        store.wait([name])
        time.sleep(LATE_SECONDS)
        start().wait()
        return
    work = start()
    store.set(name, "")
    work.wait()


def reduce_late() -> Trace:
    x = torch.ones(WIDTH, WIDTH, requires_grad=True)

    def step() -> None:
        y = x.exp()
        meet_late("reduced", lambda: dist.all_reduce(y.detach(), async_op=True))
        y.sum().backward()

    return swapkit.record(step)


def receive_late() -> Trace:
    x = torch.ones(WIDTH, WIDTH, requires_grad=True)

    def step() -> None:
        y = x.exp()
        move = dist.isend if dist.get_rank() else dist.irecv
        meet_late("sent", lambda: move(torch.ones(4), 1 - dist.get_rank()))
        y.sum().backward()

    return swapkit.record(step)


def wait_elsewhere() -> Trace:
    """Wait on a thread that is not recorded."""
    x = torch.ones(WIDTH, WIDTH, requires_grad=True)

    def step() -> None:
        with ThreadPoolExecutor(1) as executor:
            executor.submit(dist.barrier).result()
        x.exp().sum().backward()

    return swapkit.record(step)


def fail() -> Trace:
    """Wait in vain, for work of a class of one's own."""
    x = torch.ones(WIDTH, WIDTH, requires_grad=True)

    class Endless(dist.distributed_c10d.Work):
        pass

    def step() -> None:
        with pytest.raises(RuntimeError, match="timed out"):
            Endless().wait(datetime.timedelta(milliseconds=1))
        x.exp().sum().backward()

    return swapkit.record(step)


def shard() -> Trace:
    torch.manual_seed(0)
    model = nn.Sequential(*[nn.Linear(WIDTH, WIDTH) for _ in range(LAYERS)])
    for layer in model:
        fully_shard(layer)
    fully_shard(model)
    optimizer = torch.optim.AdamW(model.parameters())
    x = torch.randn(16, WIDTH)

    def step() -> None:
        model(x).square().mean().backward()
        optimizer.step()
        optimizer.zero_grad()

    step()
    return swapkit.record(step, model, optimizer)


def pipeline() -> Trace:
    """Record two stages on each rank, 1F1B."""
    torch.manual_seed(0)
    ranks, rank = dist.get_world_size(), dist.get_rank()
    numbers = [rank, rank + ranks]
    modules = [nn.Sequential(nn.Linear(WIDTH, WIDTH), nn.Tanh()) for _ in numbers]
    stages: list[Any] = [
        PipelineStage(module, number, 2 * ranks, torch.device("cpu"))
        for module, number in zip(modules, numbers, strict=True)
    ]
    schedule = ScheduleInterleaved1F1B(
        stages, n_microbatches=MICROBATCHES, loss_fn=lambda out, _: out.square().mean()
    )
    x = torch.randn(MICROBATCHES * 4, WIDTH)
    arguments: tuple[Any, ...] = () if rank else (x,)
    options: dict[str, Any] = {"target": x} if rank else {}

    def step() -> None:
        schedule.step(*arguments, **options)

    step()
    return swapkit.record(step, nn.ModuleList(modules))


def copy_beside(start: Callable[[], Any]) -> tuple[int, int]:
    """Wait for a collective while copies are under way.

    Returns:
        How many copies were under way when the wait began, and when it ended.
    """
    x = torch.ones(SWAPPED, WIDTH, WIDTH, requires_grad=True)
    with (
        slow_link(bytes_per_s=LINK_BYTES_PER_SECOND),
        swapkit.budget(1 << 30, policy="rescue"),
        swapkit.offload(),
    ):
        mover = get_runtime().current_swapper().mover

        def count() -> int:
            return sum(not mover.poll_out(each) for each in mover.resident)

        loss = torch.stack([each.exp().sum() for each in x.unbind()]).sum()
        before: list[int] = []

        def begin() -> Any:
            before.append(count())
            return start()

        meet_late(f"copied {start.__name__}", begin)
        after = count()
        loss.backward()
    return before[0], after


def gather() -> Any:
    return dist.all_gather_into_tensor(torch.empty(8), torch.ones(4), async_op=True)


def reduce_scatter() -> Any:
    return dist.reduce_scatter_tensor(torch.empty(4), torch.ones(8), async_op=True)


def keep_buckets() -> Trace:
    """Record DDP, whose buckets for gradients stay between steps. No operator makes them."""
    torch.manual_seed(0)
    width = 8 * WIDTH  # so that there are several buckets
    model = DistributedDataParallel(
        nn.Sequential(*[nn.Linear(width, width) for _ in range(LAYERS)])
    )
    optimizer = torch.optim.AdamW(model.parameters())
    x = torch.randn(16, width)

    def step() -> None:
        model(x).square().mean().backward()
        optimizer.step()
        optimizer.zero_grad()

    for _ in range(3):  # the second one makes other buckets
        step()
    swapkit.reset_peak_memory_stats()
    return swapkit.record(step, model, optimizer)


def count_tanh(trace: Trace) -> list[list[int]]:
    """Return the microbatches of each tanh and of each of its backwards, in the step's order."""
    forward, backward = (
        [each.microbatch for each in trace.operators if each.name.startswith(name)]
        for name in ("aten.tanh.", "aten.tanh_backward.")
    )
    return [forward, backward]


def main() -> None:
    torch.set_num_threads(1)
    dist.init_process_group("gloo")
    swapkit.install()
    found: dict[str, dict[str, Any]] = {}
    for make in reduce_late, receive_late, wait_elsewhere, fail, shard, pipeline, keep_buckets:
        trace = make()
        peak_bytes = swapkit.memory_stats()["allocated_bytes.all.peak"]
        found[make.__name__] = {
            "operators": Counter(each.name for each in trace.operators),
            "waited": sum(each.seconds for each in trace.operators if each.name == WAIT),
            "phases": sorted({each.phase.value for each in trace.operators if each.name == WAIT}),
            "tanh": count_tanh(trace),
            "is_plain": methods() == PLAIN,
            "peak": trace.peak_bytes / peak_bytes,
        }
    for start in gather, reduce_scatter:
        found[start.__name__] = {"copied": copy_beside(start)}
    publish_and_exit(found)


if __name__ == "__main__":
    main()
