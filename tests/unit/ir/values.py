"""A trace, a machine and a plan that hold something in every field."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from swapkit.ir import codec
from swapkit.ir.machines import Machine
from swapkit.ir.plans import Action, Decision, Plan, Prediction, Tier
from swapkit.ir.traces import Event, EventKind, Kind, Operator, Phase, Storage, Trace

if TYPE_CHECKING:
    from collections.abc import Callable

TRACE = Trace(
    operators=(
        Operator(
            name="aten.mm.default", seconds=0.5, phase=Phase.FORWARD, module="layers.0",
            reads=(0,), writes=(1,), workspace_bytes=64, is_repeatable=True,
        ),
        Operator(
            name="aten.mm.default", seconds=1, phase=Phase.FORWARD, microbatch=1,
            module="layers.0", occurrence=1, reads=(0, 1), writes=(2,),
        ),
        Operator(name="", seconds=0.0, phase=Phase.IDLE),
        Operator(name="mm_backward", seconds=1.25e-7, phase=Phase.BACKWARD, reads=(2, 1)),
        Operator(name="step", seconds=3.0, phase=Phase.OPTIMIZER, reads=(3,), writes=(0, 3)),
    ),
    storages=(
        Storage(nbytes=1024, kind=Kind.STATE, death=5),
        Storage(nbytes=512, birth=0, death=4, is_saved=True, module="layers.0", index=3),
        Storage(nbytes=256, birth=1, death=4, is_saved=True),
        Storage(nbytes=0, kind=Kind.OPTIMIZER_STATE, death=5),
    ),
    events=(
        Event(kind=EventKind.SAVE, storage=None, operator=0),
        Event(kind=EventKind.SAVE, storage=1, operator=1),
        Event(kind=EventKind.SAVE, storage=2, operator=2),
        Event(kind=EventKind.USE, storage=2, operator=3),
        Event(kind=EventKind.USE, storage=1, operator=3),
    ),
    base_bytes=7,
    device="cuda:0",
    label="Bündel",
    signature="abc",
    step_seconds=4.5,
    reserved_ratio=1.25,
)  # fmt: skip
MACHINE = Machine(
    budget_bytes=1 << 30,
    out_bytes_per_second=2e10,
    in_bytes_per_second=2.5e10,
    out_latency_seconds=1e-5,
    in_latency_seconds=2e-5,
    duplex=1.5,
    interference=0.25,
    host_bytes=1 << 34,
    disk_bytes=1 << 40,
    disk_write_bytes_per_second=1e9,
    disk_read_bytes_per_second=2e9,
    name="a machine",
)
PLAN = Plan(
    decisions=(
        Decision(storage=1, action=Action.SWAP, tier=Tier.DISK, release=2, prefetch=3),
        Decision(storage=2, action=Action.RECOMPUTE),
        Decision(storage=0, action=Action.KEEP),
    ),
    budget_bytes=4096,
    policy="auto",
    signature="abc",
    prediction=Prediction(
        seconds=5.0, peak_bytes=4000, host_peak_bytes=1, disk_peak_bytes=512, swapped_bytes=512,
        recompute_seconds=1.0, stall_seconds=0.5,
    ),
    bound_seconds=4.75,
)  # fmt: skip
DOCUMENTS: dict[str, dict[str, Any]] = {
    "trace": codec.encode_trace(TRACE),
    "machine": codec.encode_machine(MACHINE),
    "plan": codec.encode_plan(PLAN),
    "planned": codec.encode_planned(TRACE, PLAN),
}
DECODERS: dict[str, Callable[[object], Any]] = {
    "trace": codec.decode_trace,
    "machine": codec.decode_machine,
    "plan": codec.decode_plan,
    "planned": codec.decode_planned,
}
VALUES = {
    "trace": TRACE,
    "machine": MACHINE,
    "plan": PLAN,
    "planned": (TRACE, PLAN),
}
