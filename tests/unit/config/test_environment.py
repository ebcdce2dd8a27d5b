"""The environment variables: read where they count, and replaced with a warning if they are bad."""

from __future__ import annotations

import logging
from typing import TYPE_CHECKING

import pytest

import swapkit
from swapkit.config.environment import (
    Environment,
    apply_log_level,
    list_without_effect,
    read_environment,
)
from swapkit.errors import SwapkitWarning
from tests.support import installed, start_python

if TYPE_CHECKING:
    from collections.abc import Iterator


@pytest.fixture
def _pool() -> Iterator[None]:
    with installed():
        yield


def test_environment_when_nothing_is_set_then_the_defaults() -> None:
    assert read_environment({}) == Environment(min_swap_bytes=1024, swap_size_multiple=1)
    assert (
        read_environment({"MIN_SWAP_TENSOR_SIZE": " ", "SWAP_SIZE_MULTIPLE": ""}) == Environment()
    )


@pytest.mark.promise("A14")
@pytest.mark.parametrize(
    ("text", "nbytes"), [("1024", 1024), ("1048576", 1 << 20), ("1MiB", 1 << 20), (" 4096 ", 4096)]
)
def test_least_size_when_a_number_then_taken(text: str, nbytes: int) -> None:
    assert read_environment({"MIN_SWAP_TENSOR_SIZE": text}).min_swap_bytes == nbytes


@pytest.mark.promise("A14")
@pytest.mark.parametrize("text", ["512", "abc", "-1", "0", "10%", "1.5.2"])
def test_least_size_when_too_small_or_no_number_then_1024_and_a_warning(text: str) -> None:
    with pytest.warns(
        UserWarning, match=f"MIN_SWAP_TENSOR_SIZE='{text}': expected a number of at le"
    ):
        environment = read_environment({"MIN_SWAP_TENSOR_SIZE": text})
    assert environment.min_swap_bytes == 1024


@pytest.mark.promise("A15")
def test_multiple_when_a_number_then_taken() -> None:
    assert read_environment({"SWAP_SIZE_MULTIPLE": "3"}).swap_size_multiple == 3


@pytest.mark.promise("A15")
@pytest.mark.parametrize("text", ["0", "-2", "two", "1.5", "3x"])
def test_multiple_when_too_small_or_no_number_then_one_and_a_warning(text: str) -> None:
    with pytest.warns(
        UserWarning, match="SWAP_SIZE_MULTIPLE=.*: expected a number of at least 1; using 1"
    ):
        environment = read_environment({"SWAP_SIZE_MULTIPLE": text})
    assert environment.swap_size_multiple == 1


@pytest.mark.promise("E5")
@pytest.mark.parametrize(("text", "on"), [("1", True), ("0", False), ("", False), (" 1 ", True)])
def test_fragmentation_when_set_then_noted(text: str, *, on: bool) -> None:
    assert read_environment({"MEMORY_FRAGMENTATION": text}).memory_fragmentation is on


@pytest.mark.promise("E5")
@pytest.mark.parametrize("text", ["yes", "2", "-1", "true"])
def test_fragmentation_when_not_0_or_1_then_off_and_a_warning(text: str) -> None:
    with pytest.warns(UserWarning, match=f"MEMORY_FRAGMENTATION='{text}': expected .* using 0"):
        assert not read_environment({"MEMORY_FRAGMENTATION": text}).memory_fragmentation


@pytest.mark.parametrize(
    ("text", "level"),
    [("0", logging.DEBUG), ("1", logging.INFO), ("3", logging.ERROR), ("4", logging.CRITICAL)],
)
def test_log_level_when_a_number_then_that_of_logging(text: str, level: int) -> None:
    assert read_environment({"SWAP_LOG_LEVEL": text}).log_level == level


@pytest.mark.parametrize(
    ("name", "text", "instead"),
    [
        ("SWAP_LOG_LEVEL", "5", "0 to 4; ignoring it"),
        ("SWAP_LOG_LEVEL", "info", "0 to 4; ignoring it"),
        ("SWAP_LOG_RANK", "-2", "using -1"),
        ("SWAP_LOG_RANK", "all", "using -1"),
    ],
)
def test_log_setting_when_out_of_range_then_a_warning(name: str, text: str, instead: str) -> None:
    with pytest.warns(SwapkitWarning, match=f"{name}='{text}': expected a number from .*{instead}"):
        assert read_environment({name: text}) == Environment()


def test_log_level_when_applied_then_only_on_the_rank_that_is_meant() -> None:
    logger = logging.getLogger("swapkit")
    before = logger.level
    try:
        apply_log_level(Environment())
        assert logger.level == before
        asked = {"SWAP_LOG_LEVEL": "0", "SWAP_LOG_RANK": "1"}
        apply_log_level(read_environment({**asked, "RANK": "1"}))
        assert logger.level == logging.DEBUG
        apply_log_level(read_environment(asked))
        assert not logger.isEnabledFor(logging.CRITICAL)
    finally:
        logger.setLevel(before)


def test_log_level_when_set_then_messages_are_printed_unless_the_program_logs_itself() -> None:
    code = """
        import logging, swapkit
        swapkit.install()
        logging.getLogger("swapkit.here").info("first")
        logging.basicConfig(format="own: %(message)s")
        logging.getLogger("swapkit.here").info("second")
        """
    process = start_python(code, SWAP_LOG_LEVEL="1")
    _, printed = process.communicate(timeout=60)
    lines = [line for line in printed.splitlines() if "compil" not in line]
    assert lines == ["swapkit INFO: first", "own: second"]
    process = start_python(code, SWAP_LOG_LEVEL="")
    assert process.communicate(timeout=60)[1] == ""


def test_logs_when_topics_are_named_then_all_of_them_is_logged_and_nothing_else() -> None:
    code = """
        import logging, swapkit
        swapkit.install()
        for topic in ("plan", "rescue", "ranks"):
            logging.getLogger(f"swapkit.{topic}").debug("of %s", topic)
        """
    process = start_python(code, SWAPKIT_LOGS="plan, rescue", SWAP_LOG_LEVEL="")
    _, printed = process.communicate(timeout=60)
    lines = [line for line in printed.splitlines() if "compil" not in line]
    assert lines == ["swapkit DEBUG: of plan", "swapkit DEBUG: of rescue"]
    asked = {"SWAPKIT_LOGS": "plan", "SWAP_LOG_RANK": "1"}
    logger = logging.getLogger("swapkit.plan")
    apply_log_level(read_environment(asked))
    assert logger.level == logging.NOTSET


@pytest.mark.parametrize(("value", "count"), [("1", 1), ("0", 0), ("", 0)])
def test_memory_statistic_when_switched_on_then_said_what_prints_them(
    value: str, count: int
) -> None:
    texts = list(list_without_effect({"MS_MEMORY_STATISTIC": value}))
    assert len(texts) == count
    assert all("print swapkit.memory_summary() instead" in text for text in texts)


# Of the originals; `swapkit.config.environment` says why each has no meaning here.
WITHOUT_MEANING = (
    *("ADAPTIVE_RECOMPUTING", "vmmDefragment", "reuseLimit", "fragLimit", "reAlloc"),
    *("defragLevel", "autoGC", "gc_thresh", "TORCH_EXTENSIONS_DIR", "LD_LIBRARY_PATH"),
    *("ENABLE_LAZY_INLINE_NO_PIPELINE", "GLOG_v", "MS_MEMORY_STATISTIC"),
)


@pytest.mark.parametrize("name", WITHOUT_MEANING)
def test_variable_when_it_has_no_meaning_then_accepted(name: str) -> None:
    assert read_environment({name: "1"}) == Environment()


@pytest.mark.usefixtures("_pool")
@pytest.mark.promise("A14")
@pytest.mark.promise("A15")
def test_budget_when_the_environment_says_so_then_its_sessions_follow(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setenv("MIN_SWAP_TENSOR_SIZE", "1MiB")
    monkeypatch.setenv("SWAP_SIZE_MULTIPLE", "4")
    config = swapkit.budget("1GiB")._config
    assert (config.min_swap_bytes, config.rescue_multiple) == (1 << 20, 4)
    with swapkit.budget(1 << 40) as session:
        assert session._active is not None
        assert session._active.swapper.evictor._terms.multiple == 4
    assert swapkit.budget("1GiB", min_swap_bytes=2048)._config.min_swap_bytes == 2048


@pytest.mark.usefixtures("_pool")
def test_budget_when_the_environment_is_bad_then_the_warning_and_the_default(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setenv("MIN_SWAP_TENSOR_SIZE", "abc")
    with pytest.warns(UserWarning, match="MIN_SWAP_TENSOR_SIZE='abc'"):
        config = swapkit.budget("1GiB")._config
    assert config.min_swap_bytes == 1024


@pytest.mark.parametrize(
    ("variables", "count"),
    [
        ({}, 0),
        ({"LOCAL_WORLD_SIZE": "4"}, 4),
        ({"SLURM_STEP_ID": "0", "SLURM_NTASKS_PER_NODE": "8"}, 8),
        ({"SLURM_STEPID": "0", "SLURM_TASKS_PER_NODE": "4(x2),3", "SLURM_NODEID": "0"}, 4),
        ({"SLURM_STEPID": "0", "SLURM_TASKS_PER_NODE": "4(x2),3", "SLURM_NODEID": "1"}, 4),
        ({"SLURM_STEPID": "0", "SLURM_TASKS_PER_NODE": "4(x2),3", "SLURM_NODEID": "2"}, 3),
        ({"SLURM_STEPID": "0", "SLURM_TASKS_PER_NODE": "4(x2),3", "SLURM_NODEID": "3"}, 0),
        # Of the step, not of the job; and torchrun's own number comes first.
        (
            {
                "SLURM_STEP_ID": "1",
                "SLURM_STEP_TASKS_PER_NODE": "1(x2)",
                "SLURM_NTASKS_PER_NODE": "8",
            },
            1,
        ),
        ({"LOCAL_WORLD_SIZE": "2", "SLURM_STEP_ID": "0", "SLURM_NTASKS_PER_NODE": "1"}, 2),
        ({"SLURM_NTASKS_PER_NODE": "8"}, 0),  # in a batch script, which is one process
        ({"SLURM_STEP_ID": "0", "SLURM_TASKS_PER_NODE": "many"}, 0),
    ],
)
def test_processes_of_the_machine_when_a_launcher_says_how_many_then_taken(
    variables: dict[str, str], count: int
) -> None:
    assert read_environment(variables).node_processes == count
