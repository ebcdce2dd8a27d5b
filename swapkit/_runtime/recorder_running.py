"""Running a recorded operator: its time, and memory for it where nobody else makes any."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import torch

from swapkit._runtime.recompute.random_states import may_be_random

if TYPE_CHECKING:
    from collections.abc import Callable

    from swapkit._runtime.operators import Operator
    from swapkit._runtime.recorder_clocks import Timer


def run_timed(
    timer: Timer,
    call: tuple[Operator, tuple[Any, ...], dict[str, Any]],
    make_room: Callable[[], int] | None,
    *,
    is_same: bool,
) -> tuple[Any, Any]:
    """Run an operator; return what it returned, and what stands for its time.

    Args:
        timer: takes the time of the run that succeeds.
        call: the operator and its arguments.
        make_room: frees memory of the device and returns how much: the operator runs again after
            it. None: whoever allocates has freed all that there is.
        is_same: a repetition has the same effect, but for random numbers.
    """
    function, args, kwargs = call
    while True:
        timer.expect(function)
        begun = timer.begin()
        try:
            result = function(*args, **kwargs)
        except torch.OutOfMemoryError:
            timer.abandon()
            if make_room is None or not is_same or may_be_random(function) or make_room() == 0:
                raise
        except BaseException:
            timer.abandon()
            raise
        else:
            return result, timer.end(begun, call, result)
