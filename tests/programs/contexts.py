"""Contexts, modes and exceptions around and inside a program."""

from __future__ import annotations

import contextlib
import warnings
from typing import Any

import torch
from torch.autograd import forward_ad
from torch.overrides import TorchFunctionMode
from torch.utils._python_dispatch import TorchDispatchMode

from tests.programs.registry import SIDE, Evict, gradients, leaf, program
from tests.support.place import DEVICE


@program()
def exception_in_the_middle_of_forward(evict: Evict) -> list[torch.Tensor]:
    x = leaf()
    with contextlib.suppress(ZeroDivisionError):
        y = (x @ x).tanh()
        evict()
        y.exp().mul(1 / int(x.shape[0] == 0)).sum()
    loss = (x @ x).sin().sum()
    evict()
    return gradients(loss, x)


@program()
def exception_in_the_middle_of_backward(evict: Evict) -> list[torch.Tensor]:
    x = leaf()
    hidden = (x @ x).tanh()
    failures = [ZeroDivisionError()]

    def fail_once(grad: torch.Tensor) -> torch.Tensor:
        if failures:
            raise failures.pop()
        return grad

    hidden.register_hook(fail_once)
    loss = hidden.exp().sum()
    del hidden
    evict()
    with contextlib.suppress(ZeroDivisionError):
        gradients(loss, x, retain_graph=True)
    evict()
    return gradients(loss, x)


@program()
def keyboard_interrupt_in_forward_and_in_backward(evict: Evict) -> list[torch.Tensor]:
    x = leaf()

    def interrupt(_grad: torch.Tensor) -> None:
        raise KeyboardInterrupt

    with contextlib.suppress(KeyboardInterrupt):
        hidden = (x @ x).tanh().exp()
        evict()
        raise KeyboardInterrupt
    hidden = (x @ x).tanh()
    hidden.register_hook(interrupt)
    with contextlib.suppress(KeyboardInterrupt):
        hidden.exp().sum().backward()
    loss = (x @ x).sin().exp().sum()
    del hidden
    evict()
    return gradients(loss, x)


@program()
def anomaly_mode(evict: Evict) -> list[torch.Tensor]:
    x = leaf()
    with warnings.catch_warnings(), torch.autograd.set_detect_anomaly(True):
        warnings.simplefilter("ignore")
        loss = (x @ x).tanh().exp().sum()
        evict()
        return gradients(loss, x)


@program()
def anomaly_that_is_found(evict: Evict) -> list[torch.Tensor]:
    x = leaf()
    with warnings.catch_warnings(), torch.autograd.set_detect_anomaly(True):
        warnings.simplefilter("ignore")
        loss = (x * 0).sqrt().mul(0).sum()
        evict()
        try:
            gradients(loss, x)
        except RuntimeError as error:
            found = "SqrtBackward0" in str(error)
            return [torch.tensor(found), *gradients((x @ x).exp().sum(), x)]
    raise AssertionError("anomaly mode found nothing")


@program()
def default_device_context(evict: Evict) -> list[torch.Tensor]:
    x = leaf()
    loss = (x @ x).tanh().exp().sum()
    with torch.device("meta"):  # a function mode: it must not see swapkit's own tensors
        evict()
        return gradients(loss, x)


@program()
def default_dtype_and_deterministic_algorithms(evict: Evict) -> list[torch.Tensor]:
    x = leaf()
    torch.set_default_dtype(torch.float64)
    torch.use_deterministic_algorithms(True)
    try:
        loss = (x @ x).tanh().exp().sum()
        evict()
        return gradients(loss, x)
    finally:
        torch.set_default_dtype(torch.float32)
        torch.use_deterministic_algorithms(False)


class CountsOperators(TorchDispatchMode):
    def __init__(self) -> None:
        super().__init__()
        self.names: list[str] = []

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        self.names.append(str(func))
        return func(*args, **(kwargs or {}))


class CountsFunctions(TorchFunctionMode):
    def __init__(self) -> None:
        super().__init__()
        self.names: list[str] = []

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        self.names.append(str(getattr(func, "__name__", func)))
        return func(*args, **(kwargs or {}))


def as_tensor(names: list[str]) -> torch.Tensor:
    """Return a tensor that is equal only for the same names in the same order."""
    return torch.tensor(list("\n".join(names).encode()), dtype=torch.uint8)


@program("G7")
def dispatch_mode_sees_only_the_users_operators(evict: Evict) -> list[torch.Tensor]:
    x = leaf()
    with CountsOperators() as mode:
        loss = (x @ x).exp().sum()
        evict()
        grads = gradients(loss, x)
    expected = ("aten.mm", "aten.exp", "aten.sum", "aten.mul", "aten.ones", "aten.expand")
    of_user = [name for name in mode.names if name.startswith(expected)]
    copies = [name for name in mode.names if "copy" in name or "empty" in name or "set_" in name]
    return [*grads, as_tensor(of_user), as_tensor(copies)]


@program("G7")
def function_mode_sees_only_the_users_calls(evict: Evict) -> list[torch.Tensor]:
    x = leaf()
    with CountsFunctions() as mode:
        loss = (x @ x).exp().sum()
        evict()
        grads = list(torch.autograd.grad(loss, x))
    return [*grads, as_tensor(mode.names)]


@program()
def forward_mode(evict: Evict) -> list[torch.Tensor]:
    x = leaf()
    with forward_ad.dual_level():
        dual = forward_ad.make_dual(x, torch.ones_like(x))
        out = (dual * 2).exp().sum()
        evict()
        tangent = forward_ad.unpack_dual(out).tangent
        assert tangent is not None
        return [tangent.detach(), *torch.autograd.grad(out, x)]


@program()
def gradients_switched_off_and_on(evict: Evict) -> list[torch.Tensor]:
    x = leaf()
    with torch.no_grad():
        constant = (x @ x).exp()
        with torch.enable_grad():
            loss = (x @ constant.log()).tanh().sum()
    with torch.inference_mode():
        (x * 2).sum()
    evict()
    with torch.no_grad():
        return gradients(loss, x)


@program()
def autocast_only_around_forward_of_a_part(evict: Evict) -> list[torch.Tensor]:
    x = leaf()
    with torch.autocast(DEVICE, dtype=torch.bfloat16):
        hidden = x @ x
        with torch.autocast(DEVICE, enabled=False):
            hidden = hidden.float().tanh() @ x
        hidden = hidden @ x
    loss = hidden.float().sin().sum()
    del hidden
    evict()
    return gradients(loss, x)


@program()
def tensors_pickled_and_copied_between(evict: Evict) -> list[torch.Tensor]:
    import copy

    torch.manual_seed(18)
    model = torch.nn.Linear(SIDE, SIDE)
    x = leaf()
    loss = model(x * 1).exp().mul(1e-3).sum()
    evict()
    twin = copy.deepcopy(model)
    state = {name: value.clone() for name, value in model.state_dict().items()}
    grads = gradients(loss, x, *model.parameters())
    return [*grads, *twin.parameters(), *state.values()]
