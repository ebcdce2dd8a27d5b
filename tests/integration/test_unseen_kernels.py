"""What a kernel that torch does not run writes over an operator's result is in no repetition of it.

Kernels in Triton, of numpy, or of a library change memory without a version that counts it. Plans
find such results in the recorded step, by their bytes.
"""

from __future__ import annotations

import functools
from typing import TYPE_CHECKING, Any

import numpy as np
import pytest
import torch
from torch import nn

import swapkit
from swapkit._runtime.operators.checksums import Checksums
from swapkit.errors import SavedTensorModified
from swapkit.registry import Recompute
from tests.programs import assert_same_bits
from tests.support.operators import Calls, choose
from tests.support.sessions import Training, train_both
from tests.support.stateful import RecomputeAll

if TYPE_CHECKING:
    from collections.abc import Callable

DEPTH = 3
WIDTH = 64
BATCH = (512, WIDTH)
STEPS = 6
SHARE = 0.93
PLENTY = 3.0

pytestmark = [pytest.mark.usefixtures("installation", "steady_machine"), pytest.mark.promise("A3")]


def overwrite(tensor: torch.Tensor) -> None:
    """Write over a tensor as a kernel does that torch does not run."""
    np.tanh(tensor.numpy(), out=tensor.numpy())


def before_it_is_saved(x: torch.Tensor) -> tuple[torch.Tensor, ...]:
    made = x.clone()
    overwrite(made)
    return made, made


def before_another_operator_reads_it(x: torch.Tensor) -> tuple[torch.Tensor, ...]:
    made = x.mul(2)
    overwrite(made)
    read = made.exp()
    return read, read


def after_another_operator_has_read_it(x: torch.Tensor) -> tuple[torch.Tensor, ...]:
    made = x.mul(2)
    read = made.exp()
    overwrite(made)
    return made + read, made, read


def in_part(x: torch.Tensor) -> tuple[torch.Tensor, ...]:
    made = x.mul(2)
    overwrite(made[1:2, 3:5])
    return made, made


def by_a_permutation(x: torch.Tensor) -> tuple[torch.Tensor, ...]:
    made = x.mul(2)
    content = made.numpy()
    content[:] = content[::-1].copy()
    return made, made


BODIES = (
    before_it_is_saved,
    before_another_operator_reads_it,
    after_another_operator_has_read_it,
    in_part,
    by_a_permutation,
)


class Kernel(torch.autograd.Function):
    """Returns the first tensor that a function makes, and saves the others."""

    @staticmethod
    def forward(
        ctx: Any, x: torch.Tensor, body: Callable[[torch.Tensor], tuple[torch.Tensor, ...]]
    ) -> torch.Tensor:
        made, *saved = body(x)
        ctx.save_for_backward(*saved)
        return made.clone()

    @staticmethod
    def backward(ctx: Any, *grads: Any) -> Any:
        factor: torch.Tensor = sum(saved.cos() for saved in ctx.saved_tensors)
        return grads[0] * factor, None


class Kernels(nn.Module):
    """A module around it."""

    def __init__(self, body: Callable[..., Any]) -> None:
        super().__init__()
        self.body = body

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        made: torch.Tensor = Kernel.apply(x, self.body)
        return made


class Overwriting(nn.Module):
    """Writes over what autograd has saved of an operator: it has the new bytes in backward."""

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        made = x.tanh()
        read = made.sigmoid()
        overwrite(made.detach())
        return read


class Remembering(nn.Module):
    """Writes over what autograd has not saved, but the module keeps."""

    def __init__(self) -> None:
        super().__init__()
        self.kept = torch.empty(0)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        made = x * 2
        read = made.sigmoid()
        self.kept = made.detach()
        overwrite(self.kept)
        return read


def make_training(make: Callable[[], nn.Module]) -> Training:
    torch.manual_seed(0)
    layers = [each for _ in range(DEPTH) for each in (nn.Linear(WIDTH, WIDTH), make(), nn.GELU())]
    model = nn.Sequential(*layers)
    return Training(model, torch.optim.AdamW(model.parameters(), 1e-3), tokens=BATCH[0])


@pytest.mark.parametrize("body", BODIES, ids=lambda body: body.__name__)
def test_results_when_overwritten_unseen_and_all_else_is_recomputed_then_same_bits(
    body: Callable[..., Any],
) -> None:
    policy = RecomputeAll()
    make = functools.partial(make_training, functools.partial(Kernels, body))
    log = train_both(make, PLENTY, STEPS, policy=policy, search_steps=1)
    assert log.stages[-1] == "stable"
    assert policy.recomputed > 0
    assert log.session.stats.recomputed_regions > 0


@pytest.mark.parametrize("body", BODIES, ids=lambda body: body.__name__)
def test_results_when_overwritten_unseen_and_a_session_plans_then_same_bits(
    body: Callable[..., Any],
) -> None:
    make = functools.partial(make_training, functools.partial(Kernels, body))
    train_both(make, SHARE, STEPS, policy="recompute", search_steps=1)


@pytest.mark.parametrize("kind", [Overwriting, Remembering])
def test_results_when_overwritten_unseen_after_they_were_read_then_same_bits(
    kind: type[nn.Module],
) -> None:
    policy = RecomputeAll()
    make = functools.partial(make_training, kind)
    train_both(make, PLENTY, STEPS, policy=policy, search_steps=1)
    assert policy.recomputed > 0


def announced(made: torch.Tensor) -> None:
    """Overwrite a tensor, and say so before and afterwards."""
    with swapkit.op("tanh", made) as kernel:
        overwrite(made.detach())
        kernel.outputs(made)


def announced_before(made: torch.Tensor) -> None:
    with swapkit.op("tanh", made):
        overwrite(made.detach())


def announced_afterwards(made: torch.Tensor) -> None:
    with swapkit.op("tanh") as kernel:
        overwrite(made.detach())
        kernel.outputs(made)


def saved_afterwards(x: torch.Tensor, run: Callable[[torch.Tensor], None]) -> torch.Tensor:
    made = x.mul(2)
    run(made)
    return made.sin()


def read_before(x: torch.Tensor, run: Callable[[torch.Tensor], None]) -> torch.Tensor:
    """The second product, which is saved and gone, is of what the kernel overwrites."""
    made = x.mul(2)
    read = made.mul(3).sin()
    run(made)
    return read + made.exp()


def gradient(body: Callable[..., torch.Tensor], run: object, *, is_chosen: bool) -> torch.Tensor:
    torch.manual_seed(0)
    model = Calls(body)
    if is_chosen:
        choose(model, {"mul": Recompute()})
    x = torch.randn(BATCH, requires_grad=True)
    model(x, run).sum().backward()
    assert x.grad is not None
    return x.grad


@pytest.mark.parametrize(
    ("body", "run"),
    [
        (saved_afterwards, announced),
        (saved_afterwards, announced_before),
        (saved_afterwards, announced_afterwards),
        (read_before, announced),
        (read_before, announced_before),
    ],
    ids=lambda function: function.__name__,
)
def test_results_when_an_announced_kernel_overwrites_one_then_a_choice_has_the_same_bits(
    body: Callable[..., torch.Tensor], run: Callable[[torch.Tensor], None]
) -> None:
    assert_same_bits(*([gradient(body, run, is_chosen=each)] for each in (False, True)))


def test_operand_when_announced_only_after_it_was_overwritten_then_backward_says_so() -> None:
    with pytest.raises(SavedTensorModified, match=r"pass the operand to `swapkit\.op"):
        gradient(read_before, announced_afterwards, is_chosen=True)


KINDS = ("float32", "float64", "complex64", "complex128")


@pytest.mark.parametrize("shape", [(64, 64), (5, 3), (2042, 2)])
@pytest.mark.parametrize(
    ("kind", "change"),
    [
        *((kind, change) for kind in KINDS for change in (np.negative, np.abs, np.fliplr)),
        *((kind, np.conj) for kind in KINDS[2:]),
    ],
)
def test_bytes_when_only_signs_or_places_change_then_seen(
    kind: str, shape: tuple[int, int], change: Any
) -> None:
    random = np.random.default_rng(0)
    numbers = random.standard_normal(shape) + 1j * random.standard_normal(shape)
    content = (numbers if kind.startswith("complex") else numbers.real).astype(kind)
    tensor, checksums = torch.from_numpy(content), Checksums()
    before, same = checksums.take(tensor), checksums.take(tensor)
    content[:] = change(content)
    after = checksums.take(tensor)
    found = checksums.read()
    assert found[before] == found[same] != found[after]
    assert checksums.take(tensor) is None, "all were read"
