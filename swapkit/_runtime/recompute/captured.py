"""Captured regions: the function runs once; backward runs its operators again, one by one.

While a region runs, the shim captures each repeatable operator as it runs
(`shim/cpp/recompute/regions.hpp`). Saved results of these operators are recomputed from the
captures. So the function itself and its side effects run once. Results that cannot be recomputed
are kept.

In a session or a recorded step, two kinds of tensors go to the hooks that count events: saved
tensors that the region has not made, and operands of recomputed operators. So they move like other
saved tensors, and later steps have the events of the recorded step. A recomputation is no event; a
recorder sees it as a part of backward.

Capture does not suit every function. Kernels that torch does not see may write to memory. Where
much is kept, running the whole function again needs less memory. So the first run of a function,
for each kind of arguments, is checked (`operators/evidence.py`) and drops nothing before its end.
The finding holds for later runs: they are captured, or run twice, as in torch's checkpoint, or keep
everything. A function that changes what is outside of it (`surroundings.py`) never runs twice. A
warning says what is not as usual.
"""

from __future__ import annotations

import contextlib
import enum
import functools
import threading
import warnings
import weakref
from collections import OrderedDict
from typing import TYPE_CHECKING, Any, NamedTuple, TypeVar

import torch

from swapkit._runtime.operators.evidence import Evidence
from swapkit._runtime.process.captures import numbers_of, see_everything
from swapkit._runtime.process.runtime import get_runtime
from swapkit._runtime.process.scopes import default_placement, innermost_placement
from swapkit._runtime.recompute.arguments import Template
from swapkit._runtime.recompute.kinds import kind_of, kind_of_tensor, number_of, options_of
from swapkit._runtime.recompute.surroundings import Surroundings
from swapkit._runtime.recompute.watchers.watcher import check_operators
from swapkit._runtime.saved.hooks import Hooks, around_region
from swapkit._runtime.torch_compat.dispatch_modes import has_foreign_mode
from swapkit._runtime.torch_compat.internals import graph_task
from swapkit._runtime.torch_compat.isolation import untraced, untraced_itself
from swapkit.ir.plans import Action
from swapkit.units import format_bytes

if TYPE_CHECKING:
    from collections.abc import Callable, Hashable

    from swapkit._runtime.saved.hooks import Around
    from swapkit.registry import Recompute

_Value = TypeVar("_Value")

# How much may be kept without the user's choice: bytes, and a share of the recomputed bytes.
_LITTLE_BYTES = 1 << 16
_SHARE = 1 / 32
_MOST_KNOWN = 4096  # findings: one for each function and kind of arguments

UNSEEN = "a kernel hidden from torch writes to its memory"
_RUN_ONCE = (
    "Its results and gradients do not change, but side effects happen twice that swapkit does not "
    "see, such as output. To let it run once, keep what it saves: swapkit.keep(module)"
)
_RUN_TWICE = (
    "It does not run a second time, since it changes objects or tensors outside of itself. To save "
    "the memory, make these changes outside of the part, or let it run twice, as torch's "
    "checkpoint would: swapkit.checkpoint(module, check_values=True)"
)


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
            is_first,
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
        self._region.begin()
        self._hooks.enter()
        if self._is_first:
            call = self._call
            self._surroundings = Surroundings((call.function, call.args, call.kwargs))
        if self._is_first and _looks.evidence is None:
            self._look = Evidence()
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
        is_much = kept_bytes > max(_LITTLE_BYTES, _SHARE * again_bytes)
        reason = ""
        if has_changed:
            reason = UNSEEN
        elif is_much and not _known.draws(self._call):
            reason = f"operators alone cannot recompute {format_bytes(kept_bytes)} of it"
        if reason and self._is_first:
            self._decide(reason, has_changed=has_changed, is_outside=is_outside)
        elif reason:
            _known.doubt(self._call)  # the next run is checked
        elif self._evidence is not None and not moved:  # what was moved could not be checked
            _known.note(self._call, Finding(Way.CAPTURED))

    def _decide(self, reason: str, *, has_changed: bool, is_outside: bool) -> None:
        """Let the function run twice, unless that would change more than one run."""
        if not is_outside:
            _known.note(self._call, Finding(Way.TWICE, reason))
            _warn(self._call, f"runs a second time in backward, since {reason}. {_RUN_ONCE}")
        elif _known.was_outside(self._call):
            way = Way.KEPT if has_changed else Way.CAPTURED
            _known.note(self._call, Finding(way, is_settled=True))
            _warn(self._call, f"keeps more memory than a second run would: {reason}. {_RUN_TWICE}")
        # Else look again: its very first call may only have filled a cache of its own.


class _Looks(threading.local):
    """The `Evidence` of this thread's outermost first run."""

    evidence: Evidence | None = None

    def begin(self, evidence: Evidence) -> None:
        self.evidence = evidence
        evidence.__enter__()  # type: ignore[no-untyped-call]

    def end(self, evidence: Evidence) -> None:
        if self.evidence is evidence:
            self.evidence = None
        evidence.leave()


_looks = _Looks()


class RegionCall:
    """A call of a function, its tensors, and a key for its kind."""

    __slots__ = ("args", "function", "key", "kwargs", "tensors")

    def __init__(
        self,
        function: Callable[..., Any],
        args: tuple[Any, ...],
        kwargs: dict[str, Any],
        save: tuple[Any, ...],
    ) -> None:
        self.function = function
        self.args = args
        self.kwargs = kwargs
        self.tensors: list[torch.Tensor] = []
        kinds: list[Hashable] = [kind_of(function), save, tuple(kwargs)]
        kinds.append(torch.is_autocast_enabled())
        others: list[object] = [function] if type(function) is functools.partial else []
        for value in (*args, *kwargs.values()):
            if isinstance(value, torch.Tensor):
                self.tensors.append(value)
                continue
            kinds.append(kind_of(value))
            if not isinstance(value, (torch.nn.Module, int, float, str, type(None))):
                others.append(value)
        if others:
            self.tensors += Template(others).take_tensors()
        kinds += map(kind_of_tensor, self.tensors)
        self.key = tuple(kinds)

    @untraced_itself
    def run(self) -> Any:  # noqa: ANN401 - whatever the function returns
        """Run the call as without a choice."""
        return self.function(*self.args, **self.kwargs)

    @property
    def owner(self) -> object:
        """The module or function that is called."""
        return _owner_of(self.function, self.args)


def _owner_of(function: Any, args: tuple[Any, ...]) -> object:  # noqa: ANN401
    while isinstance(function, functools.partial):
        args = (*function.args, *args)
        function = function.func
    for owner in (function, getattr(function, "__self__", None), *args[:1]):
        if isinstance(owner, torch.nn.Module):
            return owner
    return function


# ---- findings ------------------------------------------------------------------------------------


class Way(enum.Enum):
    """How calls of a part run."""

    CAPTURED = enum.auto()
    TWICE = enum.auto()  # as in torch's checkpoint
    KEPT = enum.auto()  # as without a choice: nothing is recomputed


class Finding(NamedTuple):
    """What was found about calls. `is_settled`: it holds whatever they keep."""

    way: Way
    reason: str = ""
    is_settled: bool = False


class _Known:
    """The findings about calls. Any thread; single operations on dictionaries need no lock."""

    def __init__(self) -> None:
        self._found: OrderedDict[Hashable, Finding] = OrderedDict()
        self._reasons: weakref.WeakKeyDictionary[Any, str] = weakref.WeakKeyDictionary()
        self._alike: OrderedDict[Hashable, Finding] = OrderedDict()  # by `_form` of the module
        # Calls that draw from a user's generator: a second run would draw other numbers.
        self._drawing: OrderedDict[Hashable, None] = OrderedDict()
        # Calls that have changed what is outside of them, and those that were warned of.
        self._outside: OrderedDict[Hashable, None] = OrderedDict()
        self._warned: OrderedDict[Hashable, None] = OrderedDict()

    def find(self, call: RegionCall) -> Finding | None:
        """Return how such calls run; None: no finding yet."""
        found = self._found.get(call.key)
        if found is None:
            found = self._alike.get(_form(call.owner))
            if found:
                self.note(call, found)
        return found

    def note(self, call: RegionCall, finding: Finding) -> None:
        """Note the finding about a call."""
        _put(self._found, call.key, finding)
        if finding.reason:
            _put(self._alike, _form(call.owner), finding)
            self._note_reason(call.owner, finding.reason)

    def doubt(self, call: RegionCall) -> None:
        """Forget the finding about a call, unless it is settled."""
        found = self._found.get(call.key)
        if found is not None and not found.is_settled:
            self._found.pop(call.key, None)

    def was_outside(self, call: RegionCall) -> bool:
        """Note that a call has changed what is outside of it; return whether another had."""
        was = call.key in self._outside
        _put(self._outside, call.key, None)
        return was

    def warns_of(self, call: RegionCall) -> bool:
        """Return whether calls of this form were not warned of yet, and note that they are."""
        form = _form(call.owner)
        is_new = form not in self._warned
        _put(self._warned, form, None)
        return is_new

    def _note_reason(self, owner: Any, reason: str) -> None:  # noqa: ANN401
        with contextlib.suppress(TypeError):  # the owner allows no weak reference
            self._reasons[owner] = reason

    def note_draws(self, call: RegionCall) -> None:
        """Note that a call draws from a generator of the user's."""
        _put(self._drawing, call.key, None)

    def draws(self, call: RegionCall) -> bool:
        """Return whether such calls draw from a generator of the user's."""
        return call.key in self._drawing

    def reason_for(self, owner: object) -> str:
        """Return why calls of a module or function have run twice; no text: none have."""
        try:
            return self._reasons.get(owner, "")
        except TypeError:
            return ""


def _put(found: OrderedDict[Hashable, _Value], key: Hashable, value: _Value) -> None:
    found[key] = value
    with contextlib.suppress(KeyError):  # another thread removed the last entry
        if len(found) > _MOST_KNOWN:
            found.popitem(last=False)


_known = _Known()


def _warn(call: RegionCall, text: str) -> None:
    """Warn of what a choice of recomputation does to a part, once for parts of one form."""
    if _known.warns_of(call):
        owner = call.owner
        kind = owner if callable(getattr(owner, "__get__", None)) else type(owner)
        name = getattr(kind, "__qualname__", type(owner).__qualname__)
        warnings.warn(f"swapkit.checkpoint: {name} {text}", stacklevel=2)


def _form(owner: object) -> Hashable:
    """Return a key for a module's structure: modules with equal keys share findings."""
    if not isinstance(owner, torch.nn.Module):
        return kind_of(owner)
    return tuple((number_of(type(each)), options_of(each)) for each in owner.modules())


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
    if found is not None and found.way is not Way.CAPTURED:
        return None if found.way is Way.TWICE else call
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
