"""`op` names a kernel that torch does not run: in reports, in the trace, and for its whole life."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import pytest
import torch
from torch import nn

import swapkit
from swapkit._native.pool import Ring, RingKind, set_tag
from swapkit._runtime.allocators.memory_holders import find_holders
from swapkit._runtime.model.tracker import NO_MODULE
from swapkit._runtime.process.runtime import get_runtime
from swapkit.errors import InvalidArgument, SessionError
from tests.support import MIB
from tests.unit._runtime.rig import EVERYTHING

if TYPE_CHECKING:
    from collections.abc import Iterator

    from swapkit._runtime.allocators.installed_pool import Installation


@pytest.fixture
def ring(installation: Installation) -> Iterator[Ring]:
    ring = Ring(64)
    installation.pool.attach(ring)
    tracker = get_runtime().tracker
    tracker.start(ring)
    yield ring
    tracker.stop(ring)
    installation.pool.detach()


def holders(installation: Installation) -> dict[str, int]:
    found = find_holders(installation.device, installation.tracker)
    return {holder.name: holder.nbytes for holder in found}


def test_op_when_it_allocates_then_the_memory_has_its_name(installation: Installation) -> None:
    with swapkit.op("my_kernel"):
        made = torch.empty(MIB)
    assert holders(installation)["made in my_kernel"] == made.nbytes
    after = torch.empty(2 * MIB)
    assert holders(installation)["made in my_kernel"] == made.nbytes
    assert after.nbytes == 2 * made.nbytes


def test_op_when_inside_a_module_then_named_below_it(installation: Installation) -> None:
    class Layer(nn.Module):
        def forward(self, x: torch.Tensor) -> torch.Tensor:
            with swapkit.op("attention", x):
                return torch.empty(MIB)

    model = nn.ModuleDict({"layer": Layer()})
    with swapkit.budget(1 << 40, model):
        made = model["layer"](torch.ones(4))
        assert holders(installation)["made in layer.attention"] == made.nbytes
        outside = set_tag(NO_MODULE)
        assert outside == NO_MODULE


def test_op_when_it_saves_then_the_site_has_its_name() -> None:
    with swapkit.budget(1 << 40) as session, swapkit.op("my_kernel"):
        x = torch.ones(MIB, requires_grad=True)
        loss = (x * 1).sin().sum()
        assert session._active is not None
        swapper = session._active.swapper
        sites = [swapper.site(group) for group in swapper.mover.resident]
    assert [site.split(" ")[0] for site in sites] == ["my_kernel#0"]
    assert loss.requires_grad


def test_op_when_it_runs_then_begin_and_end_are_in_the_ring_with_its_bytes(ring: Ring) -> None:
    x = torch.ones(1024)
    with swapkit.op("my_kernel", x) as kernel:
        y = torch.ones(2048)
        kernel.outputs(y)
    events, lost = ring.read()
    marks = [(event.kind, event.nbytes) for event in events if event.kind >= RingKind.OP_BEGIN]
    assert marks == [(RingKind.OP_BEGIN, 0), (RingKind.OP_END, 4096 + 8192)]
    tags = {event.tag for event in events if event.kind is RingKind.TAKE and event.nbytes >= 8192}
    assert [get_runtime().tracker.name(tag) for tag in tags] == ["my_kernel"]
    assert lost == 0


@pytest.mark.usefixtures("installation")
def test_operands_when_everything_is_rescued_meanwhile_then_they_stay() -> None:
    with swapkit.budget(1 << 40) as session:
        x = torch.ones(MIB, requires_grad=True)
        saved = (x * 1).sin()
        loss = (saved * saved).sum()
        addresses = [saved.data_ptr()]
        kernel = swapkit.op("my_kernel", saved)
        del saved
        with kernel:
            session.rescue(EVERYTHING)
            assert kernel._operands[0].data_ptr() == addresses[0]
            assert torch.equal(kernel._operands[0], x.detach().sin())
        assert session.rescue(EVERYTHING) == 4 * MIB
        loss.backward()


@pytest.mark.parametrize("kind", [ValueError, KeyboardInterrupt])
def test_op_when_the_kernel_fails_then_its_name_is_gone(kind: type[BaseException]) -> None:
    runtime = get_runtime()
    with pytest.raises(kind), swapkit.op("my_kernel"):
        raise kind
    assert runtime.tracker.current() == NO_MODULE
    assert set_tag(NO_MODULE) == NO_MODULE


def test_ops_when_nested_then_each_ends_at_its_end() -> None:
    tracker = get_runtime().tracker
    names = []
    tracker.start("test")
    with swapkit.op("outer"):
        with swapkit.op("inner"):
            names.append(tracker.name(tracker.current()))
        names.append(tracker.name(tracker.current()))
    tracker.stop("test")
    assert names == ["outer.inner", "outer"]
    assert tracker.current() == NO_MODULE


def test_op_when_used_twice_or_outside_then_refused() -> None:
    kernel = swapkit.op("my_kernel")
    with pytest.raises(SessionError, match="is not running"):
        kernel.outputs(torch.ones(1))
    with kernel, pytest.raises(SessionError, match="entered only once"):
        kernel.__enter__()
    with pytest.raises(SessionError, match="entered only once"):
        kernel.__enter__()


def make_empty() -> torch.Tensor:
    tensor = torch.ones(8)
    tensor.untyped_storage().resize_(0)
    return tensor


@pytest.mark.parametrize(
    ("name", "operands", "text"),
    [
        ("", (), "the name is empty"),
        ("k", (torch.ones(1), 3), "op 'k', operand 1: expected a tensor, got 3"),
        ("k", (make_empty(),), r"operand 0: the tensor of shape \[8\] has no memory"),
    ],
)
def test_operand_when_wrong_then_named(name: str, operands: tuple[Any, ...], text: str) -> None:
    with pytest.raises(InvalidArgument, match=text):
        swapkit.op(name, *operands)


def test_output_when_wrong_then_named() -> None:
    with (
        swapkit.op("k", torch.ones(1)) as kernel,
        pytest.raises(InvalidArgument, match="operand 0: expected a tensor, got 'x'"),
    ):
        kernel.outputs("x")  # type: ignore[arg-type]


def test_operand_when_of_a_kind_without_a_storage_then_accepted() -> None:
    sparse = torch.eye(4).to_sparse()
    with swapkit.op("k", sparse, torch.empty(0), torch.ones(2, device="meta")):
        pass
