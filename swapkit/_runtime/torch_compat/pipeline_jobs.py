"""Jobs of torch's pipeline schedules: each forward and backward of a stage is reported."""

from __future__ import annotations

import contextlib
import sys
from typing import TYPE_CHECKING, Any, Protocol

import torch.distributed

from swapkit._runtime.torch_compat.isolation import untraced_itself
from swapkit._runtime.torch_compat.replaced_methods import ReplacedMethod
from swapkit.ir.stages import StagePlace

if TYPE_CHECKING:
    from collections.abc import Callable
    from contextlib import AbstractContextManager

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
