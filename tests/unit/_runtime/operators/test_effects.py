"""What operators change, and which of them may run twice."""

from __future__ import annotations

from typing import Any

import pytest
import torch

from swapkit._runtime.operators.effects import can_keep, effects_of, is_repeatable

aten: Any = torch.ops.aten
c10d: Any = torch.ops.c10d
functional: Any = torch.ops._c10d_functional

X, W, MEAN, VAR = torch.ones(2, 3), torch.ones(3), torch.zeros(3), torch.ones(3)
NORM = (X, W, W)


class Own(torch.Tensor):
    """A tensor of some other kind."""


@pytest.mark.parametrize(
    ("operator", "args", "kwargs", "expected"),
    [
        (aten.mul.Tensor, (X, 2.0), {}, True),
        (aten.mul.Tensor, (torch.nn.Parameter(X), X), {}, True),
        (aten.native_dropout.default, (X, 0.5, True), {}, True),
        (aten.cat.default, ([X, X],), {}, True),
        (aten.rand_like.default, (X,), {}, True),
        (aten.empty_like.default, (X,), {}, False),
        (aten.new_zeros.default, (X, [2]), {}, False),
        (aten.full.default, ([2], 1.0), {}, False),
        (aten.mul_.Tensor, (X, 2.0), {}, False),
        (aten.mul.out, (X, X), {"out": X}, False),
        (aten.t.default, (X,), {}, False),
        (aten._unsafe_view.default, (X, [6]), {}, False),
        (aten.unsafe_split.Tensor, (X, 1), {}, False),
        (aten.bernoulli.default, (X,), {}, True),
        (aten.bernoulli.default, (X,), {"generator": torch.Generator()}, False),
        (aten.mul.Tensor, (X.as_subclass(Own), 2.0), {}, False),
        (aten.cat.default, ([X, X.as_subclass(Own)],), {}, False),
        (torch.ops.higher_order.cond, (X,), {}, False),
        (aten.item.default, (torch.ones(1),), {}, False),
        (aten._print.default, ("",), {}, False),
        (aten.batch_norm.default, (*NORM, MEAN, VAR, True, 0.1, 1e-5, True), {}, False),
        (aten.native_batch_norm.default, (*NORM, MEAN, VAR, True, 0.1, 1e-5), {}, True),
        (aten.native_batch_norm.default, (*NORM, MEAN, VAR, False, 0.1, 1e-5), {}, True),
        (aten.native_batch_norm.default, (*NORM, None, None, True, 0.1, 1e-5), {}, True),
        (aten._native_batch_norm_legit.default, (*NORM, MEAN, VAR, True, 0.1, 1e-5), {}, False),
        (aten._native_batch_norm_legit_functional.default,
         (*NORM, MEAN, VAR, True, 0.1, 1e-5), {}, True),
        (aten.rrelu_with_noise.default, (X, X, 0.1, 0.3, True), {}, False),
        (aten._fused_moving_avg_obs_fq_helper.default,
         (X, W, W, MEAN, VAR, W, W, 0.1, 0, 255, 0), {}, False),
        (aten._cudnn_rnn.default, (X, [W], 1, None, X, None, 0, 3, 0, 1, False, 0.5, True, False,
                                   [], torch.ones(1)), {}, False),
        (aten._cudnn_rnn.default, (X, [W], 1, None, X, None, 0, 3, 0, 1, False, 0.5, True, False,
                                   [], None), {}, True),
        (functional.all_to_all_single.default, (X, [2], [2], "0"), {}, False),
        (functional.all_reduce.default, (X, "sum", "0"), {}, False),
        (functional.wait_tensor.default, (X,), {}, False),
        (torch.ops._c10d_functional_autograd.all_to_all_single.default,
         (X, [2], [2], "0"), {}, False),
        (torch.ops.symm_mem.one_shot_all_reduce.default, (X, "sum", "0"), {}, False),
    ],
    ids=lambda value: str(value) if callable(value) else "",
)  # fmt: skip
def test_call_when_judged_then_repeatable_only_if_it_does_the_same_alone(
    operator: Any, args: Any, kwargs: Any, expected: bool
) -> None:
    assert is_repeatable(operator, args, kwargs) is expected


def test_results_when_views_or_changed_in_place_then_not_kept() -> None:
    assert can_keep(aten.mm.default)
    for operator in (aten.view.default, aten.relu_.default, aten.add.out, aten.detach.default):
        assert not can_keep(operator)


def test_operators_when_they_meet_other_ranks_then_never_repeatable() -> None:
    import torch.distributed._functional_collectives
    import torch.distributed.fsdp
    import torch.distributed.tensor

    spaces = ("c10d.", "_c10d_functional", "_dtensor::", "symm_mem::", "fsdp::", "c10d::")
    names = [each for each in torch._C._dispatch_get_all_op_names() if each.startswith(spaces)]
    assert len(names) > 40
    for name in names:
        qualified, _, overload = name.partition(".")
        namespace, _, base = qualified.partition("::")
        operator = getattr(getattr(getattr(torch.ops, namespace), base), overload or "default")
        assert effects_of(operator).is_communication, name
        assert not is_repeatable(operator, (), {}), name


@pytest.mark.parametrize(
    ("operator", "args", "changed"),
    [
        (aten.mul_.Tensor, (X, W), [X]),
        (aten._foreach_add_.List, ([X, W], [X, W]), [X, W]),
        (aten.native_batch_norm.default, (*NORM, MEAN, VAR, True, 0.1, 1e-5), [MEAN, VAR]),
        (aten.native_batch_norm.default, (*NORM, MEAN, VAR, False, 0.1, 1e-5), []),
        (aten.native_batch_norm.default, (*NORM, None, None, True, 0.1, 1e-5), []),
        (aten.native_batch_norm_backward.default,
         (X, X, W, MEAN, VAR, W, W, True, 1e-5, [True] * 3), []),
        (c10d.allreduce_.default, ([X, W], None, None, None), [X, W]),
        (c10d.alltoall_base_.default, (X, W, None, [], []), [X]),
        (c10d._allgather_base_.default, (X, W, None), [X]),
        (c10d.allgather_.default, ([[X], [MEAN]], [W], None), [X, MEAN]),
        (c10d.send.default, ([X], None, 0, 0), []),
        (c10d.recv_.default, ([X], None, 0, 0), [X]),
        (functional.wait_tensor.default, (X,), [X]),
        (functional.all_reduce.default, (X, "sum", "0"), []),
    ],
    ids=lambda value: str(value) if callable(value) else "",
)  # fmt: skip
def test_call_when_it_changes_tensors_then_they_are_known(
    operator: Any, args: Any, changed: list[torch.Tensor]
) -> None:
    assert list(map(id, effects_of(operator).written(args, {}))) == list(map(id, changed))


def test_statistics_when_an_operator_only_updates_them_then_scratch_stands_for_them() -> None:
    effects = effects_of(aten.native_batch_norm.default)
    unread = effects.unread((*NORM, MEAN, VAR, True, 0.1, 1e-5), {})
    assert [each is MEAN or each is VAR for each in unread] == [True, True]
    assert not effects.unread((*NORM, MEAN, VAR, False, 0.1, 1e-5), {})
    assert not effects_of(c10d.allreduce_.default).unread(([X], None, None, None), {})


def test_statistics_when_another_argument_shares_them_then_not_repeatable() -> None:
    settings = (True, 0.1, 1e-5)
    norm = aten.native_batch_norm.default
    assert is_repeatable(norm, (X, W, W, MEAN, VAR, *settings), {})
    assert not is_repeatable(norm, (X, VAR, W, MEAN, VAR, *settings), {})
    assert not is_repeatable(norm, (X, W, MEAN.view(-1), MEAN, VAR, *settings), {})


def test_statistics_when_the_flag_is_left_out_then_its_default_counts() -> None:
    """A dispatch mode is not given an argument that comes last and is the default."""
    with torch.library._scoped_library("swapkit_norms", "FRAGMENT") as library:
        for default in ("True", "False"):
            flag = f"bool training={default}"
            library.define(f"norm_{default}(Tensor x, Tensor running_mean, {flag}) -> Tensor")
        norms = torch.ops.swapkit_norms
        assert effects_of(norms.norm_True.default).written((X, MEAN), {}) == [MEAN]
        assert effects_of(norms.norm_False.default).written((X, MEAN), {}) == []


def test_custom_operators_when_torch_knows_of_effects_then_not_repeatable() -> None:
    with torch.library._scoped_library("swapkit_effects", "FRAGMENT") as library:
        library.define("pure(Tensor x) -> Tensor")
        library.define("logged(Tensor x) -> Tensor")
        library.define("tagged(Tensor x) -> Tensor", tags=(torch.Tag.maybe_aliasing_or_mutating,))
        library.define("grouped(Tensor x, str group_name) -> Tensor")
        library.define("norm(Tensor x, Tensor? running_mean, bool training) -> Tensor")
        library._register_effectful_op(
            "swapkit_effects::logged", torch._library.effects.EffectType.ORDERED
        )
        operators: Any = torch.ops.swapkit_effects
        found = {
            name: is_repeatable(getattr(operators, name).default, args, {})
            for name, args in {
                "pure": (X,),
                "logged": (X,),
                "tagged": (X,),
                "grouped": (X, "0"),
                "norm": (X, MEAN, True),
            }.items()
        }
    assert found == {
        "pure": True, "logged": False, "tagged": False, "grouped": False, "norm": False
    }  # fmt: skip


def test_operators_when_they_fill_what_autograd_has_saved_then_that_is_known() -> None:
    filling = [aten.rrelu_with_noise.default, aten.rrelu_with_noise_.default]
    assert all(effects_of(each).fills_saved for each in filling)
    others = [aten.relu_.default, aten.add.out, aten.mm.default, aten.bernoulli_.float]
    others += [aten.native_batch_norm.default, aten._native_batch_norm_legit.default]
    assert not any(effects_of(each).fills_saved for each in others)
