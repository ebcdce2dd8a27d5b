"""`record`: the trace of one training step."""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Sequence

import torch

from swapkit._runtime.allocators.installation import choose_device, installed_pool
from swapkit._runtime.model.tracker import ModuleTracker, gather_parts
from swapkit._runtime.optimizer.wrapped import list_optimizers
from swapkit._runtime.process.runtime import get_runtime
from swapkit._runtime.recording.meta_operators import standing_for
from swapkit._runtime.recording.notes import Setting
from swapkit._runtime.recording.recorder import Recorder
from swapkit._runtime.recording.saved_events import EventWatcher
from swapkit._runtime.saved.device import TYPES, DevicePool
from swapkit._runtime.saved.hooks import Hooks, innermost
from swapkit._runtime.shim.types import Placement
from swapkit._runtime.torch_compat.internals import FakeTensor
from swapkit._runtime.torch_compat.wrappers import tensors_inside
from swapkit.config.environment import MIN_SWAP_BYTES
from swapkit.errors import InvalidArgument, SessionError
from swapkit.ir.plans import Action
from swapkit.ir.traces import Phase, Trace
from swapkit.planning.hardware import Hardware, hardware_named, price

META = torch.device("meta")


def record(
    step: Callable[[], object],
    model: torch.nn.Module | Sequence[torch.nn.Module] | None = None,
    optimizer: torch.optim.Optimizer | Sequence[torch.optim.Optimizer] | None = None,
    *,
    device: str | torch.device | None = None,
    hardware: Hardware | str | None = None,
) -> Trace:
    """Run one training step and return its trace: operators, memory and saved tensors.

    Recording does not change the step's results, bit for bit, but makes it a little slower. Run
    another step first: the first one allocates memory that stays, such as optimizer states.

    A model on the `meta` device, or of fake tensors, is recorded without memory or computation,
    whatever its size. `hardware` then determines which kernels attention and dropout use.
    Optimizers default to `foreach=True` on a GPU but not for meta tensors: set it explicitly.

    Args:
        step: runs forward, backward and, if it is part of the step, the optimizer.
        model: provides module names; its parameters count from the start. Or a list of its parts.
        optimizer: its states count from the start. An optimizer, a wrapper of one, or a list.
        device: device of the step; None: the model's device, else the CPU. For tensors without
            memory: the device that they stand for; None: the hardware's.
        hardware: the trace has the times of operators on this hardware, by a model of it, instead
            of measured ones: `"H100"`, `"H200"`, `"A100"`, `"RTX 4090"`, `"Ascend 910B"`, or a
            `swapkit.planning.hardware.Hardware`. Needed for tensors without memory.

    Returns:
        The trace, for `swapkit.plan`.

    Raises:
        InvalidArgument: an argument is invalid, `hardware` is missing, or the step has no backward,
            so there is nothing to plan.
        SessionError: a session is active on this thread.

    Example:
        >>> import swapkit, torch
        >>> with torch.device("meta"):
        ...     model = torch.nn.Sequential(torch.nn.Linear(64, 64), torch.nn.ReLU())
        ...     batch = torch.ones(512, 64)
        >>> trace = swapkit.record(lambda: model(batch).sum().backward(), model, hardware="H100")
        >>> [operator.name for operator in trace.operators][:3]
        ['aten.addmm.default', 'aten.relu.default', 'aten.sum.default']
    """
    check_step(step)
    modelled = None if hardware is None else hardware_named(hardware)
    return record_with(
        step, find_setting(gather_parts(model), optimizer, device, modelled), modelled
    )


def record_with(step: Callable[[], object], setting: Setting, hardware: Hardware | None) -> Trace:
    """Run one training step and return its trace: see `record`.

    Raises:
        InvalidArgument: the step has no backward, or an operator has no time on the hardware.
    """
    is_meta = setting.device == META
    recorder = Recorder(setting)
    with standing_for(setting.stands_for) if is_meta else contextlib.nullcontext():
        _run(step, recorder)
    trace = recorder.trace()
    if all(operator.phase is not Phase.BACKWARD for operator in trace.operators):
        raise InvalidArgument(
            "step: record() saw no backward in it, so there is nothing to plan. Call backward() "
            "inside it, on the thread that calls record(). Pass the model if its tensors are fake."
        )
    return trace if hardware is None else price(trace, hardware, setting.stands_for)


def find_setting(
    model: torch.nn.Module | None,
    optimizer: object,
    device: str | torch.device | None,
    hardware: Hardware | None,
    *,
    counts_outside: bool = False,
) -> Setting:
    """Return what `record` records with, from its arguments.

    `counts_outside`: whether tensors made before `swapkit.install()` count.

    Raises:
        InvalidArgument: an argument is invalid.
    """
    place = find_place(device, model)
    is_real = has_data(place, model)
    if not is_real and hardware is None:
        raise InvalidArgument(
            "hardware=None: operators on tensors without memory take no time. Name the hardware "
            "to model, e.g. hardware='H100'."
        )
    pool = _pool(place) if is_real else None
    tracker = get_runtime().tracker if pool is not None else ModuleTracker()
    if model is not None:
        tracker.add_model(model)
    stands_for = ""
    if not is_real and hardware is not None:
        is_said = device is not None and torch.device(device) != META
        stands_for = str(device) if is_said else hardware.device
    return Setting(
        device=place,
        tracker=tracker,
        pool=pool,
        root=model,
        optimizers=list_optimizers(optimizer),
        stands_for=stands_for,
        counts_outside=counts_outside,
    )


def _run(step: Callable[[], object], recorder: Recorder) -> None:
    watcher = EventWatcher(recorder, recorder.savings, MIN_SWAP_BYTES)
    hooks = Hooks(watcher, Placement(Action.PASS))  # type: ignore[arg-type]
    recorder.start()
    try:
        hooks.enter()
        try:
            step()
        finally:
            hooks.leave()
    finally:
        recorder.stop()
        watcher.stop()


def check_step(step: object) -> None:
    """Check what is recorded, and where.

    Raises:
        InvalidArgument: `step` is not a function.
        SessionError: a session is active on this thread.
    """
    if not callable(step):
        raise InvalidArgument(
            f"step={step!r}: expected a function of no arguments that runs forward and backward"
        )
    hooks = innermost()
    if hooks is not None and hooks.placement.action is Action.AUTO:
        raise SessionError(
            "record() runs a step without a budget. Call it outside `with swapkit.budget(...)`, "
            "which records by itself"
        )


def find_place(device: str | torch.device | None, model: torch.nn.Module | None) -> torch.device:
    """Return the device of a step's tensors.

    Raises:
        InvalidArgument: `device` is not a device.
    """
    first = None if model is None else next(model.parameters(), None)
    if first is not None and (first.device == META or _is_fake(first)):
        return first.device
    if device is None:
        return choose_device(None) if first is None else first.device
    try:
        return torch.device(device)
    except (RuntimeError, TypeError) as error:
        raise InvalidArgument(f"device={device!r} is not understood: {error}") from None


def has_data(place: torch.device, model: torch.nn.Module | None) -> bool:
    """Return whether a step's tensors have memory: not on `meta`, and no fake tensors."""
    weights = () if model is None else model.parameters()
    return place != META and not any(map(_is_fake, weights))


def _is_fake(tensor: torch.Tensor) -> bool:
    """Return whether a tensor is fake, or a shard of a fake one."""
    return any(isinstance(each, FakeTensor) for each in tensors_inside(tensor))


def _pool(place: torch.device) -> DevicePool | None:
    """Return swapkit's pool for a device; None: swapkit is not installed on it."""
    if place.type not in TYPES:
        return None
    try:
        return installed_pool(place)
    except SessionError:
        return None
