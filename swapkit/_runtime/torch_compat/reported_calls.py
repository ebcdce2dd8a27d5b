"""Calls of torch's own classes that are reported to listeners: waits, resizes, pipeline jobs."""

from __future__ import annotations

import contextlib
import inspect
import sys
import threading
from collections.abc import Callable
from contextlib import AbstractContextManager
from typing import Any, Generic, Protocol, TypeVar

import torch.distributed

from swapkit._runtime.torch_compat.internals import work_class
from swapkit._runtime.torch_compat.isolation import untraced, untraced_itself
from swapkit.ir.traces import StagePlace

# ---- replaced methods ----------------------------------------------------------------------------
#
# Methods of torch's classes that are replaced while somebody listens: torch has no hook there.

_Listener = TypeVar("_Listener")


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
        owner = self._find_class()
        if owner is None:
            return
        with self._lock:
            self._listeners = (*self._listeners, listener)
            if self._replacement is None:
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

# ---- methods of weights --------------------------------------------------------------------------
#
# Methods that torch refuses for a weight that may leave the device: `tolist`, which also prints a
# tensor, reads memory on the CPU by its address; `new` and `new_tensor` do not know the weight's
# dispatch key. They run on a tensor that stands for the weight.


def _with(stand_in: Callable[[torch.Tensor], torch.Tensor]) -> Callable[[Any], Callable[..., Any]]:
    def make(plain: Any) -> Callable[..., Any]:  # noqa: ANN401 - torch's method
        @untraced
        def method(self: torch.Tensor, *args: Any, **kwargs: Any) -> Any:  # noqa: ANN401 - torch's
            try:
                return plain(self, *args, **kwargs)
            except RuntimeError:
                return plain(stand_in(self), *args, **kwargs)

        return method

    return make


def _copy_of(tensor: torch.Tensor) -> torch.Tensor:
    return tensor.detach().clone()


def _empty_like(tensor: torch.Tensor) -> torch.Tensor:
    return torch.empty(0, dtype=tensor.dtype, device=tensor.device)


# Listeners are only who needs them.
BY_ADDRESS: tuple[ReplacedMethod[object], ...] = (
    ReplacedMethod(lambda: torch.Tensor, "tolist", _with(_copy_of)),
    ReplacedMethod(lambda: torch.Tensor, "new", _with(_empty_like)),
    ReplacedMethod(lambda: torch.Tensor, "new_tensor", _with(_empty_like)),
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


def operators_of(kind: type) -> ReplacedMethod[TrapListener]:
    """Return the method of a wrapper's class; a subclass has its own."""

    def make(plain: Any) -> Any:  # noqa: ANN401 - of any class
        @untraced
        def run(kind: type, *args: Any, **kwargs: Any) -> Any:  # noqa: ANN401 - of any class
            operator = plain.__get__(None, kind)
            for listener in replaced.listeners_of(made)[:1]:
                was_excluded = listener.exclude_key(False)  # noqa: FBT003
                try:
                    return operator(*args, **kwargs)
                finally:
                    listener.exclude_key(was_excluded)
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
