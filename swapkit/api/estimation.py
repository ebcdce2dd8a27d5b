"""`estimate`: how small a budget can be, how long a step takes then, how large a batch fits."""

from __future__ import annotations

import contextlib
import inspect
import os
from collections.abc import Callable, Iterator, Sequence
from dataclasses import replace
from functools import partial
from typing import NamedTuple, TypeAlias

import torch

from swapkit._runtime.allocators.installation import (
    choose_device,
    ensure_installation,
    is_installed,
    uninstall_cpu,
)
from swapkit._runtime.allocators.limits import AUTO, find_free_limit
from swapkit._runtime.model.ranks import count_node_ranks
from swapkit._runtime.model.tracker import gather_parts
from swapkit._runtime.optimizer.wrapped import list_optimizers
from swapkit._runtime.recording.notes import Setting
from swapkit._runtime.recording.training_state import TrainingState
from swapkit._runtime.saved.device import CPU
from swapkit.api.budgets import budget as open_session
from swapkit.api.planning import find_machine
from swapkit.api.recording import check_step, find_place, find_setting, has_data, record_with
from swapkit.errors import InvalidArgument
from swapkit.ir.machines import Machine
from swapkit.ir.traces import Trace
from swapkit.planning.estimates import Batches, find_need, find_smallest, find_times
from swapkit.planning.hardware import Hardware, find_hardware, hardware_named, price
from swapkit.reporting.estimates import Estimate, LargestBatch
from swapkit.units import MIB, parse_bytes, round_up, show

Amount: TypeAlias = int | float | str
_Target: TypeAlias = "tuple[Machine | str | os.PathLike[str] | None, Hardware | None]"

# ---- budget trials -------------------------------------------------------------------------------
#
# Trials of the smallest budget: whether a session trains in it from its first step on.

# Steps tried in the smallest budget: so many in the same one, but not more in all.
TRIALS, MOST_TRIALS = 3, 8
# Granules that a budget needs beyond the tried one: in a new process, gaps lie elsewhere.
GAPS = 8


class BudgetNeed(NamedTuple):
    """What steps of a session needed; 0: not tried."""

    budget_bytes: int = 0
    outside_bytes: int = 0  # most in use outside of steps


class BudgetTrial:
    """The first steps of a session in the smallest budget, which grows if a request would fail."""

    profile_steps = MOST_TRIALS + 1  # of the session: it makes no plan

    def __init__(self, trace: Trace, before_bytes: int = 0) -> None:
        """Begin nothing yet.

        Args:
            trace: of such a step, on a device of this process.
            before_bytes: most memory in use before the first step: then there were no states.
        """
        self._installation = ensure_installation(torch.device(trace.device))
        granule_bytes = self._installation.device.backend.granule_bytes
        need = find_need(trace, None, granule_bytes)
        self._outside_bytes = before_bytes and round_up(
            before_bytes + need.optimizer_bytes, granule_bytes
        )
        self._least_bytes = max(need.smallest_bytes, self._outside_bytes)
        self._tried_bytes: list[int] = []  # budgets at the ends of steps

    @contextlib.contextmanager
    def begin(self, begin_session: Callable[[int], object]) -> Iterator[None]:
        """Begin a session for the steps inside.

        Args:
            begin_session: begins one with a limit in bytes.
        """
        pool = self._installation.pool
        pool.trim()
        limit_bytes = max(self._least_bytes, pool.stats()["reserved_bytes.all.current"])
        begin_session(limit_bytes)
        with self._installation.growing():
            yield

    def is_over(self) -> bool:
        """Note that a step ended; return whether enough steps ran in the same budget."""
        self._tried_bytes.append(self._installation.device.budget_bytes)
        steps = len(self._tried_bytes)
        has_held = steps >= TRIALS and len(set(self._tried_bytes[-TRIALS:])) == 1
        return has_held or steps >= MOST_TRIALS

    def result(self) -> BudgetNeed:
        """Return what was tried so far."""
        tried_bytes = max(self._tried_bytes, default=0)
        if tried_bytes:
            tried_bytes += GAPS * self._installation.device.backend.granule_bytes
        return BudgetNeed(tried_bytes, self._outside_bytes)


# ---- estimation ----------------------------------------------------------------------------------
#
# `estimate`: how small a budget can be, how long a step takes then, how large a batch fits.

ACCELERATOR_GRANULE_BYTES = 2 * MIB  # of the pool; on the CPU a page
COUNT = 2  # of the batch sizes
_SIZES = "two batch sizes, such as batch_sizes=(8, 16)"


def estimate(  # noqa: PLR0913 - keyword arguments of the main interface
    step: Callable[..., object],
    model: torch.nn.Module | Sequence[torch.nn.Module] | None = None,
    optimizer: torch.optim.Optimizer | Sequence[torch.optim.Optimizer] | None = None,
    *,
    budget: Amount | Sequence[Amount] | None = None,
    batch_sizes: tuple[int, int] | None = None,
    device: str | torch.device | None = None,
    hardware: Hardware | str | None = None,
    machine: Machine | str | os.PathLike[str] | None = None,
) -> Estimate:
    """Estimate how small a budget a training step needs, and how long it takes with less memory.

    The step runs twice without a budget, the second time recorded: the first run makes the states
    of the optimizer. With `batch_sizes` it runs twice for each size. Then it runs three to eight
    times in a session with the smallest budget, which grows wherever a request would fail.
    Afterwards the model is as before, bit for bit: parameters, gradients, buffers, training mode,
    states and options of the optimizer, and the global random generators of torch, Python and
    numpy. All other effects of `step` stay: the position of a data loader, a learning rate
    scheduler, files and logs. So let it train on one fixed batch.

    Without a budget the step needs `plain_bytes`. For a step that does not fit the device, record
    two smaller batch sizes, or a model on the `meta` device, which needs neither memory nor time.

    The result holds for a session with the policy `"auto"`, with as much host memory as the copies
    need, and for a model that was made after `swapkit.install()`. On the CPU, swapkit is installed
    while the step runs; on an accelerator it stays installed. A step that keeps or swaps by choice
    (`swapkit.offload`, `swapkit.keep`) is estimated as if those tensors could move.

    Args:
        step: runs forward and backward and, if it is part of the step, the optimizer. With
            `batch_sizes`, it takes the size of the batch.
        model: provides module names, and is restored. Or a list of its parts.
        optimizer: as for `swapkit.budget`; it is restored.
        budget: budgets to predict the step's time for, one or several: bytes, `"10GiB"`, a share of
            `plain_bytes` (`"60%"`), or `"auto"`: what is free on the device of this process (see
            `swapkit.budget`), or on the `hardware`.
        batch_sizes: two sizes to record, to find the largest batch for each budget. Without
            `budget`, for `"auto"`. Choose the larger one as near to the expected result as memory
            allows, and the smaller one about half of it. The rest of the result is for the larger.
        device: as for `swapkit.record`.
        hardware: as for `swapkit.record`; then nothing is tried in a session.
        machine: links, host and disk, as for `swapkit.plan`. None: this machine, measured once and
            remembered; with `hardware`, its own links, and no step times if these are not known.

    Returns:
        The estimate: values in bytes and seconds, `str(estimate)` as tables, `to_dict()` for JSON.

    Raises:
        InvalidArgument: an argument is invalid, or the step has no backward.
        torch.OutOfMemoryError: the step does not fit without a budget; the state is restored.
        SessionError: a session is active on this thread, or it is too late to install swapkit.

    Example:
        >>> import swapkit, torch
        >>> from swapkit.ir.machines import Machine
        >>> model = torch.nn.Sequential(*[torch.nn.Linear(64, 64) for _ in range(8)])
        >>> optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
        >>> def step(batch_size):
        ...     model(torch.ones(batch_size, 64)).sum().backward()
        ...     optimizer.step()
        ...     optimizer.zero_grad()
        >>> link = Machine(budget_bytes=1 << 30, out_bytes_per_second=1e9, in_bytes_per_second=1e9)
        >>> found = swapkit.estimate(
        ...     step, model, optimizer, budget="1MiB", batch_sizes=(256, 512), machine=link
        ... )
        >>> found.smallest_budget_bytes < found.plain_bytes
        True
        >>> found.largest_batch > 512
        True
    """
    check_step(step)
    whole = gather_parts(model)
    optimizers = list_optimizers(optimizer)
    sizes = _read_sizes(batch_sizes)
    _check_calls(step, sizes)
    place = find_place(device, whole)
    modelled = None if hardware is None else hardware_named(hardware)
    if budget is None:
        budget = [] if sizes is None else AUTO
    asked = [budget] if isinstance(budget, (str, int, float)) else list(budget)
    is_real = has_data(place, whole)
    with _installed(place) if is_real else contextlib.nullcontext():
        setting = find_setting(whole, optimizer, device, modelled, counts_outside=True)
        state = TrainingState(whole, optimizers)
        try:
            steps = [step] if sizes is None else [partial(step, size) for size in sizes]
            traces = [_record(each, setting, modelled) for each in steps]
            _check_growth(sizes, traces)
            tried = BudgetNeed()
            if modelled is None:
                tried = _try_steps(steps[-1], whole, optimizers, traces[-1])
        finally:
            state.restore()
        return _conclude(traces, sizes, (machine, modelled), asked, tried)


def _try_steps(
    step: Callable[[], object],
    model: torch.nn.Module | None,
    optimizers: Sequence[torch.optim.Optimizer],
    trace: Trace,
) -> BudgetNeed:
    """Return what a new session needs to train with the step."""
    trial = BudgetTrial(trace)
    with contextlib.ExitStack() as session:

        def begin(limit_bytes: int) -> None:
            session.enter_context(
                open_session(
                    limit_bytes,
                    model,
                    optimizers,
                    device=trace.device,
                    profile_steps=trial.profile_steps,
                )
            )

        with trial.begin(begin):
            step()
            while not trial.is_over():
                step()
    return trial.result()


def estimate_trace(
    trace: Trace,
    budgets: Sequence[Amount],
    machine: Machine | str | None = None,
    *,
    tried: BudgetNeed | None = None,
) -> Estimate:
    """Return the estimate of a step that is recorded already.

    Args:
        trace: of a step whose optimizer had its states before.
        budgets: as for `estimate`; "auto": of the trace's device, on which swapkit is installed.
        machine: as for `estimate`; if it names hardware, for its times, too.
        tried: what steps needed without a plan; None: none was tried.

    Raises:
        InvalidArgument: a budget is invalid, or this machine does not have the trace's device.
    """
    hardware = find_hardware(machine)
    if hardware is not None:  # what was tried holds for the device of this process
        trace, budgets, tried = price(trace, hardware), budgets or [AUTO], None
    return _conclude([trace], None, (machine, hardware), budgets, tried or BudgetNeed())


def _find_target(target: _Target, trace: Trace) -> Machine | None:
    """Return the machine, with the budget of a plain step; None: its links are not known."""
    links, hardware = target
    if links is None and hardware is not None and (links := hardware.machine) is None:
        return None
    return find_machine(links, trace, trace.peak_bytes)


def _conclude(
    traces: Sequence[Trace],
    sizes: tuple[int, int] | None,
    target: _Target,
    asked: Sequence[Amount],
    tried: BudgetNeed,
) -> Estimate:
    """Return the estimate of recorded steps."""
    trace = traces[-1]
    machine = _find_target(target, trace)
    budgets = sorted({_parse_budget(each, trace, target[1]) for each in asked})
    is_cpu = torch.device(trace.device).type == CPU.type
    granule_bytes = os.sysconf("SC_PAGE_SIZE") if is_cpu else ACCELERATOR_GRANULE_BYTES
    planned = find_need(trace, machine, granule_bytes)  # of a session with a plan
    smallest_bytes = max(planned.smallest_bytes, *tried)
    need = replace(
        planned,
        smallest_bytes=smallest_bytes,
        plain_bytes=max(planned.plain_bytes, smallest_bytes),
    )
    largest: tuple[LargestBatch, ...] = ()
    if sizes is not None:
        gaps_bytes = max(
            0, tried.budget_bytes - planned.smallest_bytes
        )  # likewise with other sizes

        def measure(each: Trace) -> int:
            return find_smallest(each, machine, 1) + gaps_bytes

        batches = Batches(sizes, (traces[0], trace), measure)
        largest = tuple(_find_largest(batches, machine, each) for each in budgets)
    return Estimate(
        plain_bytes=need.plain_bytes,
        smallest_budget_bytes=need.smallest_bytes,
        streamed_budget_bytes=need.streamed_bytes,
        floor_bytes=need.floor_bytes,
        state_bytes=need.state_bytes,
        gradient_bytes=need.gradient_bytes,
        optimizer_bytes=need.optimizer_bytes,
        operator=need.operator,
        operator_bytes=planned.smallest_bytes - need.floor_bytes,
        outside_bytes=tried.outside_bytes,
        step_seconds=trace.seconds,
        times=() if machine is None else find_times(trace, machine, need, budgets),
        budgets=tuple(budgets),
        batch_size=None if sizes is None else sizes[1],
        largest_batches=largest,
        device=trace.device,
        label=trace.label,
        ranks=count_node_ranks(waits=False),
    )


def _find_largest(batches: Batches, machine: Machine | None, budget_bytes: int) -> LargestBatch:
    size = batches.find_largest(budget_bytes)
    seconds = None
    if size and machine is not None:
        seconds = batches.find_seconds(size, machine, budget_bytes)
    return LargestBatch(
        budget_bytes=budget_bytes,
        batch_size=size,
        step_seconds=seconds,
        is_capped=batches.is_capped(size),
    )


def _record(step: Callable[[], object], setting: Setting, hardware: Hardware | None) -> Trace:
    """Run a step, which may make memory that stays, then record it."""
    if setting.has_data:
        step()
    else:  # with the operators of the device that the tensors stand for
        record_with(step, setting, hardware)
    return record_with(step, setting, hardware)


@contextlib.contextmanager
def _installed(place: torch.device) -> Iterator[None]:
    """Have swapkit's pool below torch on a device; on the CPU only inside, if it was not before."""
    name = choose_device(place)
    was_installed = is_installed(name)
    ensure_installation(name)
    try:
        yield
    finally:
        if not was_installed and name == CPU:
            uninstall_cpu()


def _check_growth(sizes: tuple[int, int] | None, traces: Sequence[Trace]) -> None:
    """Check that the step used its batch size.

    Raises:
        InvalidArgument: what it makes and uses takes as many bytes with both sizes.
    """
    taken = {sum(storage.nbytes for storage in trace.storages) for trace in traces}
    if sizes is not None and len(taken) == 1:
        raise InvalidArgument(
            f"batch_sizes={show(sizes)}: the step takes the same memory with both sizes. It has to "
            "make its batch of the size that it is called with"
        )


# ---- arguments -----------------------------------------------------------------------------------


def _read_sizes(sizes: object) -> tuple[int, int] | None:
    """Return the two batch sizes, the smaller one first; None: none were given."""
    if sizes is None:
        return None
    listed = list(sizes) if isinstance(sizes, Sequence) and not isinstance(sizes, str) else []
    are_counts = all(type(each) is int and each > 0 for each in listed)
    if len(set(map(repr, listed))) != COUNT or len(listed) != COUNT or not are_counts:
        raise InvalidArgument(f"batch_sizes={show(sizes)}: expected {_SIZES}")
    small, large = sorted(listed)
    return small, large


def _check_calls(step: Callable[..., object], sizes: tuple[int, int] | None) -> None:
    """Check that the step takes what it will be called with."""
    try:
        signature = inspect.signature(step)
    except (TypeError, ValueError):  # no signature available
        return
    try:
        signature.bind(*() if sizes is None else sizes[:1])
    except TypeError:
        if sizes is None:
            hint = f"it takes arguments: pass {_SIZES}, or a function without arguments"
        else:
            hint = "with batch_sizes= it is called with the size of the batch: step(batch_size)"
        raise InvalidArgument(f"step={show(step)}: {hint}") from None


def _parse_budget(budget: Amount, trace: Trace, hardware: Hardware | None) -> int:
    """Return a budget in bytes.

    Raises:
        InvalidArgument: it cannot be parsed, or is "auto" for hardware of unknown memory.
    """
    if budget != AUTO:
        return parse_bytes(budget, whole_bytes=trace.peak_bytes, name="budget")
    if hardware is None:
        return find_free_limit(ensure_installation(torch.device(trace.device)))
    if hardware.machine is None:
        raise InvalidArgument(
            f"budget='auto': the memory of {hardware.name or 'this hardware'} is not known. Pass "
            "bytes, e.g. budget='80GiB'"
        )
    return hardware.machine.budget_bytes
