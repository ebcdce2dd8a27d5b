"""`offload` and `keep` apply to whatever runs, change no result, and leave nothing behind."""

from __future__ import annotations

import copy
import inspect
import io
import pickle
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import pytest
import torch

import swapkit
from swapkit._runtime.shim.types import Placement
from swapkit._runtime.user_choices.wrapping import PartForward, part_of
from swapkit.errors import InvalidArgument
from swapkit.ir.plans import Action, Tier
from swapkit.registry import Swap
from tests.support import MIB
from tests.unit._runtime.rig import EVERYTHING
from tests.unit.scoped import (
    ROOMY,
    SIDE,
    Block,
    assert_gone,
    copied,
    gradient,
    leaf,
    make_model,
)

if TYPE_CHECKING:
    from collections.abc import Callable
    from pathlib import Path


pytestmark = pytest.mark.usefixtures("installation")

# ---- what it applies to -------------------------------------------------------------------------


def test_offload_when_applied_to_a_class_then_all_its_instances() -> None:
    @swapkit.offload
    class Chosen(Block):
        pass

    torch.manual_seed(3)
    chosen = Chosen()
    torch.manual_seed(3)
    plain = Block()
    before = copied()
    assert torch.equal(gradient(chosen), gradient(plain))
    assert copied() > before
    assert isinstance(chosen, Block)
    assert_gone()


def test_offload_when_applied_to_a_module_then_that_one_only() -> None:
    first, second = make_model(), make_model()
    assert swapkit.offload(first, prefetch=2) is first
    before = copied()
    expected = gradient(second)
    assert copied() == before
    assert torch.equal(gradient(first), expected)
    assert copied() > before


def test_offload_when_applied_to_a_function_then_a_function_like_it() -> None:
    @swapkit.offload(prefetch=1, min_bytes="1KiB")
    def run(x: torch.Tensor, *, times: int = 2) -> torch.Tensor:
        """Run it."""
        for _ in range(times):
            x = torch.sin(x)
        return x

    before = copied()
    assert torch.equal(gradient(run), gradient(lambda x: x.sin().sin()))
    assert copied() > before
    assert run.__name__ == "run"
    assert run.__doc__ == "Run it."
    assert str(inspect.signature(run)).startswith("(x: 'torch.Tensor', *, times: 'int' = 2)")


def test_offload_when_on_an_object_that_is_called_then_a_function_like_it() -> None:
    @dataclass  # such as these cannot be hashed
    class Scale:
        factor: float = 2.0

        def __call__(self, x: torch.Tensor) -> torch.Tensor:
            return (x * self.factor).sin()

    before = copied()
    swapped = swapkit.offload(Scale())
    assert torch.equal(gradient(swapped), gradient(Scale()))
    assert copied() > before
    module = Block()
    module.forward = Scale()  # type: ignore[method-assign, assignment]
    assert len(swapkit.choices(module)) == 0
    assert len(swapkit.choices(swapkit.offload(module))) == 1


def test_offload_when_a_scope_then_what_runs_inside() -> None:
    scope = swapkit.offload(min_bytes=2048)
    before = copied()
    for _ in range(2):
        x = leaf()
        with scope, scope:
            loss = x.sin().sum()
        loss.backward()
    assert copied() == before + 2 * 4 * SIDE * SIDE - 2 * 4 * SIDE * SIDE  # a leaf stays
    with scope:
        gradient(lambda x: (x * 1).sin().cos())  # at the last one backward begins
    assert copied() == before + 4 * SIDE * SIDE
    assert_gone()


@pytest.mark.promise("B9")
def test_offload_when_a_pattern_is_given_then_the_submodules_that_it_matches() -> None:
    model = make_model()
    assert swapkit.offload(model, r"layers\.[02]\.up") is model
    chosen = [path for path, m in model.named_modules() if isinstance(m.forward, PartForward)]
    assert chosen == ["layers.0.up", "layers.2.up"]
    before = copied()
    gradient(model)
    assert copied() == before + 4 * SIDE * SIDE  # what the first one saves is a leaf


@pytest.mark.parametrize("choose", [swapkit.offload, swapkit.keep])
@pytest.mark.parametrize(
    ("pattern", "text"),
    [
        ("nothing", r"matches no submodule of Model; its paths begin with: layers, layers\.0"),
        ("layer", "matches no submodule"),  # not as a whole
        ("a{4294967296}", "repetition number is too large"),
        ("(" * 5000, "maximum recursion depth"),
        ("(", r"pattern '\(': "),
    ],
)
def test_pattern_when_it_matches_nothing_then_the_error_names_paths(
    choose: Any, pattern: str, text: str
) -> None:
    with pytest.raises(InvalidArgument, match=text):
        choose(make_model(), pattern)


@pytest.mark.parametrize(
    ("arguments", "options", "text"),
    [
        ((), {"to": "moon"}, "to='moon': expected 'host' or 'disk'"),
        ((), {"prefetch": 0}, "prefetch=0: expected None or a whole number of at least 1"),
        ((), {"prefetch": True}, "prefetch=True"),
        ((), {"prefetch": 1.5}, r"prefetch=1\.5"),
        ((), {"min_bytes": "much"}, "min_bytes='much' is not understood"),
        ((3,), {}, "3: expected a Module class"),
        ((int,), {}, "int.*expected a Module class"),
        ((None, "x"), {}, "pattern 'x' needs a model"),
        ((len, "x"), {}, "expected a Module, whose submodules"),
    ],
)
def test_argument_when_wrong_then_named(
    arguments: tuple[Any, ...], options: dict[str, Any], text: str
) -> None:
    with pytest.raises(InvalidArgument, match=text):
        swapkit.offload(*arguments, **options)


def test_options_when_given_then_they_are_the_choice() -> None:
    choice = swapkit.offload(to="disk", prefetch=7, min_bytes="2MiB").placement
    assert choice == Placement(Action.SWAP, Tier.DISK, 7, 2 * MIB)
    assert swapkit.offload().placement == Placement(Action.SWAP, Tier.ANY, None, 1024)
    assert swapkit.offload(min_bytes=1).placement.min_bytes == 1024
    assert swapkit.keep().placement.action is Action.KEEP


@pytest.mark.promise("A14")
def test_min_bytes_when_the_environment_asks_for_more_then_smaller_ones_stay(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setenv("MIN_SWAP_TENSOR_SIZE", str(MIB))
    before = copied()
    gradient(swapkit.offload(lambda x: (x * 1).sin()))
    region = swapkit.checkpoint(lambda x: x.sin().exp(), swap_inputs=True)
    gradient(lambda x: region(x * 1))
    assert copied() == before
    assert swapkit.offload(min_bytes="2MiB").placement.min_bytes == 2 * MIB


def test_disk_when_there_is_none_then_an_error_and_nothing_stays(tmp_path: Path) -> None:
    with pytest.raises(InvalidArgument, match="needs a disk"):
        swapkit.offload(to="disk").__enter__()
    assert_gone()
    with swapkit.budget(ROOMY, disk=tmp_path) as session:
        found = gradient(swapkit.offload(lambda x: (x * 1).sin().cos(), to="disk"))
        assert session._active is not None
        session._active.swapper.scheduler.drain()
        assert session.stats.disk_peak_bytes > 0
    assert torch.equal(found, gradient(lambda x: x.sin().cos()))


# ---- modules stay modules -----------------------------------------------------------------------


@pytest.mark.parametrize("how", ["deepcopy", "pickle", "torch.save"])
def test_module_when_copied_then_the_copy_is_offloaded_and_stands_alone(how: str) -> None:
    model = swapkit.keep(swapkit.offload(make_model(), r"layers\.\d+", prefetch=3))
    expected = gradient(model)
    if how == "deepcopy":
        twin = copy.deepcopy(model)
    elif how == "pickle":
        twin = pickle.loads(pickle.dumps(model))
    else:
        file = io.BytesIO()
        torch.save(model, file)
        file.seek(0)
        twin = torch.load(file, weights_only=False)
    part = part_of(twin.layers[0])
    assert part is not None
    assert part.judgement.swap == Swap(prefetch=3)
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.zero_()
    before = copied()
    assert torch.equal(gradient(twin), expected)
    assert copied() > before


def test_module_when_offloaded_then_signature_and_state_are_as_before() -> None:
    plain, chosen = Block(), swapkit.offload(Block())
    assert inspect.signature(chosen.forward) == inspect.signature(plain.forward)
    assert chosen.forward.__doc__ == "Say something."
    assert list(chosen.state_dict()) == list(plain.state_dict())
    x = leaf()
    assert torch.equal(chosen(x, scale=0.5), chosen(x, scale=1.0)) is False


def test_module_when_shared_then_each_call_has_the_same_bits() -> None:
    torch.manual_seed(3)
    block = Block()
    expected = gradient(lambda x: block(block(x)))
    swapkit.offload(block)
    assert torch.equal(gradient(lambda x: block(block(x))), expected)


def change_pieces(x: torch.Tensor) -> torch.Tensor:
    """Change the pieces of a storage in place, each after the one before was saved."""
    result = x.exp()
    for _ in range(4):
        gate, value = (result.repeat(1, 2) * 2).unsafe_chunk(2, 1)
        result = gate.sigmoid_() * value.tanh_()
    return result


def run_cells(x: torch.Tensor) -> torch.Tensor:
    torch.manual_seed(1)
    cell = torch.nn.LSTMCell(SIDE, SIDE)
    hidden = memory = x.cos()
    for _ in range(4):
        hidden, memory = cell(x, (hidden, memory))
    return hidden


def draw_slopes(x: torch.Tensor) -> torch.Tensor:
    """Run an operator that saves its noise first, and then draws it."""
    torch.manual_seed(1)
    return torch.nn.functional.rrelu(x.sin(), training=True).exp()


@pytest.mark.parametrize("prefetch", [None, 1, 4])
@pytest.mark.parametrize("program", [change_pieces, run_cells, draw_slopes])
def test_offload_when_storages_are_written_after_they_were_saved_then_same_bits(
    program: Callable[[torch.Tensor], torch.Tensor], prefetch: int | None
) -> None:
    before = copied()
    swapped = gradient(swapkit.offload(program, prefetch=prefetch))
    assert copied() > before
    assert torch.equal(swapped, gradient(program))


# ---- keep ---------------------------------------------------------------------------------------


def test_keep_when_everything_is_rescued_then_nothing_of_it_moves() -> None:
    with swapkit.budget(ROOMY) as session:
        x = leaf()
        with swapkit.keep():
            loss = (x * 1).sin().cos().sum()
        assert session.rescue(EVERYTHING) == 0
        kept = gradient(swapkit.keep(lambda y: (y * 1).sin()))
        assert session.stats.swapped_out_bytes == 0
        loss.backward()
    assert x.grad is not None
    assert torch.equal(kept, gradient(torch.sin))


def test_keep_when_inside_or_around_offload_then_the_inner_one_holds() -> None:
    before = copied()
    with swapkit.offload():
        gradient(swapkit.keep(lambda x: (x * 1).sin()))
        assert copied() == before
    with swapkit.keep():
        gradient(swapkit.offload(lambda x: (x * 1).sin()))
    assert copied() > before
