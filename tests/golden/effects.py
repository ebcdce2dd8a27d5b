"""What choices come to, operator by operator.

An operator is recomputed if it is marked so itself, or else if what is around it is; it is swapped
if it, or what is around it, is marked so and it is not recomputed. The last mark counts.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from collections.abc import Iterable, Iterator

    from swapkit.config.mindformers.layer_actions import LayerActions
    from tests.golden.cases import Tree

# The original's Llama marks these itself, in every layer.
MARKED_BY_MODEL = {"llama": ("ffn_norm.cast", "attention_norm.cast")}


def list_operators(tree: Tree, lead: str = "") -> Iterator[str]:
    """Yield the paths of all operators of a layer, in the order of their declaration."""
    yield from (lead + name for name in tree.operators)
    for name, child in tree.children:
        yield from list_operators(child, f"{lead}{name}.")


def derive_effects(actions: LayerActions, tree: Tree, name: str) -> dict[str, Any]:
    operators = list(list_operators(tree))
    marks = dict.fromkeys(MARKED_BY_MODEL.get(name, ()), True)
    scopes = [""] if actions.full else []
    for match in actions.select:
        if match.operator is None:
            scopes.append(f"{match}.")
        else:
            marks[str(match)] = True
    marks |= {str(match): False for match in actions.select_exclude}
    recomputed = [op for op in operators if marks.get(op, any(map(op.startswith, scopes)))]
    swapped = _derive_swaps(actions, operators)
    return {
        "recompute_ops": recomputed,
        "swap_ops": {op: n for op, n in swapped.items() if op not in recomputed},
        "suppressed_swap_ops": {op: n for op, n in swapped.items() if op in recomputed},
    }


def _derive_swaps(actions: LayerActions, operators: Iterable[str]) -> dict[str, Any]:
    swapped: dict[str, Any] = {}
    marks = [] if actions.layer_swap is None else [("", actions.layer_swap)]
    marks += [(str(match), prefetch) for match, prefetch in actions.op_swaps]
    for path, prefetch in marks:
        inside = f"{path}." if path else ""
        swapped |= {op: prefetch for op in operators if op == path or op.startswith(inside)}
    return swapped
