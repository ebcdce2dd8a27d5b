"""Torch's own databases of operators and modules, as programs of one call each.

Loaded when a test first asks: it takes seconds, and comes with settings of torch's own test suite.
"""

from __future__ import annotations

import functools
import warnings
from dataclasses import dataclass
from itertools import islice
from typing import TYPE_CHECKING, Any

import torch
from torch.utils._pytree import tree_leaves, tree_map

from tests.programs import is_same
from tests.programs.remains import note_leaf

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator, Sequence

    from tests.programs import Evict

SEED = 3
# Of what nobody has written.
UNWRITTEN = ("empty", "new_empty", "resize_", "resize_as_")


@dataclass(frozen=True, slots=True, kw_only=True)
class Case:
    """One call of one operator, or of a new module.

    Attributes:
        name: of the operator or module, with the number of the sample.
        make: returns what is called; from the same numbers each time.
        arguments: by position and by name.
    """

    name: str
    make: Callable[[], Callable[..., Any]]
    arguments: tuple[tuple[Any, ...], dict[str, Any]]


def _load(module: str, name: str) -> list[Any]:
    """Return a database, with torch's switches for users as they were before."""
    # `torch.backends` is a wrapper: only the module inside of it has the flag that counts.
    flag, switches = "__allow_nonbracketed_mutation_flag", torch.backends.flags_frozen.__globals__
    before = switches[flag]
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        found = __import__(f"torch.testing._internal.{module}", fromlist=[name])
    switches[flag] = before
    return list(getattr(found, name))


@functools.cache
def operators() -> list[Any]:
    """Return torch's database of operators, but those whose results nobody writes."""
    found = _load("common_methods_invocations", "op_db")
    return [each for each in found if not each.name.startswith((*UNWRITTEN, "jiterator"))]


@functools.cache
def modules() -> list[Any]:
    """Return torch's database of modules."""
    return _load("common_modules", "module_db")


def operator_cases(
    entries: Sequence[Any], *, dtypes: Sequence[torch.dtype], samples: int | None
) -> Iterator[Case]:
    """Yield the first samples of operators (None: all), with gradients, in each dtype."""
    for entry in entries:
        for dtype in dtypes:
            if dtype not in entry.supported_dtypes("cpu"):
                continue
            wants_gradient = entry.supports_autograd and entry.supports_dtype(dtype, "cpu")
            wants_gradient &= dtype.is_floating_point or dtype.is_complex
            torch.manual_seed(SEED)
            found = entry.sample_inputs("cpu", dtype, requires_grad=wants_gradient)
            for number, sample in enumerate(islice(found, samples)):
                yield Case(
                    name=f"{entry.formatted_name} {str(dtype)[6:]} {number}",
                    make=functools.partial(_itself, entry.op),
                    arguments=((sample.input, *sample.args), dict(sample.kwargs)),
                )


def _itself(function: Callable[..., Any]) -> Callable[..., Any]:
    return function


def module_cases(entries: Sequence[Any], *, samples: int | None) -> Iterator[Case]:
    """Yield the first samples of modules in training (None: all)."""
    for entry in entries:
        torch.manual_seed(SEED)
        found = entry.module_inputs_func(
            entry, device="cpu", dtype=torch.float32, requires_grad=True, training=True
        )
        for number, sample in enumerate(islice(found, samples)):
            given, called = sample.constructor_input, sample.forward_input
            if called is None:
                continue
            yield Case(
                name=f"{entry.formatted_name} {number}",
                make=functools.partial(_new, entry.module_cls, given.args, given.kwargs),
                arguments=(tuple(called.args), dict(called.kwargs)),
            )


def _new(kind: Any, args: Any, kwargs: Any) -> torch.nn.Module:
    torch.manual_seed(SEED)
    made: torch.nn.Module = kind(*args, **kwargs)
    return made.train()


def tensors_in(tree: object) -> list[torch.Tensor]:
    """Return the tensors in a tree."""
    return [leaf for leaf in tree_leaves(tree) if isinstance(leaf, torch.Tensor)]


def _copy(leaf: Any) -> Any:
    if not isinstance(leaf, torch.Tensor):
        return leaf
    return leaf.detach().clone().requires_grad_(leaf.requires_grad)


def copied(case: Case) -> tuple[tuple[Any, ...], dict[str, Any]]:
    """Return new arguments for a case."""
    made: tuple[tuple[Any, ...], dict[str, Any]] = tree_map(_copy, case.arguments)
    return made


def runs_plainly(case: Case) -> bool:
    """Return whether torch itself can run a case here."""
    try:
        run_case(case, lambda: None)
    except Exception:  # noqa: BLE001 - of whatever kind it is
        return False
    return True


def run_case(
    case: Case, evict: Evict, function: Callable[..., Any] | None = None
) -> list[torch.Tensor]:
    """Run a case forward and backward; `function`: what is called if not a new one.

    Returns:
        Whatever must not depend on what `evict` does: results, gradients, all arguments and the
        whole state as they are afterwards, and the random numbers that come next.
    """
    args, kwargs = copied(case)
    function = case.make() if function is None else function
    for each in tensors_in((args, kwargs)):
        note_leaf(each)
    evict()
    torch.manual_seed(SEED)
    results = function(*args, **kwargs)
    evict()
    state = list(function.state_dict().values()) if isinstance(function, torch.nn.Module) else []
    parameters = list(function.parameters()) if isinstance(function, torch.nn.Module) else []
    wanted = [each for each in tensors_in((args, kwargs)) if each.requires_grad] + parameters
    made = tensors_in(results)
    gradients = _gradients([each for each in made if each.requires_grad], wanted)
    given = tensors_in((args, kwargs))
    everything = [*made, *gradients, *given, *state, torch.get_rng_state()]
    return [each.detach() for each in everything]


def _gradients(made: list[torch.Tensor], wanted: list[torch.Tensor]) -> list[torch.Tensor]:
    if not made or not wanted:
        return []
    losses = [each.to_dense() if each.layout is not torch.strided else each for each in made]
    loss = sum(each.abs().sum() if each.is_complex() else each.sum() for each in losses)
    assert isinstance(loss, torch.Tensor)
    found: Any = torch.autograd.grad(loss, wanted, allow_unused=True)
    return [each for each in found if each is not None]


def differences(results: list[torch.Tensor], expected: list[torch.Tensor]) -> list[int]:
    """Return the numbers of the tensors that differ; -1: there are not as many."""
    if len(results) != len(expected):
        return [-1]
    pairs = enumerate(zip(results, expected, strict=True))
    return [number for number, (one, other) in pairs if not is_same(one, other)]
