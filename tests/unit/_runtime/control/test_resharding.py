"""What a choice of `reshard_after_forward` changes, with modules that only note it."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any

import pytest

from swapkit._runtime.control import resharding
from swapkit._runtime.control.resharding import Resharding
from swapkit.planning.resharding import KeptWeights


@dataclass
class Noted:
    """A module that FSDP2 shards."""

    path: str
    frees: bool
    process_group: object = None
    settings: list[bool] = field(default_factory=list)

    @property
    def paths(self) -> tuple[str, ...]:
        return (self.path,)

    def set(self, *, frees: bool) -> None:
        self.settings.append(frees)

    def take(self) -> None:
        pass

    restore = give = release = take


class Agreeing:
    """A switch whose ranks agree at once."""

    kept: tuple[str, ...] | None = None

    def propose(self, kept: tuple[str, ...] | None, reason: str) -> None:
        self.kept, self.reason = kept, reason


@pytest.mark.parametrize("frees", [False, True])
def test_modules_when_the_choice_leaves_one_out_then_it_stays_as_it_is(
    monkeypatch: pytest.MonkeyPatch, *, frees: bool
) -> None:
    modules = [Noted(path, frees) for path in "012"]
    monkeypatch.setattr(resharding, "find_sharded", lambda _model: modules)
    monkeypatch.setattr(Resharding, "_ranks_of", lambda _self, _group: (0, 1))
    chosen, switch = Resharding(None, "swap"), Agreeing()
    agreeing: Any = switch
    chosen._propose(agreeing, KeptWeights(kept=("0",), freed=("2",), changes=True))
    proposal: Any = switch
    chosen._follow(proposal)
    chosen.restore()
    assert [each.settings for each in modules] == [[False], [frees], [True]]
