"""The ways to train that are compared on a virtual GPU, and those that are run unless told."""

from __future__ import annotations

import dataclasses
import re
from functools import partial
from typing import TYPE_CHECKING

from benchmarks.gpu.comparison import Way
from benchmarks.gpu.ways import Ways

if TYPE_CHECKING:
    from benchmarks.gpu.comparison import Results
    from benchmarks.gpu.configurations import Setup

POLICIES = ("auto", "swap", "recompute", "rescue")
OF_TORCH = ("plain", "recompute", "selective", "save_on_cpu")
RIVALS = ("torchtune", "trl", "fsdp2_offload", "torchao_offload", "ramtorch")
BUDGETS = ("at_recompute", "40", "20")  # the peak of recompute; percent of the activations
# Of a model whose weights are frozen: what is left of the device's memory, percent of the weights.
CARD, OF_WEIGHTS = "card", {f"weights_{share}": share for share in (60, 40, 30)}
DEFAULT = (
    *("plain", "recompute", "offload"),
    *(f"auto_{budget}" for budget in BUDGETS),
    *(f"{policy}_at_recompute" for policy in POLICIES[1:]),
    *(f"auto_{budget}" for budget in (CARD, *OF_WEIGHTS)),
)
# Compiled as a whole, of torch's own kernels: inductor's would need a GPU's compiler and driver.
BACKEND = "aot_eager"
# A model of transformers has no blocks that could be told what to recompute.
NOT_OF_LIBRARIES = ("selective", "fsdp2_offload", "ramtorch")
LIMITED = re.compile(rf"({'|'.join(POLICIES)})_({'|'.join((*BUDGETS, CARD, *OF_WEIGHTS))})")
# So much is unlimited memory. Layers of a part: a rival that copies all weights' gradients by the
# CPU would take more of this machine than there is.
UNLIMITED_BYTES, PART, PART_LAYERS = 1 << 40, "_part", 4


def list_ways(base: Setup, *, of_library: bool = False) -> list[Way]:
    """Return every way, those that others depend on first."""
    ways = Ways(base)
    others = (*OF_TORCH, *RIVALS)
    listed = [ways.fixed(each) for each in others if not (of_library and each in NOT_OF_LIBRARIES)]
    listed.append(ways.fixed("offload", "swapkit", offload=True))
    for policy in POLICIES:
        listed.append(ways.at(f"{policy}_at_recompute", "recompute", policy=policy))
        listed += [
            ways.share(f"{policy}_{budget}", int(budget), policy=policy) for budget in BUDGETS[1:]
        ]
    listed.append(ways.fixed("compiled", "plain", backend=BACKEND))
    listed += [
        ways.share(f"compiled_{budget}", int(budget), backend=BACKEND) for budget in BUDGETS[1:]
    ]
    return listed


def list_lora_ways(base: Setup, card_bytes: int) -> list[Way]:
    """Return every way to train adapters of frozen weights; `card_bytes`: the largest limit."""
    base = dataclasses.replace(base, memory_bytes=UNLIMITED_BYTES)
    plain, ways = Ways(base), Ways(dataclasses.replace(base, memory_bytes=0))

    def of_weights(percent: int, results: Results) -> Setup | None:
        limit = (results.most("plain", "frozen_bytes") or 0) * percent // 100
        return ways.setup("swapkit", limit_bytes=limit) if 0 < limit <= card_bytes else None

    return [
        plain.fixed("plain"),
        *(ways.fixed(name) for name in ("recompute", "fsdp2_offload", "fsdp2_recompute")),
        plain.fixed(f"plain{PART}", "plain", layers=PART_LAYERS),
        ways.fixed(f"ramtorch{PART}", "ramtorch", layers=PART_LAYERS),
        ways.fixed(f"auto_{CARD}", "swapkit", limit_bytes=card_bytes),
        *(
            Way(name=f"auto_{name}", setup=partial(of_weights, percent))
            for name, percent in OF_WEIGHTS.items()
        ),
    ]


def plain_of(name: str) -> str:
    """Return the way that a way is compared with."""
    return f"plain{PART}" if name.endswith(PART) else "plain"


def choose(asked: str, known: list[str], *, everything: bool) -> list[str]:
    """Return the names that are asked for and what their limits follow from, in their order.

    Raises:
        ValueError: there is no such way; the message names those that there are.
    """
    words = asked.replace(",", " ").split()
    for word in words:
        if word not in known:
            raise ValueError(f"no way is named {word!r}; the ways are {', '.join(known)}")
    if not words:
        words = known if everything else [name for name in DEFAULT if name in known]
    needed = {"plain", *words, *map(plain_of, words)}
    if any(name.endswith("_at_recompute") for name in words):
        needed.add("recompute")
    return [name for name in known if name in needed]
