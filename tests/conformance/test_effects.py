"""No operator of torch has an effect that no rule knows, and whatever may be repeated is harmless.

Every operator that torch's own databases of operators and modules come to is watched: whether it
changes an argument that it does not declare, draws random numbers, or returns memory of its
arguments; and what may be repeated is repeated.
"""

from __future__ import annotations

from collections import Counter
from typing import TYPE_CHECKING, Any, NamedTuple

import pytest
import torch
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_map

from swapkit._runtime.operators.effects import effects_of, is_repeatable
from swapkit._runtime.operators.settings import RandomState, may_be_random
from tests.conformance.database import (
    Case,
    module_cases,
    modules,
    operator_cases,
    operators,
    run_case,
    runs_plainly,
    tensors_in,
)
from tests.programs import is_same
from tests.support.place import install

if TYPE_CHECKING:
    from collections.abc import Iterable

pytestmark = pytest.mark.filterwarnings("ignore")

SHARDS, SLOW_SHARDS = 4, 16
QUICK: dict[str, Any] = {"dtypes": (torch.float32,), "samples": 1}
FULL: dict[str, Any] = {
    "dtypes": (torch.float32, torch.bfloat16, torch.int64, torch.complex64),
    "samples": 10,
}
LEAST_CALLS = 300  # of a shard: fewer, and the test would watch nothing


class Seen(NamedTuple):
    """An effect of an operator: what it is, and on which argument."""

    operator: str
    effect: str


class _Call:
    """A call to be repeated: with the random numbers that it had, and scratch for what it fills."""

    def __init__(self, function: Any, args: Any, kwargs: Any) -> None:
        self._function, self._args, self._kwargs = function, args, kwargs
        self._unread = effects_of(function).unread(args, kwargs)
        self._random = RandomState(function, tensors_in((args, kwargs)))

    def repeat(self) -> list[torch.Tensor]:
        """Return what it makes now."""
        args, kwargs = tree_map(self._scratch, (self._args, self._kwargs))
        with self._random.again():
            return tensors_in(self._function(*args, **kwargs))

    def _scratch(self, leaf: Any) -> Any:
        if not any(leaf is each for each in self._unread):
            return leaf
        return torch.empty_strided(leaf.size(), leaf.stride(), dtype=leaf.dtype)


class Detector(TorchDispatchMode):
    """Looks at everything that each operator is given, before and after."""

    def __init__(self) -> None:
        super().__init__()
        self.found: Counter[Seen] = Counter()  # known to a rule, but declared nowhere
        self.unknown: Counter[Seen] = Counter()
        self.repeated: Counter[str] = Counter()

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        if isinstance(func, torch._ops.HigherOrderOperator):
            return func(*args, **kwargs)
        given = tensors_in((args, kwargs))
        before = [_content(each) for each in given]
        random_state = torch.get_rng_state()
        call = _Call(func, args, kwargs) if is_repeatable(func, args, kwargs) else None
        results = func(*args, **kwargs)
        after = torch.get_rng_state()
        self._look_at_arguments(func, args, kwargs, before)
        if not torch.equal(after, random_state) and not may_be_random(func):
            self.unknown[Seen(str(func), "draws random numbers")] += 1
        made = tensors_in(results)
        if _shares_memory(func, given, made):
            is_known = effects_of(func).is_unsafe_view
            (self.found if is_known else self.unknown)[Seen(str(func), "gives a view")] += 1
        if call is not None:
            self._repeat(func, call, given, made)
        return results

    def _look_at_arguments(self, func: Any, args: Any, kwargs: Any, before: list[Any]) -> None:
        given = _by_argument(func, args, kwargs)
        names = {id(tensor): each.name for each, tensor in given}
        declared = {
            _storage(tensor)
            for each, tensor in given
            if each.alias_info is not None and each.alias_info.is_write
        } - {0}
        known = list(map(id, effects_of(func).written(args, kwargs)))
        for tensor, content in zip(tensors_in((args, kwargs)), before, strict=True):
            if _storage(tensor) in declared or _is_same(tensor, content):
                continue
            seen = Seen(str(func), f"changes {names[id(tensor)]}")
            (self.found if id(tensor) in known else self.unknown)[seen] += 1

    def _repeat(
        self, func: Any, call: _Call, given: list[torch.Tensor], made: list[torch.Tensor]
    ) -> None:
        """Repeat a call; nothing may change by it."""
        before = [_content(each) for each in given]
        state = torch.get_rng_state()
        again = call.repeat()
        self.repeated[str(func)] += 1
        if not all(map(_is_same, given, before)):
            self.unknown[Seen(str(func), "changes an argument when repeated")] += 1
        if not torch.equal(torch.get_rng_state(), state):
            self.unknown[Seen(str(func), "changes the random state when repeated")] += 1
        if len(again) != len(made) or not all(map(_is_same, again, made)):
            self.unknown[Seen(str(func), "gives other results when repeated")] += 1


def _by_argument(func: Any, args: Any, kwargs: Any) -> list[tuple[Any, torch.Tensor]]:
    """Return the tensors of a call, each with what the schema says of its argument."""
    return [
        (each, tensor)
        for number, each in enumerate(func._schema.arguments)
        for tensor in tensors_in(args[number] if number < len(args) else kwargs.get(each.name))
    ]


def _content(tensor: torch.Tensor) -> torch.Tensor:
    return tensor.detach().clone()


def _is_same(tensor: torch.Tensor, content: torch.Tensor) -> bool:
    if tensor.layout is not torch.strided or tensor.is_quantized:
        return True
    return is_same(_content(tensor), _content(content))


def _storage(tensor: torch.Tensor) -> int:
    is_plain = tensor.layout is torch.strided and tensor.device.type != "meta"
    return tensor.untyped_storage()._cdata if is_plain else 0


def _shares_memory(func: Any, given: list[torch.Tensor], made: list[torch.Tensor]) -> bool:
    """Whether a result is memory of an argument, though the schema says that it is not."""
    if not effects_of(func).can_keep:
        return False
    storages = {_storage(each) for each in given if each.numel()} - {0}
    return any(_storage(each) in storages for each in made if each.numel())


def watch(cases: Iterable[Case]) -> Detector:
    """Run cases, and watch their operators."""
    install()
    detector = Detector()
    for case in cases:
        try:
            with detector:
                run_case(case, lambda: None)
        except Exception:
            if runs_plainly(case):
                raise
    return detector


def check(detector: Detector) -> None:
    assert not detector.unknown, "\n".join(map(str, sorted(detector.unknown)))
    assert sum(detector.repeated.values()) >= LEAST_CALLS


@pytest.mark.parametrize("shard", range(SHARDS))
def test_operators_when_called_then_every_effect_is_known(shard: int) -> None:
    check(watch(operator_cases(operators()[shard::SHARDS], **QUICK)))


@pytest.mark.slow
@pytest.mark.parametrize("shard", range(SLOW_SHARDS))
def test_operators_when_called_with_all_samples_then_every_effect_is_known(shard: int) -> None:
    check(watch(operator_cases(operators()[shard::SLOW_SHARDS], **FULL)))


def test_modules_when_called_then_every_effect_is_known() -> None:
    detector = watch(module_cases(modules(), samples=2))
    check(detector)
    assert Seen("aten.native_batch_norm.default", "changes running_mean") in detector.found
