"""`swapkit plan`: decides which tensors of a recorded step to keep, swap and recompute."""

from __future__ import annotations

import json

import click

from swapkit.cli.base import DONE, CliCommand, machine_option
from swapkit.ir.plans import Plan
from swapkit.ir.traces import Trace
from swapkit.planning import POLICIES
from swapkit.texts import waiting

_PREDICTED = (
    *("step_seconds", "stall_seconds", "recompute_seconds", "peak_bytes", "reserved_bytes"),
    *("host_peak_bytes", "swapped_bytes"),
)


@click.command(cls=CliCommand)
@click.argument("trace")
@click.argument("budget")
@machine_option
@click.option("--policy", type=click.Choice(POLICIES), default="auto", show_default=True)
@click.option("--out", metavar="FILE", help="Write the plan, for swapkit.budget(..., plan=FILE).")
@click.option("--json", "as_json", is_flag=True, help="Print the figures as JSON instead of text.")
def plan(
    *,
    trace: str,
    budget: str,
    machine_file: str | None,
    policy: str,
    out: str | None,
    as_json: bool,
) -> int:
    """Plan a recorded step for a budget, without training.

    TRACE is a recorded step: swapkit.ir.codec.write_trace(TRACE, swapkit.record(step, model)).
    BUDGET is bytes, "10GiB", or a share of the step's peak without a plan, "60%".
    """
    from swapkit.api.planning import find_machine
    from swapkit.ir.codec import read_trace, write_planned
    from swapkit.planning.hardware import find_hardware, price
    from swapkit.planning.placed import make_placed_plan
    from swapkit.planning.planner import trade_offs
    from swapkit.planning.reasons import explain_decisions
    from swapkit.reporting.plans import format_plan, format_trade_offs

    step = read_trace(trace)
    if (hardware := find_hardware(machine_file)) is not None:
        step = price(step, hardware)
    with waiting("measuring the machine"):
        machine = find_machine(machine_file, step, budget)
    with waiting("planning"):
        made = make_placed_plan(step, machine, policy)
    if out is not None:
        write_planned(out, step, made)
    if as_json:
        click.echo(json.dumps(list_figures(step, made), indent=2))
        return DONE
    click.echo(format_plan(made, explain_decisions(step, made, machine)))
    with waiting("planning for other budgets"):
        offers = trade_offs(step, machine, policy=policy)
    click.echo("\n" + format_trade_offs(offers, plan=made))
    return DONE


def list_figures(step: Trace, made: Plan) -> dict[str, int | float | str | None]:
    """Return the figures of a plan by flat names, in bytes and seconds; None: unknown."""
    swapped, recomputed = made.count_moved()
    found = made.prediction
    return {
        "policy": made.policy,
        "budget_bytes": made.budget_bytes,
        "plain_peak_bytes": step.peak_bytes,
        "plain_step_seconds": step.seconds,
        "storages": len(step.storages),
        "swapped": swapped,
        "recomputed": recomputed,
        "bound_seconds": made.bound_seconds,
        **{name: None if found is None else getattr(found, name) for name in _PREDICTED},
    }
