"""Side effects of operators: the one place that decides which operators may run twice.

A schema declares most effects: which arguments an operator writes to, and which results are views
of its arguments. Some effects are not declared. A batch norm in training mode updates its running
statistics, collectives communicate with other ranks and write to their outputs, and some operators
keep a state of their own. All code that repeats, keeps or settles results decides through this
module.

A rule uses an operator's schema and tags (names and types of arguments) rather than the operator's
name, so that the rule holds for every backend. `tests/conformance` runs torch's own operator
database and fails on an effect that no rule covers.
"""

from __future__ import annotations

import functools
import re
from collections.abc import Iterable, Sequence
from typing import Any, NamedTuple

import torch

from swapkit._runtime.operators.names import Operator
from swapkit._runtime.torch_compat.internals import (
    HigherOrderOperator,
    pytree,
    schema_of,
    side_effects,
    simple_registry,
    storage_address,
)
from swapkit._runtime.torch_compat.wrappers import is_plain
from swapkit.ir.traces import COMMUNICATION

# All ranks must run the same operators of `COMMUNICATION` in the same order.
FUNCTIONAL = "_c10d_functional"
# Arguments that name the ranks: these mark collectives of vendors and of users.
_GROUPS = frozenset(
    {
        *("group", "group_name", "process_group", "group_ep", "group_tp"),
        *("hcom", "hcom_info", "comm", "communicator"),
    }
)
_OBJECT = "__torch__.torch.classes"  # a C++ object, which may have a state

# Operators of these namespaces without declared writes fill their tensor arguments, unless the
# argument's name marks an input. The tensor's version counter does not change.
_FILLING = frozenset({"c10d", "fsdp"})
_INPUT = "input"
_SENDING = frozenset({"send", "barrier", "monitored_barrier_", "check_for_nan"})
# These end the write that another operator started to their argument.
_WAITING = frozenset({"wait_tensor", "irecv", "batch_p2p_ops"})

# Arguments written in place unless a flag is off. Functional operators return them instead, and
# backward operators only read them.
_STATISTICS = frozenset({"running_mean", "running_var", "running_min", "running_max"})
_TRAINING = frozenset({"training", "train", "is_training", "use_input_stats"})
_READING = ("backward", "no_training", "no_update", "functional")
_OTHERS = frozenset({("mkldnn_rnn_layer_backward", "workspace")})
_NOISE = "noise"  # filled by the operator with random numbers
_CHANCE = "dropout_p"
_DROPOUT_STATE = "dropout_state"  # random numbers from no generator
# Torch's own normalisations compute results from the batch alone while they update the
# statistics.
_TORCH = "aten"

# Results of these share memory with their argument, undeclared. `linear` ends with the first.
HIDDEN_VIEWS = frozenset(
    {
        torch.ops.aten._unsafe_view.default,  # noqa: SLF001 - an operator's name
        torch.ops.aten.unsafe_split.Tensor,
        torch.ops.aten.unsafe_split_with_sizes.default,
    }
)
# Operators whose results a kernel outside torch, such as a Triton kernel, may fill unseen. A
# repetition would return the memory before that fill. Other results may be overwritten in this way,
# too: when a step is recorded, `recording/tables/kept_bytes.py` finds them.
_UNFILLED = re.compile(r"(new_)?(_?empty|zeros|ones|full)(_.*)?")
# These change a tensor whatever it was before.
_OVERWRITING = frozenset(
    {
        *("copy_", "fill_", "zero_", "uniform_", "normal_", "random_", "exponential_"),
        *("bernoulli_", "cauchy_", "geometric_", "log_normal_"),
    }
)
# A repetition gives different bits: part of the results is never written; or LAPACK reads
# uninitialized memory (`lstsq`); or an argument that is read is overwritten (the last one).
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
        """Return the argument's value in a call; None: not given."""
        return args[self.position] if self.position < len(args) else kwargs.get(self.name)


class ArgumentPlaces(NamedTuple):
    """Positions of the arguments that decide whether to repeat a call. -1: none."""

    declared: tuple[int, ...]  # changed, as declared in the schema
    undeclared: tuple[int, ...]  # changed without a declaration if the flag is on
    barred: tuple[int, ...]  # a call with any of them is not repeated
    flag: int
    chance: int  # the dropout probability: 0 draws no random numbers


class Effects:
    """The effects of one operator in all its calls; `effects_of` creates one per operator.

    Attributes:
        can_keep: the results own their memory. False for in-place operators and views, whose
            results share the arguments' memory. Those always run again, which is free for a view.
        gives_written: the results are the tensors that the operator changes, and it has no other
            effect.
        reads_written: what it changes affects its results: `mul_`, not `copy_`.
        fills_saved: the operator may write to an argument that autograd has already saved and that
            is no result, such as the noise of `rrelu`.
        is_communication: the operator communicates with other ranks.
        is_wait: the operator ends a write that another one started, and returns that one's result.
        declares_writes: the schema declares that the operator changes an argument.
        is_unsafe_view: the results share memory with the first argument, undeclared.
    """

    __slots__ = (
        "_chance",
        "_declared",
        "_dropout_state",
        "_flag",
        "_generators",
        "_has_own_state",
        "_undeclared",
        "can_keep",
        "declares_writes",
        "fills_saved",
        "gives_written",
        "is_communication",
        "is_unsafe_view",
        "is_wait",
        "reads_written",
    )

    def __init__(self, operator: Operator) -> None:
        """Read an operator's schema, tags and registrations."""
        self.is_unsafe_view = operator in HIDDEN_VIEWS
        self._declared: tuple[_Argument, ...] = ()
        self._undeclared: tuple[_Argument, ...] = ()
        self._generators: tuple[_Argument, ...] = ()
        self._flag: tuple[_Argument, bool] | None = None  # with its default
        self._dropout_state: _Argument | None = None
        self._chance: _Argument | None = None
        self.is_communication = False
        self.is_wait = False
        self.declares_writes = False
        self.fills_saved = self.gives_written = self.reads_written = False
        if isinstance(operator, HigherOrderOperator):
            self.can_keep = True
            self._has_own_state = True  # it runs arbitrary functions
            return
        schema = schema_of(operator)
        self.declares_writes = bool(schema.is_mutable)
        self.can_keep = not schema.is_mutable and all(
            each.alias_info is None for each in schema.returns
        )
        self.is_communication = _communicates(operator)
        self.is_wait = _is_wait(operator)
        self._has_own_state = self.is_communication or _has_own_state(operator)
        self._look_at_arguments(operator)
        written: tuple[_Argument, ...] = self._declared + self._undeclared
        may_be_saved = any(_may_be_saved(schema, argument) for argument in written)
        self.fills_saved = may_be_saved and not self.is_communication
        is_alone = not self._has_own_state and written == self._declared
        self.gives_written = is_alone and _gives(schema)
        self.reads_written = self.gives_written and _reads_written(schema)

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
                self._flag = argument, bool(each.default_value)
            elif each.name == _CHANCE:
                self._chance = argument
            elif each.name == _DROPOUT_STATE:
                self._dropout_state = argument

    @property
    def may_be_repeatable(self) -> bool:
        """Whether some calls can be repeated."""
        return not self._has_own_state and self.can_keep and not self.is_unsafe_view

    def places(self) -> ArgumentPlaces:
        """Return the positions of arguments that `written`, `unread` and `is_repeatable` check."""
        barred = (*self._generators, *filter(None, [self._dropout_state]))
        return ArgumentPlaces(
            tuple(each.position for each in self._declared),
            tuple(each.position for each in self._undeclared),
            tuple(each.position for each in barred),
            -1 if self._flag is None else self._flag[0].position,
            -1 if self._chance is None else self._chance.position,
        )

    # ---- for one call ----------------------------------------------------------------------------

    def written(self, args: Sequence[Any], kwargs: dict[str, Any]) -> list[torch.Tensor]:
        """Return the tensors that a call changes, declared or undeclared."""
        changed = self._declared
        if self._undeclared and self._is_training(args, kwargs):
            changed = (*changed, *self._undeclared)
        if not changed:
            return []
        values = [argument.value(args, kwargs) for argument in changed]
        return [leaf for leaf in pytree.tree_leaves(values) if isinstance(leaf, torch.Tensor)]

    def unread(self, args: Sequence[Any], kwargs: dict[str, Any]) -> list[torch.Tensor]:
        """Return the tensors that a call changes but whose values do not affect its results.

        A repetition gets scratch memory in their place, and so changes none of them.
        """
        if self._has_own_state or not self._undeclared or not self._is_training(args, kwargs):
            return []
        values = [argument.value(args, kwargs) for argument in self._undeclared]
        return [value for value in values if value is not None]

    def is_repeatable(
        self, args: Sequence[Any], kwargs: dict[str, Any], tensors: Iterable[torch.Tensor]
    ) -> bool:
        """Return whether a call can be repeated with the same results and no side effects.

        `tensors`: the tensor arguments that must be plain.
        """
        if not self.may_be_repeatable:
            return False
        if any(argument.value(args, kwargs) is not None for argument in self._generators):
            return False  # a repetition must not advance a user's generator
        state = self._dropout_state
        if state is not None and state.value(args, kwargs) is not None:
            return False
        if _is_shared(self.unread(args, kwargs), (args, kwargs)):
            return False  # the call also reads this memory, so scratch would change the results
        return all(map(is_plain, tensors))

    def _is_training(self, args: Sequence[Any], kwargs: dict[str, Any]) -> bool:
        if self._flag is None:
            return True
        flag, default = self._flag
        value = flag.value(args, kwargs)
        # Dispatch modes do not get trailing arguments that have their default values.
        return default if value is None else bool(value)


def _is_shared(some: Sequence[torch.Tensor], arguments: object) -> bool:
    """Return whether other arguments share memory with the tensors in `some`."""
    if not some:
        return False
    storages = {storage_address(each.untyped_storage()) for each in some}
    tensors = [leaf for leaf in pytree.tree_leaves(arguments) if is_plain(leaf)]
    there = sum(storage_address(each.untyped_storage()) in storages for each in tensors)
    return there > len(some)


@functools.cache
def effects_of(operator: Operator) -> Effects:
    """Return the side effects of an operator."""
    return Effects(operator)


def can_keep(operator: Operator) -> bool:
    """Return whether an operator's results own their memory."""
    return effects_of(operator).can_keep


def is_repeatable(operator: Operator, args: Sequence[Any], kwargs: dict[str, Any]) -> bool:
    """Return whether a call can be repeated with the same results and no side effects.

    False if the operator communicates with or waits for other ranks, has its own state, or changes
    an argument that scratch memory cannot replace. Also false if a tensor argument is not plain.
    """
    tensors = [
        leaf for leaf in pytree.tree_leaves((args, kwargs)) if isinstance(leaf, torch.Tensor)
    ]
    return effects_of(operator).is_repeatable(args, kwargs, tensors)


# ---- rules about operators -----------------------------------------------------------------------


def _is_wait(operator: Any) -> bool:  # noqa: ANN401 - an overload
    base = schema_of(operator).name.partition("::")[2]
    return operator.namespace in COMMUNICATION and base in _WAITING


def _communicates(operator: Any) -> bool:  # noqa: ANN401 - an overload
    if operator.namespace in COMMUNICATION:
        return True
    return any(
        each.name in _GROUPS and "Tensor" not in str(each.type) and str(each.type) != "int"
        for each in schema_of(operator).arguments
    )


def _has_own_state(operator: Any) -> bool:  # noqa: ANN401 - an overload
    """Return whether an operator has effects or inputs that its arguments do not show."""
    schema = schema_of(operator)
    base = schema.name.partition("::")[2]
    if torch.Tag.maybe_aliasing_or_mutating in operator.tags:
        return True
    if _UNFILLED.fullmatch(base) or base in _INEXACT:
        return True
    if any(_OBJECT in str(each.type) for each in (*schema.arguments, *schema.returns)):
        return True
    if not any("Tensor" in str(each.type) for each in schema.returns):
        return True  # run for an effect, or for a number that Python code has read
    return _may_read_statistics(operator) or _is_registered(operator)


def _may_read_statistics(operator: Any) -> bool:  # noqa: ANN401 - an overload
    """Return whether an operator updates statistics that may affect its results."""
    if operator.namespace == _TORCH:
        return False
    return any(_is_written_silently(operator, name) for name in _STATISTICS) and any(
        each.name in _STATISTICS for each in schema_of(operator).arguments
    )


def _is_registered(operator: Any) -> bool:  # noqa: ANN401 - an overload
    """Return whether `torch.library` or `torch.fx` has an effect registered."""
    # `fx.node.has_side_effect` adds to these.
    if operator in side_effects or operator.overloadpacket in side_effects:
        return True
    entry = simple_registry.singleton.find(schema_of(operator).name)
    holder = getattr(entry, "effect", None)  # not in every version of torch
    return getattr(holder, "effect", None) is not None


def _may_be_saved(schema: Any, argument: _Argument) -> bool:  # noqa: ANN401
    """Return whether backward may need a written argument: not a result, not statistics."""
    alias = schema.arguments[argument.position].alias_info
    if alias is None:
        return argument.name == _NOISE
    results = {
        name for each in schema.returns if each.alias_info for name in each.alias_info.before_set
    }
    return argument.name not in _STATISTICS and not results & alias.before_set


def _gives(schema: Any) -> bool:  # noqa: ANN401
    """Return whether an operator's results are the arguments that it writes to, in order."""
    written = [
        each.alias_info.before_set
        for each in schema.arguments
        if each.alias_info is not None and each.alias_info.is_write
    ]
    given = [getattr(each.alias_info, "before_set", None) for each in schema.returns]
    is_single = all(str(each.type) == "Tensor" for each in schema.returns)
    return bool(written) and given == written and is_single


def _reads_written(schema: Any) -> bool:  # noqa: ANN401
    base = schema.name.partition("::")[2]
    is_out = any(each.is_out for each in schema.arguments)
    return not is_out and base not in _OVERWRITING


def _is_written_silently(operator: Any, name: str) -> bool:  # noqa: ANN401 - an overload
    """Return whether an operator changes the argument of this name without declaring it."""
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
