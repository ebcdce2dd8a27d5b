"""The ways to train that are compared on a virtual GPU, and those that are run unless told."""

from __future__ import annotations

import re
from typing import TYPE_CHECKING

from benchmarks.gpu.ways import Ways

if TYPE_CHECKING:
    from benchmarks.gpu.comparison import Way
    from benchmarks.gpu.configurations import Setup

POLICIES = ("auto", "swap", "recompute", "rescue")
OF_TORCH = ("plain", "recompute", "selective", "save_on_cpu")
RIVALS = ("torchtune", "trl", "fsdp2_offload", "torchao_offload", "ramtorch")
BUDGETS = ("at_recompute", "40", "20")  # the peak of recompute; percent of the activations
DEFAULT = (
    *("plain", "recompute", "offload"),
    *(f"auto_{budget}" for budget in BUDGETS),
    *(f"{policy}_at_recompute" for policy in POLICIES[1:]),
)
# Compiled as a whole, of torch's own kernels: inductor's would need a GPU's compiler and driver.
BACKEND = "aot_eager"
# A model of transformers has no blocks that could be told what to recompute.
NOT_OF_LIBRARIES = ("selective", "fsdp2_offload", "ramtorch")
LIMITED = re.compile(rf"({'|'.join(POLICIES)})_({'|'.join(BUDGETS)})")


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
    needed = {"plain", *words}
    if any(name.endswith("_at_recompute") for name in words):
        needed.add("recompute")
    return [name for name in known if name in needed]
