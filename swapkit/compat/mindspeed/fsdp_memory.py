"""The names of MindSpeed's `fsdp/memory`: choices by patterns, `TensorSwapContext`, `AdamWSwap`.

Source:
    MindSpeed, `fsdp/memory` and `fsdp/utils/str_match.py`: names, arguments, attributes, patterns.
"""

from __future__ import annotations

import re
import threading
from collections import Counter
from collections.abc import Callable, Iterable
from dataclasses import replace
from typing import TYPE_CHECKING, Any, ClassVar, NamedTuple, TypeVar

import torch

from swapkit._runtime.model.tracker import runs
from swapkit._runtime.process.scopes import opened_for
from swapkit._runtime.shim.types import placement_of
from swapkit._runtime.user_choices.wrapping import make_part
from swapkit.api.offloading import offload
from swapkit.config.environment import read_environment
from swapkit.errors import InvalidArgument, SessionError
from swapkit.registry import Choice, Recompute, Source, Swap
from swapkit.texts import get_logger

if TYPE_CHECKING:
    import contextlib

    from torch.optim.optimizer import ParamsT

    from swapkit._runtime.user_choices.part import Part

_log = get_logger("settings")
_Model = TypeVar("_Model", bound="torch.nn.Module")

# ---- module patterns -----------------------------------------------------------------------------
#
# MindSpeed's patterns for paths of modules.
#
# `*` matches any text, dots included; `?` one character; `{*}` a number; `{a-b}` a number from a to
# b. All other characters match themselves, and a pattern matches whole paths only.

_PARTS = re.compile(r"\{([^}]*)\}|.", re.DOTALL)
_RANGE = re.compile(r"(\d{1,18})-(\d{1,18})")  # no digits that `int` would refuse


class ModulePattern(NamedTuple):
    """A compiled pattern, with the range of each number in it; None: any number."""

    expression: re.Pattern[str]
    ranges: tuple[tuple[int, int] | None, ...]

    def matches(self, path: str) -> bool:
        """Return whether the whole path matches."""
        match = self.expression.fullmatch(path)
        return match is not None and all(
            limits is None or limits[0] <= int(number) <= limits[1]
            for number, limits in zip(match.groups(), self.ranges, strict=True)
        )


def compile_pattern(pattern: str) -> ModulePattern:
    """Return a compiled pattern.

    Raises:
        InvalidArgument: braces hold neither `*` nor a range such as `0-3`.

    Example:
        >>> compile_pattern("model.layers.{0-3}.mlp").matches("model.layers.2.mlp")
        True
    """
    ranges: list[tuple[int, int] | None] = []

    def convert(part: re.Match[str]) -> str:
        if part[1] is not None:
            ranges.append(_parse_range(pattern, part[1]))
            return r"(\d{1,18})"
        return {"*": ".*", "?": "."}.get(part[0]) or re.escape(part[0])

    return ModulePattern(re.compile(_PARTS.sub(convert, pattern), re.DOTALL), tuple(ranges))


def _parse_range(pattern: str, text: str) -> tuple[int, int] | None:
    if text == "*":
        return None
    match = _RANGE.fullmatch(text)
    if match is None or int(match[1]) > int(match[2]):
        accepted = "{*} nor a range such as {0-3}"
        raise InvalidArgument(f"pattern {pattern!r}: {{{text}}} is neither {accepted}")
    return int(match[1]), int(match[2])


def find_modules(
    model: torch.nn.Module, plan: Iterable[str]
) -> tuple[dict[str, torch.nn.Module], list[str]]:
    """Return the modules that a plan names, by path, and the patterns that match none.

    Args:
        model: the model; its own path is empty.
        plan: patterns of paths.

    Raises:
        InvalidArgument: `plan` is not a list of patterns, or a pattern is malformed.
    """
    if isinstance(plan, str) or not isinstance(plan, Iterable):
        raise InvalidArgument(f"plan={plan!r}: expected a list of patterns, e.g. ['layers.{{*}}']")
    patterns = {str(each): compile_pattern(str(each)) for each in plan}
    modules = dict(model.named_modules())
    matched = {text: set(filter(each.matches, modules)) for text, each in patterns.items()}
    chosen = set[str]().union(*matched.values())
    found = {path: module for path, module in modules.items() if path in chosen}
    return found, [text for text, paths in matched.items() if not paths]


# ---- chosen modules ------------------------------------------------------------------------------
#
# `swap_activation_modules`, `recompute_modules`: choices for the modules that a plan names.


def swap_activation_modules(model: _Model, plan: Iterable[str]) -> _Model:
    """Swap the activations of the modules that a plan names.

    Same as `swapkit.offload` for each module: the tensors that it saves for backward move to the
    host and back. (In MindSpeed only the first input moves.) If a module is recomputed, its inputs
    are all that it saves, so these move: see `swap_inputs` of `swapkit.checkpoint`.

    Args:
        model: the model.
        plan: patterns of module paths: `*` is any text, `?` a character, `{*}` a number, `{a-b}` a
            number from a to b. A pattern that matches nothing is logged.

    Returns:
        The model.

    Raises:
        InvalidArgument: `plan` is not a list of patterns, or a pattern is malformed.
    """
    found, unmatched = find_modules(model, plan)
    for pattern in unmatched:
        name = type(model).__name__
        _log.warning("no module of %s matches %r: nothing is swapped", name, pattern)
    for part in _parts_of(found):
        recompute = part.judgement.recompute
        swap = Swap(min_bytes=read_environment().min_swap_bytes)
        what = swap if recompute is None else replace(recompute, swap_inputs=True)
        part.add(Choice(source=Source.PATTERN, what=what))
    return model


def recompute_modules(model: _Model, plan: Iterable[str]) -> _Model:
    """Recompute the modules that a plan names in backward.

    Same as `swapkit.checkpoint` for each module. If a module's activations are swapped, too, its
    inputs move to the host. Unlike in MindSpeed, `past_key_values` is passed on unchanged.

    Args:
        model: the model.
        plan: patterns of module paths; see `swap_activation_modules`.

    Returns:
        The model.

    Raises:
        InvalidArgument: nothing matches, `plan` is not a list of patterns, or a pattern is
            malformed.
    """
    found, _ = find_modules(model, plan)
    parts = _parts_of(found)
    if not parts:
        nothing = f"no module of {type(model).__name__} that has a forward"
        raise InvalidArgument(f"plan={list(plan)!r} matches {nothing}")
    for part in parts:
        what = Recompute(swap_inputs=part.judgement.swap is not None)
        part.add(Choice(source=Source.PATTERN, what=what))
    return model


def _parts_of(modules: dict[str, torch.nn.Module]) -> list[Part]:
    """Return the parts of modules; a list of modules never runs, so it has none."""
    for path in modules:
        _log.info("choosing for module %r", path)
    return [make_part(module) for module in modules.values() if runs(module)]


# ---- scopes --------------------------------------------------------------------------------------

# The copy back starts this many operators ahead of its use, without prefetching.
LEAST_AHEAD = 1
_numbering = threading.Lock()  # guards `TensorSwapContext.contexts_of`; nothing waits inside


class _Entered(threading.local):
    """The contexts that a thread has entered."""

    def __init__(self) -> None:
        self.contexts: list[contextlib.AbstractContextManager[None]] = []


class TensorSwapContext:
    """Swap tensors that are saved inside, as `with swapkit.offload():` does.

    Any thread may enter it, also several times.
    """

    contexts_of: ClassVar[Counter[str]] = Counter()  # number of contexts by tag

    def __init__(
        self,
        module_tag: str = "default",
        custom_check_fn: Callable[[torch.Tensor], bool] | None = None,
        prefetch: bool = True,  # noqa: FBT001, FBT002 - MindSpeed's arguments
    ) -> None:
        """Prepare a context; nothing is swapped before it is entered.

        Args:
            module_tag: a name that the same module of each layer has in common. It only numbers the
                layers: swapkit copies back by operators, not by layers.
            custom_check_fn: says for a tensor whether to swap it; None: all. Tensors that view one
                storage move together. The thread that saves the tensor calls it, with no lock held.
            prefetch: True: copy back as early as memory allows. False: one operator ahead.

        Raises:
            InvalidArgument: `custom_check_fn` is not a function.
        """
        self.set_custom_check_fn(custom_check_fn)
        self.module_tag = module_tag
        with _numbering:
            self.layer_idx = TensorSwapContext.contexts_of[module_tag]
            TensorSwapContext.contexts_of[module_tag] += 1
        self.prefetch = prefetch
        self._entered = _Entered()

    @property
    def layer_nums(self) -> int:
        """The number of contexts with this tag."""
        return TensorSwapContext.contexts_of[self.module_tag]

    def set_custom_check_fn(self, fn: Callable[[torch.Tensor], bool] | None) -> None:
        """Set the function that picks tensors, for the tensors saved from now on.

        Raises:
            InvalidArgument: `fn` is not a function.
        """
        if fn is not None and not callable(fn):
            raise InvalidArgument(f"custom_check_fn={fn!r}: expected a function of a tensor")
        self._check_fn = fn

    def __enter__(self) -> None:
        ahead = None if self.prefetch else LEAST_AHEAD
        swap = Swap(prefetch=ahead, min_bytes=read_environment().min_swap_bytes)
        context = opened_for(placement_of(swap, None), self._picks)
        context.__enter__()
        self._entered.contexts.append(context)

    def __exit__(self, *args: object) -> None:
        """End the innermost entry of this thread.

        Raises:
            SessionError: this thread has not entered the context.
        """
        if not self._entered.contexts:
            raise SessionError("a TensorSwapContext must end on the thread on which it began")
        self._entered.contexts.pop().__exit__(None, None, None)

    def _picks(self, tensor: torch.Tensor) -> bool:
        return self._check_fn is None or bool(self._check_fn(tensor))


# ---- optimizer -----------------------------------------------------------------------------------

MEM_FRACTION = 0.8  # MindSpeed's default
STATE_KEYS = ("exp_avg", "exp_avg_sq", "max_exp_avg_sq")


class AdamWSwap(torch.optim.AdamW):
    """AdamW with `swapkit.offload(optimizer)` applied: same results, states on the host."""

    def __init__(
        self,
        params: ParamsT,
        *args: Any,
        mem_fraction_static: float | None = MEM_FRACTION,
        state_keys: Iterable[str] | None = None,
        **options: Any,
    ) -> None:
        """Create the optimizer; its states go to the host as steps create them.

        Args:
            params: as for `torch.optim.AdamW`.
            *args: like `params`, as for `torch.optim.AdamW`: `lr`, `betas`, `eps`, `weight_decay`,
                `amsgrad`.
            mem_fraction_static: the share of free memory that a step may use for states, above 0
                and at most 1. No effect: swapkit copies in pieces of at most 64 MiB.
            state_keys: names of the states to move. No effect, as in MindSpeed: all states move.
            **options: the further arguments of `torch.optim.AdamW`, and those of `args` by name.
                (MindSpeed always uses its fused kernel.)

        Raises:
            InvalidArgument: `mem_fraction_static` is out of range, or a name in `state_keys` is not
                one of AdamW's states.
        """
        _check(mem_fraction_static, state_keys)
        super().__init__(params, *args, **options)
        offload(self)


def _check(mem_fraction_static: float | None, state_keys: Iterable[str] | None) -> None:
    if mem_fraction_static is not None and not 0 < mem_fraction_static <= 1:
        accepted = "expected a number above 0, at most 1"
        raise InvalidArgument(f"mem_fraction_static={mem_fraction_static!r}: {accepted}")
    unknown = ", ".join(sorted(set(state_keys or ()).difference(STATE_KEYS)))
    if unknown:
        states = ", ".join(STATE_KEYS)
        raise InvalidArgument(f"state_keys names {unknown}; the states of AdamW are {states}")
    if mem_fraction_static not in {None, MEM_FRACTION}:
        why = "swapkit copies states in pieces of at most 64 MiB"
        _log.warning("mem_fraction_static=%s has no effect: %s", mem_fraction_static, why)
