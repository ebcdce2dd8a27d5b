"""Steps of layers of one matrix each, with times and bytes to count by hand."""

from __future__ import annotations

from swapkit.ir.machines import Machine
from swapkit.ir.traces import Event, EventKind, Kind, Operator, Phase, Storage, Trace

WEIGHT, ACTIVATION, GIVEN = 1000, 400, 10


def layers(count: int, *, forward: float = 1.0, backward: float = 2.0) -> Trace:
    """A microbatch: each layer saves one activation, which its forward can make again."""
    operators, storages, events = [], [], []
    storages.append(Storage(nbytes=WEIGHT, kind=Kind.STATE, death=2 * count))
    storages.append(Storage(nbytes=GIVEN, kind=Kind.INPUT, death=2 * count, is_saved=True))
    for layer in range(count):
        operators.append(
            Operator(
                name="up", seconds=forward, phase=Phase.FORWARD, module=f"layers.{layer}",
                reads=(0, 1 + layer), writes=(2 + layer,), is_repeatable=True,
            )
        )  # fmt: skip
        storages.append(
            Storage(
                nbytes=ACTIVATION, birth=layer, death=2 * count - layer, is_saved=True,
                module=f"layers.{layer}",
            )
        )  # fmt: skip
        events.append(Event(kind=EventKind.SAVE, storage=2 + layer, operator=layer + 1))
    for layer in reversed(range(count)):
        operators.append(
            Operator(
                name="down",
                seconds=backward,
                phase=Phase.BACKWARD,
                reads=(0, 2 + layer, 1 + layer),
            )
        )
        events.append(Event(kind=EventKind.USE, storage=2 + layer, operator=2 * count - 1 - layer))
    return Trace(
        operators=tuple(operators), storages=tuple(storages), events=tuple(events), signature="s"
    )


def machine(budget_bytes: int, *, bytes_per_second: float = 100.0) -> Machine:
    """A machine whose links move an activation in 4 s."""
    return Machine(
        budget_bytes=budget_bytes,
        out_bytes_per_second=bytes_per_second,
        in_bytes_per_second=bytes_per_second,
    )
