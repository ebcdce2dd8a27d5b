"""What operators do besides returning results: the one place that decides what may run twice.

A schema declares most of it: which arguments an operator writes to, and which results are views of
its arguments. Not everything is declared. A batch norm in training mode updates its running
statistics, collectives meet other ranks and write to their outputs, and others keep a state of
their own. Whoever repeats, keeps or settles results asks here, and nowhere else.

A rule goes by what an operator's schema has (names and types of arguments, tags) rather than by the
name of the operator, so that it holds for the operators of every backend. `tests/conformance` runs
torch's own database of operators and fails on an effect that no rule knows.
"""

from __future__ import annotations

import functools
import re
from typing import TYPE_CHECKING, Any, NamedTuple

import torch

from swapkit._runtime.torch_compat.internals import (
    HigherOrderOperator,
    pytree,
    schema_of,
    side_effects,
    simple_registry,
    storage_address,
)
from swapkit._runtime.torch_compat.plain_tensors import is_plain

if TYPE_CHECKING:
    from collections.abc import Iterable, Sequence

    from swapkit._runtime.operators.names import Operator

# Operators that meet other ranks. All ranks must run them equally often, in one order.
FUNCTIONAL = "_c10d_functional"
_COMMUNICATION = frozenset(
    {
        *("c10d", "c10d_functional", FUNCTIONAL, "_c10d_functional_autograd"),
        *("_dtensor", "symm_mem", "fsdp"),
    }
)
# The same by an argument that says with whom: collectives of vendors and of users.
_GROUPS = frozenset(
    {
        *("group", "group_name", "process_group", "group_ep", "group_tp"),
        *("hcom", "hcom_info", "comm", "communicator"),
    }
)
_OBJECT = "__torch__.torch.classes"  # an object of C++, which may have a state

# Operators of these namespaces that declare nothing fill what they are given, unless its name says
# that it is an input. The count of its versions stays as it is.
_FILLING = frozenset({"c10d", "fsdp"})
_INPUT = "input"
_SENDING = frozenset({"send", "barrier", "monitored_barrier_", "check_for_nan"})
# These end what another one has begun: until then their argument is written to.
_WAITING = frozenset({"wait_tensor", "irecv", "batch_p2p_ops"})

# Written where they are given, unless a flag is off. A functional form returns them instead, and
# a backward only reads them.
_STATISTICS = frozenset({"running_mean", "running_var", "running_min", "running_max"})
_TRAINING = frozenset({"training", "train", "is_training", "use_input_stats"})
_READING = ("backward", "no_training", "no_update", "functional")
_OTHERS = frozenset({("mkldnn_rnn_layer_backward", "workspace")})
_NOISE = "noise"  # drawn by the operator that is given it
_CHANCE = "dropout_p"
_DROPOUT_STATE = "dropout_state"  # random numbers that no generator has
# Of torch's own normalisations it is known that their results come from the batch alone while they
# update the statistics.
_TORCH = "aten"

# Tensors of the same memory, which these do not declare: `linear` ends with the first.
_VIEWS = frozenset(
    {
        torch.ops.aten._unsafe_view.default,  # noqa: SLF001 - an operator's name
        torch.ops.aten.unsafe_split.Tensor,
        torch.ops.aten.unsafe_split_with_sizes.default,
    }
)
# Memory that a kernel may fill that is no operator of torch, such as one in Triton: nothing shows
# that. A repetition would return the memory as it was before. Other results may be overwritten in
# that way, too: where a step is recorded, `recording/tables/kept_bytes.py` finds those.
_UNFILLED = re.compile(r"(new_)?(_?empty|zeros|ones|full)(_.*)?")
# A repetition has other bits: a part of the results is never written; or, of `lstsq`, LAPACK reads
# memory that nobody has written; or, of the last, an argument that is read is overwritten.
_INEXACT = frozenset(
    {
        *("mkldnn_rnn_layer", "_ctc_loss", "_sparse_mm_reduce_impl", "linalg_lstsq"),
        "mkldnn_rnn_layer_backward",
    }
)


class _Argument(NamedTuple):
    """An argument of an operator."""

    position: int
    name: str

    def value(self, args: Sequence[Any], kwargs: dict[str, Any]) -> Any:  # noqa: ANN401
        """Return what a call has for it; None: nothing."""
        return args[self.position] if self.position < len(args) else kwargs.get(self.name)


class ArgumentPlaces(NamedTuple):
    """Where the arguments are that decide about repeating a call. -1: there is none."""

    declared: tuple[int, ...]  # changed,
    undeclared: tuple[int, ...]  # likewise, and nothing says so: if the flag is on
    barred: tuple[int, ...]  # a call that has them is not repeated
    flag: int
    chance: int  # of random numbers: none are drawn where it is zero


class Effects:
    """What one operator does in any of its calls; `effects_of` makes one for each operator.

    Attributes:
        can_keep: its results are memory of their own. Not if it changes a tensor in place, nor if
            it gives a view: then results are their arguments' memory. Those always run again, which
            for a view costs nothing.
        fills_saved: it may write to an argument that autograd has saved by then, as the noise of
            `rrelu` is, and which is no result.
        is_communication: it meets other ranks.
        is_wait: it ends the write that another operator began; its result is that one's.
        declares_writes: its schema says that it changes an argument.
        is_unsafe_view: its results are memory of its first argument, and it does not say so.
    """

    __slots__ = (
        "_chance",
        "_declared",
        "_dropout_state",
        "_flag",
        "_flag_default",
        "_generators",
        "_has_own_state",
        "_undeclared",
        "can_keep",
        "declares_writes",
        "fills_saved",
        "is_communication",
        "is_unsafe_view",
        "is_wait",
    )

    def __init__(self, operator: Operator) -> None:
        """Look at an operator's schema, tags and registrations."""
        self.is_unsafe_view = operator in _VIEWS
        self._declared: tuple[_Argument, ...] = ()
        self._undeclared: tuple[_Argument, ...] = ()
        self._generators: tuple[_Argument, ...] = ()
        self._flag: _Argument | None = None
        self._flag_default = False
        self._dropout_state: _Argument | None = None
        self._chance: _Argument | None = None
        self.is_communication = False
        self.is_wait = False
        self.declares_writes = False
        self.fills_saved = False
        if isinstance(operator, HigherOrderOperator):
            self.can_keep = True
            self._has_own_state = True  # it runs functions, which may do anything
            return
        schema = schema_of(operator)
        self.declares_writes = bool(schema.is_mutable)
        self.can_keep = not schema.is_mutable and all(
            each.alias_info is None for each in schema.returns
        )
        self.is_communication = _meets_others(operator)
        self.is_wait = _is_wait(operator)
        self._has_own_state = self.is_communication or _has_own_state(operator)
        self._look_at_arguments(operator)
        written: tuple[_Argument, ...] = self._declared + self._undeclared
        may_be_saved = any(_may_be_saved(schema, argument) for argument in written)
        self.fills_saved = may_be_saved and not self.is_communication

    def _look_at_arguments(self, operator: Any) -> None:  # noqa: ANN401 - an overload
        schema = schema_of(operator)
        for position, each in enumerate(schema.arguments):
            argument = _Argument(position, each.name)
            if each.alias_info is not None:
                if each.alias_info.is_write:
                    self._declared += (argument,)
            elif "Tensor" in str(each.type) and _is_written_silently(operator, each.name):
                self._undeclared += (argument,)
            elif "Generator" in str(each.type):
                self._generators += (argument,)
            elif each.name in _TRAINING:
                self._flag = argument
                self._flag_default = bool(each.default_value)
            elif each.name == _CHANCE:
                self._chance = argument
            elif each.name == _DROPOUT_STATE:
                self._dropout_state = argument

    @property
    def may_be_repeatable(self) -> bool:
        """Whether some calls can be repeated."""
        return not self._has_own_state and self.can_keep and not self.is_unsafe_view

    def places(self) -> ArgumentPlaces:
        """Return where the arguments are that `written`, `unread` and `is_repeatable` look at."""
        barred = (*self._generators, *filter(None, [self._dropout_state]))
        return ArgumentPlaces(
            tuple(each.position for each in self._declared),
            tuple(each.position for each in self._undeclared),
            tuple(each.position for each in barred),
            -1 if self._flag is None else self._flag.position,
            -1 if self._chance is None else self._chance.position,
        )

    # ---- of one call -----------------------------------------------------------------------------

    def written(self, args: Sequence[Any], kwargs: dict[str, Any]) -> list[torch.Tensor]:
        """Return the tensors that a call changes, declared or not."""
        changed = self._declared
        if self._undeclared and self._is_training(args, kwargs):
            changed = (*changed, *self._undeclared)
        if not changed:
            return []
        values = [argument.value(args, kwargs) for argument in changed]
        return [leaf for leaf in pytree.tree_leaves(values) if isinstance(leaf, torch.Tensor)]

    def unread(self, args: Sequence[Any], kwargs: dict[str, Any]) -> list[torch.Tensor]:
        """Return the tensors that a call changes, and of which its results do not depend.

        A repetition is given scratch memory in their place, and so changes nothing.
        """
        if self._has_own_state or not self._undeclared or not self._is_training(args, kwargs):
            return []
        values = [argument.value(args, kwargs) for argument in self._undeclared]
        return [value for value in values if value is not None]

    def is_repeatable(
        self, args: Sequence[Any], kwargs: dict[str, Any], tensors: Iterable[torch.Tensor]
    ) -> bool:
        """Return whether a call can be repeated with the same results and no effect.

        `tensors`: those among its arguments whose kind matters.
        """
        if not self.may_be_repeatable:
            return False
        if any(argument.value(args, kwargs) is not None for argument in self._generators):
            return False  # what a generator of the user's draws next is not ours to draw again
        state = self._dropout_state
        if state is not None and state.value(args, kwargs) is not None:
            return False
        if _is_shared(self.unread(args, kwargs), (args, kwargs)):
            return False  # what is read there is no scratch
        return all(map(is_plain, tensors))

    def _is_training(self, args: Sequence[Any], kwargs: dict[str, Any]) -> bool:
        if self._flag is None:
            return True
        value = self._flag.value(args, kwargs)
        # A dispatch mode is not given what comes last and is the default.
        return self._flag_default if value is None else bool(value)


def _is_shared(some: Sequence[torch.Tensor], arguments: object) -> bool:
    """Return whether other arguments lie in the memory of some of them."""
    if not some:
        return False
    storages = {storage_address(each.untyped_storage()) for each in some}
    tensors = [leaf for leaf in pytree.tree_leaves(arguments) if is_plain(leaf)]
    there = sum(storage_address(each.untyped_storage()) in storages for each in tensors)
    return there > len(some)


@functools.cache
def effects_of(operator: Operator) -> Effects:
    """Return what an operator does besides returning results."""
    return Effects(operator)


def can_keep(operator: Operator) -> bool:
    """Return whether an operator's results are memory of their own."""
    return effects_of(operator).can_keep


def is_repeatable(operator: Operator, args: Sequence[Any], kwargs: dict[str, Any]) -> bool:
    """Return whether a call can be repeated with the same results and no effect besides them.

    Not one that meets other ranks or waits for them, that has a state of its own, or that changes
    what it is given in a way that cannot be left out. Nor one on tensors that are made of others.
    """
    tensors = [
        leaf for leaf in pytree.tree_leaves((args, kwargs)) if isinstance(leaf, torch.Tensor)
    ]
    return effects_of(operator).is_repeatable(args, kwargs, tensors)


# ---- rules about operators -----------------------------------------------------------------------


def _is_wait(operator: Any) -> bool:  # noqa: ANN401 - an overload
    base = schema_of(operator).name.partition("::")[2]
    return operator.namespace in _COMMUNICATION and base in _WAITING


def _meets_others(operator: Any) -> bool:  # noqa: ANN401 - an overload
    if operator.namespace in _COMMUNICATION:
        return True
    return any(
        each.name in _GROUPS and "Tensor" not in str(each.type) and str(each.type) != "int"
        for each in schema_of(operator).arguments
    )


def _has_own_state(operator: Any) -> bool:  # noqa: ANN401 - an overload
    """Whether an operator does, or depends on, something that none of its arguments shows."""
    schema = schema_of(operator)
    base = schema.name.partition("::")[2]
    if torch.Tag.maybe_aliasing_or_mutating in operator.tags:
        return True
    if _UNFILLED.fullmatch(base) or base in _INEXACT:
        return True
    if any(_OBJECT in str(each.type) for each in (*schema.arguments, *schema.returns)):
        return True
    if not any("Tensor" in str(each.type) for each in schema.returns):
        return True  # run for an effect, or for a number that somebody has read
    return _may_read_statistics(operator) or _is_registered(operator)


def _may_read_statistics(operator: Any) -> bool:  # noqa: ANN401 - an overload
    """Whether an operator updates statistics, and its results may depend on what they were."""
    if operator.namespace == _TORCH:
        return False
    return any(_is_written_silently(operator, name) for name in _STATISTICS) and any(
        each.name in _STATISTICS for each in schema_of(operator).arguments
    )


def _is_registered(operator: Any) -> bool:  # noqa: ANN401 - an overload
    """Whether an effect was registered by `torch.library` or `torch.fx`."""
    # `fx.node.has_side_effect` adds to these.
    if operator in side_effects or operator.overloadpacket in side_effects:
        return True
    entry = simple_registry.singleton.find(schema_of(operator).name)
    holder = getattr(entry, "effect", None)  # not in every version of torch
    return getattr(holder, "effect", None) is not None


def _may_be_saved(schema: Any, argument: _Argument) -> bool:  # noqa: ANN401
    """Whether backward may need what an operator writes there: no result, and no statistics."""
    alias = schema.arguments[argument.position].alias_info
    if alias is None:
        return argument.name == _NOISE
    results = {
        name for each in schema.returns if each.alias_info for name in each.alias_info.before_set
    }
    return argument.name not in _STATISTICS and not results & alias.before_set


def _is_written_silently(operator: Any, name: str) -> bool:  # noqa: ANN401 - an overload
    """Whether an operator changes an argument of this name that it does not declare as changed."""
    schema = schema_of(operator)
    base = schema.name.partition("::")[2]
    if operator.namespace in _FILLING:
        return not schema.is_mutable and base not in _SENDING and _INPUT not in name
    if _is_wait(operator):
        return True
    if (base, name) in _OTHERS:
        return True
    if name in _STATISTICS:
        return not any(word in base for word in _READING)
    return name == _NOISE and torch.Tag.nondeterministic_seeded in operator.tags
