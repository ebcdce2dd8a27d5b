"""What a recorder notes of one step: operators, the lives of storages, what autograd saved."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import pytest
import torch
from torch import nn
from torch.optim import optimizer as optimizer_hooks
from torch.testing._internal.two_tensor import TwoTensor
from torch.utils._python_dispatch import TorchDispatchMode, is_in_torch_dispatch_mode
from torch.utils.checkpoint import checkpoint

from swapkit._runtime.operators.effects import is_repeatable
from swapkit._runtime.torch_compat.dispatch_modes import mode_stack
from swapkit.api.recording import record
from swapkit.errors import SavedTensorModified
from swapkit.ir.checks import check_trace
from swapkit.ir.traces import BEFORE, EventKind, Kind, Phase, Trace
from tests.support.threads import on_thread

if TYPE_CHECKING:
    from collections.abc import Callable

SIDE = 32
BYTES = SIDE * SIDE * 4


def batch() -> torch.Tensor:
    torch.manual_seed(1)
    return torch.randn(SIDE, SIDE)


def two_layers() -> nn.Sequential:
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(SIDE, SIDE), nn.ReLU(), nn.Linear(SIDE, SIDE))


def names(trace: Trace, phase: Phase | None = None) -> list[str]:
    return [
        each.name.removeprefix("aten.")
        for each in trace.operators
        if phase is None or each.phase is phase
    ]


def made_by(trace: Trace, name: str, at: int = 0) -> int:
    """The first storage that an operator of this name makes."""
    matching = [k for k, each in enumerate(trace.operators) if each.name == f"aten.{name}"]
    return next(n for n in trace.operators[matching[at]].writes
                if trace.storages[n].birth == matching[at])  # fmt: skip


def recorded(step: Callable[[], object], *options: Any, **named: Any) -> Trace:
    trace = record(step, *options, **named)
    check_trace(trace)
    return trace


def test_operators_when_two_layers_train_then_each_is_there_once() -> None:
    model, x = two_layers(), batch()
    trace = recorded(lambda: model(x).sum().backward(), model)
    forward = ["addmm.default", "relu.default", "addmm.default", "sum.default"]
    assert names(trace) == [
        *forward, "ones_like.default",
        "mm.default", "mm.default", "sum.dim_IntList", "threshold_backward.default",
        "mm.default", "sum.dim_IntList",
    ]  # fmt: skip
    assert [each.module for each in trace.operators[:4]] == ["0", "1", "2", ""]
    assert {each.phase for each in trace.operators[5:]} == {Phase.BACKWARD}
    assert all(each.seconds > 0 for each in trace.operators)


def test_lives_when_two_layers_train_then_as_autograd_keeps_them() -> None:
    model, x = two_layers(), batch()
    trace = recorded(lambda: model(x).sum().backward(), model)
    linear, relu = made_by(trace, "addmm.default"), made_by(trace, "relu.default")
    assert (trace.storages[linear].birth, trace.storages[linear].death) == (0, 2)
    assert not trace.storages[linear].is_saved
    saved = trace.storages[relu]
    # Made by relu, for which its result is saved, and needed last by relu's backward.
    last = names(trace).index("threshold_backward.default")
    assert (saved.birth, saved.death, saved.is_saved) == (1, last + 1, True)
    assert (saved.module, saved.index, saved.nbytes) == ("1", 0, BYTES)
    reads = [k for k, each in enumerate(trace.operators) if relu in each.reads]
    # Idle after 2, until 5: backward asks for it together with the weight, which 5 multiplies by.
    assert reads == [2, 5, 6, last]


def test_kinds_when_two_layers_train_then_state_gradients_and_input_are_told_apart() -> None:
    model, x = two_layers(), batch()
    optimizer = torch.optim.Adam(model.parameters())

    def step() -> None:
        model(x).sum().backward()
        optimizer.step()

    step()
    model.zero_grad()
    trace = recorded(step, model, optimizer)
    kinds = [each.kind for each in trace.storages]
    assert kinds.count(Kind.STATE) == kinds.count(Kind.GRADIENT) == 4
    assert kinds.count(Kind.OPTIMIZER_STATE) == 3 * 4
    assert kinds.count(Kind.INPUT) == 1
    states = [each for each in trace.storages if each.kind is Kind.OPTIMIZER_STATE]
    assert {(each.birth, each.death) for each in states} == {(BEFORE, len(trace.operators))}
    gradients = [each for each in trace.storages if each.kind is Kind.GRADIENT]
    assert all(each.birth > 4 and each.death == len(trace.operators) for each in gradients)
    assert Phase.OPTIMIZER in {each.phase for each in trace.operators}


def test_optimizer_when_it_is_not_named_then_its_phase_and_states_are_known() -> None:
    model, x = two_layers(), batch()
    optimizer = torch.optim.SGD(model.parameters(), momentum=0.9)

    def step() -> None:
        model(x).sum().backward()
        optimizer.step()

    trace = recorded(step)
    kinds = [each.kind for each in trace.storages]
    assert kinds.count(Kind.OPTIMIZER_STATE) == kinds.count(Kind.STATE) == 4
    assert names(trace, Phase.OPTIMIZER)[:2] == ["clone.default", "add_.Tensor"]


def test_views_when_they_share_memory_then_they_are_one_storage_and_no_operator() -> None:
    x = batch().requires_grad_()
    trace = recorded(lambda: (x * 2).view(-1)[1:].t().expand(2, -1).exp().sum().backward())
    assert names(trace, Phase.FORWARD) == [
        "mul.Tensor", "exp.default", "sum.default", "ones_like.default",
    ]  # fmt: skip
    assert trace.operators[1].reads == (made_by(trace, "mul.Tensor"),)


def test_view_when_it_is_not_declared_then_it_is_none_either() -> None:
    x, w = torch.randn(2, 8, SIDE), torch.randn(SIDE, SIDE, requires_grad=True)
    trace = recorded(lambda: (x @ w).exp().sum().backward())
    assert names(trace, Phase.FORWARD)[:2] == ["mm.default", "exp.default"]


def test_change_in_place_when_it_runs_then_it_writes_what_is_there() -> None:
    x = batch().requires_grad_()
    trace = recorded(lambda: (x * 2).add_(1).exp().sum().backward())
    made = made_by(trace, "mul.Tensor")
    assert trace.operators[1].name == "aten.add_.Tensor"
    assert trace.operators[1].writes == (made,)
    assert not trace.operators[1].is_repeatable
    assert trace.operators[0].is_repeatable


def test_storage_when_an_operator_replaces_it_then_it_is_there_while_that_runs() -> None:
    w, other = batch().requires_grad_(), batch()

    def step() -> None:
        w.sum().backward()
        made = other * 2
        made.set_(other)  # type: ignore[call-overload]

    trace = recorded(step)
    made = made_by(trace, "mul.Tensor")
    at = [each.name for each in trace.operators].index("aten.set_.source_Tensor")
    assert made in trace.operators[at].reads
    assert trace.storages[made].death == at + 1


def test_gradient_when_it_goes_before_the_step_ends_then_it_was_one() -> None:
    model, x = nn.Linear(SIDE, SIDE, bias=False), batch()

    def step() -> None:
        model(x).sum().backward()
        assert model.weight.grad is not None
        model.weight.grad.norm()
        model.zero_grad()

    trace = recorded(step, model)
    assert [each.kind for each in trace.storages].count(Kind.GRADIENT) == 1


def test_list_of_tensors_when_it_is_an_operand_then_each_is_read() -> None:
    x = batch().requires_grad_()
    trace = recorded(lambda: torch.cat([x * 2, x * 3]).exp().sum().backward())
    both = made_by(trace, "mul.Tensor"), made_by(trace, "mul.Tensor", 1)
    assert next(o for o in trace.operators if o.name == "aten.cat.default").reads == both


def test_events_when_two_layers_train_then_saves_and_uses_are_in_order() -> None:
    model, x = two_layers(), batch()
    trace = recorded(lambda: model(x * 1).sum().backward(), model)
    x_at, relu = made_by(trace, "mul.Tensor"), made_by(trace, "relu.default")
    save, use = EventKind.SAVE, EventKind.USE
    assert [(each.kind, each.storage, each.operator) for each in trace.events] == [
        (save, x_at, 1), (save, relu, 3), (save, relu, 3), (save, None, 3),
        (use, relu, 6), (use, None, 6), (use, relu, 9), (use, x_at, 10),
    ]  # fmt: skip


def test_batch_when_the_caller_holds_it_then_no_plan_moves_it() -> None:
    model, x = two_layers(), batch()
    trace = recorded(lambda: model(x).sum().backward(), model)
    (held,) = [each for each in trace.storages if each.kind is Kind.INPUT]
    assert (held.birth, held.is_saved) == (BEFORE, False)
    assert trace.events[0].storage is None


def test_small_storage_when_it_is_saved_then_no_plan_moves_it() -> None:
    x = torch.ones(8, requires_grad=True)
    trace = recorded(lambda: (x * 2).exp().sum().backward())
    assert not any(each.is_saved for each in trace.storages)
    assert {each.storage for each in trace.events} == {None}


def test_autocast_when_it_casts_a_weight_then_the_copy_is_none_that_moves() -> None:
    model, x = two_layers(), batch()

    def step() -> None:
        with torch.autocast("cpu", torch.bfloat16):
            loss = model(x).float().sum()
        loss.backward()

    trace = recorded(step, model)
    # The second layer's weight, in half precision, is needed for the gradient of what came before.
    (copy,) = [
        each
        for o in trace.operators
        for each in o.writes
        if (o.name, o.module) == ("aten._to_copy.default", "2")
        and trace.storages[each].nbytes == BYTES // 2
    ]
    assert any(copy in o.reads for o in trace.operators if o.phase is Phase.BACKWARD)
    assert not trace.storages[copy].is_saved
    relu = trace.storages[made_by(trace, "relu.default")]
    assert (relu.is_saved, relu.nbytes) == (True, BYTES // 2)


def test_region_when_it_is_checkpointed_then_it_runs_again_in_backward() -> None:
    model, x = two_layers(), batch()
    first = nn.Linear(SIDE, SIDE)

    def step() -> None:
        checkpoint(model, first(x), use_reentrant=False).sum().backward()

    trace = recorded(step)
    again = [o for o in trace.operators if o.phase is Phase.BACKWARD and o.module.endswith("1")]
    assert [each.name for each in again] == ["aten.relu.default"]
    relu = made_by(trace, "relu.default")
    # Nothing of the region is kept. By name: torch 2.10's checkpoint allocates two empty tensors.
    assert trace.storages[relu].death == names(trace).index("sum.default")
    assert not trace.storages[relu].is_saved


def test_function_when_it_is_the_users_then_what_it_uses_is_read_by_what_follows() -> None:
    class Odd(torch.autograd.Function):
        @staticmethod
        def forward(ctx: Any, x: torch.Tensor) -> torch.Tensor:
            ctx.save_for_backward(x)
            return x * 2

        @staticmethod
        def backward(ctx: Any, grad: torch.Tensor) -> torch.Tensor:
            ctx.saved_tensors  # noqa: B018 - and no operator reads it
            return grad * 2

    w = batch().requires_grad_()
    trace = recorded(lambda: Odd.apply(w.exp()).sum().backward())
    saved = made_by(trace, "exp.default")
    reading = next(o for o in trace.operators if o.phase is Phase.BACKWARD)
    assert reading.name == "aten.mul.Tensor"
    assert saved in reading.reads


def test_backward_when_it_runs_twice_then_both_are_recorded() -> None:
    w = batch().requires_grad_()

    def step() -> None:
        loss = (w * 2).exp().sum()
        loss.backward(retain_graph=True)
        loss.backward()

    trace = recorded(step)
    saved = made_by(trace, "exp.default")
    (later,) = (n for n, each in enumerate(trace.storages) if each.continues == saved)
    uses = [each.storage for each in trace.events if each.kind is EventKind.USE]
    assert uses == [saved, later]
    assert names(trace, Phase.BACKWARD).count("add_.Tensor") == 1


def test_subclass_when_it_is_made_of_tensors_then_their_operators_are_seen() -> None:
    x = TwoTensor(batch(), batch()).requires_grad_()
    trace = recorded(lambda: x.exp().sum().backward())
    assert names(trace, Phase.FORWARD).count("exp.default") == 2


def test_predicate_when_operators_can_be_repeated_then_it_is_that_of_recipes() -> None:
    model, x = nn.Sequential(two_layers(), nn.Dropout(0.5), nn.LayerNorm(SIDE)), batch()
    judged: list[bool] = []

    class Judge(TorchDispatchMode):
        def __torch_dispatch__(
            self, func: Any, types: Any, args: Any = (), kwargs: Any = None
        ) -> Any:
            if not func.is_view:
                judged.append(is_repeatable(func, args, kwargs or {}))
            return func(*args, **(kwargs or {}))

    def step() -> None:
        with Judge():
            model(x).sum().backward()

    trace = recorded(step, model)
    assert [each.is_repeatable for each in trace.operators] == judged
    assert set(judged) == {True, False}


def test_tensor_when_it_is_changed_after_it_was_saved_then_backward_refuses() -> None:
    x = batch().requires_grad_()

    def step() -> None:
        y = x * 2
        loss = (y * y).sum()
        y.add_(1)
        loss.backward()

    with pytest.raises(SavedTensorModified, match="modified by an inplace operation"):
        record(step)


def test_step_when_it_raises_then_nothing_of_the_recorder_stays() -> None:
    model, x = two_layers(), batch()

    def step() -> None:
        model(x)
        raise KeyError("mine")

    with pytest.raises(KeyError, match="mine"):
        record(step, model)
    assert len(mode_stack()) == 0
    assert torch._C._autograd._top_saved_tensors_default_hooks(True) is None
    assert not torch.nn.modules.module._global_forward_pre_hooks
    assert not optimizer_hooks._global_optimizer_pre_hooks


def test_mode_when_another_is_left_open_inside_then_only_the_recorder_goes() -> None:
    seen: list[str] = []

    class Other(TorchDispatchMode):
        def __torch_dispatch__(
            self, func: Any, types: Any, args: Any = (), kwargs: Any = None
        ) -> Any:
            seen.append(str(func))
            return func(*args, **(kwargs or {}))

    other, w = Other(), batch().requires_grad_()
    was_in_mode = is_in_torch_dispatch_mode()  # torch's own flag: threads may have left it set

    def step() -> None:
        other.__enter__()
        w.exp().sum().backward()

    trace = recorded(step)
    try:
        assert "exp.default" in names(trace)
        assert len(mode_stack()) == 1
        w.sin()
        assert seen[-1] == "aten.sin.default"
    finally:
        other.__exit__(None, None, None)
    assert is_in_torch_dispatch_mode() == was_in_mode


def test_backward_when_another_thread_runs_it_then_its_uses_are_events() -> None:
    w = batch().requires_grad_()

    def step() -> None:
        (w * 2).exp().sum().backward()
        loss = (w * 3).exp().sum()
        on_thread(loss.backward)

    trace = recorded(step)
    saved = made_by(trace, "exp.default", 1)
    assert [e.kind for e in trace.events if e.storage == saved] == [EventKind.SAVE, EventKind.USE]


def test_view_when_its_base_was_changed_before_the_step_then_recording_leaves_its_node() -> None:
    made: list[torch.Tensor] = []
    hidden = batch().requires_grad_() * 1
    view = hidden.t()
    with torch.no_grad():
        hidden.add_(1)  # the view gets another node as soon as anybody reads its node

    def step() -> None:
        with torch.no_grad():
            view.sum()
        made.append(hidden * 2)
        made[-1].sum().backward(retain_graph=True)

    record(step)
    assert made[0].grad_fn is not None
    assert view.grad_fn is not None
    assert view.grad_fn._sequence_nr() > made[0].grad_fn._sequence_nr()
