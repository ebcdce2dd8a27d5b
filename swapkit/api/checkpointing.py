"""`checkpoint`: parts of a program that are recomputed in backward."""

from __future__ import annotations

from collections.abc import Callable, Hashable, Iterable, Sequence
from typing import TYPE_CHECKING, Any, TypeVar, overload

from swapkit._runtime.operators.names import find_operators
from swapkit._runtime.recompute.watchers.watcher import check_operators
from swapkit.api.targets import apply, choose
from swapkit.errors import InvalidArgument
from swapkit.registry import Recompute

if TYPE_CHECKING:
    import torch

Target = TypeVar("Target", bound="Callable[..., Any] | torch.nn.Module | Sequence[torch.nn.Module]")
Parts = TypeVar("Parts", bound="torch.nn.Module | Sequence[torch.nn.Module]")


class Checkpoint:
    """Decorator that marks a part for recomputation. Made by `checkpoint`."""

    def __init__(self, what: Recompute) -> None:
        self.what = what

    def __call__(self, target: Target) -> Target:
        """Make the choice for a `Module` class, a `Module`, a function or autograd's `Function`.

        Raises:
            InvalidArgument: `target` is none of these, or never runs.
        """
        result: Target = choose(target, self.what)
        return result


@overload
def checkpoint(
    *,
    save: Iterable[Any] = ...,
    offload: Iterable[Any] = ...,
    policy: Callable[..., Any] | None = ...,
    swap_inputs: bool = ...,
    check_values: bool = ...,
    preserve_rng_state: bool = ...,
) -> Checkpoint: ...
@overload
def checkpoint(
    target: Target,
    /,
    *,
    save: Iterable[Any] = ...,
    offload: Iterable[Any] = ...,
    policy: Callable[..., Any] | None = ...,
    swap_inputs: bool = ...,
    check_values: bool = ...,
    preserve_rng_state: bool = ...,
) -> Target: ...
@overload
def checkpoint(
    target: Parts,
    pattern: str,
    /,
    *,
    save: Iterable[Any] = ...,
    offload: Iterable[Any] = ...,
    policy: Callable[..., Any] | None = ...,
    swap_inputs: bool = ...,
    check_values: bool = ...,
    preserve_rng_state: bool = ...,
) -> Parts: ...
def checkpoint(  # noqa: PLR0913 - keyword arguments of a public function
    target: Any = None,
    pattern: str | None = None,
    /,
    *,
    save: Iterable[Any] = (),
    offload: Iterable[Any] = (),
    policy: Callable[..., Any] | None = None,
    swap_inputs: bool = False,
    check_values: bool = False,
    preserve_rng_state: bool = True,
) -> Any:
    r"""Recompute a part of a program in backward instead of keeping its saved tensors.

    Decorates a `Module` class, a `Module`, a function or a `torch.autograd.Function` (if it runs
    through `adapt_mem_func_wrapper`). Called with options only, it returns a decorator. Called with
    a model and a pattern, it applies to the submodules whose whole dotted path matches. Regions
    nest.

    The part runs once. Backward runs its operators again, one by one, with the operands, random
    numbers and settings of forward. The part's inputs are kept. Each input tensor (also a keyword
    argument, an element of a list, tuple or dict, or bound by `functools.partial`) is a saved
    tensor like any other: an enclosing `offload` scope or a budget may swap it. A session's plan
    may move the inputs and the kept results; recomputed tensors count as memory that backward
    needs. On one part, `checkpoint` wins over `offload`: use `swap_inputs=True` instead.

    Collectives inside the part are repeated in backward, as by torch's checkpoint, so all ranks
    must use it alike.

    Some parts run twice, as in non-reentrant `torch.utils.checkpoint`: in programs of several
    ranks, and with `offload`, `policy` or `check_values`. So do parts, from their second run on, if
    the first run shows that kernels invisible to torch write to their memory or that too much would
    have to be kept; `swapkit.choices` shows why. Side effects then happen twice: a batch norm
    updates its running statistics in both runs, unless `save` names it.

    Args:
        target: the part, or the model to search for `pattern`. A list of a model's parts: each;
            paths then begin with the part's number, as in `r"\d+\.layers\.\d+"`.
        pattern: a regular expression for paths of submodules, such as `r"layers\.\d+"`.
        save: operators whose results are kept on the device and not recomputed: names such as
            `"mm"`, `"matmul"`, `"flash_attention"` or `"aten.mm.default"`, or overloads.
        offload: operators whose results are kept on the host; given as for `save`.
        policy: replaces `save` and `offload`, as in torch's selective checkpointing: called with a
            context, the overload and its operands, it returns a
            `torch.utils.checkpoint.CheckpointPolicy`. `MUST_CPU_OFFLOAD` and `PREFER_CPU_OFFLOAD`
            move the result to the host.
        swap_inputs: swap the region's inputs wherever it is called; parameters stay.
        check_values: compare each operator's recomputed result with its forward result. For
            debugging: it reads everything twice.
        preserve_rng_state: False: let random numbers differ, which saves the cost of their state.

    Returns:
        The target (for a function: a replacement); without `target`, a decorator.

    Raises:
        InvalidArgument: an argument is invalid, or no submodule matches the pattern.
        RecomputeMismatch: in backward, with `check_values`: a recomputed result differs; the
            message names the first such operator.

    Example:
        >>> import swapkit, torch
        >>> @swapkit.checkpoint(save=["matmul"])
        ... def block(x, *, weight):
        ...     return torch.nn.functional.gelu(x @ weight).square()
        >>> x = torch.ones(64, 64, requires_grad=True)
        >>> block(x, weight=torch.ones(64, 64)).sum().backward()
    """
    if pattern is not None and not isinstance(pattern, str):
        raise InvalidArgument(
            f"checkpoint: expected a pattern as the second argument, got {pattern!r}. To run a "
            "checkpointed function, write checkpoint(function)(*args)."
        )
    what = Recompute(
        save=_parse_operators("save", save),
        offload=_parse_operators("offload", offload),
        policy=policy,
        swap_inputs=swap_inputs,
        check_values=check_values,
        preserve_rng_state=preserve_rng_state,
    )
    _check(what)
    return apply(Checkpoint(what), what, target, pattern)


def _parse_operators(name: str, operators: object) -> tuple[Any, ...]:
    if isinstance(operators, str) or not isinstance(operators, Iterable):
        example = "mm" if operators is None else operators
        raise InvalidArgument(f"{name}={operators!r}: expected a list, e.g. [{example!r}]")
    found = tuple(operators)
    if not all(isinstance(each, Hashable) for each in found):
        raise InvalidArgument(f"{name}={list(found)!r}: expected names or objects of torch.ops")
    return found


def _check(what: Recompute) -> None:
    for name in ("swap_inputs", "check_values", "preserve_rng_state"):
        if not isinstance(getattr(what, name), bool):
            raise InvalidArgument(f"{name}={getattr(what, name)!r}: expected True or False")
    check_operators(what)
    both = _resolve(what.save) & _resolve(what.offload)
    if both:
        raise InvalidArgument(
            f"save= and offload= both name {', '.join(sorted(map(str, both)))}. Keep a result "
            "either on the device or on the host."
        )
    if what.policy is not None and (what.save or what.offload):
        raise InvalidArgument("policy= decides for every operator. Omit save= and offload=.")
    if what.policy is not None and not callable(what.policy):
        raise InvalidArgument(f"policy={what.policy!r}: expected a function")


def _resolve(names: tuple[Any, ...]) -> set[object]:
    return {operator for name in names for operator in find_operators(name)}
