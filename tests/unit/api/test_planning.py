"""`plan` and `simulate` say what is wrong with what they are given."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest

import swapkit
from swapkit.errors import InvalidArgument
from tests.unit.ir.values import MACHINE, PLAN, TRACE


def altered(value: Any, **fields: Any) -> Any:
    return replace(value, **fields)


@pytest.mark.parametrize(
    ("options", "text"),
    [
        ({"trace": 5}, "trace=5: expected a trace from .*, or the path"),
        ({"trace": ""}, "trace='': expected a trace from"),
        ({"trace": "/nowhere/x"}, "trace='/nowhere/x': there is no such file; expected a trace"),
        ({"machine": 5}, "machine=5: expected a swapkit.ir.machines.Machine, or the path"),
        ({"machine": "none.json"}, "machine='none.json': there is no such file in '/"),
        ({"machine": altered(MACHINE, budget_bytes=10**400)}, "machine: budget_bytes: expected"),
        ({"machine": altered(MACHINE, duplex="x")}, "machine: duplex: expected .* got 'x'"),
        ({"machine": None}, "budget=None: pass a budget, or a machine that has one"),
        ({"policy": "rescue"}, "policy='rescue': expected 'auto', 'swap', 'recompute', or an"),
        ({"policy": None}, "policy=None: expected 'auto'"),
        ({"budget": 10**400}, "budget=1000.* is more than any device has; expected bytes"),
        ({"budget": float("inf")}, "budget=inf is not a whole number; expected bytes"),
        ({"budget": float("nan")}, "budget=nan is not a whole number"),
        ({"budget": -1}, "budget=-1 is less than one byte"),
        ({"budget": True}, "budget=True is not understood"),
    ],
)
def test_plan_when_an_argument_is_wrong_then_named(options: dict[str, Any], text: str) -> None:
    with pytest.raises(InvalidArgument, match=text):
        swapkit.plan(**{"trace": TRACE, "machine": MACHINE, **options})


@pytest.mark.parametrize(
    ("plan", "text"),
    [
        (None, "plan=None: expected a plan from swapkit.plan()"),
        ("plan.json", "plan='plan.json': expected a plan from swapkit.plan()"),
        (altered(PLAN, budget_bytes="x"), "plan: budget_bytes: expected a whole number"),
        (altered(PLAN, decisions=(5,)), r"plan: decisions\[0\]: expected a Decision, got 5"),
    ],
)
def test_simulate_when_the_plan_is_none_then_named(plan: Any, text: str) -> None:
    with pytest.raises(InvalidArgument, match=text):
        swapkit.simulate(TRACE, plan, machine=MACHINE)
