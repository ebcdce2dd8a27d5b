"""Plan before renting: a 70B-shaped model of 48 layers over the 8 stages of a pipeline.

The stages are recorded on the meta device, with the speed of the hardware from a table, so nothing
is computed and hardly any memory is used. Each stage is planned for the same budget. The output has
its peaks without and with the plan, and the pipeline's step time without a limit, under the plans,
and with full recompute. The figure shows the cost of other budgets.

Optimizer states are assumed to be sharded over data-parallel groups, and are not counted.
"""

from __future__ import annotations

import argparse
import dataclasses
import time
from itertools import accumulate
from pathlib import Path
from typing import TYPE_CHECKING

import matplotlib as mpl
from matplotlib.figure import Figure

from benchmarks._planner_instances import Part, measure_memory, record_part
from benchmarks._planner_measures import full_recompute_seconds
from benchmarks.pipelines.composing import compose_stages
from benchmarks.pipelines.timetables import Pipeline, order_jobs, time_jobs
from swapkit.ir.machines import Machine
from swapkit.ir.traces import Phase, Trace
from swapkit.planning.planner import TradeOff, make_plan, trade_offs
from swapkit.simulation.timeline import simulate
from swapkit.units import format_bytes, parse_bytes

if TYPE_CHECKING:
    from collections.abc import Iterable, Mapping, Sequence

    from swapkit.ir.plans import Schedule

LAYERS, STAGES, WIDTH = 48, 8, 8192
NETWORK_BYTES_PER_SECOND = 50e9
LATENCY_SECONDS = 10e-6
FIGURE = Path("build/plan_70b.png")
SHARES = (0.12, 0.2, 0.4)  # budgets of the figure, as shares of a stage's activations


def record_stages(options: argparse.Namespace) -> tuple[Trace, ...]:
    """Return the trace of the whole step of each stage."""
    inner = Part(
        shape="70b",
        layers=LAYERS // STAGES,
        tokens=options.tokens,
        is_first=False,
        is_last=False,
        hardware=options.hardware,
    )
    parts = [inner] * STAGES
    parts[0] = dataclasses.replace(inner, is_first=True)
    parts[-1] = dataclasses.replace(inner, is_last=True)
    return compose_stages(
        [[record_part(part)] for part in parts],
        schedule="1f1b",
        microbatches=options.microbatches,
        communication_seconds=communication_seconds(options),
    )


def communication_seconds(options: argparse.Namespace) -> float:
    """Return the seconds to send a microbatch's activations from one stage to the next."""
    return float(options.tokens * WIDTH * 2 / NETWORK_BYTES_PER_SECOND)


def time_pipeline(pipeline: Pipeline, seconds: Sequence[Sequence[float]]) -> float:
    """Return the step time of the pipeline from the time of each job of each stage."""
    orders = [order_jobs(pipeline, stage) for stage in range(pipeline.stages)]
    tables = [
        dict(zip(jobs, each, strict=True)) for jobs, each in zip(orders, seconds, strict=True)
    ]
    starts = time_jobs(pipeline, lambda stage, job: tables[stage][job])
    return max(begins[-1] + each[-1] for begins, each in zip(starts, seconds, strict=True))


def time_full_recompute(pipeline: Pipeline, traces: Sequence[Trace]) -> float:
    """Return the step time when each layer's forward runs again before its backward."""
    seconds = []
    for stage, trace in enumerate(traces):
        again = (full_recompute_seconds(trace) - trace.seconds) / pipeline.microbatches
        jobs = order_jobs(pipeline, stage)
        plain = measure_jobs(trace, accumulate(each.seconds for each in trace.operators))
        seconds.append(
            [
                each + again * (job.phase is Phase.BACKWARD)
                for job, each in zip(jobs, plain, strict=True)
            ]
        )
    return time_pipeline(pipeline, seconds)


def measure_jobs(trace: Trace, ends: Iterable[float]) -> list[float]:
    """Return the seconds of each job, including the stalls in it and right before it.

    Args:
        trace: the trace of a stage.
        ends: the end times of its operators.
    """
    seconds: list[float] = []
    before: tuple[Phase, int] | None = None
    clock = 0.0
    for operator, end in zip(trace.operators, ends, strict=True):
        if operator.phase is not Phase.IDLE:
            job = operator.phase, operator.microbatch
            if job != before:
                seconds.append(0.0)
            seconds[-1] += end - clock
            before = job
        clock = end
    return seconds


def plan_stages(traces: Sequence[Trace], options: argparse.Namespace) -> list[Schedule]:
    """Plan each stage for the budget, and print its peaks and its step time."""
    print(f"{'stage':<6} {'fixed':>10} {'no limit':>11} {'planned':>10} {'host':>10} {'time':>8}")
    schedules = []
    for stage, trace in enumerate(traces):
        machine = make_machine(options)
        schedules.append(simulate(trace, make_plan(trace, machine), machine))
        fixed, peak = measure_memory(trace)
        outcome = schedules[-1].prediction
        print(
            f"{stage:<6} {format_bytes(fixed):>10} {format_bytes(peak):>11}"
            f" {format_bytes(outcome.peak_bytes):>10} {format_bytes(outcome.host_peak_bytes):>10}"
            f" {outcome.seconds / trace.seconds - 1:>+8.2%}",
            flush=True,
        )
    return schedules


def make_machine(options: argparse.Namespace) -> Machine:
    """Return a machine with the requested budget and link."""
    return Machine(
        budget_bytes=parse_bytes(options.budget, name="--budget"),
        out_bytes_per_second=options.link * 1e9,
        in_bytes_per_second=options.link * 1e9,
        out_latency_seconds=LATENCY_SECONDS,
        in_latency_seconds=LATENCY_SECONDS,
        name=options.hardware,
    )


def draw(curves: Mapping[int, Sequence[TradeOff]], traces: Sequence[Trace], path: Path) -> None:
    """Write the figure: for each stage, the time added to the unlimited step over the budget."""
    figure = Figure(figsize=(8, 4.8), layout="constrained")
    panel = figure.subplots()
    colours = mpl.colormaps["viridis"]
    for stage, curve in curves.items():
        colour = colours(0.9 * stage / max(1, len(traces) - 1))
        free = traces[stage].seconds
        budgets = [each.budget_bytes / 2**30 for each in curve]
        added = [100 * (each.seconds / free - 1) for each in curve]
        bound = [100 * (each.bound_seconds / free - 1) for each in curve]
        panel.plot(budgets, added, "o-", color=colour, markersize=4, label=f"stage {stage}")
        panel.plot(budgets, bound, ":", color=colour, linewidth=1)
    panel.set_xlabel("budget of a device, GiB")
    panel.set_ylabel("time added to the step without a limit, %")
    panel.set_title("70B-shaped, 48 layers, 8 stages: plans, and their lower bound (dotted)")
    panel.grid(alpha=0.25)
    panel.legend(fontsize="small", ncols=2)
    path.parent.mkdir(parents=True, exist_ok=True)
    figure.savefig(path, dpi=140)


def parse(arguments: Sequence[str] | None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--budget", default="60GiB", help="budget of each device (60GiB)")
    parser.add_argument("--link", type=float, default=50.0, help="GB/s each way (50)")
    parser.add_argument("--tokens", type=int, default=8192, help="tokens of a microbatch (8192)")
    parser.add_argument("--microbatches", type=int, default=16, help="microbatches of a step (16)")
    parser.add_argument(
        "--hardware", default="H100", help="hardware=, as for swapkit.record (H100)"
    )
    parser.add_argument("--figure", type=Path, default=FIGURE, metavar="FILE")
    parser.add_argument(
        "--stages-drawn", type=int, nargs="*", default=[0, 4, 7], help="stages in the figure"
    )
    return parser.parse_args(arguments)


def main(arguments: Sequence[str] | None = None) -> None:
    options = parse(arguments)
    begin = time.perf_counter()
    traces = record_stages(options)
    print(f"{STAGES} stages of {LAYERS // STAGES} layers, recorded and composed in", end=" ")
    print(f"{time.perf_counter() - begin:.1f} s\n")
    schedules = plan_stages(traces, options)
    pipeline = Pipeline(
        schedule="1f1b",
        stages=STAGES,
        microbatches=options.microbatches,
        communication_seconds=communication_seconds(options),
    )
    free = max(trace.seconds for trace in traces)
    full = time_full_recompute(pipeline, traces)
    pairs = zip(traces, schedules, strict=True)
    planned = time_pipeline(pipeline, [measure_jobs(trace, each.ends) for trace, each in pairs])
    print(f"\nstep without a limit        {free:.3f} s")
    print(f"step under the plans        {planned:.3f} s  {abs(planned / free - 1):+.2%}")
    print(f"step with full recompute    {full:.3f} s  {full / free - 1:+.2%}")
    print(f"recovered throughput        {(full - planned) / (full - free):.3f}")
    print(f"planned in                  {time.perf_counter() - begin:.1f} s")
    machine = make_machine(options)
    curves = {stage: trade_offs(traces[stage], machine, SHARES) for stage in options.stages_drawn}
    draw(curves, traces, options.figure)
    print(f"figure                      {options.figure}")
    print(f"total                       {time.perf_counter() - begin:.1f} s")


if __name__ == "__main__":
    main()
