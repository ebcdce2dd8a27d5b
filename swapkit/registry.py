"""What may be chosen for a part of a model, who may choose it, and which choice holds.

A *row* is one choice: who made it, for which part, and what. Rows for one part are judged together:

- Exclusion beats everything: what must not be recomputed is not.
- Recompute beats swap: a recomputed part saves nothing that could be swapped.
- Full recompute beats selective.
- Keep beats swap.
- A user's word beats the planner's, whatever it says; of two users' words of the same kind the
  later one holds.

Source:
    MindFormers, recompute and swap configuration: the order of precedence.
"""

from __future__ import annotations

import enum
from dataclasses import dataclass, replace
from itertools import chain
from typing import TYPE_CHECKING, Any, TypeAlias

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable


class Source(enum.Enum):
    """Who made a choice."""

    DECORATOR = "decorator"
    PATTERN = "pattern"
    CONFIGURATION = "configuration"
    FLAGS = "flags"
    PLANNER = "planner"


@dataclass(frozen=True, slots=True, kw_only=True)
class Keep:
    """Never move what the part saves."""

    kind = "keep"

    def __str__(self) -> str:
        return "keep"


@dataclass(frozen=True, slots=True, kw_only=True)
class Swap:
    """Swap what the part saves. `prefetch` None: back as early as memory allows; else operators."""

    kind = "swap"
    to: str = "host"
    prefetch: int | None = None
    min_bytes: int = 1024

    def __str__(self) -> str:
        ahead = "" if self.prefetch is None else f", prefetch {self.prefetch}"
        return f"swap to {self.to}{ahead}"


@dataclass(frozen=True, slots=True, kw_only=True)
class Collectives:
    """Which collectives of a recomputed region run again in backward; the others' results are kept.

    Names are those of modules as the tracker gives them, or ends of these; one holds for all that
    is inside.
    """

    repeat: bool = True  # those of activations
    repeat_weights: bool = True  # those that gather weights
    repeat_in: tuple[str, ...] = ()  # modules whose collectives run again, whatever `repeat` says
    keep_in: tuple[str, ...] = ()  # modules whose results are kept, whatever else is said


@dataclass(frozen=True, slots=True, kw_only=True)
class Recompute:
    """Run the part again in backward instead of keeping what it saves.

    `save` and `offload` name operators whose results are kept nevertheless, on the device or on the
    host; `policy` decides it for each operator as a policy of torch's selective checkpointing does.
    """

    kind = "recompute"
    save: tuple[Any, ...] = ()  # names, packets or overloads
    offload: tuple[Any, ...] = ()
    policy: Callable[..., Any] | None = None
    swap_inputs: bool = False  # swap what the part is handed
    preserve_rng_state: bool = True
    check_values: bool = False
    collectives: Collectives = Collectives()
    slice_group: Any = None  # process group over whose ranks an activation handed in is sliced
    # Names of modules inside, and patterns of their operators that are not recomputed.
    excluded: tuple[tuple[str, str], ...] = ()

    @property
    def is_full(self) -> bool:
        """Whether nothing of the part's inside is kept."""
        return not self.save and not self.offload and self.policy is None

    def __str__(self) -> str:
        parts = [
            f"{verb} {', '.join(map(str, names))}"
            for verb, names in (("save", self.save), ("offload", self.offload))
            if names
        ]
        if self.policy is not None:
            parts.append("by policy")
        if self.swap_inputs:
            parts.append("swap its inputs")
        return "recompute" + (f" ({'; '.join(parts)})" if parts else "")


@dataclass(frozen=True, slots=True, kw_only=True)
class Exclude:
    """Never recompute the part, even where what is around it is."""

    kind = "exclude"

    def __str__(self) -> str:
        return "do not recompute"


What: TypeAlias = "Keep | Swap | Recompute | Exclude"


@dataclass(frozen=True, slots=True, kw_only=True)
class Choice:
    """One choice."""

    source: Source
    what: What
    operator: str = ""  # inside the module, by a pattern of names; empty: the module itself
    meaning: str = ""  # a pattern of the operators that `operator` stands for, if not of its own
    occurrences: tuple[int, ...] = ()  # which of these in a call of the module; empty: all

    def __deepcopy__(self, _memo: object) -> Choice:
        return self  # a value; and a group of ranks that it names cannot be copied


@dataclass(frozen=True, slots=True, kw_only=True)
class Verdict:
    """A row, and why it holds or does not."""

    row: Choice
    holds: bool
    reason: str = ""


@dataclass(frozen=True, slots=True, kw_only=True)
class Judgement:
    """What is to be done with one part, and a verdict on each of its rows, in their order."""

    recompute: Recompute | None = None
    swap: Swap | None = None
    keep: bool = False
    verdicts: tuple[Verdict, ...] = ()
    swap_source: Source | None = None


def judge(rows: Iterable[Choice]) -> Judgement:
    """Say which of the rows of one part hold; later rows are later words."""
    rows = tuple(rows)
    spoken = _spoken(rows)
    best = _best_of_each_kind(spoken)
    lost = {id(row): _why(row, best) for row in rows if best.get(row.what.kind) is not row}
    for loser, winner, reason in _PRECEDENCE:
        if loser in best and winner in best:
            lost[id(best.pop(loser))] = reason
    recompute, swap = best.get("recompute"), best.get("swap")
    return Judgement(
        recompute=None if recompute is None else _with_exclusions(recompute.what, spoken),
        swap=swap.what if swap and isinstance(swap.what, Swap) else None,
        swap_source=swap.source if swap else None,
        keep="keep" in best,
        verdicts=tuple(
            Verdict(row=row, holds=id(row) not in lost, reason=lost.get(id(row), ""))
            for row in rows
        ),
    )


# Who loses against whom, and what is said of it.
_PRECEDENCE = (
    ("recompute", "exclude", "excluded from recomputation"),
    ("swap", "recompute", "it is recomputed"),
    ("swap", "keep", "it is kept"),
)


def _spoken(rows: tuple[Choice, ...]) -> tuple[Choice, ...]:
    """Return the rows of users; if there are none, those of the planner."""
    return tuple(row for row in rows if row.source is not Source.PLANNER) or rows


def _best_of_each_kind(rows: tuple[Choice, ...]) -> dict[str, Choice]:
    """Return the row that holds of each kind, if only its own kind counted."""
    best: dict[str, Choice] = {}
    for row in rows:
        former = best.get(row.what.kind)
        if former is None or _rank(row) >= _rank(former):
            best[row.what.kind] = row
    return best


def _rank(row: Choice) -> bool:
    """Return what decides between two rows of a kind before their order does."""
    return isinstance(row.what, Recompute) and row.what.is_full


def _why(row: Choice, best: dict[str, Choice]) -> str:
    """Return why a row does not hold that is not the best of its kind."""
    winner = best.get(row.what.kind)
    if winner is None or row.source is Source.PLANNER is not winner.source:
        return "a user chose otherwise"
    if _rank(row) != _rank(winner):
        return "it is recomputed in full"
    return "a later choice of the same kind"


def _with_exclusions(what: What, rows: tuple[Choice, ...]) -> Recompute:
    """Return how a part is recomputed, without what any of its rows excludes."""
    assert isinstance(what, Recompute)
    every = [row.what.excluded for row in rows if isinstance(row.what, Recompute)]
    return replace(what, excluded=tuple(dict.fromkeys(chain.from_iterable(every))))
