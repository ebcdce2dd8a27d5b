"""`session.report` and the card in notebooks: in every stage, during the session and after it."""

from __future__ import annotations

import html
import re
from typing import TYPE_CHECKING

import pytest
import torch

import swapkit
from swapkit.errors import InvalidArgument, SessionError
from swapkit.reporting.run_records import read_run
from tests.support.gelu_layers import make, train

if TYPE_CHECKING:
    from pathlib import Path

    from swapkit._runtime.session.session import Session


def missing(session: Session, path: Path) -> list[str]:
    session.report(path)
    text = html.unescape(path.read_text(encoding="utf-8"))
    return re.findall(r'<p class="missing">([^<]*)</p>', text)


def test_report_when_a_session_trains_then_more_is_known_in_each_stage(tmp_path: Path) -> None:
    model, optimizer = make()
    with swapkit.budget("4MiB", model, optimizer) as session:
        empty = missing(session, tmp_path / "0.html")
        assert len(empty) == 4
        assert all("no step" in each for each in empty)
        assert "plan: none" in session._repr_html_()
        while session.stage != "stable":
            train(model, optimizer, 1)
        assert missing(session, tmp_path / "1.html") == []
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
    assert missing(session, tmp_path / "2.html") == []
    assert "ended" in session._repr_html_()


def test_report_when_a_session_only_rescues_then_its_steps_and_why(tmp_path: Path) -> None:
    model, optimizer = make()
    with swapkit.budget("4MiB", model, optimizer, policy="rescue") as session:
        train(model, optimizer, 3)
    found = missing(session, tmp_path / "run.html")
    assert len(found) == 3
    assert all("policy='rescue'" in each for each in found)
    assert 'id="plot-times"' in (tmp_path / "run.html").read_text(encoding="utf-8")


def test_report_when_a_plan_is_given_then_it_has_what_is_known(tmp_path: Path) -> None:
    model, optimizer = make()
    with swapkit.budget("4MiB", model, optimizer) as first:
        while first.stage != "stable":
            train(model, optimizer, 1)
    first.save_plan(tmp_path / "plan.json")
    with swapkit.budget("4MiB", model, optimizer, plan=tmp_path / "plan.json") as session:
        train(model, optimizer, 3)
        session.report(tmp_path / "run.html")
    text = (tmp_path / "run.html").read_text(encoding="utf-8")
    assert 'id="plot-memory"' in text


def test_report_when_not_entered_or_misnamed_then_refused(tmp_path: Path) -> None:
    session = swapkit.budget("4MiB")
    with pytest.raises(SessionError):
        session.report(tmp_path / "run.html")
    with pytest.raises(InvalidArgument, match=r"\.html"):
        session.report(tmp_path / "run.txt")
    assert "budget 4.00 MiB, not entered" in session._repr_html_()
    assert list(tmp_path.iterdir()) == []
