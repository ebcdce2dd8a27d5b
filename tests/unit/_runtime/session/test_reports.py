"""`session.report` and the card in notebooks: in every stage, during the session and after it."""

from __future__ import annotations

import html
import subprocess
import sys
from typing import TYPE_CHECKING, Any

import pytest
import torch

import swapkit
from swapkit.errors import InvalidArgument, SessionError
from swapkit.reporting.run_records import read_run
from tests.support.gelu_layers import make, train
from tests.support.run_records import read_page

if TYPE_CHECKING:
    from pathlib import Path

    from swapkit._runtime.session.session import Session


TRAIN = """
import sys, torch, swapkit
model = torch.nn.Linear(8, 8)
optimizer = torch.optim.SGD(model.parameters())
with swapkit.budget("64MiB", model, optimizer) as session:
    for _ in range(3):
        model(torch.ones(4, 8)).sum().backward()
        optimizer.step()
session.metrics()
print(*(name for name in sys.modules if name.startswith("swapkit.reporting.")))
"""


def shown(session: Session, path: Path) -> dict[str, Any]:
    session.report(path)
    return read_page(path)


def test_report_when_a_session_trains_then_more_is_known_in_each_stage(tmp_path: Path) -> None:
    model, optimizer = make()
    with swapkit.budget("4MiB", model, optimizer) as session:
        empty = shown(session, tmp_path / "0.html")
        assert (empty["step"], empty["plan_bytes"], empty["steps"]["rows"]) == (None, None, [])
        assert empty["why_no_plan"].startswith("no step was recorded yet (0 steps")
        assert "plan: none" in session._repr_html_()
        while session.stage != "stable":
            train(model, optimizer, 1)
        found = shown(session, tmp_path / "1.html")
        assert found["step"]["decisions"]
        assert found["trade_offs"]["rows"]
        during = session._repr_html_()
    session.report(tmp_path / "after.json")
    record = read_run(tmp_path / "after.json")
    assert record.is_ended
    assert (record.trace, record.plan) == (session.trace, session.plan)
    assert record.steps == session.history
    assert record.stats == session.stats
    assert len(record.trade_offs) > 1
    assert record.plan_text in html.unescape(during)
    assert record.plan_text
    assert record.torch_version == torch.__version__
    assert record.swapkit_version == swapkit.__version__
    assert shown(session, tmp_path / "2.html")["step"]["why_not_planned"] == ""
    assert "ended" in session._repr_html_()


def test_report_when_a_session_only_rescues_then_its_steps_and_why(tmp_path: Path) -> None:
    model, optimizer = make()
    with swapkit.budget("4MiB", model, optimizer, policy="rescue") as session:
        train(model, optimizer, 3)
    found = shown(session, tmp_path / "run.html")
    assert found["step"] is None
    assert "policy='rescue'" in found["why_no_plan"]
    assert len(found["steps"]["rows"]) == 3


def test_report_when_a_plan_is_given_then_it_has_what_is_known(tmp_path: Path) -> None:
    model, optimizer = make()
    with swapkit.budget("4MiB", model, optimizer) as first:
        while first.stage != "stable":
            train(model, optimizer, 1)
    first.save_plan(tmp_path / "plan.json")
    with swapkit.budget("4MiB", model, optimizer, plan=tmp_path / "plan.json") as session:
        train(model, optimizer, 3)
        found = shown(session, tmp_path / "run.html")
    assert found["step"]["works"]
    assert found["plan_bytes"] is not None


def test_session_when_it_writes_no_report_then_it_loads_none_of_its_modules() -> None:
    done = subprocess.run([sys.executable, "-c", TRAIN], check=True, capture_output=True, text=True)
    loaded = {name.removeprefix("swapkit.reporting.") for name in done.stdout.split()}
    assert loaded <= {"machines", "paths", "text"}


def test_report_when_not_entered_or_misnamed_then_refused(tmp_path: Path) -> None:
    session = swapkit.budget("4MiB")
    with pytest.raises(SessionError):
        session.report(tmp_path / "run.html")
    with pytest.raises(InvalidArgument, match=r"\.html"):
        session.report(tmp_path / "run.txt")
    assert "budget 4.00 MiB, not entered" in session._repr_html_()
    assert list(tmp_path.iterdir()) == []
