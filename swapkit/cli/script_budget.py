"""The sessions of `swapkit run`: a script inside a budget that it does not know of.

When torch is imported, a first session without a plan begins. From then on the budget holds, and
memory is freed when it runs out, whatever the script does. The hooks watch which modules the script
trains and which optimizers step. Once each optimizer has stepped, a second session takes its place,
with the model and the optimizers, as a user would have opened it. It records, plans and tries
plans. So its steps begin with the model's forward: evaluation and data loading between steps belong
to none, and inputs of other shapes get plans of their own.

A script may train one model after another: the folds of a cross-validation, the stages of a
distillation. Sessions hold their models weakly, so that each one goes when the script drops it.
Once other optimizers step instead of the session's, the next session takes its place.
"""

from __future__ import annotations

import gc
import sys
import threading
import weakref
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import torch

import swapkit
from swapkit._runtime.model import global_hooks
from swapkit._runtime.model.step_counter import MOST_AHEAD
from swapkit._runtime.model.tracker import find_weakly
from swapkit._runtime.optimizer.wrapped import list_optimizers
from swapkit._runtime.saved.hooks import is_foreign
from swapkit._runtime.torch_compat.internals import NO_TASK, graph_task
from swapkit.errors import InvalidArgument, PlanMismatch, SwapkitError
from swapkit.texts import get_logger

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable, Mapping

    from swapkit._runtime.session.session import Session

_log = get_logger("plan")


class ScriptBudget:
    """Keeps one process within a budget. A listener of `global_hooks`.

    The hooks call it on any thread that runs modules or optimizers, with no lock held. Its own lock
    guards the change from one session to the next, and nothing waits for it.
    """

    may_bypass = True  # it needs the outermost module calls only

    def __init__(
        self,
        limit: str,
        options: Mapping[str, Any],
        *,
        plan: str | None,
        refuse: Callable[[SwapkitError], None],
    ) -> None:
        """Begin the first session.

        Args:
            limit: the budget, as for `swapkit.budget`.
            options: other arguments of `swapkit.budget`.
            plan: the path of a plan to follow; None: none.
            refuse: called if the plan does not fit the script; raises an exception.

        Raises:
            SwapkitError: swapkit cannot be installed, or an option is invalid.
        """
        self._options = dict(options)
        self._plan = plan
        self._refuse = refuse
        self._roots: list[weakref.ref[torch.nn.Module]] = []  # in the order of their first calls
        self._steps: weakref.WeakKeyDictionary[torch.optim.Optimizer, int]
        self._steps = weakref.WeakKeyDictionary()  # of the training that has no plan yet
        self._is_ready = False  # whether the optimizers of a step are known
        self.planned: weakref.WeakSet[torch.optim.Optimizer] = weakref.WeakSet()
        self.find_model = find_weakly(None)  # the model of the present plan
        self._others = 0  # steps of other optimizers since one of `planned` stepped
        self.before_bytes = 0  # most in use before a module trained first
        self._ended = Totals()
        self._lock = threading.Lock()
        self.has_own = False  # whether the script has sessions of its own
        self.trainings = 0  # those that a session was opened for
        self.session = self._open_first(limit)
        global_hooks.calls.add(self)
        global_hooks.steps.add(self)

    def _open_first(self, limit: int | str) -> Session:
        options = {**self._options, "policy": "rescue"}
        return swapkit.budget(limit, **options).__enter__()

    def totals(self) -> Totals:
        """Return the numbers of all sessions so far."""
        return self._ended.add(self.session)

    def restart(self, limit_bytes: int, **options: Any) -> None:
        """Replace the session that plans by one with another limit; call between steps.

        Args:
            limit_bytes: the limit.
            **options: further arguments of `swapkit.budget`.

        Raises:
            OverBudget: more memory is in use; there is no session then.
        """
        self.session.close()
        self._ended = self.totals()
        self._options |= options
        self.session = self._open(limit_bytes, self.find_model(), list(self.planned))

    def close(self) -> None:
        """End the budget."""
        self._stop_watching()
        self.session.close()

    # ---- for the hooks ---------------------------------------------------------------------------

    def enter(self, module: torch.nn.Module) -> None:
        """Note a module that the script itself calls to train."""
        if not torch.is_grad_enabled() or graph_task() != NO_TASK:
            return
        running = global_hooks.running_modules(sys._getframe(1))  # noqa: SLF001
        if any(each is not module for each in running):
            return
        if self._is_ready and self._is_quiet():
            self._begin_planning()
        elif not any(each() is module for each in self._roots) and _is_trained(module):
            self._note_root(module)

    def _note_root(self, module: torch.nn.Module) -> None:
        if not (self._roots or self.trainings):
            stats = swapkit.memory_stats(self._options.get("device"))
            self.before_bytes = stats["allocated_bytes.all.peak"]
        self._roots.append(weakref.ref(module))

    def leave(self, module: torch.nn.Module) -> None:
        """Do nothing: only the begin of a call matters."""

    def before_step(self, optimizer: torch.optim.Optimizer) -> None:
        """Do nothing: only the end of a step matters."""

    def after_step(self, optimizer: torch.optim.Optimizer) -> None:
        """Begin to plan after the step of the last optimizer, if nothing is in the way."""
        if self._belongs_to_plan(optimizer):
            return
        steps = self._steps[optimizer] = self._steps.get(optimizer, 0) + 1
        if not self._is_ready:
            known = {*self._steps, *self.planned}
            self._is_ready = steps >= MOST_AHEAD or known >= _list_living_optimizers()
        if self._is_ready and self._is_quiet():
            self._begin_planning()

    def _belongs_to_plan(self, optimizer: torch.optim.Optimizer) -> bool:
        """Return whether an optimizer's step belongs to the training that the session plans.

        It does not once the session's optimizers are gone, or have been overtaken by `MOST_AHEAD`
        steps of others: the inner loop of meta-learning makes optimizers of its own, too.
        """
        if self.trainings == 0:
            return False
        if optimizer in self.planned or self._holds(optimizer):
            self._others = 0
            self._steps.clear()
            self._is_ready = False
            return True
        self._others += 1
        return bool(self.planned) and self._others < MOST_AHEAD

    def _holds(self, optimizer: torch.optim.Optimizer) -> bool:
        """Return whether an optimizer holds parameters of the present plan's model."""
        model = self.find_model()
        own = _list_parameters([optimizer])
        return model is not None and any(id(each) in own for each in model.parameters())

    def _is_quiet(self) -> bool:
        """Return whether a session can begin here and last.

        It cannot inside a session of the script, a backward pass, or hooks for saved tensors: these
        end before it.
        """
        is_inside_own = any(each is not self.session for each in swapkit.sessions())
        self.has_own |= is_inside_own
        return (
            not is_inside_own
            and graph_task() == NO_TASK
            and not is_foreign()
            and self.session.is_active
        )

    def _begin_planning(self) -> None:
        if not self._lock.acquire(blocking=False):
            return  # another thread is just doing it
        try:
            if self._is_ready:
                self._is_ready = False
                self._replace()
        finally:
            self._lock.release()

    def _stop_watching(self) -> None:
        global_hooks.calls.remove(self)
        global_hooks.steps.remove(self)

    def _replace(self) -> None:
        """End the present session and begin one that plans; without success, one like the first."""
        optimizers = [each for each in list_optimizers(list(self._steps)) if each in self._steps]
        model = self._choose_model(optimizers)
        limit_bytes = self.session.limit_bytes
        self.session.close()  # before the next one: its hooks are on top of the thread's stack
        self._ended = self.totals()
        try:
            self.session = self._open(limit_bytes, model, optimizers)
        except SwapkitError as error:
            self.session = self._open_first(limit_bytes)
            if self._plan is not None and self.trainings == 0:
                self._refuse(error)
            _log.warning("no plan, rescue only: %s", error)
        self.trainings += 1
        self.find_model = find_weakly(model)
        self.planned = weakref.WeakSet(optimizers)
        self._others = 0
        self._steps.clear()
        self._roots[:] = [each for each in self._roots if each() is not None]

    def _open(
        self,
        limit_bytes: int,
        model: torch.nn.Module | None,
        optimizers: list[torch.optim.Optimizer],
    ) -> Session:
        """Begin a session that plans; the given plan must fit the first training only.

        Raises:
            SwapkitError: the given plan does not fit, or the session cannot begin.
        """

        def begin(plan: str | None) -> Session:
            session = swapkit.budget(limit_bytes, model, optimizers, plan=plan, **self._options)
            session.hold_weakly()
            return session.__enter__()

        if self._plan is not None and self.trainings > 0:
            try:
                return begin(self._plan)
            except PlanMismatch as error:
                _log.info("training %d makes a plan of its own: %s", self.trainings + 1, error)
                return begin(None)
        return begin(self._plan)

    def _choose_model(self, optimizers: list[torch.optim.Optimizer]) -> torch.nn.Module | None:
        """Return the first module of a step whose parameters an optimizer holds; None: none."""
        held = _list_parameters(optimizers)
        roots = [module for each in self._roots if (module := each()) is not None]
        found = next(
            (root for root in roots if any(id(each) in held for each in root.parameters())), None
        )
        # The names of a compiled module's parts are those of the module itself.
        return getattr(found, "_orig_mod", found)


@dataclass(frozen=True, slots=True)
class Totals:
    """The numbers of several sessions."""

    steps: int = 0
    rescues: int = 0
    peak_bytes: int = 0  # reserved

    def add(self, session: Session) -> Totals:
        """Return the numbers with those of a session."""
        stats = session.stats
        return Totals(
            self.steps + stats.steps,
            self.rescues + stats.oom_rescues,
            max(self.peak_bytes, stats.peak_bytes),
        )


def _list_parameters(optimizers: Iterable[torch.optim.Optimizer]) -> set[int]:
    """Return the identities of the optimizers' parameters."""
    return {
        id(each)
        for optimizer in optimizers
        for group in optimizer.param_groups
        for each in group["params"]
    }


def _is_trained(module: torch.nn.Module) -> bool:
    return any(each.requires_grad for each in module.parameters())


def _list_living_optimizers() -> set[torch.optim.Optimizer]:
    """Return the optimizers of the process. A type's check runs no code of the objects."""
    found: set[torch.optim.Optimizer] = set()
    for each in gc.get_objects():
        if issubclass(type(each), torch.optim.Optimizer):
            try:
                found.update(list_optimizers(each))
            except InvalidArgument:  # a wrapper without an optimizer yet
                continue
    return found
