"""Captured regions: the function runs once; backward runs its operators again, one by one."""

from __future__ import annotations

import contextlib
import threading
from collections.abc import Callable, Iterator
from typing import Any

import torch

from swapkit._runtime.operators.evidence import Evidence
from swapkit._runtime.process.captures import numbers_of, see_everything, see_fills
from swapkit._runtime.process.runtime import get_runtime
from swapkit._runtime.process.scopes import default_placement, innermost_placement
from swapkit._runtime.recompute.region_findings import (
    RUN_ONCE,
    RUN_TWICE,
    Known,
    RegionCall,
    RegionFinding,
    RegionWay,
)
from swapkit._runtime.recompute.surroundings import Surroundings
from swapkit._runtime.recompute.watchers.watcher import check_operators
from swapkit._runtime.saved.hooks import Around, Hooks, around_region
from swapkit._runtime.torch_compat.dispatch_modes import has_foreign_mode
from swapkit._runtime.torch_compat.internals import graph_task, top_hooks
from swapkit._runtime.torch_compat.isolation import hidden, untraced, untraced_itself
from swapkit.ir.plans import Action
from swapkit.registry import Recompute
from swapkit.units import format_bytes

# ---- fills ---------------------------------------------------------------------------------------
#
# Tensors that operators fill after autograd has saved them, such as the noise of `rrelu`.
#
# Torch's checkpoint stops a second run at the last saved tensor, which would then stay unfilled.


class Fills:
    """Tracks whether a region's first run filled saved tensors; then a rerun must go to its end."""

    def __init__(self) -> None:
        """Start before the first run."""
        self._must_end = False

    @contextlib.contextmanager
    @untraced
    def noting(self) -> Iterator[None]:
        """Note whether the first run fills saved tensors."""
        shim = get_runtime().shim
        see_fills(shim.operators_known())
        before = shim.fills_run()
        yield
        self._must_end = shim.fills_run() != before

    @contextlib.contextmanager
    @untraced
    def ending(self) -> Iterator[None]:
        """Save a dummy tensor at the end of a run, so that torch does not stop it earlier."""
        pair = top_hooks(True)  # noqa: FBT003
        assert pair is not None  # torch's checkpoint has pushed its own pair
        yield
        if self._must_end:
            with hidden():
                nothing = torch.empty(0)
            pair[0](nothing)


# ---- captured ------------------------------------------------------------------------------------
#
# Captured regions: the function runs once; backward runs its operators again, one by one.
#
# While a region runs, the shim captures each repeatable operator as it runs
# (`shim/cpp/recompute/regions.hpp`). Saved results of these operators are recomputed from the
# captures. So the function itself and its side effects run once. Results that cannot be recomputed
# are kept.
#
# In a session or a recorded step, two kinds of tensors go to the hooks that count events: saved
# tensors that the region has not made, and operands of recomputed operators. So they move like
# other saved tensors, and later steps have the events of the recorded step. A recomputation is no
# event; a recorder sees it as a part of backward.
#
# Capture does not suit every function. Kernels that torch does not see may write to memory. Where
# much is kept, running the whole function again needs less memory. So the first run of a function,
# for each kind of arguments, is checked (`operators/evidence.py`) and drops nothing before its end.
# The finding holds for later runs: they are captured, or run twice, as in torch's checkpoint, or
# keep everything. A function that changes what is outside of it (`surroundings.py`) never runs
# twice. A warning says what is not as usual.

# How much may be kept without the user's choice: bytes, and a share of the recomputed bytes.
_LITTLE_BYTES = 1 << 16
_SHARE = 1 / 32

UNSEEN = "a kernel hidden from torch writes to its memory"


class Captured:
    """One captured call of a region."""

    @untraced
    def __init__(
        self, call: RegionCall, terms: Recompute, around: Around, *, is_first: bool
    ) -> None:
        """Prepare the call. `is_first`: no finding exists yet for such calls."""
        runtime = get_runtime()
        swapper = runtime.current_swapper()
        placement, scope = default_placement(swapper), innermost_placement()
        is_kept = scope is not None and scope.action is Action.KEEP
        see_everything()
        self._call = call
        self._region = runtime.shim.region(
            swapper.mover.packer(placement),
            around.pack,
            None if is_kept else around.events,
            numbers_of(terms.save) if terms.save else (),
            call.tensors,
        )
        self._hooks = Hooks(swapper, placement, region=self._region)
        self._is_first = is_first
        self._surroundings: Surroundings | None = None
        self._look: Evidence | None = None  # its own
        self._evidence: Evidence | None = None  # its own or, for an inner region, the outer one's

    @untraced_itself
    def run(self) -> Any:  # noqa: ANN401 - whatever the function returns
        """Run the call."""
        call = self._call
        drops = False
        try:
            self._begin()
            result = call.function(*call.args, **call.kwargs)
            is_outside = self._changes_outside()
            drops = self._may_drop()
        finally:
            # A signal handler may raise in any Python function, so the last step is a C++ one.
            try:
                self._leave()
            finally:
                sums = self._region.end(drops)
        self._learn(sums, has_changed=not drops, is_outside=is_outside)
        return result

    @untraced
    def _begin(self) -> None:
        self._region.begin(self._is_first)
        self._hooks.enter()
        if not self._is_first:
            return
        call = self._call
        self._surroundings = Surroundings((call.function, call.args, call.kwargs))
        if _looks.evidence is None:
            self._look = Evidence(self._surroundings.tensors())
            _looks.begin(self._look)

    @untraced
    def _changes_outside(self) -> bool:
        """Return whether the run has changed what a second run would change again."""
        return self._surroundings is not None and self._surroundings.have_changed()

    @untraced
    def _may_drop(self) -> bool:
        """Return whether every write to memory was seen, so that the region may drop tensors."""
        if self._look is not None:
            _looks.end(self._look)
            self._evidence = self._look
        elif self._region.holds:
            self._evidence = _looks.evidence  # covers the run so far
        return self._evidence is None or not self._evidence.has_changed()

    @untraced
    def _leave(self) -> None:
        if self._look is not None:
            _looks.end(self._look)
        self._hooks.leave()

    @untraced
    def _learn(self, sums: tuple[int, int, int], *, has_changed: bool, is_outside: bool) -> None:
        kept_bytes, again_bytes, moved = sums
        if self._evidence is not None and self._evidence.draws:
            _known.note_draws(self._call)
        reason = UNSEEN if has_changed else self._why_much(kept_bytes, again_bytes)
        if reason and self._is_first:
            self._decide(reason, has_changed=has_changed, is_outside=is_outside)
        elif reason:
            _known.doubt(self._call)  # the next run is checked
        elif self._evidence is not None and not moved:  # what was moved could not be checked
            _known.note(self._call, RegionFinding(RegionWay.CAPTURED))

    def _why_much(self, kept_bytes: int, again_bytes: int) -> str:
        """Return why the region keeps much; no text: it does not, or no second run would help."""
        is_little = kept_bytes <= max(_LITTLE_BYTES, _SHARE * again_bytes)
        if is_little or _known.draws(self._call):
            return ""
        return f"operators alone cannot recompute {format_bytes(kept_bytes)} of it"

    def _decide(self, reason: str, *, has_changed: bool, is_outside: bool) -> None:
        """Let the function run twice, unless that would change more than one run."""
        if not is_outside:
            _known.note(self._call, RegionFinding(RegionWay.TWICE, reason))
            _known.warn(self._call, f"runs a second time in backward, since {reason}. {RUN_ONCE}")
        elif _known.was_outside(self._call):
            way = RegionWay.KEPT if has_changed else RegionWay.CAPTURED
            _known.note(self._call, RegionFinding(way, is_settled=True))
            _known.warn(self._call, f"keeps more than a second run would: {reason}. {RUN_TWICE}")
        # Else look again: its very first call may only have filled a cache of its own.


class _Looks(threading.local):
    """The `Evidence` of this thread's outermost first run."""

    evidence: Evidence | None = None

    def begin(self, evidence: Evidence) -> None:
        self.evidence = evidence
        evidence.__enter__()

    def end(self, evidence: Evidence) -> None:
        if self.evidence is evidence:
            self.evidence = None
        evidence.leave()


_looks = _Looks()


_known = Known()


def why_twice(terms: Recompute, owner: object) -> str:
    """Return why calls of a module or function run twice; no text: no known reason."""
    return _known.reason_for(owner) if _is_simple(terms) else "its options require it"


@untraced
def capture(
    terms: Recompute,
    function: Callable[..., Any],
    args: tuple[Any, ...],
    kwargs: dict[str, Any],
) -> Captured | RegionCall | None:
    """Return what runs the call; None: the function runs twice, as in torch's checkpoint."""
    if not _is_simple(terms) or graph_task() != -1 or has_foreign_mode(may_record=True):
        return None
    check_operators(terms)
    around = around_region()
    if around is None:
        return None
    call = RegionCall(function, args, kwargs, terms.save)
    found = _known.find(call)
    if found is not None and found.way is not RegionWay.CAPTURED:
        return None if found.way is RegionWay.TWICE else call
    return Captured(call, terms, around, is_first=found is None)


def _is_simple(terms: Recompute) -> bool:
    """Return whether no term requires the function to run twice."""
    is_alone = terms.slice_group is None and not terms.check_values
    is_by_name = terms.policy is None and not terms.offload
    distributed = torch.distributed
    is_one_of_many = (
        distributed.is_available()
        and distributed.is_initialized()
        and distributed.get_world_size() > 1
    )
    return is_alone and is_by_name and not is_one_of_many
