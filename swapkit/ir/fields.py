"""Valid values of each field of the shared values, and their form in a document.

A rule checks one value (`holds`), describes valid values in words (`expectation`), and converts a
value to JSON (`encode`) and back (`decode`). Decoding returns a value that it cannot convert
unchanged; the check of the result then reports it.
"""

from __future__ import annotations

import enum
from collections.abc import Iterable
from dataclasses import dataclass, fields
from typing import Any, NoReturn

from swapkit.errors import InvalidDocument
from swapkit.ir.machines import Machine
from swapkit.ir.plans import PLANNED, Decision, Plan, Prediction, Tier
from swapkit.ir.traces import BEFORE, Event, EventKind, Kind, Operator, Phase, Storage, Trace
from swapkit.units import MOST_BYTES, show

MOST_COUNT = (1 << 31) - 1  # operators and storages have 32-bit numbers
MOST_SECONDS = 1e9
MOST_BYTES_PER_SECOND = 1e18


class Rule:
    """The valid values of a field."""

    expectation = "anything"

    def holds(self, value: object) -> bool:
        """Return whether `value` is valid."""
        raise NotImplementedError

    def encode(self, value: object) -> object:
        """Return the form of `value` in a document."""
        return value

    def decode(self, value: object) -> object:
        """Return the value for its form in a document, or `value` itself if there is none."""
        return value


class Text(Rule):
    """Text that can be encoded as UTF-8."""

    expectation = "text"

    def holds(self, value: object) -> bool:
        """Return whether `value` is text without surrogates."""
        if type(value) is not str:
            return False
        return value.isascii() or not any("\ud800" <= letter <= "\udfff" for letter in value)


class Flag(Rule):
    """True or false."""

    expectation = "true or false"

    def holds(self, value: object) -> bool:
        """Return whether `value` is a bool."""
        return type(value) is bool


class Whole(Rule):
    """A whole number in a range."""

    def __init__(self, least: int, most: int = MOST_COUNT) -> None:
        self.least, self.most = least, most
        self.expectation = f"a whole number from {least} to {most}"
        if most == MOST_COUNT:
            self.expectation = f"a whole number of at least {least}"

    def holds(self, value: object) -> bool:
        """Return whether `value` is an int in the range, and not a bool."""
        return type(value) is int and self.least <= value <= self.most


class Number(Rule):
    """A finite number in a range; in a document, a whole number may stand for a float."""

    def __init__(self, least: float, most: float) -> None:
        self.least, self.most = least, most
        self.expectation = f"a number from {least:g} to {most:g}"
        if most == MOST_SECONDS:
            self.expectation = f"a number of at least {least:g}"

    def holds(self, value: object) -> bool:
        """Return whether `value` is a number in the range, and not a bool."""
        is_number = isinstance(value, (int, float)) and not isinstance(value, bool)
        return is_number and self.least <= value <= self.most  # type: ignore[operator]

    def decode(self, value: object) -> object:
        """Convert a valid int to a float."""
        return float(value) if type(value) is int and self.holds(value) else value


class Member(Rule):
    """An enum member; in a document, its value if that is text, otherwise its name."""

    def __init__(self, members: Iterable[enum.Enum]) -> None:
        self._texts = {
            member: member.value if isinstance(member.value, str) else member.name.lower()
            for member in members
        }
        self._members = {text: member for member, text in self._texts.items()}
        (kind,) = {type(member) for member in self._texts}
        self.expectation = f"a {kind.__name__}: {', '.join(map(repr, self._members))}"

    def holds(self, value: object) -> bool:
        """Return whether `value` is one of the members."""
        return isinstance(value, enum.Enum) and value in self._texts

    def encode(self, value: object) -> object:
        """Return the text of a member."""
        assert isinstance(value, enum.Enum)
        return self._texts[value]

    def decode(self, value: object) -> object:
        """Return the member with this text."""
        return self._members.get(value, value) if isinstance(value, str) else value


class Many(Rule):
    """A tuple of values that another rule allows and encodes as they are."""

    def __init__(self, rule: Rule, expectation: str) -> None:
        self.rule, self.expectation = rule, expectation

    def holds(self, value: object) -> bool:
        """Return whether `value` is a tuple of valid values."""
        return type(value) is tuple and all(map(self.rule.holds, value))

    def encode(self, value: object) -> object:
        """Return a list."""
        assert isinstance(value, tuple)
        return list(value)

    def decode(self, value: object) -> object:
        """Return a tuple."""
        return tuple(value) if type(value) is list else value


class Optional(Rule):
    """A value that another rule allows, or None."""

    def __init__(self, rule: Rule) -> None:
        self.rule = rule
        self.expectation = f"{rule.expectation}, or nothing"

    def holds(self, value: object) -> bool:
        """Return whether `value` is None or valid for the other rule."""
        return value is None or self.rule.holds(value)

    def encode(self, value: object) -> object:
        """Encode with the other rule; None stays None."""
        return None if value is None else self.rule.encode(value)

    def decode(self, value: object) -> object:
        """Decode with the other rule; None stays None."""
        return None if value is None else self.rule.decode(value)


@dataclass(frozen=True, slots=True, kw_only=True)
class Shape:
    """The plain fields of one kind of value, in document order."""

    title: str  # the document's `format`; empty: the value is part of other documents
    version: int
    rules: dict[str, Rule]
    # Fields that a document omits if they are None, columns that a table omits if every row has
    # None. Documents of this version that were written before the field existed stay readable.
    optional: frozenset[str] = frozenset()


_COUNT = Whole(0)
_SECONDS = Number(0.0, MOST_SECONDS)
_DISK_SPEED = Number(0.0, MOST_BYTES_PER_SECOND)
TEXT = Text()
_BY_TYPE: dict[str, Rule] = {
    "str": TEXT,
    "bool": Flag(),
    "int": _COUNT,
    "float": _SECONDS,
    "tuple[int, ...]": Many(_COUNT, "a list of whole numbers of at least 0"),
    "Phase": Member(Phase),
    "Kind": Member(Kind),
    "EventKind": Member(EventKind),
    "Action": Member(PLANNED),
    "Tier": Member((Tier.HOST, Tier.DISK)),
}
# Of fields with narrower or wider limits than others of their type; the last part of a name that
# fits holds.
_BY_NAME: dict[str, Rule] = {
    "bytes": Whole(0, MOST_BYTES),
    "birth": Whole(BEFORE),
    "held": Whole(BEFORE),
    "ranks": Whole(1),
    "flops": Number(0.0, 1e30),  # of one operator
    "reserved_ratio": Number(1e-6, 1e6),
    "duplex": Number(1.0, 2.0),
    "interference": Number(0.0, 1000.0),
    "bytes_per_second": Number(1.0, MOST_BYTES_PER_SECOND),
    "disk_write_bytes_per_second": _DISK_SPEED,
    "disk_read_bytes_per_second": _DISK_SPEED,
}


def _rule_of(name: str, type_: str) -> Rule:
    plain = type_.removesuffix(" | None")
    ends = [end for end in _BY_NAME if name.endswith(end)]
    rule = _BY_NAME[max(ends, key=len)] if ends else _BY_TYPE[plain]
    return rule if plain == type_ else Optional(rule)


def _shape(kind: type, names: str, *, title: str = "", optional: str = "") -> Shape:
    found = {each.name: each for each in fields(kind)}
    rules = {name: _rule_of(name, str(found[name].type)) for name in names.split()}
    version: Any = found["version"].default if "version" in found else 1
    return Shape(title=title, version=version, rules=rules, optional=frozenset(optional.split()))


SHAPES: dict[type, Shape] = {
    Operator: _shape(
        Operator,
        "name seconds phase microbatch module occurrence reads writes workspace_bytes "
        "is_repeatable flops touched_bytes",
        optional="flops touched_bytes",
    ),
    Storage: _shape(
        Storage,
        "nbytes kind birth death is_saved module index held continues",
        optional="continues",
    ),
    Event: _shape(Event, "kind storage operator"),
    Trace: _shape(
        Trace,
        "label signature device base_bytes step_seconds reserved_ratio ranks",
        title="swapkit trace",
        optional="ranks",
    ),
    Machine: _shape(
        Machine,
        "name budget_bytes out_bytes_per_second in_bytes_per_second out_latency_seconds "
        "in_latency_seconds duplex interference host_bytes disk_bytes "
        "disk_write_bytes_per_second disk_read_bytes_per_second",
        title="swapkit machine",
    ),
    Decision: _shape(Decision, "storage action tier release prefetch"),
    Prediction: _shape(
        Prediction,
        "seconds peak_bytes host_peak_bytes disk_peak_bytes swapped_bytes recompute_seconds "
        "stall_seconds",
    ),
    Plan: _shape(Plan, "policy signature budget_bytes bound_seconds", title="swapkit plan"),
}


def refuse(where: str, expectation: str, value: object) -> NoReturn:
    """Raise an InvalidDocument that names the place, the expectation and the actual value."""
    raise InvalidDocument(f"{where}: expected {expectation}, got {show(value)}")
