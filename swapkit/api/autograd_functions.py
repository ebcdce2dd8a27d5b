"""`adapt_mem_func_wrapper`: autograd functions under keep, swap or recompute."""

from __future__ import annotations

import functools
import inspect
from typing import Any

import torch

from swapkit._runtime.torch_compat.internals import backward_class_of, set_backward_class
from swapkit._runtime.user_choices.operator_choices import choices_for_operator
from swapkit._runtime.user_choices.part import Part
from swapkit._runtime.user_choices.wrapping import operator_part
from swapkit.errors import InvalidArgument, InvalidType
from swapkit.registry import Choice, Recompute

_POSITIONAL = (inspect.Parameter.POSITIONAL_ONLY, inspect.Parameter.POSITIONAL_OR_KEYWORD)


def adapt_mem_func_wrapper(
    function: type[torch.autograd.Function], /, *args: Any, **kwargs: Any
) -> Any:  # noqa: ANN401 - what the function returns
    """Apply an `autograd.Function` under the choices made for it; use instead of `Fn.apply(*args)`.

    The choices for the class hold (`swapkit.checkpoint(Fn)`, `swapkit.offload(Fn)`,
    `swapkit.keep(Fn)`), as do those for an operator of its name in the running module
    (`swapkit.configure`). Without a choice, the enclosing scope and the budget hold. Results and
    gradients are those of `Fn.apply`. Tensors that `forward` stores on `ctx` without
    `save_for_backward` cannot be moved. A function that changes its input in place
    (`ctx.mark_dirty`) cannot run again, so it is not recomputed.

    Args:
        function: a subclass of `torch.autograd.Function`.
        *args: the arguments of its `forward` after `ctx`.
        **kwargs: the same by name; `Fn.apply` itself takes no keywords.

    Returns:
        The result of `Fn.apply`.

    Raises:
        InvalidType: `function` is not such a class. Also a `TypeError`.
        InvalidArgument: an argument cannot be passed to `forward` by position.

    Source:
        MindSpeed, adaptive memory optimisation: the name and the signature.

    Example:
        >>> import swapkit, torch
        >>> class Double(torch.autograd.Function):
        ...     @staticmethod
        ...     def forward(ctx, x):
        ...         return x * 2
        ...     @staticmethod
        ...     def backward(ctx, grad):
        ...         return grad * 2
        >>> swapkit.adapt_mem_func_wrapper(Double, torch.ones(2, requires_grad=True)).detach()
        tensor([2., 2.])
    """
    given: object = function
    if not (isinstance(given, type) and issubclass(given, torch.autograd.Function)):
        raise InvalidType(
            f"adapt_mem_func_wrapper: {given!r} is not a subclass of torch.autograd.Function. Use "
            "swapkit.checkpoint or swapkit.offload for a module or a function."
        )
    if kwargs:
        args = _by_position(function, args, kwargs)
    chosen = operator_part(function)
    choices = () if chosen is None else chosen.choices
    choices += choices_for_operator(function.__name__)
    if not choices:
        return function.apply(*args)  # type: ignore[no-untyped-call]
    part = _part(choices, _changes_input(function))
    if part.judgement.recompute is not None:
        function = _readable_often(function)
    return part.run(function.apply, args, {})


@functools.lru_cache(maxsize=256)
def _part(choices: tuple[Choice, ...], changes_input: bool) -> Part:  # noqa: FBT001 - a key of the cache
    return Part(
        choice for choice in choices if not (changes_input and isinstance(choice.what, Recompute))
    )


@functools.lru_cache(maxsize=256)
def _changes_input(function: type[torch.autograd.Function]) -> bool:
    """Return whether a function calls `mark_dirty`, so it changes an input in place."""
    methods = (function.forward, function.setup_context)
    return any("mark_dirty" in inspect.unwrap(method).__code__.co_names for method in methods)


@functools.lru_cache(maxsize=256)
def _readable_often(function: type[torch.autograd.Function]) -> type[torch.autograd.Function]:
    """Return an equivalent class whose `backward` may read `ctx.saved_tensors` repeatedly.

    Torch returns the saved tensors of a recomputed region only once.
    """
    backward: Any = backward_class_of(function)

    class Context(backward):  # type: ignore[misc]
        _read: tuple[torch.Tensor, ...] | None = None

        @property
        def saved_tensors(self) -> tuple[torch.Tensor, ...]:
            if self._read is None:
                self._read = super().saved_tensors
            return self._read or ()

        def apply(self, *grads: Any) -> Any:  # noqa: ANN401
            try:
                return super().apply(*grads)
            finally:
                self._read = None

    Context.__name__ = backward.__name__
    made: Any = type(function.__name__, (function,), {"__module__": function.__module__})
    set_backward_class(made, Context)
    return made  # type: ignore[no-any-return]


def _by_position(
    function: type[torch.autograd.Function], args: tuple[Any, ...], kwargs: dict[str, Any]
) -> tuple[Any, ...]:
    """Return all arguments in the positional order of `forward`, with defaults where needed."""
    signature = inspect.signature(function.forward)
    parameters = list(signature.parameters.values())
    if function.setup_context is torch.autograd.Function.setup_context:
        parameters = parameters[1:]  # ctx
    try:
        bound = signature.replace(parameters=parameters).bind(*args, **kwargs)
    except TypeError as error:
        raise InvalidArgument(f"{function.__name__}.forward: {error}") from None
    last = max(index for index, one in enumerate(parameters) if one.name in bound.arguments)
    beyond = [one for one in parameters[: last + 1] if one.kind not in _POSITIONAL]
    if any(one.kind is not inspect.Parameter.VAR_POSITIONAL for one in beyond):
        raise InvalidArgument(
            f"{function.__name__}.forward takes {beyond[-1].name!r} by keyword only, but autograd "
            "passes no keywords. Make it a positional parameter."
        )
    bound.apply_defaults()
    positional = [bound.arguments[one.name] for one in parameters[: last + 1] if one not in beyond]
    return (*positional, *(value for one in beyond for value in bound.arguments[one.name]))
