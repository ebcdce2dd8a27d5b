"""Parts that are interrupted anywhere: their choices are in force no longer."""

from __future__ import annotations

from collections import OrderedDict
from typing import TYPE_CHECKING, Any

import pytest
import torch
from torch import nn
from torch.nn.modules import module as module_hooks

import swapkit
from swapkit._runtime.model import global_hooks
from swapkit._runtime.process.runtime import get_runtime
from swapkit._runtime.saved import hooks
from swapkit._runtime.thread_state import thread_state
from tests.unit._runtime.rig import interrupts

if TYPE_CHECKING:
    from collections.abc import Callable

pytestmark = [pytest.mark.usefixtures("installation"), pytest.mark.promise("C5")]


def make_module() -> Callable[[torch.Tensor], Any]:
    block: Any = swapkit.offload(nn.Sequential(nn.Linear(8, 8), nn.Tanh()), min_bytes=0)
    return block  # type: ignore[no-any-return]


def make_function() -> Callable[[torch.Tensor], Any]:
    return swapkit.keep(lambda x: x.exp().sin())


@pytest.mark.parametrize("make", [make_module, make_function])
def test_part_when_interrupted_anywhere_then_no_choice_stays_in_force(
    make: Callable[[], Callable[[torch.Tensor], Any]],
) -> None:
    part = make()
    x = torch.randn(4, 8, requires_grad=True)
    users = get_runtime().tracker._users
    nth = 1
    while interrupts(nth, lambda: part(x)):
        with swapkit.keep():  # takes off what is left
            pass
        assert thread_state.scopes == [], nth
        assert thread_state.hooks == [], nth
        assert hooks._top() is None, nth
        assert get_runtime().tracker._users == users, nth
        nth += 1
    assert nth > 40
    assert torch._C._autograd._saved_tensors_hooks_disable is hooks._torchs_disable
    assert not module_hooks._has_any_global_hook()
    # Torch's own tables, without hooks of ours.
    assert type(module_hooks._global_forward_pre_hooks) is OrderedDict
    assert type(module_hooks._global_forward_hooks) is OrderedDict
    assert global_hooks._enter not in module_hooks._global_forward_pre_hooks.values()
    assert global_hooks._leave not in module_hooks._global_forward_hooks.values()
