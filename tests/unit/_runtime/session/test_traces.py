"""`session.export_trace` and `session.record_memory_history`."""

from __future__ import annotations

import gc
import gzip
import json
import tracemalloc
from typing import TYPE_CHECKING, Any

import pytest
import torch

import swapkit
from swapkit._runtime.model import hook_bypass
from swapkit._runtime.session.memory_history import PoolLook
from swapkit.errors import DiskError, InvalidArgument, InvalidType, SessionError
from swapkit.testing import planning_at_once, slow_link
from tests.support.gelu_layers import WIDTH, make, train
from tests.support.sessions import in_use_bytes
from tests.support.trace_format import check_trace, counts_of, slices_of

if TYPE_CHECKING:
    from pathlib import Path

    from swapkit._runtime.allocators.installed_pool import Installation

MEASURED = 2


def read(path: Path) -> list[dict[str, Any]]:
    return check_trace(json.loads(path.read_bytes()))


def copies_of(events: list[dict[str, Any]], process: str, thread: str = "") -> list[dict[str, Any]]:
    """Return the copies of a process, on threads whose names begin with `thread`."""
    rows = {each["tid"]: each["args"]["name"] for each in events if each["name"] == "thread_name"}
    return [
        each
        for each in slices_of(events, process)
        if each["cat"] == "copy" and rows[each["tid"]].startswith(thread)
    ]


def total(slices: list[dict[str, Any]], name: str) -> int:
    return sum(each["args"][name] for each in slices)


def values_of(slices: list[dict[str, Any]], name: str) -> set[object]:
    return {each["args"].get(name) for each in slices}


def parts_of_model() -> set[str]:
    return {f"{layer}{part}" for layer in range(6) for part in ("", ".0", ".1")}


def device_bytes(path: Path) -> list[dict[str, float]]:
    return counts_of(read(path), MEASURED, "device bytes")


def test_steps_when_a_plan_was_followed_then_planned_and_measured(tmp_path: Path) -> None:
    swapkit.install(device="cpu")
    limit = in_use_bytes() + (4 << 20)  # tests before may have left something behind
    model, optimizer = make()
    with planning_at_once(), swapkit.budget(limit, model, optimizer, policy="swap") as session:
        train(model, optimizer, 6)
        assert session.plan is not None
        session.export_trace(tmp_path / "live.json")
    session.export_trace(tmp_path / "ended.json")
    session.export_trace(str(tmp_path / "ended.json.gz"))
    events = read(tmp_path / "ended.json")
    steps = slices_of(events, "measured", "steps")
    assert [each["args"]["step"] for each in steps] == [1, 2, 3, 4, 5, 6]
    for each, record in zip(steps, session.history, strict=True):
        assert each["dur"] == pytest.approx(record.seconds * 1e6, abs=0.01)
        assert each["args"]["swapped_out_bytes"] == record.swapped_out_bytes
    planned = slices_of(events, "planned step", "compute")
    assert min(each["ts"] for each in planned) >= steps[-1]["ts"]  # side by side with it
    swapped, _ = session.plan.count_moved()
    copies = copies_of(events, "planned step")
    assert len(copies) == 2 * swapped > 0
    assert values_of(copies, "module") <= parts_of_model()
    live = slices_of(read(tmp_path / "live.json"), "measured")
    assert [each["name"] for each in live] == [each["name"] for each in steps]
    packed = gzip.decompress((tmp_path / "ended.json.gz").read_bytes())
    assert packed == (tmp_path / "ended.json").read_bytes()


def test_copies_when_recorded_then_each_with_the_time_that_the_link_took(tmp_path: Path) -> None:
    model, optimizer = make()
    nbytes, speed = 2048 * WIDTH * 4, 20e6
    with (
        slow_link(bytes_per_s=speed),
        swapkit.budget("4MiB", model, optimizer, policy="rescue") as session,
    ):
        session.record_memory_history()
        train(model, optimizer, 2)
        session.export_trace(tmp_path / "run.json")
        stats = session.stats
    events = read(tmp_path / "run.json")
    out, back = (copies_of(events, "measured", thread) for thread in ("copy out", "copy in"))
    assert total(out, "bytes") == stats.swapped_out_bytes > 0
    assert total(back, "bytes") == stats.swapped_in_bytes > 0
    for each in (*out, *back):
        # The link takes at least this long; how much longer is up to the machine.
        assert each["dur"] >= each["args"]["bytes"] / speed * 1e6 * 0.95
    assert nbytes in values_of(out, "bytes")
    assert values_of(out, "module") <= parts_of_model()
    assert values_of(back, "group") <= values_of(out, "group")
    counts = counts_of(events, MEASURED, "device bytes")
    assert max(each["reserved"] for each in counts) <= 4 << 20
    steps = slices_of(events, "measured", "steps")
    begin, end = steps[0]["ts"], steps[-1]["ts"] + steps[-1]["dur"]
    assert all(begin <= each["ts"] <= end for each in (*out, *back)), "one clock for both"


def test_copies_when_recorded_after_steps_with_room_then_by_inner_modules(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(hook_bypass, "has_compiled", lambda: False)  # by another test
    model, optimizer = make()
    with swapkit.budget("4MiB", model, optimizer, policy="rescue") as session:
        session.record_memory_history()
        for tokens in (64, 64, 64, 64, 2048):
            model(torch.randn(tokens, WIDTH)).square().mean().backward()
            optimizer.step()
            optimizer.zero_grad()
        session.export_trace(tmp_path / "run.json")
    out = copies_of(read(tmp_path / "run.json"), "measured", "copy out")
    assert len(values_of(out, "module")) > 1


def test_memory_when_the_session_ended_then_as_it_was_at_its_end(tmp_path: Path) -> None:
    model, optimizer = make()
    with swapkit.budget("4MiB", model, optimizer, policy="rescue") as session:
        session.record_memory_history()
        train(model, optimizer, 2)
        session.export_trace(tmp_path / "live.json")
    junk = [torch.ones(1 << 16) for _ in range(8)]
    session.export_trace(tmp_path / "run.json")
    live, ended = (device_bytes(tmp_path / name) for name in ("live.json", "run.json"))
    assert len(junk) == 8
    assert 100 < len(live) <= len(ended) < len(live) + 8
    with swapkit.budget("64MiB") as after:  # the pool is free for another record
        after.record_memory_history()


def test_memory_when_the_session_ends_meanwhile_then_the_record_is_kept(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    model, optimizer = make()
    with swapkit.budget("64MiB", model, optimizer) as session:
        session.record_memory_history()
        train(model, optimizer, 2)

        def end_first(installation: Installation) -> PoolLook:
            monkeypatch.undo()
            session.close()
            return PoolLook(installation)

        monkeypatch.setattr("swapkit._runtime.session.session.PoolLook", end_first)
        session.export_trace(tmp_path / "run.json")
    assert len(device_bytes(tmp_path / "run.json")) > 100


def test_memory_when_the_session_ended_then_its_record_is_small_until_it_is_written(
    tmp_path: Path,
) -> None:
    entries = 20_000
    with swapkit.budget("64MiB") as session:
        session.record_memory_history(max_entries=entries)
        for _ in range(entries // 3):
            torch.empty(1 << 20)
        tracemalloc.start()
        session.close()
        held_bytes = tracemalloc.get_traced_memory()[0]
        tracemalloc.stop()
    assert held_bytes < 100 * entries  # as objects, four times that
    session.export_trace(tmp_path / "run.json")
    assert len(device_bytes(tmp_path / "run.json")) > entries // 2


def test_memory_when_more_happens_than_is_kept_then_the_latest_and_still_sound(
    tmp_path: Path,
) -> None:
    model, optimizer = make()
    with swapkit.budget("4MiB", model, optimizer, policy="rescue") as session:
        session.record_memory_history(max_entries=50)
        train(model, optimizer, 3)
        session.export_trace(tmp_path / "run.json")
    assert 0 < len(device_bytes(tmp_path / "run.json")) <= 50
    assert json.loads((tmp_path / "run.json").read_bytes())["otherData"]["lost_events"] > 0


def test_record_when_switched_off_then_dropped(tmp_path: Path) -> None:
    make()
    with swapkit.budget("64MiB", policy="rescue") as session:
        session.record_memory_history()
        session.record_memory_history(enabled=True)  # begins anew
        torch.ones(1 << 16)
        session.record_memory_history(enabled=False)
        session.record_memory_history(enabled=False)
        session.export_trace(tmp_path / "run.json")
    assert device_bytes(tmp_path / "run.json") == []


def test_record_when_another_session_records_then_refused_until_it_is_lost() -> None:
    make()
    outer = swapkit.budget("64MiB", policy="rescue")
    outer.__enter__()
    outer.record_memory_history()
    with swapkit.budget("64MiB", policy="rescue") as inner:
        with pytest.raises(SessionError, match="another session records"):
            inner.record_memory_history()
        del outer
        gc.collect()
        inner.record_memory_history()
    assert swapkit.sessions() == ()  # undoes what the lost session left


def test_record_when_it_cannot_then_why() -> None:
    make()
    session = swapkit.budget("64MiB", policy="rescue")
    with pytest.raises(SessionError, match="not active"):
        session.record_memory_history()
    with session:
        for wrong in (0, -1, 1.5, True, "many"):
            with pytest.raises(InvalidArgument, match=f"max_entries={wrong!r}"):
                session.record_memory_history(max_entries=wrong)  # type: ignore[arg-type]
    with pytest.raises(SessionError, match="not active"):
        session.record_memory_history()


def test_recording_when_a_step_is_recorded_for_a_plan_then_neither_disturbs_the_other() -> None:
    """Workspaces are read from another ring of the same pool."""
    traces = []
    for is_recorded in (False, True):
        model, optimizer = make()
        with planning_at_once(), swapkit.budget("4MiB", model, optimizer) as session:
            if is_recorded:
                session.record_memory_history()
            train(model, optimizer, 4)
            assert session.trace is not None
            traces.append(session.trace)
    plain, recorded = traces
    assert [each.workspace_bytes for each in plain.operators] == [
        each.workspace_bytes for each in recorded.operators
    ]
    assert plain.peak_bytes == recorded.peak_bytes


def test_export_when_it_cannot_then_why_and_the_old_file_stays(tmp_path: Path) -> None:
    make()
    session = swapkit.budget("64MiB", policy="rescue")
    with pytest.raises(SessionError, match="not active"):
        session.export_trace(tmp_path / "a.json")
    with session:
        with pytest.raises(InvalidArgument, match=r"ends in \.json"):
            session.export_trace(tmp_path / "a.pickle")
        with pytest.raises(InvalidType, match="path=5"):
            session.export_trace(5)  # type: ignore[arg-type]
        with pytest.raises(DiskError, match="does not exist; create it first"):
            session.export_trace(tmp_path / "no" / "a.json")
        (tmp_path / "folder.json").mkdir()
        with pytest.raises(DiskError, match="this is a folder"):
            session.export_trace(tmp_path / "folder.json")
        session.export_trace(tmp_path / "a.json")
    events = read(tmp_path / "a.json")  # no step, no plan: what there is
    assert not slices_of(events, "measured")
    assert [path.name for path in tmp_path.iterdir() if path.is_file()] == ["a.json"]


def test_export_when_writing_fails_halfway_then_the_old_file_stays(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    make()
    path = tmp_path / "a.json"
    path.write_text("old")

    def fail(*_args: object, **_options: object) -> None:
        raise OSError(28, "No space left on device")

    monkeypatch.setattr("os.fsync", fail)
    with (
        swapkit.budget("64MiB", policy="rescue") as session,
        pytest.raises(DiskError, match="No space left"),
    ):
        session.export_trace(path)
    assert path.read_text() == "old"
    assert list(tmp_path.iterdir()) == [path]
