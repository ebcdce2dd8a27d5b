"""Selective recomputation: some operators' results are kept, on the device or on the host.

In a region's first run, a dispatch mode, `RegionRecording`, keeps results. In a recomputation,
another mode, `Replaying`, returns them in the order in which each operator ran, and lets the other
operators run again. Results are kept as autograd keeps saved tensors, detached and with their
version; offloaded results move like other saved tensors.

- A returned result is dropped, unless the backward pass retains its graph.
- An operator runs again if its result is gone, or was changed in place since. The first run also
  checks the memory that operators write: the pieces of `unsafe_chunk` have their own versions, so
  the version of the whole does not count their changes.
- A kept random operator leaves the generator as in the first run, so that later operators draw the
  same numbers.
- In-place operators and views always run again: their results have no memory of their own. So do
  autocast's copies of weights, which forward may have found in autocast's cache.
- For DTensors, and for results of collectives that are not waited for yet, the modes see the
  underlying operators on plain tensors.

Source:
    torch.utils.checkpoint, selective checkpointing: policies, and results by their order.
"""

from __future__ import annotations

import enum
import itertools
from collections import defaultdict
from collections.abc import Callable, Iterator
from typing import Any, NamedTuple, TypeAlias

import torch
from torch.multiprocessing.reductions import StorageWeakRef
from torch.utils.checkpoint import CheckpointPolicy, SelectiveCheckpointContext

from swapkit._runtime.operators.effects import can_keep, effects_of
from swapkit._runtime.operators.names import Operator, is_random, matches
from swapkit._runtime.operators.settings import VERSIONS
from swapkit._runtime.recompute.watchers.operator_modes import (
    OperatorCall,
    OperatorMode,
    ReplayMode,
    inspect,
    is_tensor,
)
from swapkit._runtime.shim.types import SavedTensor
from swapkit._runtime.torch_compat.internals import ExcludeKey, keeps_graph, pytree, storage_address
from swapkit._runtime.torch_compat.wrappers import is_plain
from swapkit.errors import InvalidArgument, RecomputeMismatch, SavedTensorModified
from swapkit.registry import Recompute


class ResultDecision(enum.Enum):
    """The choice for an operator's result: recompute, keep or offload it."""

    AGAIN = "again"
    SAVE = "save"
    OFFLOAD = "offload"


# Decides for one call of an operator: the operator, its arguments, and its results.
Decide: TypeAlias = "Callable[[Operator, tuple[Any, ...], dict[str, Any], Any], ResultDecision]"

_BY_NAME = {
    "MUST_SAVE": ResultDecision.SAVE,
    "PREFER_SAVE": ResultDecision.SAVE,
    "MUST_RECOMPUTE": ResultDecision.AGAIN,
    "PREFER_RECOMPUTE": ResultDecision.AGAIN,
    "MUST_CPU_OFFLOAD": ResultDecision.OFFLOAD,  # not in every version of torch
    "PREFER_CPU_OFFLOAD": ResultDecision.OFFLOAD,
}
_GONE: list[SavedTensor | object] = []


class ResultSelection:
    """Decides which results are kept: first by `save`, then by `offload`, then by the policy."""

    def __init__(self, terms: Recompute) -> None:
        """Store the terms.

        Raises:
            InvalidArgument: a name matches no operator, or one whose results cannot be kept.
        """
        self._is_saved = matches(terms.save)
        self._is_offloaded = matches(terms.offload)
        self._policy = terms.policy
        self.offloads = bool(terms.offload) or terms.policy is not None

    def is_candidate(self, operator: Operator) -> bool:
        """Return whether an operator's results may be kept; the answer never changes."""
        if not can_keep(operator):
            return False
        return self._policy is not None or self._is_saved(operator) or self._is_offloaded(operator)

    def decide(
        self,
        operator: Operator,
        args: tuple[Any, ...],
        kwargs: dict[str, Any],
        results: Any,  # noqa: ANN401 - whatever the operator returns
    ) -> ResultDecision:
        """Decide for one call of a candidate.

        Raises:
            InvalidArgument: the policy returned no valid decision.
        """
        if self._is_saved(operator):
            return ResultDecision.SAVE
        if self._is_offloaded(operator):
            return ResultDecision.OFFLOAD
        assert self._policy is not None
        context = SelectiveCheckpointContext(is_recompute=False)
        context.op_output = results
        answer = self._policy(context, operator, *args, **kwargs)
        if isinstance(answer, bool):
            return ResultDecision.SAVE if answer else ResultDecision.AGAIN
        if isinstance(answer, CheckpointPolicy):
            return _BY_NAME[answer.name]
        raise InvalidArgument(
            f"the policy returned {answer!r} for {operator}: expected a CheckpointPolicy or a bool"
        )


# ---- keeping -------------------------------------------------------------------------------------


def _storages(leaves: list[Any]) -> Iterator[torch.UntypedStorage]:
    for leaf in leaves:
        if is_plain(leaf):
            yield leaf.untyped_storage()


class _CallResults:
    """The results of one call of an operator."""

    __slots__ = ("form", "generator", "parts", "spec")

    def __init__(
        self,
        form: tuple[object, ...],
        results: object,
        pack: Callable[[torch.Tensor], SavedTensor],
        generator: tuple[torch.device, torch.Tensor] | None,
    ) -> None:
        self.form = form
        self.generator = generator
        leaves, self.spec = pytree.tree_flatten(results)
        # Below autograd, the kept aliases would not share the results' version counters; they must.
        with ExcludeKey(VERSIONS, False):  # noqa: FBT003
            self.parts: list[SavedTensor | object] = [
                pack(leaf.detach()) if is_tensor(leaf) else leaf for leaf in leaves
            ]


class Keeper(NamedTuple):
    """The functions that keep results and return them."""

    save: Callable[[torch.Tensor], SavedTensor]
    offload: Callable[[torch.Tensor], SavedTensor]
    unpack: Callable[[SavedTensor], torch.Tensor]
    handle_types: tuple[type, ...]
    preserves_random_state: bool


class Log:
    """The results that a region's first run kept: by operator, in the order of its runs."""

    def __init__(self, keeper: Keeper) -> None:
        self.keeper = keeper
        self.calls: defaultdict[Operator, list[_CallResults | None]] = defaultdict(list)
        self.is_complete = False
        # Recomputations under way, if backward runs inside of the first run.
        self.replays: set[OperatorMode] = set()
        # Results kept in the first run, by storage. While the weak reference exists, no other
        # storage gets this address, even if the kept storage is on the host.
        self._by_storage: dict[int, tuple[StorageWeakRef, list[_CallResults]]] = {}

    def note(
        self,
        operator: Operator,
        call: OperatorCall,
        decision: ResultDecision,
        results: object,
        generator: tuple[torch.device, torch.Tensor] | None,
    ) -> None:
        """Note a call of an operator; keep its results unless the decision is AGAIN."""
        if decision is ResultDecision.AGAIN:
            self.calls[operator].append(None)
            return
        pack = self.keeper.offload if decision is ResultDecision.OFFLOAD else self.keeper.save
        kept = _CallResults(call.form, results, pack, generator)
        self.calls[operator].append(kept)
        for storage in _storages(pytree.tree_leaves(results)):
            reference = StorageWeakRef(storage)  # type: ignore[no-untyped-call]
            self._by_storage.setdefault(reference.cdata, (reference, []))[1].append(kept)

    def note_written(self, tensors: list[torch.Tensor]) -> None:
        """Drop the results kept in memory that an operator of the first run changes."""
        for storage in _storages(tensors):
            _, changed = self._by_storage.pop(storage_address(storage), (None, ()))
            for kept in changed:
                kept.parts = _GONE

    def end(self) -> None:
        """Note that the first run has ended."""
        self.is_complete = True
        self._by_storage.clear()

    def give(self, kept: _CallResults) -> object:
        """Return kept results, and drop them if no later recomputation needs them."""
        parts, spec = kept.parts, kept.spec
        # Aliases without autograd history: each recomputation records its own.
        leaves = [
            self.keeper.unpack(part).detach()  # type: ignore[arg-type]
            if isinstance(part, self.keeper.handle_types)
            else part
            for part in parts
        ]
        if self.is_complete and not keeps_graph():
            kept.parts = _GONE
        if kept.generator is not None and self.keeper.preserves_random_state:
            _set_random_state(*kept.generator)
        return pytree.tree_unflatten(leaves, spec)


class RegionRecording(OperatorMode):
    """Watches a region's first run, and keeps results."""

    def __init__(self, log: Log, is_candidate: Callable[[Operator], bool], decide: Decide) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self._log = log
        self._is_candidate = is_candidate
        self._decide = decide

    def run(self, func: Operator, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:  # noqa: ANN401
        """Run an operator."""
        results = func(*args, **kwargs)
        if self._log.replays:
            return results
        effects = effects_of(func)
        if not effects.is_wait and (written := effects.written(args, kwargs)):
            self._log.note_written(written)
        if not self._is_candidate(func):
            return results
        call = inspect(func, args, kwargs)
        if call.is_abstract or call.is_weight_cast:
            return results
        decision = self._decide(func, args, kwargs, results)
        generator = None
        if decision is not ResultDecision.AGAIN and is_random(func):
            generator = _random_state(args, kwargs, results)
        self._log.note(func, call, decision, results, generator)
        return results


class Replaying(ReplayMode):  # type: ignore[no-untyped-call]
    """Returns the results that a region's first run kept. One mode for each recomputation."""

    def __init__(self, log: Log) -> None:
        super().__init__(log.replays)
        self._log = log
        self._counts: defaultdict[Operator, itertools.count[int]] = defaultdict(itertools.count)

    def run(self, func: Operator, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:  # noqa: ANN401
        """Run an operator."""
        kept = self._find(func, args, kwargs) if func in self._log.calls else None
        if kept is not None:
            try:
                return self._log.give(kept)
            except SavedTensorModified:
                kept.parts = _GONE  # the operator that changed it will run again, too
        return func(*args, **kwargs)

    def _find(
        self, operator: Operator, args: tuple[Any, ...], kwargs: dict[str, Any]
    ) -> _CallResults | None:
        call = inspect(operator, args, kwargs)
        if call.is_abstract or call.is_weight_cast:
            return None
        calls = self._log.calls[operator]
        number = next(self._counts[operator])
        if number >= len(calls):
            if not self._log.is_complete or not any(calls):
                return None
            raise RecomputeMismatch(
                f"{operator} ran {len(calls)} times in forward, and more often in recomputation, "
                f"so its kept results cannot be matched to calls. {CAUSES}"
            )
        kept = calls[number]
        if kept is None or kept.parts is _GONE:
            return None
        if kept.form != call.form:
            raise RecomputeMismatch(
                f"{operator}, call {number}: its result was kept, but recomputation calls it with "
                f"{_describe(call.form)} instead of {_describe(kept.form)}. {CAUSES}"
            )
        return kept


CAUSES = (
    "The function must do the same each time: it may depend on state that changed, on random "
    "numbers from outside torch, or on a nondeterministic operator"
)


def _describe(form: tuple[Any, ...]) -> str:
    return ", ".join(f"{dtype} {list(shape)}" for shape, dtype in form) or "no tensors"


# ---- random numbers ------------------------------------------------------------------------------


def _random_state(
    args: tuple[Any, ...], kwargs: dict[str, Any], results: object
) -> tuple[torch.device, torch.Tensor] | None:
    """Return the state of the generator that an operator used; None: it was the user's own."""
    leaves = pytree.tree_leaves((args, kwargs))
    if any(isinstance(leaf, torch.Generator) for leaf in leaves):
        return None
    device = next(leaf.device for leaf in pytree.tree_leaves(results) if is_tensor(leaf))
    if device.type == "cpu":
        return device, torch.get_rng_state()
    return device, torch.get_device_module(device.type).get_rng_state(device)


def _set_random_state(device: torch.device, state: torch.Tensor) -> None:
    if device.type == "cpu":
        torch.set_rng_state(state)
    else:
        torch.get_device_module(device.type).set_rng_state(state, device)
