"""A session leaves the user's objects as they are: attributes, pickles, copies, compilers."""

from __future__ import annotations

import copy
import io
import pickle
import subprocess
import sys
import textwrap
import weakref
from typing import TYPE_CHECKING, Any

import pytest
import torch
from torch import nn

import swapkit
from swapkit.errors import SessionError
from swapkit.registry import Recompute
from tests.support.operators import choose as choose_operators
from tests.support.sessions import WIDTH, make_training, train_plainly

if TYPE_CHECKING:
    from collections.abc import Callable
    from pathlib import Path

    from tests.support.sessions import Training

STEPS = 8


pytestmark = pytest.mark.usefixtures("installation")


def attributes_of(training: Training) -> dict[str, dict[str, object]]:
    """Return every attribute of what a user handed in: hooks by themselves, the rest by identity.

    Of the optimizer's state, which steps replace, only the keys.
    """
    found: dict[str, dict[str, object]] = {}
    for path, module in training.model.named_modules():
        found[f"module {path}"] = {
            key: dict(value) if isinstance(value, dict) else id(value)
            for key, value in vars(module).items()
        }
    for path, parameter in training.model.named_parameters():
        hooks = (parameter._backward_hooks, getattr(parameter, "_post_accumulate_grad_hooks", None))
        found[f"parameter {path}"] = {**vars(parameter), "hooks": hooks}
    optimizer = training.optimizer
    assert optimizer is not None
    # Of the rest only the kind: a step replaces its states.
    found["optimizer"] = {
        key: dict(value) if "hooks" in key else type(value)
        for key, value in vars(optimizer).items()
    }
    return found


@pytest.mark.parametrize("policy", ["auto", "swap", "recompute"])
def test_attributes_when_a_session_is_at_any_stage_then_as_before(policy: str) -> None:
    plain = train_plainly(make_training, STEPS)
    training = make_training()
    before = attributes_of(training)
    stages, inside = set(), []
    forward = training.forward

    def look() -> torch.Tensor:
        loss = forward()
        inside.append(attributes_of(training) == before)
        return loss

    training.forward = look  # type: ignore[method-assign]

    limit_bytes = plain.budget(0.9)
    with swapkit.budget(limit_bytes, training.model, training.optimizer, policy=policy) as session:
        assert attributes_of(training) == before
        for _ in range(STEPS):
            stages.add(session.stage)
            training.step()
            assert attributes_of(training) == before
    assert attributes_of(training) == before
    assert inside == [True] * STEPS
    assert stages >= {"warmup", "search", "stable"}


# ---- copies and pickles -------------------------------------------------------------------------

# Loads a model where swapkit cannot be imported, and calls it.
_LOAD = """
import sys

class Missing:
    def find_spec(self, name, path=None, target=None):
        if name.partition(".")[0] == "swapkit":
            raise ModuleNotFoundError(name, name="swapkit")

sys.meta_path.insert(0, Missing())

import torch

model = torch.load(sys.argv[1], weights_only=False)
print(model(torch.ones(2, 8)).sum().item())
assert not any(name.partition(".")[0] == "swapkit" for name in sys.modules)
"""


def make_plain_model() -> nn.Sequential:
    """Return a model that needs no code of the tests."""
    torch.manual_seed(0)
    layers = [nn.Sequential(nn.Linear(8, 8), nn.GELU()) for _ in range(3)]
    return nn.Sequential(*layers)


def assert_loads_without_swapkit(model: nn.Module, path: Path) -> None:
    torch.save(model, path)
    done = subprocess.run(
        [sys.executable, "-c", textwrap.dedent(_LOAD), str(path)],
        capture_output=True,
        text=True,
        check=False,
    )
    assert done.returncode == 0, done.stderr
    assert float(done.stdout) == pytest.approx(model(torch.ones(2, 8)).sum().item())


@pytest.mark.parametrize("policy", ["auto", "recompute"])
def test_model_when_saved_in_a_session_then_it_loads_without_swapkit(
    policy: str, tmp_path: Path
) -> None:
    model = make_plain_model()
    optimizer = torch.optim.AdamW(model.parameters())
    with swapkit.budget("64MiB", model, optimizer, policy=policy):
        for _ in range(3):
            model(torch.ones(2, 8)).sum().backward()
            optimizer.step()
        assert_loads_without_swapkit(model, tmp_path / "model.pt")


class Scale:
    """A `forward` that a user has put in the place of a module's."""

    def __call__(self, x: torch.Tensor) -> torch.Tensor:
        return x * 2


CHOICES: dict[str, Callable[[nn.Module], object]] = {
    "offload": lambda model: swapkit.offload(model, r"\d", prefetch=3),
    "keep": swapkit.keep,
    "checkpoint": lambda model: swapkit.checkpoint(model, r"\d", save=["addmm"]),
    "operators": lambda model: choose_operators(model, {".*": Recompute()}),
}


def choose(name: str) -> nn.Sequential:
    """Return a model with choices by hand."""
    model = make_plain_model()
    CHOICES[name](model)
    return model


@pytest.mark.parametrize("name", CHOICES)
def test_model_with_choices_when_saved_then_it_loads_with_and_without_swapkit(
    name: str, tmp_path: Path
) -> None:
    model = choose(name)
    assert_loads_without_swapkit(model, tmp_path / "model.pt")
    loaded = torch.load(tmp_path / "model.pt", weights_only=False)
    assert str(swapkit.choices(loaded)) == str(swapkit.choices(model))
    assert len(swapkit.choices(model)) > 0


def test_forward_of_the_users_when_chosen_for_and_copied_then_it_is_there() -> None:
    model = make_plain_model()
    model[0].forward = Scale()
    swapkit.offload(model, r"\d")
    for twin in (copy.deepcopy(model), pickle.loads(pickle.dumps(model))):
        assert torch.equal(twin(torch.ones(2, 8)), model(torch.ones(2, 8)))
        assert len(swapkit.choices(twin)) == 3
        assert swapkit.choices(twin).remove() == 3
        assert isinstance(twin[0].forward, Scale)
        assert twin[0].forward is not model[0].forward


def test_forward_when_pickled_or_copied_by_itself_then_it_brings_its_module() -> None:
    model = swapkit.offload(make_plain_model())
    expected = model(torch.ones(2, 8))
    forwards: list[Any] = [model.forward]
    for forward in (*copy.deepcopy(forwards), *pickle.loads(pickle.dumps(forwards))):
        assert torch.equal(forward(torch.ones(2, 8)), expected)
        twin = forward.__self__
        assert twin is not model
        assert torch.equal(twin(torch.ones(2, 8)), expected)
        assert len(swapkit.choices(twin)) == 1


def keep_nothing(*_: object, **__: object) -> bool:
    return False


def test_choices_when_a_policy_is_given_then_copies_have_it() -> None:
    model = swapkit.checkpoint(make_plain_model(), policy=keep_nothing)
    for twin in (copy.deepcopy(model), pickle.loads(pickle.dumps(model))):
        assert str(swapkit.choices(twin)) == str(swapkit.choices(model))


class WithPolicy(nn.Sequential):
    """A model whose own method decides what its regions keep."""

    def decide(self, *_: object, **__: object) -> bool:
        return False


def test_choices_when_a_policy_refers_to_the_model_then_it_pickles() -> None:
    model = WithPolicy(nn.Linear(8, 8), nn.Linear(8, 8))
    swapkit.checkpoint(model, r"\d", policy=model.decide)
    loaded = pickle.loads(pickle.dumps(model))
    assert len(swapkit.choices(loaded)) == 2
    assert torch.equal(loaded(torch.ones(2, 8)), model(torch.ones(2, 8)))


def test_forward_when_its_module_is_gone_then_the_error_says_so() -> None:
    forward = swapkit.offload(make_plain_model()).forward
    with pytest.raises(SessionError, match="the module of this `forward` was deleted"):
        forward(torch.ones(2, 8))


def assert_freed_at_once(model: nn.Module) -> None:
    twin = copy.deepcopy(model)
    twin(torch.ones(2, 8)).sum().backward()
    references = [weakref.ref(module) for module in twin.modules()]
    del twin
    assert [reference() for reference in references] == [None] * len(references)


@pytest.mark.usefixtures("no_collector")
@pytest.mark.parametrize("name", CHOICES)
def test_copies_when_a_model_has_choices_then_they_are_freed_at_once(name: str) -> None:
    assert_freed_at_once(choose(name))


@pytest.mark.usefixtures("no_collector")
@pytest.mark.parametrize("policy", ["auto", "recompute"])
def test_copies_when_made_in_a_session_then_they_are_freed_at_once(policy: str) -> None:
    model = make_plain_model()
    optimizer = torch.optim.AdamW(model.parameters())
    with swapkit.budget("64MiB", model, optimizer, policy=policy):
        for _ in range(4):
            model(torch.ones(2, 8)).sum().backward()
            optimizer.step()
            assert_freed_at_once(model)


@pytest.mark.usefixtures("no_collector")
@pytest.mark.parametrize("policy", ["rescue", "swap", "auto"])
def test_training_when_copies_are_evaluated_under_a_tight_budget_then_it_holds(policy: str) -> None:
    def evaluate(training: Training) -> None:
        twin = copy.deepcopy(training.model).eval()
        with torch.no_grad():
            twin(torch.zeros(16, WIDTH))

    plain = train_plainly(make_training, STEPS)
    training = make_training()
    copy_bytes = sum(4 * parameter.numel() for parameter in training.model.parameters())
    limit_bytes = plain.budget(0.8)
    assert copy_bytes * STEPS > limit_bytes // 4  # they would not fit together
    with swapkit.budget(limit_bytes, training.model, training.optimizer, policy=policy):
        for _ in range(STEPS):
            training.step()
            evaluate(training)
    assert training.outcome() == plain.outcome


# ---- compilers ----------------------------------------------------------------------------------


def export(model: nn.Module, x: torch.Tensor) -> Any:
    return torch.export.export(model, (x,)).module()(x)


def script(model: nn.Module, x: torch.Tensor) -> Any:
    file = io.BytesIO()
    torch.jit.save(torch.jit.script(model), file)
    file.seek(0)
    return torch.jit.load(file)(x)


def trace(model: nn.Module, x: torch.Tensor) -> Any:
    return torch.jit.trace(model, x)(x)


def symbolically_trace(model: nn.Module, x: torch.Tensor) -> Any:
    return torch.fx.symbolic_trace(model)(x)


COMPILERS = [export, script, trace, symbolically_trace]
ignores = pytest.mark.filterwarnings("ignore::DeprecationWarning", "ignore:The .grad:UserWarning")


@ignores
@pytest.mark.parametrize("compile_it", COMPILERS)
def test_model_when_exported_in_every_stage_then_as_outside(compile_it: Any) -> None:
    model = make_plain_model()
    optimizer = torch.optim.AdamW(model.parameters())
    x = torch.ones(2, 8)
    with swapkit.budget("64MiB", model, optimizer, policy="auto") as session:
        stages = set()
        for _ in range(STEPS):
            model(x).sum().backward()
            optimizer.step()
            stages.add(session.stage)
            assert torch.allclose(compile_it(model, x), model(x))
    assert "stable" in stages


@ignores
@pytest.mark.parametrize("compile_it", COMPILERS)
@pytest.mark.parametrize("name", CHOICES)
def test_model_with_choices_when_exported_then_as_without(name: str, compile_it: Any) -> None:
    model, x = choose(name), torch.ones(2, 8)
    assert torch.allclose(compile_it(model, x), model(x))


@ignores
@pytest.mark.parametrize("how", ["whole", "in place", "block"])
def test_model_when_compiled_without_breaks_in_a_session_then_it_trains(how: str) -> None:
    calls = 0

    def count(graph: Any, _inputs: object) -> Any:
        def run(*arguments: Any) -> Any:
            nonlocal calls
            calls += 1
            return graph.forward(*arguments)

        return run

    def train(around: Any) -> list[torch.Tensor]:
        torch._dynamo.reset()
        training = make_training()
        model: Any = training.model
        with around(training):
            if how == "whole":
                training.model = torch.compile(model, backend=count, fullgraph=True)  # type: ignore[assignment]
            elif how == "in place":
                for block in model:
                    block.compile(backend=count, fullgraph=True)
            else:
                blocks: list[Any] = [
                    torch.compile(block, backend=count, fullgraph=True) for block in model
                ]
                training.model = nn.Sequential(*blocks)
            for _ in range(STEPS):
                training.step()
        torch._dynamo.reset()
        return [parameter.detach().clone() for parameter in model.parameters()]

    expected = train(lambda _training: torch.enable_grad())
    plain_calls, calls = calls, 0
    found = train(
        lambda training: swapkit.budget("256MiB", training.model, training.optimizer, policy="auto")
    )
    assert all(map(torch.equal, found, expected))
    assert calls == plain_calls > 0


def test_step_when_inputs_have_names_then_their_shapes_tell_steps_apart() -> None:
    class Named(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.layer = nn.Linear(8, 8)

        def forward(self, x: torch.Tensor, *, scale: torch.Tensor) -> torch.Tensor:
            return torch.tanh(self.layer(x)) * scale

    model = Named()
    optimizer = torch.optim.SGD(model.parameters())
    signatures = []
    with swapkit.budget("64MiB", model, optimizer, policy="auto") as session:
        for rows in (1, 4, 1, 4):
            model(torch.ones(4, 8), scale=torch.ones(rows, 8)).sum().backward()
            optimizer.step()
            assert session._active is not None
            assert session._active.controller is not None
            signatures.append(session._active.controller._signature)
    assert len(set(signatures)) == 2
    assert signatures[:2] == signatures[2:]
