"""Which weights leave first, and what is copied before they have to."""

from __future__ import annotations

from typing import TYPE_CHECKING

import pytest
import torch
from torch import nn

import swapkit

if TYPE_CHECKING:
    from swapkit._runtime.allocators.installed_pool import Installation
    from swapkit._runtime.saved.swapper import Swapper

pytestmark = pytest.mark.usefixtures("installation")

WIDTH, LAYERS, MEBI = 512, 6, 1 << 20
EVERYTHING = 1 << 40


def make_model() -> nn.Sequential:
    layers = [nn.Linear(WIDTH, WIDTH) for _ in range(LAYERS)]
    return nn.Sequential(*layers).requires_grad_(requires_grad=False)


def swapper_of(installation: Installation) -> Swapper:
    return next(
        each for each in installation.runtime.swappers(installation.device) if each.mover.held[0]
    )


def free(swapper: Swapper, nbytes: int, *, spares: bool) -> int:
    """Let weights leave for so many bytes; return the bytes of those that are still here."""
    with swapper.shared.lock:
        swapper.mover.free_held(nbytes, spares)
    return swapper.mover.held[1]


def test_weights_when_they_leave_then_small_ones_stay_to_the_last(
    installation: Installation,
) -> None:
    model = make_model()
    biases_bytes = LAYERS * model.get_parameter("0.bias").nbytes
    with swapkit.budget(3 * MEBI, model, policy="rescue") as session:
        swapper = swapper_of(installation)
        for _ in range(3):
            model(torch.ones(2, WIDTH))
            session.mark_step()
        assert free(swapper, EVERYTHING, spares=True) >= biases_bytes
        model(torch.ones(2, WIDTH))
        late = swapper.mover.held[3]
        model(torch.ones(2, WIDTH))
        assert swapper.mover.held[3] - late < LAYERS + 1  # uses that waited: no bias did
        assert free(swapper, EVERYTHING, spares=False) == 0


def test_weight_when_written_ones_have_left_then_the_next_is_copied_while_it_stays(
    installation: Installation,
) -> None:
    model = make_model()
    first, second = (model.get_parameter(f"{i}.weight") for i in range(2))
    expected = first.clone().numpy() * 8
    with swapkit.budget(4 * MEBI, model, policy="rescue") as session:
        swapper = swapper_of(installation)
        first.mul_(2)
        free(swapper, EVERYTHING, spares=False)
        first.mul_(2)
        before = session.stats.swapped_out_bytes
        second.sum()
        swapper.scheduler.drain()
        assert session.stats.swapped_out_bytes - before == first.nbytes
        first.mul_(2)  # the copy is out of date
        free(swapper, EVERYTHING, spares=False)
        assert (first.clone().numpy() == expected).all()
