"""Watchers of a region's runs: they keep results of operators, and compare values.

A region that keeps and compares nothing has no watcher, and costs the same as torch's checkpoint.
"""

from __future__ import annotations

import contextlib
import functools
from collections.abc import Iterator
from typing import Any

import torch

from swapkit._runtime.operators.effects import can_keep
from swapkit._runtime.operators.names import Operator, find_operators, matches
from swapkit._runtime.process.scopes import default_placement
from swapkit._runtime.recompute.watchers.digests import RegionDigests
from swapkit._runtime.recompute.watchers.operator_modes import RepeatedCollectives, is_collective
from swapkit._runtime.recompute.watchers.selection import (
    Keeper,
    Log,
    RegionRecording,
    Replaying,
    ResultDecision,
    ResultSelection,
)
from swapkit._runtime.saved.swapper import Swapper
from swapkit._runtime.saved.taken_apart import TakenApart
from swapkit._runtime.shim.types import Placement
from swapkit._runtime.torch_compat.dispatch_modes import DispatchMode, entered
from swapkit._runtime.torch_compat.isolation import untraced
from swapkit.config.environment import read_environment
from swapkit.errors import InvalidArgument
from swapkit.ir.plans import Action
from swapkit.registry import Collectives, Recompute


def check_operators(terms: Recompute) -> None:
    """Refuse terms that name missing operators, or operators whose results cannot be kept.

    Raises:
        InvalidArgument: the terms do; the message names the operator and a remedy.
    """
    _check_operators((*terms.save, *terms.offload))


@functools.lru_cache(maxsize=256)
def _check_operators(names: tuple[object, ...]) -> None:
    matches(names)
    for name in names:
        found = list(find_operators(name))
        if found and not any(map(can_keep, found)):
            raise InvalidArgument(
                f"{name}: an operator that changes a tensor in place or returns a view has no "
                "result of its own to keep. Name the operator that produces that tensor"
            )


class RegionWatcher:
    """The modes that watch a region's runs, and their notes."""

    def __init__(
        self,
        swapper: Swapper,
        module: torch.nn.Module | None,
        keeping: _Keeping | None,
        digests: RegionDigests | None,
    ) -> None:
        self._swapper = swapper
        self._name = "" if module is None else swapper.shared.tracker.name_of(module)
        self._keeping = keeping
        self._digests = digests

    @contextlib.contextmanager
    @untraced
    def watching(self) -> Iterator[None]:
        """Watch the first run."""
        modes: list[DispatchMode] = []
        if self._keeping is not None:
            modes.append(self._keeping.recording())
        if self._digests is not None:
            modes.append(self._digests.recording())  # innermost, so that it sees every operator
        with self._named(), entered(modes):
            yield
        if self._digests is not None:
            self._digests.is_complete = True
        if self._keeping is not None:
            self._keeping.log.end()
            if self._keeping.offloads:
                self._swapper.end_scope()

    @contextlib.contextmanager
    @untraced
    def replaying(self) -> Iterator[None]:
        """Watch a recomputation."""
        modes: list[DispatchMode] = []
        if self._keeping is not None:
            modes.append(self._keeping.replaying())
        comparing = None if self._digests is None else self._digests.comparing()
        if comparing is not None:
            modes.append(comparing)
        with entered(modes):
            yield
            if comparing is not None:
                comparing.end()

    @contextlib.contextmanager
    @untraced
    def _named(self) -> Iterator[None]:
        """Tell the tracker which module runs."""
        tracker = self._swapper.shared.tracker
        user = object()
        entered_as = None
        try:
            tracker.start(user)
            if self._name and not tracker.name(tracker.current()):
                entered_as = tracker.enter_operator(self._name)
            yield
        finally:
            if entered_as is not None:
                tracker.leave_operator(entered_as)
            tracker.stop(user)


class _Keeping:
    """The choice of results to keep, and the log that keeps them."""

    def __init__(
        self, log: Log, selection: ResultSelection, repetition: RepeatedCollectives | None
    ) -> None:
        self.log = log
        self.offloads = selection.offloads
        self._selection = selection
        self._repetition = repetition

    def recording(self) -> DispatchMode:
        """Return the mode of the first run."""
        return RegionRecording(self.log, self._is_candidate, self._decide)

    def replaying(self) -> DispatchMode:
        """Return the mode of one recomputation."""
        return Replaying(self.log)

    def _is_candidate(self, operator: Operator) -> bool:
        if self._repetition is not None and is_collective(operator):
            return True
        return self._selection.is_candidate(operator)

    def _decide(
        self,
        operator: Operator,
        args: tuple[Any, ...],
        kwargs: dict[str, Any],
        results: Any,  # noqa: ANN401 - whatever the operator returns
    ) -> ResultDecision:
        if self._repetition is not None and is_collective(operator):
            return (
                ResultDecision.SAVE
                if self._repetition.is_kept(operator, args)
                else ResultDecision.AGAIN
            )
        return self._selection.decide(operator, args, kwargs, results)


@untraced
def make_watcher(
    terms: Recompute, swapper: Swapper, module: torch.nn.Module | None
) -> RegionWatcher | None:
    """Return the watcher of a region; None: the region needs none."""
    keeping: _Keeping | None = None
    digests: RegionDigests | None = None
    repetition: RepeatedCollectives | None = None
    if _has_rules(terms.collectives):
        repetition = RepeatedCollectives(terms.collectives, swapper, module)
    if not terms.is_full or repetition is not None:
        keeping = _make_keeping(terms, swapper, repetition)
    if terms.check_values:
        digests = RegionDigests(swapper.shared.tracker)
    if keeping is None and digests is None:
        return None
    return RegionWatcher(swapper, module, keeping, digests)


def _make_keeping(
    terms: Recompute, swapper: Swapper, repetition: RepeatedCollectives | None
) -> _Keeping:
    check_operators(terms)
    keeper = Keeper(
        save=swapper.packer(default_placement(swapper)),
        offload=swapper.packer(Placement(Action.SWAP, min_bytes=read_environment().min_swap_bytes)),
        unpack=swapper.unpack,
        handle_types=(swapper.shared.shim.saved_tensor, TakenApart),  # type: ignore[arg-type]
        preserves_random_state=terms.preserve_rng_state,
    )
    return _Keeping(Log(keeper), ResultSelection(terms), repetition)


def _has_rules(collectives: Collectives) -> bool:
    """Return whether any collective's results may be kept."""
    if not (torch.distributed.is_available() and torch.distributed.is_initialized()):
        return False  # no collectives run
    return bool(not collectives.repeat or not collectives.repeat_weights or collectives.keep_in)
