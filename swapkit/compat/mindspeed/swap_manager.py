"""`SwapManager`: a session that starts when it is made and counts steps by `step()`.

Source:
    MindSpeed, SmartSwap, `swap_manager.py`: name, arguments, and one manager per process.
"""

from __future__ import annotations

import argparse
import contextlib
from collections.abc import Callable, Iterable
from typing import TYPE_CHECKING, Any, TypeAlias

import torch

from swapkit._runtime.allocators.installation import choose_device, ensure_installation
from swapkit._runtime.optimizer.chunked_step import attached
from swapkit._runtime.optimizer.wrapped import list_optimizers
from swapkit.api.command_line import choose_swap_policy, from_arguments, layer_paths
from swapkit.api.offloading import offload
from swapkit.compat.mindspeed.swap_policy import EditedPolicy
from swapkit.errors import InvalidArgument, SessionError

if TYPE_CHECKING:
    from swapkit._runtime.session.session import Session
    from swapkit.compat.mindspeed.swap_policy import SwapPolicy

    _Models: TypeAlias = tuple[torch.nn.Module, ...]
    _Edit: TypeAlias = Callable[[SwapPolicy], object] | None


class StepSession:
    """The running SwapManager: a session of `swapkit.budget`, as attribute `session`."""

    def __init__(self, models: _Models, session: Session) -> None:
        """Enter a session.

        Args:
            models: its models.
            session: the session.
        """
        self.models = models
        self.session = session
        session.__enter__()

    def step(self) -> None:
        """End a training step.

        Raises:
            SessionError: the session has ended.
        """
        self.session.mark_step()

    def close(self) -> None:
        """End the session and forget the models; the next SwapManager starts another session."""
        try:
            self.session.close()
        finally:
            self.models = ()
            with contextlib.suppress(ValueError):  # closed before
                _running.remove(self)


def accept_module_class(module_class: type) -> None:
    """Do nothing: MindSpeed needs to know the layers that it may plan for; swapkit plans for all.

    Args:
        module_class: class of the layers.

    Raises:
        InvalidArgument: `module_class` is not a class.
    """
    if not isinstance(module_class, type):
        raise InvalidArgument(f"{module_class!r}: expected a module class")


_running: list[StepSession] = []  # at most one


def start_swap_manager(  # noqa: PLR0913, PLR0917 - MindSpeed's arguments
    num_micro_batch_fcn: Callable[[], int],
    models: torch.nn.Module | Iterable[torch.nn.Module],
    num_layers: int,
    optimizer: object = None,
    get_optimizer_tensors_fcn: Callable[..., Any] | None = None,
    get_shared_tensors_fcn: Callable[..., Any] | None = None,
    custom_policy_fcn: _Edit = None,
) -> StepSession:
    """Return the process's SwapManager; the first call starts a session with `--smart-swap`.

    The session obeys `swap_policy_config` as it is then. Its budget is the device's memory, or
    `target_memory` if `target_mode` is on. Call `step()` after each training step, on the thread
    that trains. `close()` ends the session.

    Args:
        num_micro_batch_fcn: returns the number of microbatches. Not called: swapkit sees them.
        models: the model, or its chunks.
        num_layers: the number of layers, or -1. swapkit finds the layers itself.
        optimizer: the optimizer, or a wrapper of one or several (`chained_optimizers`). Its states
            go to the host if `policy_pref` is `BETTER_MEMORY_SAVING`.
        get_optimizer_tensors_fcn: returns optimizer states. Not called: swapkit knows them.
        get_shared_tensors_fcn: returns tensors that must not move, such as buffers of DDP. Not
            called: swapkit moves only memory that nothing but autograd's graph refers to.
        custom_policy_fcn: edits the swaps of each plan; see `SwapPolicy`.

    Raises:
        InvalidArgument: an argument is wrong.
        SessionError: a SwapManager for other models runs.
    """
    for each in (get_optimizer_tensors_fcn, get_shared_tensors_fcn, custom_policy_fcn):
        if each is not None and not callable(each):
            raise InvalidArgument(f"{each!r}: expected a function or None")
    chunks = _check(num_micro_batch_fcn, models, num_layers)
    if _running and _running[0].session.is_active:
        if _running[0].models != chunks:
            raise SessionError("a SwapManager for other models runs: call its close() first")
        return _running[0]
    manager = _start(chunks, optimizer, custom_policy_fcn)
    _running[:] = [manager]
    return manager


def _check(num_micro_batch_fcn: object, models: object, num_layers: object) -> _Models:
    if not callable(num_micro_batch_fcn):
        raise InvalidArgument(f"num_micro_batch_fcn={num_micro_batch_fcn!r}: expected a function")
    if type(num_layers) is not int or num_layers < -1 or num_layers == 0:
        raise InvalidArgument(f"num_layers={num_layers!r}: expected a number above 0, or -1")
    is_one = isinstance(models, torch.nn.Module) or not isinstance(models, Iterable)
    chunks = (models,) if is_one else tuple(models)  # type: ignore[arg-type]
    if not chunks or not all(isinstance(each, torch.nn.Module) for each in chunks):
        raise InvalidArgument(f"models={models!r}: expected a Module, or a list of them")
    return chunks  # type: ignore[return-value]


def _start(chunks: _Models, optimizer: object, edit: _Edit) -> StepSession:
    model = chunks[0] if len(chunks) == 1 else torch.nn.ModuleList(chunks)
    optimizers = list_optimizers(optimizer)
    asked = from_arguments(argparse.Namespace(smart_swap=True))
    assert asked.smart_swap is not None
    options: dict[str, Any] = {}
    if edit is not None:
        policy = choose_swap_policy(asked.smart_swap, model)
        options["policy"] = EditedPolicy(policy=policy, edit=edit, layers=layer_paths(model))
    ensure_installation(choose_device(None, model))
    # No optimizers: only step() ends the session's steps, as in a loop without an optimizer.
    session = asked.budget(model, **options)
    with contextlib.ExitStack() as on_failure:
        for each in optimizers if asked.swap_optimizer else ():
            if attached(each) is None:  # else an earlier SwapManager has offloaded them
                on_failure.callback(_fetch_states, each)
                offload(each)
        manager = StepSession(chunks, session)
        on_failure.pop_all()
    return manager


def _fetch_states(optimizer: torch.optim.Optimizer) -> None:
    """Undo `offload`, also if it failed."""
    states = attached(optimizer)
    if states is not None:
        states.detach()
