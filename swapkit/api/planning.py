"""`plan`, `simulate`: planning and simulation of a recorded step without a session."""

from __future__ import annotations

import os
from dataclasses import replace

from swapkit._runtime.allocators.installation import choose_device
from swapkit._runtime.machine.measured_machine import measure_machine
from swapkit._runtime.process.runtime import get_runtime
from swapkit._runtime.saved.device import Limits
from swapkit.api.path_arguments import read_argument
from swapkit.errors import InvalidArgument, InvalidType, Unsupported
from swapkit.ir.checks import check_machine, check_plan
from swapkit.ir.codec import inside, read_machine, read_trace
from swapkit.ir.machines import Machine
from swapkit.ir.passes import divide_weights
from swapkit.ir.plans import Plan, Schedule
from swapkit.ir.traces import Trace
from swapkit.planning.hardware import find_hardware
from swapkit.planning.placed import make_placed_plan
from swapkit.planning.planner import Policy
from swapkit.simulation.timeline import simulate as run_simulation
from swapkit.units import parse_bytes, show

_TRACE = "a trace from swapkit.record(), or the path of a file with one"
_MACHINE = "a swapkit.ir.machines.Machine, or the path of a file with one, or the name of a device"


def plan(
    trace: Trace | str | os.PathLike[str],
    budget: int | float | str | None = None,
    *,
    machine: Machine | str | os.PathLike[str] | None = None,
    policy: str | Policy = "auto",
    optimizer_states: bool = False,
    weights: bool = False,
) -> Plan:
    """Decide which tensors to keep, swap and recompute so that a recorded step fits a budget.

    Args:
        trace: trace of one step from `swapkit.record`, or the path of a file that holds one.
        budget: most bytes of the device reserved at once: bytes, `"10GiB"`, or a share of the
            step's peak without a plan, `"60%"` or 0.6. None: the machine's budget.
        machine: links, host and disk, as `swapkit machine --json` prints them, or the
            path of such a file, or a name of `swapkit.planning.hardware.HARDWARE`, such as
            `"H100"`. None: this machine, measured once and remembered.
        policy: `"auto"`, `"swap"`, `"recompute"`, or an object with `plan(trace, machine)`.
        optimizer_states: whether optimizer states may be swapped too.
        weights: whether weights that the step does not change may leave while it does not use them,
            as in a session with a smaller budget than the model. The plan's own trace has a storage
            for each idle stretch of a weight.

    Returns:
        The plan, with a prediction and a lower bound for all plans. Its storages were given
        addresses: `prediction.reserved_bytes` is the memory that they take. A session can
        follow it:
        `swapkit.budget(limit, model, optimizer, plan=made)`.

    Raises:
        InfeasibleBudget: no plan fits; the error names the smallest budget for which one exists.
        InvalidArgument: an argument is invalid; `InvalidDocument` for a file's content.

    Example:
        >>> import swapkit, torch
        >>> from swapkit.ir.machines import Machine
        >>> model = torch.nn.Sequential(*[torch.nn.Linear(64, 64) for _ in range(8)])
        >>> trace = swapkit.record(lambda: model(torch.ones(512, 64)).sum().backward(), model)
        >>> link = Machine(budget_bytes=1 << 30, out_bytes_per_second=1e9, in_bytes_per_second=1e9)
        >>> made = swapkit.plan(trace, "80%", machine=link)
        >>> made.prediction.peak_bytes <= made.budget_bytes
        True
    """
    read = _read_trace(trace)
    if weights:
        read = divide_weights(read)
    return make_placed_plan(
        read, find_machine(machine, read, budget), policy, optimizer_states=optimizer_states
    )


def simulate(
    trace: Trace | str | os.PathLike[str],
    plan: Plan,
    *,
    machine: Machine | str | os.PathLike[str] | None = None,
) -> Schedule:
    """Simulate a step under a plan and return its timeline.

    Args:
        trace: as for `swapkit.plan`.
        plan: a plan for this trace.
        machine: as for `swapkit.plan`; the plan's budget replaces its budget.

    Returns:
        The times of operators, transfers and stalls, with the totals in `prediction`.

    Raises:
        InfeasibleBudget: the step cannot run under the plan.
        PlanMismatch: the plan is for another trace.
        InvalidArgument: an argument is invalid; `InvalidDocument` for a file's content.
    """
    read = _read_trace(trace)
    _check_plan(plan)
    if any(each.storage >= len(read.storages) for each in plan.decisions):
        read = divide_weights(read)
    return run_simulation(read, plan, find_machine(machine, read, plan.budget_bytes))


def _read_trace(trace: Trace | str | os.PathLike[str]) -> Trace:
    if isinstance(trace, Trace):
        return trace
    return read_argument("trace", trace, read_trace, _TRACE)


def _check_plan(plan: object) -> None:
    if not isinstance(plan, Plan):
        raise InvalidType(f"plan={show(plan)}: expected a plan from swapkit.plan()")
    with inside("plan: "):
        check_plan(plan)


def find_machine(
    machine: Machine | str | os.PathLike[str] | None,
    trace: Trace,
    budget: int | float | str | None,
) -> Machine:
    """Return the machine for a trace, with a budget: see `plan`.

    Raises:
        InvalidArgument: an argument is invalid; `InvalidDocument` for a file's content.
    """
    if isinstance(machine, Machine):
        with inside("machine: "):
            check_machine(machine)
    elif (known := find_hardware(machine)) is not None:
        machine = known.machine
    elif machine is not None:
        machine = read_argument("machine", machine, read_machine, _MACHINE)
    if budget is None:
        if machine is None:
            raise InvalidArgument("budget=None: pass a budget, or a machine that has one")
        return machine
    budget_bytes = parse_bytes(budget, whole_bytes=trace.peak_bytes, name="budget")
    if machine is None:
        machine = _measure(trace.device, budget_bytes)
    return replace(machine, budget_bytes=budget_bytes)


def _measure(name: str, budget_bytes: int) -> Machine:
    """Measure this machine with the device that a trace was recorded on.

    Raises:
        InvalidArgument: this machine has no such device.
    """
    try:
        place = choose_device(name.partition(":")[0])
    except (InvalidArgument, Unsupported):
        raise InvalidArgument(
            f"machine=None: the trace was recorded on {name}, which this process does not have. "
            "Pass machine= (--machine), with the speed of its link, or a name such as 'H100'."
        ) from None
    device = get_runtime().device(place)
    return measure_machine(device, Limits(budget_bytes=budget_bytes))
