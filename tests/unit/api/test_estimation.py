"""`estimate`: what it finds holds for real sessions, and it leaves everything as it was."""

from __future__ import annotations

import json
import random
from dataclasses import replace
from typing import TYPE_CHECKING, Any

import numpy as np
import pytest
import torch
from torch import nn

import swapkit
from swapkit.errors import InvalidArgument, OverBudget, SessionError
from swapkit.ir.machines import Machine
from swapkit.planning.hardware import GIB, HARDWARE
from swapkit.units import format_bytes
from tests.conftest import is_pool_installed
from tests.support import MIB, installed, limit_above_reserved

if TYPE_CHECKING:
    from collections.abc import Callable

    from swapkit.reporting.estimates import Estimate

WIDTH = 64
LINK = Machine(budget_bytes=1 << 30, out_bytes_per_second=1e9, in_bytes_per_second=1e9)


class Training:
    """A model with buffers and dropout, and AdamW; a step on a batch of any size."""

    def __init__(self) -> None:
        torch.manual_seed(0)
        block = (nn.Linear(WIDTH, WIDTH), nn.BatchNorm1d(WIDTH), nn.GELU(), nn.Dropout(0.1))
        self.model = nn.Sequential(*block, nn.Linear(WIDTH, WIDTH), nn.GELU(), nn.Tanh())
        self.optimizer = torch.optim.AdamW(self.model.parameters(), lr=0.01)

    def step(self, batch: int = 2048) -> None:
        self.model(torch.randn(batch, WIDTH)).square().mean().backward()
        self.optimizer.step()
        self.optimizer.zero_grad()

    def estimate(self, **options: Any) -> Estimate:
        return swapkit.estimate(
            self.step, self.model, self.optimizer, **{"machine": LINK, **options}
        )

    def state(self) -> list[torch.Tensor]:
        """Everything that training changes."""
        tensors = [*self.model.state_dict().values(), torch.get_rng_state()]
        for parameter in self.model.parameters():
            tensors += [] if parameter.grad is None else [parameter.grad]
            tensors += self.optimizer.state.get(parameter, {}).values()
        return [each.clone() for each in tensors]


def same_bits(first: list[torch.Tensor], second: list[torch.Tensor]) -> bool:
    return len(first) == len(second) and all(map(torch.equal, first, second))


# ---- what it finds -------------------------------------------------------------------------------


def test_estimate_when_made_then_parts_are_in_order_and_the_sizes_those_of_the_model() -> None:
    training = Training()
    found = training.estimate()
    weights = sum(each.numel() * 4 for each in training.model.parameters())
    assert found.floor_bytes < found.smallest_budget_bytes < found.plain_bytes
    assert found.gradient_bytes == pytest.approx(weights, rel=0.1)
    assert found.optimizer_bytes == pytest.approx(2 * weights, rel=0.1)
    assert found.state_bytes == pytest.approx(weights, rel=0.1)
    assert 0 < found.streamed_budget_bytes < found.smallest_budget_bytes
    assert found.times[0].budget_bytes == found.streamed_budget_bytes
    assert found.times[-1].budget_bytes == found.plain_bytes
    seconds = [each.seconds for each in found.times]
    assert seconds == sorted(seconds, reverse=True)
    assert found.fits(found.smallest_budget_bytes)
    assert found.fits(found.streamed_budget_bytes)
    assert not found.fits(found.streamed_budget_bytes - 1)


def test_estimate_when_the_model_is_made_before_or_after_install_then_the_same() -> None:
    before = Training().estimate()
    with installed():
        after = Training().estimate()
    assert before.state_bytes == after.state_bytes
    assert before.smallest_budget_bytes == pytest.approx(after.smallest_budget_bytes, rel=0.01)
    assert before.plain_bytes == pytest.approx(after.plain_bytes, rel=0.01)


@pytest.mark.parametrize(("share", "fits"), [(1.02, True), (0.97, False)])
def test_session_when_its_budget_is_about_the_smallest_then_trains_only_above_it(
    *, share: float, fits: bool
) -> None:
    with installed() as installation:
        reserved_bytes = limit_above_reserved(installation, 0)  # by other tests
        training = Training()
        found = training.estimate()
        others_bytes = reserved_bytes if found.floor_bytes < reserved_bytes else 0
        assert others_bytes == 0, "other tests left memory behind: the budget would not be tight"
        budget_bytes = int(found.smallest_budget_bytes * share)
        failed = False
        try:
            with swapkit.budget(budget_bytes, training.model, training.optimizer) as session:
                for _ in range(6):
                    training.step()
            assert session.stats.oom_rescues > 0
        except (torch.OutOfMemoryError, OverBudget):
            failed = True
        assert failed is not fits


def test_largest_batch_when_recorded_at_that_size_then_it_fits_and_the_next_does_not() -> None:
    training = Training()
    found = training.estimate(budget="6MiB", batch_sizes=(2000, 1000))
    assert found.batch_size == 2000
    largest = found.largest_batch
    assert largest is not None
    assert largest > 2000

    def smallest_at(size: int) -> int:
        return training.estimate(batch_sizes=(1000, size), budget="6MiB").smallest_budget_bytes

    assert smallest_at(largest) <= 6 * MIB
    assert smallest_at(largest + 8) > 6 * MIB  # a block of the pool is a multiple of 512 bytes
    (row,) = found.largest_batches
    assert row.step_seconds is not None
    assert row.step_seconds > found.step_seconds


def test_largest_batch_when_not_even_one_sample_fits_then_zero() -> None:
    found = Training().estimate(budget="10KiB", batch_sizes=(8, 16))
    assert found.largest_batch == 0
    assert "none fits" in str(found)


def test_budgets_when_given_then_each_has_its_times_and_its_batch() -> None:
    found = Training().estimate(budget=["90%", "80%"], batch_sizes=(1000, 2000))
    assert found.smallest_budget_bytes < found.budgets[0] < found.budgets[1]
    assert [each.budget_bytes for each in found.largest_batches] == list(found.budgets)
    sizes = [each.batch_size for each in found.largest_batches]
    assert sizes == sorted(sizes)
    assert set(found.budgets) <= {each.budget_bytes for each in found.times}


def test_budget_when_auto_then_the_free_memory_of_the_device() -> None:
    found = Training().estimate(batch_sizes=(64, 128))
    assert len(found.budgets) == 1
    assert found.budgets[0] > 64 * MIB
    assert found.largest_batch is not None
    assert found.largest_batch > 128


def test_model_when_on_meta_then_estimated_without_memory_and_timed_with_a_link() -> None:
    with torch.device("meta"):
        model = nn.Sequential(*[nn.Linear(1024, 1024) for _ in range(4)])
        optimizer = torch.optim.SGD(model.parameters(), momentum=0.9, foreach=True)

    def step(batch: int) -> None:
        model(torch.ones(batch, 1024, device="meta")).sum().backward()
        optimizer.step()
        optimizer.zero_grad()

    rates = replace(HARDWARE["H100"], out_bytes_per_second=0.0)  # its link is not known
    options: Any = {"hardware": rates, "batch_sizes": (1 << 16, 1 << 17), "budget": "80GiB"}
    found = swapkit.estimate(step, model, optimizer, **options)
    assert found.optimizer_bytes == pytest.approx(4 * 1024 * 1025 * 4, rel=0.01)
    assert found.device == "cuda"
    assert found.times == ()
    assert "pass machine=" in str(found)
    assert not optimizer.state
    fourth = found.largest_batch
    assert fourth is not None
    assert fourth > 1 << 20
    assert not is_pool_installed()
    timed = swapkit.estimate(step, model, optimizer, machine=LINK, **options)
    assert timed.largest_batch == fourth
    assert timed.times


# ---- as values and as a table --------------------------------------------------------------------


def test_estimate_when_shown_then_all_rows_as_text_html_and_flat_values() -> None:
    found = Training().estimate(budget="3MiB", batch_sizes=(1000, 2000))
    text, html = str(found), found._repr_html_()
    for words in ("without a budget", "smallest budget", "largest batch", "Sequential on cpu"):
        assert words in text
        assert words in html
    assert html.count("<table>") == html.count("</table>") == 3
    values = found.to_dict()
    assert json.loads(json.dumps(values)) == values
    assert values["largest_batches_0_batch_size"] == found.largest_batch
    assert values["times_0_budget_bytes"] == found.streamed_budget_bytes
    assert "\n" not in repr(found)


@pytest.mark.promise("F19")
def test_estimate_when_eight_ranks_share_the_machine_then_host_memory_of_one_and_of_all(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    def estimate() -> tuple[Estimate, int]:
        found = Training().estimate()  # copies depend on the measured times: no two are the same
        taken = found.host_bytes
        assert taken == max(each.host_peak_bytes for each in found.times)
        assert taken
        return found, taken

    alone, taken = estimate()
    assert f"up to {format_bytes(taken)} of host memory" in str(alone)
    monkeypatch.setenv("LOCAL_WORLD_SIZE", "8")
    found, taken = estimate()
    values = found.to_dict()
    assert (values["ranks"], values["machine_host_bytes"]) == (8, 8 * taken)
    one, whole = format_bytes(taken), format_bytes(8 * taken)
    assert f"up to {one} per rank, {whole} for the 8 ranks of this machine" in str(found)


# ---- what it leaves behind -----------------------------------------------------------------------


@pytest.mark.parametrize("steps", [0, 1])
def test_estimate_when_made_then_training_goes_on_with_the_same_bits(steps: int) -> None:
    def train(*, estimates: bool) -> list[torch.Tensor]:
        training = Training()
        for _ in range(steps):
            training.step()
        training.model(torch.randn(4, WIDTH)).sum().backward()  # a gradient that is there already
        if estimates:
            before = training.state()
            training.estimate()
            assert same_bits(training.state(), before)
        for _ in range(2):
            training.step()
        return training.state()

    assert same_bits(train(estimates=True), train(estimates=False))


def test_estimate_when_made_then_the_generators_and_the_pool_are_as_before() -> None:
    training = Training()

    def step() -> None:
        random.random()
        np.random.rand()
        training.step()

    before = random.getstate(), np.random.get_state()[1].tolist()  # type: ignore[index]
    swapkit.estimate(step, training.model, training.optimizer, machine=LINK)
    after = random.getstate(), np.random.get_state()[1].tolist()  # type: ignore[index]
    assert after == before
    assert not is_pool_installed()
    assert not training.optimizer.state
    with installed():
        swapkit.estimate(step, training.model, training.optimizer, machine=LINK)
        assert is_pool_installed()


def test_estimate_when_the_step_raises_then_the_state_is_restored() -> None:
    training = Training()

    def step() -> None:
        training.step()
        raise KeyError("the data ran out")

    before = training.state()
    with pytest.raises(KeyError, match="ran out"):
        swapkit.estimate(step, training.model, training.optimizer, machine=LINK)
    assert same_bits(training.state(), before)
    assert not is_pool_installed()


# ---- what it refuses -----------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("options", "text"),
    [
        ({"batch_sizes": 8}, r"batch_sizes=8: expected two batch sizes, such as .*\(8, 16\)"),
        ({"batch_sizes": (8, 8)}, r"batch_sizes=\(8, 8\): expected two"),
        ({"batch_sizes": (8, True)}, "batch_sizes=.*: expected two"),
        ({"batch_sizes": (0, 8)}, "batch_sizes=.*: expected two"),
        ({"batch_sizes": (1, 2, 3)}, "batch_sizes=.*: expected two"),
        ({"batch_sizes": (8, 16), "step": lambda: None}, "it is called with the size of the batch"),
        ({"step": lambda size: size}, r"it takes arguments: pass two batch sizes"),
        ({"step": 5}, "step=5: expected a function"),
        ({"step": lambda: None}, "no backward"),
        ({"model": 5}, "model=5: expected a torch"),
        ({"optimizer": 5}, "optimizer=5: expected a torch"),
        ({"budget": "plenty"}, "budget='plenty' is not understood"),
        ({"machine": 5}, "machine=5: expected"),
        ({"hardware": "H1000"}, "hardware='H1000': expected a Hardware or one of H100"),
    ],
)
def test_estimate_when_an_argument_is_wrong_then_named(options: dict[str, Any], text: str) -> None:
    training = Training()
    given: dict[str, Any] = {
        "step": training.step,
        "model": training.model,
        "optimizer": training.optimizer,
        "machine": LINK,
    }
    with pytest.raises(InvalidArgument, match=text):
        swapkit.estimate(**{**given, **options})


def test_budget_when_auto_or_missing_for_a_device_not_at_hand_then_its_memory_counts() -> None:
    with torch.device("meta"):
        model = nn.Linear(4, 4)

    def step(batch: int) -> None:
        model(torch.ones(batch, 4, device="meta")).sum().backward()

    for budget in (None, "auto"):
        found = swapkit.estimate(step, model, hardware="4090", batch_sizes=(8, 16), budget=budget)
        assert found.budgets == (int(0.96 * int(23.5 * GIB)),)
    unknown = replace(HARDWARE["H100"], memory_bytes=0)
    with pytest.raises(InvalidArgument, match="budget='auto': the memory of H100 is not known"):
        swapkit.estimate(step, model, hardware=unknown, batch_sizes=(8, 16))
    with pytest.raises(InvalidArgument, match="hardware=None"):
        swapkit.estimate(lambda: step(8), model)


def test_estimate_when_a_session_is_active_then_refused() -> None:
    training = Training()
    with (
        installed(),
        swapkit.budget("1GiB", training.model, training.optimizer),
        pytest.raises(SessionError, match="outside `with"),
    ):
        training.estimate()


def test_step_when_it_is_not_alike_at_both_sizes_then_a_line_through_both_budgets() -> None:
    training = Training()

    def step(batch: int) -> None:
        extra: Callable[[torch.Tensor], torch.Tensor] = torch.sin if batch > 1500 else torch.clone
        loss = training.model(torch.randn(batch, WIDTH)).square()
        (extra(loss) if batch > 1500 else loss).mean().backward()
        training.optimizer.step()
        training.optimizer.zero_grad()

    found = swapkit.estimate(
        step,
        training.model,
        training.optimizer,
        budget="6MiB",
        batch_sizes=(1000, 2000),
        machine=LINK,
    )
    (row,) = found.largest_batches
    assert row.batch_size > 2000
    assert row.step_seconds is None


def test_batch_sizes_when_the_step_ignores_them_then_refused() -> None:
    model = torch.nn.Linear(8, 8)

    def step(_size: int) -> None:
        model(torch.ones(16, 8)).sum().backward()

    with pytest.raises(InvalidArgument, match="takes the same memory with both sizes"):
        swapkit.estimate(step, model, budget="1MiB", batch_sizes=(8, 16))


def test_budget_when_too_small_then_the_table_says_so() -> None:
    found = Training().estimate(budget="10KiB")
    assert "10.00 KiB is too small: try " in str(found)


def test_estimate_when_weights_are_frozen_then_a_second_budget_below_the_model() -> None:
    with torch.device("meta"):
        model = torch.nn.Sequential(
            *(torch.nn.Linear(1024, 1024).requires_grad_(requires_grad=False) for _ in range(12)),
            torch.nn.Linear(1024, 8),
        )
        batch = torch.empty(64, 1024)
    weights = sum(each.nbytes for each in model.parameters())
    found = swapkit.estimate(
        lambda: model(batch).sum().backward(), model, hardware="H100", budget=weights // 2
    )
    assert found.smallest_budget_bytes > weights > 3 * found.streamed_budget_bytes > 0
    assert found.fits(weights // 2)
    budgets = [each.budget_bytes for each in found.times]
    assert budgets == sorted(budgets)
    assert {found.streamed_budget_bytes, weights // 2} <= set(budgets)
    half = found.times[budgets.index(weights // 2)]
    # Half of the weights, at least, come twice; their copies stay on the host.
    assert half.swapped_bytes > weights // 2
    assert half.host_peak_bytes >= 0.99 * weights
    assert "smallest if weights leave" in str(found)
