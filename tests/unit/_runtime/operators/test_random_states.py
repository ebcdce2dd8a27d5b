"""Random numbers of users' operators that are repeated: from generators of the whole process."""

from __future__ import annotations

import random
import warnings
from typing import TYPE_CHECKING, Any

import numpy as np
import pytest
import torch

from tests.support.captured import capture, unpack

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator

DRAWS: dict[str, Callable[[], float]] = {
    "python": random.random,
    "numpy": lambda: float(np.random.random()),
    "torch": lambda: float(torch.rand(())),
}


class Users:
    """Operators of a user's, in Python."""

    def __init__(self) -> None:
        self._library = torch.library.Library("swapkit_random", "FRAGMENT")

    def define(self, name: str, body: Callable[[torch.Tensor], torch.Tensor]) -> Any:
        self._library.define(f"{name}(Tensor x) -> Tensor")
        self._library.impl(name, body, "CPU")
        return getattr(torch.ops.swapkit_random, name).default

    def close(self) -> None:
        self._library._destroy()


pytestmark = pytest.mark.usefixtures("installation")


@pytest.fixture
def users() -> Iterator[Users]:
    made = Users()
    yield made
    made.close()


@pytest.fixture
def newer_kind() -> Iterator[None]:
    """Let numpy's global generator be of another kind than it was in all former versions."""
    numpy: Any = np.random
    before = numpy.get_bit_generator()
    numpy.set_bit_generator(numpy.PCG64(1))
    yield
    numpy.set_bit_generator(before)


def states() -> list[Any]:
    numpy = np.random.get_state(legacy=False)
    return [random.getstate(), str(numpy), torch.get_rng_state().tolist()]


def saved(operator: Any) -> tuple[Any, torch.Tensor]:
    """Return what a graph keeps of an operator's result, and that."""
    (packed,), (made,) = capture(operator, torch.ones(160, 160))
    return packed, made.clone()


@pytest.mark.parametrize("drawn", [*DRAWS, "all"])
def test_users_operator_when_repeated_then_it_draws_the_same_from_global_generators(
    users: Users, drawn: str
) -> None:
    draws = list(DRAWS.values()) if drawn == "all" else [DRAWS[drawn]]
    operator = users.define("noisy", lambda x: x * sum(draw() for draw in draws))
    packed, expected = saved(operator)
    after = states()
    assert torch.equal(unpack(packed), expected)
    assert states() == after


@pytest.mark.usefixtures("newer_kind")
def test_users_operator_when_numpys_generator_is_of_a_newer_kind_then_the_same_and_no_warning(
    users: Users,
) -> None:
    operator = users.define("noisy", lambda x: x * DRAWS["numpy"]())
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        packed, expected = saved(operator)
        after = states()
        assert torch.equal(unpack(packed), expected)
    assert states() == after


def test_users_operator_when_it_draws_nothing_then_others_draws_meanwhile_stay(
    users: Users,
) -> None:
    is_repeated = False

    def other_thread_draws() -> None:
        if is_repeated:
            for draw in DRAWS.values():
                draw()

    def plain(x: torch.Tensor) -> torch.Tensor:
        other_thread_draws()
        return x * 2

    packed, expected = saved(users.define("plain", plain))
    before = states()
    is_repeated = True
    assert torch.equal(unpack(packed), expected)
    assert all(one != other for one, other in zip(states(), before, strict=True))


def test_users_operator_when_it_draws_from_one_generator_then_only_that_one_is_wound_back(
    users: Users,
) -> None:
    is_repeated = False

    def draw(x: torch.Tensor) -> torch.Tensor:
        if is_repeated:
            DRAWS["numpy"]()  # as another thread does
        return x * DRAWS["python"]()

    packed, expected = saved(users.define("noisy", draw))
    python, numpy, _ = states()
    is_repeated = True
    assert torch.equal(unpack(packed), expected)
    assert states()[0] == python
    assert states()[1] != numpy
