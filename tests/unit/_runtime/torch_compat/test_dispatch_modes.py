"""Modes of ours: torch computes the same bits under them, and each sees the operators it should."""

from __future__ import annotations

import contextlib
import threading
from typing import TYPE_CHECKING, Any

import numpy as np
import pytest
import torch
from torch.nn import functional
from torch.testing._internal.two_tensor import TwoTensor
from torch.utils._python_dispatch import TorchDispatchMode

from swapkit._runtime.torch_compat import dispatch_modes
from swapkit._runtime.torch_compat.dispatch_modes import DispatchMode, entered, mode_stack
from swapkit._runtime.torch_compat.internals import (
    DispatchKey,
    HigherOrderOperator,
)
from swapkit._runtime.torch_compat.isolation import may_compile
from tests.programs import assert_same_bits

if TYPE_CHECKING:
    from collections.abc import Callable

pytestmark = pytest.mark.usefixtures("installation", "late_modes")


class Seeing(DispatchMode):
    """Notes the names of operators."""

    def __init__(self, log: list[str], name: str = "") -> None:
        super().__init__()
        self.log, self.name = log, name

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        del types
        self.log.append(f"{self.name}{func}")
        return func(*args, **(kwargs or {}))


class Named(torch.Tensor):
    pass


class Foreign(TorchDispatchMode):
    """A mode of the user's."""

    def __init__(self, log: list[str]) -> None:
        super().__init__()
        self.log = log

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        del types
        self.log.append(f"foreign {func}")
        return func(*args, **(kwargs or {}))


def double_sine(value: torch.Tensor) -> torch.Tensor:
    return value.sin() * 2


def weighted(value: torch.Tensor) -> torch.Tensor:
    labels, weight = torch.randint(value.shape[1], value.shape[:1]), torch.rand(value.shape[1])
    labels[0] = -100  # ignored
    return functional.cross_entropy(value, labels, weight=weight, label_smoothing=0.1)


FORMULAS: dict[str, Callable[[torch.Tensor], torch.Tensor]] = {
    "prod": lambda value: value[:, :9].prod(1).sum(),
    "masked_fill": lambda value: value.masked_fill(value > 0, value.mean()).square().sum(),
    "cross_entropy": weighted,
}


@pytest.mark.promise("A1")
@pytest.mark.parametrize("formula", FORMULAS)
def test_bits_when_torch_has_another_formula_for_modes_then_they_are_those_without(
    formula: str,
) -> None:
    def run(modes: list[DispatchMode]) -> list[torch.Tensor]:
        found = []
        for seed in range(20):
            torch.manual_seed(seed)
            value = torch.randn(100 + seed, 40 + 7 * seed).requires_grad_()
            with entered(modes):
                result = FORMULAS[formula](value)
                result.backward()
            assert value.grad is not None
            found += [result.detach(), value.grad]
        return found

    seen: list[str] = []
    assert_same_bits(run([Seeing(seen), Seeing(seen)]), run([]))
    assert seen


def test_modes_when_there_are_several_then_the_innermost_sees_each_operator_first() -> None:
    log: list[str] = []
    outer, inner = Seeing(log, "outer "), Seeing(log, "inner ")
    x = torch.ones(3)
    with entered([outer, inner]):
        with Foreign(log):
            x.sin()
        outer.leave()
        x.cos()
        assert mode_stack() == [inner]
    x.exp()
    operators = ["foreign aten.sin.default", "inner aten.sin.default", "outer aten.sin.default"]
    assert log == [*operators, "inner aten.cos.default"]
    assert mode_stack() == []
    with Foreign(log[:]), entered([outer]):  # inside of a foreign one
        log.clear()
        x.tan()
    assert log == ["outer aten.tan.default"]


def test_modes_when_a_subclass_or_parameter_is_made_then_as_without() -> None:
    log: list[str] = []
    with entered([Seeing(log)]):
        pair = TwoTensor(torch.ones(2), torch.ones(2)).exp()
        assert type(pair) is TwoTensor
        assert type(torch.nn.Parameter(torch.ones(2))) is torch.nn.Parameter
        for given in ([1.0, 2.0], (2, 3), (), np.ones(2), torch.Size([2]), torch.ones(2)):
            made = Named(*given) if isinstance(given, tuple) else Named(given)
            assert type(made) is Named
        data = torch.empty(2)
        data.fill_(3.0)
        assert data._version == 1
        with torch._C._DisableTorchDispatch():
            torch.ones(2).tanh()
    assert log.count("aten.exp.default") == 2
    assert "aten.tanh.default" not in log


def test_modes_when_another_thread_runs_backward_then_only_the_callers_operators_are_seen() -> None:
    log: list[str] = []
    value = torch.randn(5, requires_grad=True)

    def elsewhere() -> None:
        value.exp()
        assert mode_stack() == []

    with entered([Seeing(log)]):
        thread = threading.Thread(target=elsewhere)
        thread.start()
        thread.join()
        assert log == []
        value.sin().sum().backward()
    assert "aten.cos.default" in log


def test_modes_when_an_operator_fails_then_they_stay_as_they_were() -> None:
    mode = Seeing([])
    with entered([mode]):
        with contextlib.suppress(RuntimeError):
            torch.ones(2, 3) @ torch.ones(2, 3)
        assert mode_stack() == [mode]
        assert torch._C._len_torch_dispatch_stack() == 0


def test_code_when_it_is_compiled_then_modes_do_not_have_it_compiled_again(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(dispatch_modes, "may_compile", may_compile)
    log: list[str] = []
    compiled: Any = torch.compile(double_sine, backend="aot_eager")
    expected = compiled(torch.ones(3))
    with torch.compiler.set_stance("fail_on_recompile"), entered([Seeing(log)]):
        assert torch.equal(compiled(torch.ones(3)), expected)
    assert "aten.sin.default" in log


def test_operators_of_higher_order_when_made_while_a_mode_is_there_then_they_run() -> None:
    class Twice(HigherOrderOperator):
        def __init__(self) -> None:
            super().__init__("twice_of_a_test")

        def __call__(self, value: torch.Tensor) -> torch.Tensor:
            found: torch.Tensor = super().__call__(value)
            return found

    log: list[str] = []
    twice: Any = None
    x = torch.ones(3)
    for _ in range(2):
        with entered([Seeing(log)]):
            if twice is None:
                twice = Twice()
                twice.py_impl(DispatchKey.CPU)(double_sine)
                twice.fallthrough(DispatchKey.AutogradCPU)
            twice(x)
    assert log == ["aten.sin.default", "aten.mul.Tensor", "twice_of_a_test"]
