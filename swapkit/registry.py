"""The choices for parts of a model, their sources, and the rules that decide which choice holds.

A choice has a source, a part and an action. The choices for one part are judged together:

- Exclusion beats everything: an excluded part is never recomputed.
- Recompute beats swap: a recomputed part saves nothing that could be swapped.
- Full recompute beats selective.
- Keep beats swap.
- Any user choice beats the planner's choices; of two user choices of the same kind, the later one
  holds.

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
    """The origin of a choice."""

    DECORATOR = "decorator"
    PATTERN = "pattern"
    CONFIGURATION = "configuration"
    FLAGS = "flags"
    PLANNER = "planner"


@dataclass(frozen=True, slots=True, kw_only=True)
class Keep:
    """Never move the tensors that the part saves."""

    kind = "keep"

    def __str__(self) -> str:
        return "keep"


@dataclass(frozen=True, slots=True, kw_only=True)
class Swap:
    """Swap the part's saved tensors.

    `prefetch`: operators ahead of the use; None: as early as memory allows.
    """

    kind = "swap"
    to: str = "host"
    prefetch: int | None = None
    min_bytes: int = 1024

    def __str__(self) -> str:
        ahead = "" if self.prefetch is None else f", prefetch {self.prefetch}"
        return f"swap to {self.to}{ahead}"


@dataclass(frozen=True, slots=True, kw_only=True)
class Collectives:
    """The collectives of a recomputed region that run again in backward; other results are kept.

    Names are module names as the tracker reports them, or their suffixes; a name covers everything
    inside the module.
    """

    repeat: bool = True  # collectives on activations
    repeat_weights: bool = True  # collectives that gather weights
    repeat_in: tuple[str, ...] = ()  # modules whose collectives run again; overrides `repeat`
    keep_in: tuple[str, ...] = ()  # modules whose results are kept; overrides all the others


@dataclass(frozen=True, slots=True, kw_only=True)
class Recompute:
    """Run the part again in backward instead of keeping its saved tensors.

    `save` and `offload` name operators whose results are still kept, on the device or on the host;
    `policy` decides this per operator, like a policy of torch's selective checkpointing.
    """

    kind = "recompute"
    save: tuple[Any, ...] = ()  # names, packets or overloads
    offload: tuple[Any, ...] = ()
    policy: Callable[..., Any] | None = None
    swap_inputs: bool = False  # swap the part's inputs
    preserve_rng_state: bool = True
    check_values: bool = False
    collectives: Collectives = Collectives()
    slice_group: Any = None  # process group over whose ranks an input activation is sliced
    # Names of inner modules, each with a pattern of its operators that are not recomputed.
    excluded: tuple[tuple[str, str], ...] = ()

    @property
    def is_full(self) -> bool:
        """Return whether no result inside the part is kept."""
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
    """Never recompute the part, even inside a recomputed region."""

    kind = "exclude"

    def __str__(self) -> str:
        return "do not recompute"


What: TypeAlias = "Keep | Swap | Recompute | Exclude"


@dataclass(frozen=True, slots=True, kw_only=True)
class Choice:
    """One choice."""

    source: Source
    what: What
    operator: str = ""  # pattern of operator names inside the module; empty: the module itself
    meaning: str = ""  # pattern of the operators that `operator` stands for; empty: `operator`
    occurrences: tuple[int, ...] = ()  # indices of these in one call of the module; empty: all

    def __deepcopy__(self, _memo: object) -> Choice:
        return self  # immutable, and a process group in it cannot be copied


@dataclass(frozen=True, slots=True, kw_only=True)
class Verdict:
    """A choice, whether it holds, and why not."""

    choice: Choice
    holds: bool
    reason: str = ""


@dataclass(frozen=True, slots=True, kw_only=True)
class Judgement:
    """The outcome for one part, with a verdict on each of its choices, in their order."""

    recompute: Recompute | None = None
    swap: Swap | None = None
    keep: bool = False
    verdicts: tuple[Verdict, ...] = ()
    swap_source: Source | None = None


def judge(choices: Iterable[Choice]) -> Judgement:
    """Decide which choices of one part hold. They come in the order in which they were made."""
    choices = tuple(choices)
    decisive = _decisive(choices)
    best = _best_of_each_kind(decisive)
    lost = {
        id(choice): _why(choice, best)
        for choice in choices
        if best.get(choice.what.kind) is not choice
    }
    for loser, winner, reason in _PRECEDENCE:
        if loser in best and winner in best:
            lost[id(best.pop(loser))] = reason
    recompute, swap = best.get("recompute"), best.get("swap")
    return Judgement(
        recompute=None if recompute is None else _with_exclusions(recompute.what, decisive),
        swap=swap.what if swap and isinstance(swap.what, Swap) else None,
        swap_source=swap.source if swap else None,
        keep="keep" in best,
        verdicts=tuple(
            Verdict(choice=choice, holds=id(choice) not in lost, reason=lost.get(id(choice), ""))
            for choice in choices
        ),
    )


# (loser, winner, reason reported for the loser).
_PRECEDENCE = (
    ("recompute", "exclude", "excluded from recomputation"),
    ("swap", "recompute", "it is recomputed"),
    ("swap", "keep", "it is kept"),
)


def _decisive(choices: tuple[Choice, ...]) -> tuple[Choice, ...]:
    """Return the users' choices; if there are none, the planner's."""
    return tuple(choice for choice in choices if choice.source is not Source.PLANNER) or choices


def _best_of_each_kind(choices: tuple[Choice, ...]) -> dict[str, Choice]:
    """Return for each kind the choice that holds among choices of that kind."""
    best: dict[str, Choice] = {}
    for choice in choices:
        former = best.get(choice.what.kind)
        if former is None or _rank(choice) >= _rank(former):
            best[choice.what.kind] = choice
    return best


def _rank(choice: Choice) -> bool:
    """Return the rank that decides between two choices of a kind; on a tie, the later holds."""
    return isinstance(choice.what, Recompute) and choice.what.is_full


def _why(choice: Choice, best: dict[str, Choice]) -> str:
    """Return why a choice that is not the best of its kind does not hold."""
    winner = best.get(choice.what.kind)
    if winner is None or choice.source is Source.PLANNER is not winner.source:
        return "a user chose otherwise"
    if _rank(choice) != _rank(winner):
        return "it is recomputed in full"
    return "a later choice of the same kind"


def _with_exclusions(what: What, choices: tuple[Choice, ...]) -> Recompute:
    """Return how a part is recomputed, with the exclusions of all its choices."""
    assert isinstance(what, Recompute)
    every = [choice.what.excluded for choice in choices if isinstance(choice.what, Recompute)]
    return replace(what, excluded=tuple(dict.fromkeys(chain.from_iterable(every))))
