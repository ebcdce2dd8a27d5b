"""Whether FSDP2's modules keep their gathered weights after forward, chosen by a session.

The first rank of a group chooses, from its recorded step and the budget that the ranks agreed on
(`planning/resharding.py`, on a thread beside the training). All ranks of the group then change the
setting at the same step, or none does (`rank_switch.py`). There is one choice in a session.

Plain training must have the same bits, so gathered weights never outlive a change of the shards: a
module that keeps them by our choice frees them before an optimizer of the model steps, if a forward
without backward has left them, and forwards without gradients run with the user's setting.
"""

from __future__ import annotations

from collections import deque
from functools import partial

import torch
import torch.distributed

from swapkit._runtime.control.rank_agreement import Ranks
from swapkit._runtime.control.rank_switch import Proposal, RankSwitch, WeightSetting
from swapkit._runtime.model import global_hooks
from swapkit._runtime.model.sharded_modules import find_sharded
from swapkit._runtime.torch_compat.internals import count_collectives
from swapkit.ir.machines import Machine
from swapkit.ir.traces import Trace
from swapkit.planning.beside import ThreadJob, is_at_once
from swapkit.planning.resharding import WORTH, KeptWeights, choose_kept
from swapkit.reporting.machines import format_seconds
from swapkit.texts import get_logger

_log = get_logger("plan")
USER, AUTO = "user", "auto"  # who chooses
POSITIONS_KEPT = 256  # ends of steps
NAME = "reshard_after_forward"


def describe_choice(found: KeptWeights) -> str:
    """Return what was chosen and why, for people."""
    if not found.changes and not found.seconds_before:
        return "no setting has a plan within the budget"
    if not found.changes:
        return f"no other one is predicted to save {WORTH:.0%} of a step's time"
    count, total = len(found.kept), len(found.kept) + len(found.freed)
    predicted = f"{format_seconds(found.seconds)} a step predicted, "
    return (
        f"{count} of {total} modules keep their gathered weights from forward to backward, the "
        "others gather them again: "
        + predicted
        + (
            f"{format_seconds(found.seconds_before)} as the user has set it"
            if found.seconds_before
            else "as the user has set it, there is no plan within the budget"
        )
    )


class Resharding:
    """The choice of one session. On the thread of the steps, unless stated otherwise."""

    def __init__(self, model: torch.nn.Module | None, policy: str) -> None:
        """Look for modules whose setting may change; nothing changes yet."""
        self._modules = find_sharded(model)
        self._policy = policy
        self._settings = tuple(WeightSetting(each.paths[0], each.frees) for each in self._modules)
        self._positions: deque[int] = deque(maxlen=POSITIONS_KEPT)
        self._switch: RankSwitch | None = None
        self._job: ThreadJob[KeptWeights | None] | None = None
        self._kept: frozenset[str] | None = None  # paths; None: the user's setting holds
        self._is_evaluating = False
        self._steps = 0
        self._why = self._find_obstacle()
        self._done = ""  # what was changed
        for each in self._modules:
            each.take()

    def _find_obstacle(self) -> str:
        """Return why there is nothing to choose; empty: there may be."""
        if not self._modules:
            return "no inner module is sharded by FSDP2 with a plain setting"
        groups = {self._ranks_of(each.process_group) for each in self._modules}
        if len(groups) > 1:
            return "modules are sharded over different groups of ranks"
        return ""

    def _ranks_of(self, group: object) -> tuple[int, ...]:
        return tuple(torch.distributed.get_process_group_ranks(group))  # type: ignore[arg-type]

    @property
    def text(self) -> str:
        """A line about the choice."""
        if self._done:
            return f"{NAME}: {self._done}"
        why = self._why or ("" if self._switch is None else self._switch.why)
        return f"{NAME}: as the user has set it: {why or 'the ranks have not chosen yet'}"

    # ---- the choice ------------------------------------------------------------------------------

    def begin(self, trace: Trace, ranks: Ranks | None, machine: Machine) -> None:
        """Choose by a recorded step, or follow the rank that does. Later calls do nothing.

        Args:
            trace: of a step that the ranks agreed to plan for.
            ranks: that have agreed; None: there are no others.
            machine: with the budget that they agreed on.
        """
        if self._why or self._switch is not None:
            return
        members = self._ranks_of(self._modules[0].process_group)
        if ranks is not None:
            self._switch = ranks.make_switch(members, self._positions, self._settings)
        if self._switch is None:
            self._why = "not all ranks of the group have a session that does the same"
        elif self._switch.proposes:
            paths = frozenset(path for each in self._modules for path in each.paths)
            self._job = ThreadJob(partial(choose_kept, trace, paths, machine, self._policy))
            if is_at_once():
                self._job.wait()

    def _propose(self, switch: RankSwitch, found: KeptWeights | None) -> None:
        if found is None:
            switch.propose(None, "the recorded step has no gathers that swapkit knows")
            return
        known = {*found.kept, *found.freed}
        others = [each for each in self._modules if known.isdisjoint(each.paths)]
        kept = *found.kept, *(each.paths[0] for each in others if not each.frees)
        switch.propose(kept if found.changes else None, describe_choice(found))

    # ---- steps -----------------------------------------------------------------------------------

    def end_step(self) -> str:
        """Go on, where a step has ended; return why all steps are other ones now, if they are.

        Raises:
            SessionError: the ranks have lost each other: see `rank_switch.py`.
        """
        self._steps += 1
        switch = self._switch
        if self._why or (switch is not None and switch.is_over):
            return ""
        first = self._modules[0]
        try:
            position = count_collectives(first.process_group, first.device)
        except RuntimeError as error:  # a backend that does not count, or a group that is gone
            self._why = f"the ranks' collectives cannot be counted: {error}"
            self.leave()
            return ""
        self._positions.append(position)
        if switch is None:
            return ""
        self._take_choice(switch)
        proposal = switch.end_step()
        if proposal is not None:
            self._follow(proposal)
        if switch.is_over:
            _log.info("%s", self.text)
        return "" if proposal is None else f"{NAME} has changed"

    def _take_choice(self, switch: RankSwitch) -> None:
        """Propose what was chosen beside the training."""
        job, found = self._job, None
        if job is None or not job.is_done:
            return
        self._job = None
        try:
            found = job.take()
        finally:  # else the other ranks would ask for ever
            self._propose(switch, found)

    def _follow(self, proposal: Proposal) -> None:
        self._kept = frozenset(proposal.kept or ())
        self._done = f"since step {self._steps}, {proposal.reason}"
        global_hooks.steps.add(self)
        self._set()

    def _set(self) -> None:
        kept = self._kept
        assert kept is not None
        for each in self._modules:
            is_kept = not kept.isdisjoint(each.paths)
            each.set(frees=each.frees if self._is_evaluating else not is_kept)

    def see_forward(self) -> None:
        """Handle the start of a forward of the model.

        After a forward without gradients no backward frees what it keeps: the user's setting holds.
        """
        is_evaluating = not torch.is_grad_enabled()
        if self._kept is not None and is_evaluating is not self._is_evaluating:
            self._is_evaluating = is_evaluating
            self._set()

    # ---- a listener of `global_hooks.steps` ------------------------------------------------------

    def before_step(self, optimizer: torch.optim.Optimizer) -> None:
        """Free gathered weights that the optimizer is about to outdate. Any thread.

        An optimizer of other parameters may step between a forward and its backward.
        """
        changed = {id(each) for group in optimizer.param_groups for each in group["params"]}
        for each in self._modules:
            if each.frees and each.has_any_of(changed):
                each.release()

    def after_step(self, _optimizer: torch.optim.Optimizer) -> None:
        """Do nothing."""

    # ---- the end ---------------------------------------------------------------------------------

    def leave(self) -> None:
        """Stop choosing, and withdraw from the other ranks. Any thread; a second call does nothing.

        Raises:
            SessionError: the other ranks have made the change that this rank has consented to.
        """
        job = self._job
        if job is not None:
            job.give_up()
            job.wait()
        if self._switch is not None:
            self._switch.leave()

    def restore(self) -> None:
        """Return to the user's settings."""
        global_hooks.steps.remove(self)
        for each in self._modules:
            each.restore()
            each.give()
        if self._kept is not None:
            self._kept = None
            for each in self._modules:
                if each.frees:
                    each.release()
