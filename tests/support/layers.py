"""Traces like those of a decoder: layers of attention and MLP, an optimizer with two states."""

from __future__ import annotations

from dataclasses import dataclass, field

import numpy as np

from swapkit.ir.traces import (
    BEFORE,
    Event,
    EventKind,
    Kind,
    Operator,
    Phase,
    Storage,
    Trace,
)

UNIT = 1 << 20
# Of one layer: name, module, what it reads (names of this layer; "x": what the layer gets), what it
# makes with its size in units, seconds in milliseconds, whether autograd saves it.
FORWARD = (
    ("norm", "norm1", ("x",), (("n1", 2),), 0.1),
    ("mm", "attention.qkv", ("n1",), (("qkv", 6),), 1.5),
    ("attention", "attention", ("qkv",), (("o", 2), ("lse", 1)), 2.0),
    ("mm", "attention.out", ("o",), (("p", 2),), 0.5),
    ("add", "", ("x", "p"), (("x2", 2),), 0.1),
    ("norm", "norm2", ("x2",), (("n2", 2),), 0.1),
    ("mm", "mlp.up", ("n2",), (("u", 8),), 2.0),
    ("gelu", "mlp", ("u",), (("a", 8),), 0.2),
    ("mm", "mlp.down", ("a",), (("d", 2),), 2.0),
    ("add", "", ("x2", "d"), (("y", 2),), 0.1),
)
# What backward of the operators reads, the last operator first; `add` saves nothing.
SAVED = {
    "norm1": ("x",),
    "attention.qkv": ("n1",),
    "attention": ("qkv", "o", "lse"),
    "attention.out": ("o",),
    "norm2": ("x2",),
    "mlp.up": ("n2",),
    "mlp": ("u",),
    "mlp.down": ("a",),
}


@dataclass
class _Builder:
    """Operators and storages as they come."""

    scale: float
    rng: np.random.Generator
    operators: list[Operator] = field(default_factory=list)
    births: list[int] = field(default_factory=list)
    deaths: dict[int, int] = field(default_factory=dict)
    sizes: list[int] = field(default_factory=list)
    kinds: list[Kind] = field(default_factory=list)
    modules: list[str] = field(default_factory=list)
    saved: dict[int, int] = field(default_factory=dict)  # and after which operator
    uses: list[tuple[int, int]] = field(default_factory=list)  # operator, storage

    def add_storage(self, units: float, kind: Kind, birth: int, module: str = "") -> int:
        self.births.append(birth)
        self.sizes.append(int(units * UNIT * self.scale))
        self.kinds.append(kind)
        self.modules.append(module)
        return len(self.births) - 1

    def run(
        self,
        name: str,
        phase: Phase,
        milliseconds: float,
        reads: tuple[int, ...],
        writes: tuple[int, ...],
        module: str = "",
    ) -> int:
        jitter = float(self.rng.uniform(0.8, 1.2))
        operator = Operator(
            name=name,
            seconds=milliseconds * 1e-3 * jitter,
            phase=phase,
            module=module,
            reads=reads,
            writes=writes,
            workspace_bytes=int(UNIT * self.scale) if name == "attention" else 0,
            is_repeatable=phase is Phase.FORWARD,
        )
        self.operators.append(operator)
        for storage in (*reads, *writes):
            self.deaths[storage] = len(self.operators)
        return len(self.operators) - 1

    def finish(self, seed: int) -> Trace:
        count = len(self.operators)
        lasting = {Kind.STATE, Kind.OPTIMIZER_STATE, Kind.INPUT}
        storages = tuple(
            Storage(
                nbytes=self.sizes[number],
                kind=self.kinds[number],
                birth=self.births[number],
                death=count if self.kinds[number] in lasting else self.deaths[number],
                is_saved=number in self.saved,
                module=self.modules[number],
            )
            for number in range(len(self.births))
        )
        events = [
            Event(kind=EventKind.SAVE, storage=storage, operator=operator + 1)
            for storage, operator in self.saved.items()
        ]
        events += [
            Event(kind=EventKind.USE, storage=storage, operator=operator)
            for operator, storage in self.uses
        ]
        return Trace(
            operators=tuple(self.operators),
            storages=storages,
            events=tuple(sorted(events, key=lambda event: event.operator)),
            base_bytes=UNIT,
            signature=f"layered {seed}",
        )


def layered_trace(
    layers: int = 4,
    *,
    seed: int = 0,
    scale: float = 1.0,
    numbered: bool = True,
    optimizer: bool = False,
) -> Trace:
    """Return the step of a decoder.

    Args:
        layers: how many.
        seed: of the times, which vary by a fifth.
        scale: of the sizes; a layer saves 29 MiB for each 1.
        numbered: whether modules are called "model.layers.7.mlp"; else they have no numbers.
        optimizer: whether a step of one with two states for each layer follows.
    """
    builder = _Builder(scale=scale, rng=np.random.default_rng(seed))
    weights = [builder.add_storage(4, Kind.STATE, BEFORE) for _ in range(layers)]
    tokens = builder.add_storage(0.125, Kind.INPUT, BEFORE)
    x = builder.add_storage(2, Kind.ACTIVATION, 0, "model.embed")
    builder.run("embedding", Phase.FORWARD, 0.1, (tokens,), (x,), "model.embed")
    made = []
    for layer in range(layers):
        block = f"model.layers.{layer}" if numbered else "model.body"
        made.append(_run_layer(builder, x, weights[layer], block))
        x = made[-1]["y"]
    gradient = _finish_forward(builder, x)
    gradients = []
    for layer in reversed(range(layers)):
        block = f"model.layers.{layer}" if numbered else "model.body"
        gradient = _run_backward(builder, made[layer], weights[layer], block, gradient)
        gradients.append((layer, gradient))
    last = builder.add_storage(4, Kind.GRADIENT, len(builder.operators))
    builder.run("embedding_backward", Phase.BACKWARD, 0.1, (tokens, gradient), (last,), "model")
    if optimizer:
        _run_optimizer(builder, weights)
    return builder.finish(seed)


def _run_layer(builder: _Builder, x: int, weight: int, block: str) -> dict[str, int]:
    names = {"x": x}
    for name, part, reads, makes, milliseconds in FORWARD:
        module = f"{block}.{part}" if part else block
        here = len(builder.operators)
        for made, units in makes:
            names[made] = builder.add_storage(units, Kind.ACTIVATION, here, module)
        operands = [names[read] for read in reads] + ([weight] if name == "mm" else [])
        writes = tuple(names[made] for made, _ in makes)
        builder.run(name, Phase.FORWARD, milliseconds, tuple(operands), writes, module)
        for saved in SAVED.get(part, ()):
            builder.saved.setdefault(names[saved], here)
    return names


def _finish_forward(builder: _Builder, x: int) -> int:
    loss = builder.add_storage(0.001, Kind.ACTIVATION, len(builder.operators), "model")
    builder.run("loss", Phase.FORWARD, 0.2, (x,), (loss,), "model")
    builder.saved.setdefault(x, len(builder.operators) - 1)
    gradient = builder.add_storage(2, Kind.GRADIENT, len(builder.operators))
    here = builder.run("loss_backward", Phase.BACKWARD, 0.2, (x, loss), (gradient,), "model")
    builder.uses.append((here, x))
    return gradient


def _run_backward(
    builder: _Builder, names: dict[str, int], weight: int, block: str, gradient: int
) -> int:
    for name, part, _, _, milliseconds in reversed(FORWARD):
        if name == "add":
            continue
        reads = [names[saved] for saved in SAVED[part]]
        here = len(builder.operators)
        after = builder.add_storage(2, Kind.GRADIENT, here)
        operands = [gradient, *reads] + ([weight] if name == "mm" else [])
        builder.run(
            f"{name}_backward", Phase.BACKWARD, 2 * milliseconds, tuple(operands), (after,), block
        )
        builder.uses += [(here, read) for read in reads]
        gradient = after
    return gradient


def _run_optimizer(builder: _Builder, weights: list[int]) -> None:
    for weight in weights:
        states = [builder.add_storage(4, Kind.OPTIMIZER_STATE, BEFORE) for _ in range(2)]
        reads = (weight, *states)
        builder.run("adam", Phase.OPTIMIZER, 0.2, reads, reads)
