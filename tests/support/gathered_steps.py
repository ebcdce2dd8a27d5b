"""Steps of a sharded model as FSDP2 runs them, as traces made by hand."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

from swapkit.ir.traces import BEFORE, WAIT, Event, EventKind, Kind, Operator, Phase, Storage, Trace

if TYPE_CHECKING:
    from collections.abc import Collection

GATHER_SECONDS, CAST_SECONDS, WAIT_SECONDS, WORK_SECONDS = 0.001, 0.002, 0.010, 0.050


@dataclass
class _Made:
    """The storages and operators so far; a life is closed by `end`."""

    weight_bytes: int
    is_half: bool
    shards: list[int] = field(default_factory=list)
    operators: list[Operator] = field(default_factory=list)
    births: dict[int, tuple[int, Kind, int, bool]] = field(default_factory=dict)
    deaths: dict[int, int] = field(default_factory=dict)

    def begin(self, nbytes: int, kind: Kind = Kind.ACTIVATION, *, is_saved: bool = False) -> int:
        number = len(self.births)
        birth = BEFORE if kind in {Kind.STATE, Kind.INPUT} else len(self.operators)
        self.births[number] = nbytes, kind, birth, is_saved
        return number

    def run(
        self,
        name: str,
        seconds: float,
        phase: Phase,
        module: str,
        operands: tuple[tuple[int, ...], tuple[int, ...]] = ((), ()),
    ) -> None:
        reads, writes = operands
        self.operators.append(
            Operator(
                name=name, seconds=seconds, phase=phase, module=module, reads=reads, writes=writes
            )
        )

    def end(self, number: int) -> None:
        self.deaths[number] = len(self.operators)

    def gather(self, layer: int, phase: Phase) -> int:
        """Add a gather; return the storage of the weights."""
        return self.copy_out(layer, phase, self.fill(layer, phase))

    def fill(self, layer: int, phase: Phase, waited: float = WAIT_SECONDS) -> int:
        """Add what fills the buffer of a gather; return the buffer."""
        module = str(layer) if phase is Phase.FORWARD else ""
        source = shard = self.shards[layer]
        if self.is_half:
            source = self.begin(self.weight_bytes // 2)
            self.run("aten._to_copy.default", CAST_SECONDS, phase, module, ((shard,), (source,)))
        buffer = self.begin(self.weight_bytes)
        own = (buffer,)
        for name, operands in (
            ("aten.empty.memory_format", ((), own)),
            ("fsdp.all_gather_copy_in.default", ((source, buffer), own)),
            ("c10d._allgather_base_.default", (own, own)),
        ):
            self.run(name, GATHER_SECONDS, phase, module, operands)
        self.run(WAIT, waited, phase, module)
        if self.is_half:
            self.end(source)
        return buffer

    def copy_out(self, layer: int, phase: Phase, buffer: int) -> int:
        """Add what copies the buffer of a gather out; return the storage of the weights."""
        module = str(layer) if phase is Phase.FORWARD else ""
        weights = self.begin(self.weight_bytes)
        operands = ((buffer, weights), (weights,))
        self.run("fsdp.split_with_sizes_copy.default", GATHER_SECONDS, phase, module, operands)
        self.end(buffer)
        return weights


@dataclass(frozen=True, kw_only=True)
class Wanted:
    """A step to make.

    Args:
        kept: layers that keep their gathered weights.
        layers: their number.
        weight_bytes: of each layer, gathered.
        activation_bytes: that each layer saves.
        late: a layer whose second gather waits for another rank that is late.
        is_ahead: whether backward fills the buffer of a second gather one layer ahead, as FSDP2.
        is_half: whether weights are gathered in another precision than their shards'.
        evaluates: whether a forward without backward comes last.
    """

    kept: Collection[int]
    layers: int = 3
    weight_bytes: int = 1000
    activation_bytes: int = 400
    late: int | None = None
    is_ahead: bool = False
    is_half: bool = False
    evaluates: bool = False


def make_step(kept: Collection[int], **options: Any) -> Trace:
    """Return a step whose layers `kept` keep their weights; `options`: the others of `Wanted`."""
    return _Step(Wanted(kept=kept, **options)).trace()


class _Step:
    """A step in the making."""

    def __init__(self, wanted: Wanted) -> None:
        self.wanted = wanted
        made = self.made = _Made(wanted.weight_bytes, is_half=wanted.is_half)
        layers = range(wanted.layers)
        made.shards = [made.begin(wanted.weight_bytes // 2, Kind.STATE) for _ in layers]
        self.saved = [made.begin(wanted.activation_bytes, Kind.INPUT)]
        self.weights: dict[int, int] = {}
        self.buffers: dict[int, int] = {}
        self.again = [layer for layer in reversed(layers) if layer not in wanted.kept]
        self.events: list[Event] = []

    def trace(self) -> Trace:
        layers, x = range(self.wanted.layers), self.saved[0]
        for layer in layers:
            self.forward(layer)
        for layer in reversed(layers):
            self.backward(layer)
        for layer in layers if self.wanted.evaluates else ():
            self.evaluate(layer, x)
        made = self.made
        count = len(made.operators)
        storages = tuple(
            Storage(
                nbytes=nbytes,
                kind=kind,
                birth=birth,
                death=made.deaths.get(number, count),
                is_saved=is_saved,
            )
            for number, (nbytes, kind, birth, is_saved) in made.births.items()
        )
        return Trace(operators=tuple(made.operators), storages=storages, events=tuple(self.events))

    def note(self, kind: EventKind) -> None:
        now = len(self.made.operators)
        self.events.append(Event(kind=kind, storage=self.saved[-1], operator=now))

    def forward(self, layer: int) -> None:
        made = self.made
        weights = self.weights[layer] = made.gather(layer, Phase.FORWARD)
        result = made.begin(self.wanted.activation_bytes, is_saved=True)
        operands = ((weights, self.saved[-1]), (result,))
        made.run("aten.mm.default", WORK_SECONDS, Phase.FORWARD, str(layer), operands)
        self.saved.append(result)
        self.note(EventKind.SAVE)
        if layer not in self.wanted.kept:
            made.end(weights)

    def backward(self, layer: int) -> None:
        made = self.made
        if layer in self.again:
            self.gather_again(layer)
        self.note(EventKind.USE)
        gradient = made.begin(self.wanted.weight_bytes // 2, Kind.GRADIENT)
        operands = ((self.weights[layer], self.saved[-1]), (gradient,))
        made.run("aten.mm.default", WORK_SECONDS, Phase.BACKWARD, "", operands)
        made.end(self.weights[layer])
        made.end(self.saved.pop())

    def gather_again(self, layer: int) -> None:
        self.fill(layer)
        buffer = self.buffers[layer]
        self.weights[layer] = self.made.copy_out(layer, Phase.BACKWARD, buffer)
        after = self.again[self.again.index(layer) + 1 :]
        if self.wanted.is_ahead and after:
            self.fill(after[0])

    def fill(self, layer: int) -> None:
        waited = 10 * WAIT_SECONDS if layer == self.wanted.late else WAIT_SECONDS
        if layer not in self.buffers:
            self.buffers[layer] = self.made.fill(layer, Phase.BACKWARD, waited)

    def evaluate(self, layer: int, x: int) -> None:
        made = self.made
        looked = made.gather(layer, Phase.FORWARD)
        operands = ((looked, x), ())
        made.run("aten.mm.default", WORK_SECONDS, Phase.FORWARD, str(layer), operands)
        made.end(looked)
