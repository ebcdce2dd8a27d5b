"""Calls of torch's classes that are reported: waits, weights, resizes, regions, jobs."""

from __future__ import annotations

import contextlib
import functools
import inspect
import sys
import threading
from collections.abc import Callable, Collection, Sequence
from contextlib import AbstractContextManager
from typing import Any, Generic, Protocol, TypeVar

import torch.distributed

from swapkit._runtime.torch_compat.internals import (
    ADDING_CALLS,
    CHANGING_CALLS,
    MOVING_CALL,
    work_class,
)
from swapkit._runtime.torch_compat.isolation import untraced, untraced_itself
from swapkit.ir.traces import StagePlace

# ---- replaced methods ----------------------------------------------------------------------------
#
# Methods of torch's classes that are replaced while somebody listens: torch has no hook there.

_Listener = TypeVar("_Listener")
_Result = TypeVar("_Result")


class ReplacedMethod(Generic[_Listener]):
    """One method. Each replacement is a new one that knows the method in its place.

    So another library may replace the method, too, at any time, and call what it found there.
    """

    def __init__(
        self, find_class: Callable[[], Any], name: str, make: Callable[[Any], Any]
    ) -> None:
        """Replace nothing yet.

        Args:
            find_class: returns torch's class; None: there is no such class here.
            name: of the method.
            make: returns a replacement that reports to `listeners_of` it, and calls its argument.
        """
        self._listeners: tuple[_Listener, ...] = ()
        self._find_class = find_class
        self._name = name
        self._make = make
        self._plain: Any = None
        self._is_own = True  # whether the class has the method itself, and not from a base
        self._replacement: Any = None  # while it is there
        self._lock = threading.Lock()

    def listeners_of(self, replacement: object) -> tuple[_Listener, ...]:
        """Return to whom a replacement reports: nobody if it is one of earlier."""
        return self._listeners if replacement is self._replacement else ()

    def add(self, listener: _Listener) -> None:
        """Report calls to a listener from now on."""
        with self._lock:
            self._listeners = (*self._listeners, listener)
        self.look_again()

    def look_again(self) -> None:
        """Replace the method for listeners that came when there was no such class yet."""
        owner = self._find_class()
        with self._lock:
            if owner is None or self._replacement is not None or not self._listeners:
                return
            self._is_own = self._name in vars(owner)
            self._plain = inspect.getattr_static(owner, self._name)
            self._replacement = self._make(self._plain)
            setattr(owner, self._name, self._replacement)

    def remove(self, listener: _Listener) -> None:
        """Report no more calls to a listener; without others, torch has its own method again.

        Calls under way, and those that begin meanwhile on other threads, may still be reported.
        """
        owner = self._find_class()
        with self._lock:
            self._listeners = tuple(each for each in self._listeners if each is not listener)
            if self._listeners or self._replacement is None:
                return
            if inspect.getattr_static(owner, self._name) is self._replacement:
                # One change: another thread may call the method now.
                if self._is_own:
                    setattr(owner, self._name, self._plain)
                else:
                    delattr(owner, self._name)
            self._replacement = None


# ---- collective waits ----------------------------------------------------------------------------
#
# Waits for collectives: each call of `Work.wait` is reported to listeners.
#
# Torch runs no operator in these calls. Waits inside of C++, as of DDP's reducer, are not seen.


class WaitListener(Protocol):
    """Notified of every wait, on the thread that waits, with no lock held."""

    def waiting(self) -> AbstractContextManager[None]:
        """Return what the wait runs in."""


def _make(plain: Any) -> Callable[..., Any]:  # noqa: ANN401 - torch's method
    # Its name, and that it calls torch's method itself, keep pybind11 from taking it for an
    # override in subclasses written in Python: torch's method would call it again.
    @untraced
    def wait(self: object, *args: Any, **kwargs: Any) -> Any:  # noqa: ANN401 - torch's
        with contextlib.ExitStack() as stack:
            for listener in waits.listeners_of(wait):
                stack.enter_context(listener.waiting())
            return plain(self, *args, **kwargs)

    return wait


waits: ReplacedMethod[WaitListener] = ReplacedMethod(work_class, "wait", _make)

# ---- changes of weights --------------------------------------------------------------------------
#
# Calls that give a module other parameters or buffers. Torch has global hooks for some of them, in
# tables that must not change while another thread calls them. And captures of graphs on a GPU, each
# replay of which uses the addresses of then.


class ChangeListener(Protocol):
    """Notified of every such call on its thread, with no lock held."""

    def moving(self, module: torch.nn.Module, /) -> object:
        """Return what `changed` gets, before all tensors of a module move."""

    def changed(
        self,
        module: torch.nn.Module,
        tensor: torch.Tensor | None,
        before: Any,  # noqa: ANN401 - see `moving`
        /,
    ) -> None:
        """Note that a module has got a tensor; None: any. `before`: they have moved."""

    def captures(self) -> None:
        """Note that a graph is about to be captured."""


def _change(name: str, *, is_of_one: bool) -> ReplacedMethod[ChangeListener]:
    is_move = name == MOVING_CALL

    def make(plain: Any) -> Callable[..., Any]:  # noqa: ANN401 - torch's method
        @untraced_itself
        @functools.wraps(plain)
        def run(module: torch.nn.Module, *args: Any, **kwargs: Any) -> Any:  # noqa: ANN401 - torch's
            listeners = changes.listeners_of(run)
            before = [each.moving(module) if is_move else None for each in listeners]
            result = plain(module, *args, **kwargs)
            given = next((each for each in args if isinstance(each, torch.Tensor)), None)
            for listener, known in zip(listeners, before, strict=True):
                listener.changed(module, given if is_of_one else None, known)
            return result

        return run

    changes: ReplacedMethod[ChangeListener] = ReplacedMethod(lambda: torch.nn.Module, name, make)
    return changes


def _make_capture(plain: Any) -> Callable[..., Any]:  # noqa: ANN401 - torch's method
    @untraced
    @functools.wraps(plain)
    def capture_begin(graph: object, *args: Any, **kwargs: Any) -> Any:  # noqa: ANN401 - torch's
        for listener in _captures.listeners_of(capture_begin):
            listener.captures()
        return plain(graph, *args, **kwargs)

    return capture_begin


_captures: ReplacedMethod[ChangeListener] = ReplacedMethod(
    lambda: torch.cuda.CUDAGraph, "capture_begin", _make_capture
)
WEIGHT_CHANGES = (
    *(_change(name, is_of_one=True) for name in ADDING_CALLS),
    *(_change(name, is_of_one=False) for name in CHANGING_CALLS),
    _captures,
)

# ---- operators of wrappers -----------------------------------------------------------------------
#
# What a wrapper's class does instead of an operator. Torch excludes all dispatch keys there that
# come before Python's, also that of weights that leave: they would not come for the operators on
# the tensors inside.


class TrapListener(Protocol):
    """Lets weights inside of wrappers leave."""

    @property
    def exclude_key(self) -> Callable[[bool], bool]:
        """Exclude the key of weights that leave on this thread, or not; return whether it was."""


def run_with_key(exclude_key: Callable[[bool], bool], run: Callable[[], _Result]) -> _Result:
    """Run something with the key of weights, where torch excludes it."""
    was_excluded = exclude_key(False)  # noqa: FBT003 - in C++
    try:
        return run()
    finally:
        exclude_key(was_excluded)


def operators_of(kind: type) -> ReplacedMethod[TrapListener]:
    """Return the method of a wrapper's class; a subclass has its own."""

    def make(plain: Any) -> Any:  # noqa: ANN401 - of any class
        @untraced
        def run(kind: type, *args: Any, **kwargs: Any) -> Any:  # noqa: ANN401 - of any class
            operator = plain.__get__(None, kind)
            for listener in replaced.listeners_of(made)[:1]:
                call = functools.partial(operator, *args, **kwargs)
                return run_with_key(listener.exclude_key, call)
            return operator(*args, **kwargs)

        made: Any = classmethod(run)
        return made

    replaced: ReplacedMethod[TrapListener] = ReplacedMethod(
        lambda: kind, "__torch_dispatch__", make
    )
    return replaced


# ---- resized storages ----------------------------------------------------------------------------
#
# Storages that get or lose memory and live on, as those of FSDP2's gathered weights do.


class ResizeListener(Protocol):
    """Notified of every storage whose size `resize_` has changed, on the thread that did."""

    def resized(self, storage: torch.UntypedStorage, former_bytes: int) -> None:
        """Note the new size."""


def _make_resize(plain: Any) -> Callable[..., Any]:  # noqa: ANN401 - torch's method
    @untraced
    def resize_(self: torch.UntypedStorage, nbytes: int) -> Any:  # noqa: ANN401 - torch's
        former_bytes = self.nbytes()
        result = plain(self, nbytes)
        if type(former_bytes) is int and self.nbytes() != former_bytes:  # else not known yet
            for listener in resizes.listeners_of(resize_):
                listener.resized(self, former_bytes)
        return result

    return resize_


resizes: ReplacedMethod[ResizeListener] = ReplacedMethod(
    lambda: torch.UntypedStorage, "resize_", _make_resize
)

# ---- compiled regions ----------------------------------------------------------------------------
#
# Calls of inductor's code, of forwards and backwards. Its kernels are no operators of torch: they
# read operands by their address. A class of another name is not reported: weights that leave then
# raise torch's error there.

REGIONS = "torch._inductor.output_code"


class RunRegion(Protocol):
    """Calls a compiled region, on the thread that does, while its weights are on the device."""

    def __call__(
        self,
        function: Callable[..., Any],
        region: object,
        operands: Sequence[Any],
        written: Collection[int] | None,
        is_recorded: bool,  # noqa: FBT001 - in C++
        /,
    ) -> Any:  # noqa: ANN401 - torch's
        """Return what a function returns for a region and its operands.

        Args:
            function: makes the call.
            region: its first argument.
            operands: a list, which the call may empty.
            written: the places of operands that the region changes; None: not known.
            is_recorded: whether a device graph has the addresses of the operands.

        Raises:
            RuntimeError: it has, and weights among them leave the device.
        """


def _region_class() -> Any:  # noqa: ANN401 - torch's
    return getattr(sys.modules.get(REGIONS), "CompiledFxGraph", None)


def _make_region(plain: Any) -> Callable[..., Any]:  # noqa: ANN401 - torch's
    @untraced_itself
    def call(self: Any, inputs: Sequence[Any]) -> Any:  # noqa: ANN401 - torch's
        # Not by the setting of the compilation: forward and backward share it, and change it.
        is_recorded = bool(self.cudagraph_info) and not self.disabled_cudagraphs_reason
        function = plain
        for run in regions.listeners_of(call):  # the last one calls those before it
            function = functools.partial(_run_region, run, function, is_recorded)
        return function(self, inputs)

    return call


def _run_region(
    run: RunRegion,
    function: Callable[..., Any],
    is_recorded: bool,  # noqa: FBT001
    region: Any,  # noqa: ANN401 - torch's
    inputs: Sequence[Any],
) -> Any:  # noqa: ANN401 - torch's
    return run(function, region, inputs, region.mutated_input_idxs, is_recorded)


regions: ReplacedMethod[RunRegion] = ReplacedMethod(_region_class, "__call__", _make_region)

# ---- pipeline jobs -------------------------------------------------------------------------------
#
# Jobs of torch's pipeline schedules: each forward and backward of a stage is reported.

_STAGES = "torch.distributed.pipelining.stage"
_NAMES = ("forward_one_chunk", "backward_one_chunk", "backward_weight_one_chunk")


class JobListener(Protocol):
    """Notified of every job of a stage, on the thread that runs it, with no lock held."""

    def working(self, microbatch: int, place: StagePlace, /) -> AbstractContextManager[None]:
        """Return what the job runs in. `place`: of the stage."""


def _stage_class() -> Any:  # noqa: ANN401 - torch's base class of stages
    """Return the class; None: the program has no pipeline."""
    module = sys.modules.get(_STAGES)
    return None if module is None else getattr(module, "_PipelineStageBase", None)


def _place_of(stage: Any) -> StagePlace:  # noqa: ANN401 - torch's
    try:
        ranks = torch.distributed.get_process_group_ranks(stage.group)
    except (KeyError, ValueError):  # the group is destroyed: a stage alone needs none
        ranks = []
    return StagePlace((stage.stage_index,), stage.num_stages, tuple(ranks))


def _replace(name: str) -> ReplacedMethod[JobListener]:
    def make(plain: Any) -> Callable[..., Any]:  # noqa: ANN401 - torch's method
        @untraced_itself
        def run(stage: Any, *args: Any, **kwargs: Any) -> Any:  # noqa: ANN401 - torch's
            microbatch = args[0] if args else next(iter(kwargs.values()))
            with contextlib.ExitStack() as stack:
                for listener in replaced.listeners_of(run):
                    stack.enter_context(listener.working(microbatch, _place_of(stage)))
                return plain(stage, *args, **kwargs)

        return run

    replaced: ReplacedMethod[JobListener] = ReplacedMethod(_stage_class, name, make)
    return replaced


_methods = [_replace(name) for name in _NAMES]


def add(listener: JobListener) -> None:
    """Report jobs to a listener from now on."""
    for each in _methods:
        each.add(listener)


def remove(listener: JobListener) -> None:
    """Report no more jobs to a listener, whether or not it was added."""
    for each in _methods:
        each.remove(listener)
