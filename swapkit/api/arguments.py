"""`add_arguments`, `from_arguments`: choices and budgets by command line flags."""

from __future__ import annotations

import logging
import re
from dataclasses import dataclass, fields
from typing import TYPE_CHECKING, Any

from swapkit._runtime.allocators import choose_device, ensure_installation
from swapkit._runtime.layers import find_layers
from swapkit._runtime.parts import carry_marks, make_part
from swapkit.api.contexts import budget
from swapkit.api.scopes import offload
from swapkit.config import flags
from swapkit.config.environment import read_environment
from swapkit.config.settings import CORE_ATTENTION, LAYER_INPUT, ROLES, Settings
from swapkit.registry import Recompute, Row, Source, Swap

if TYPE_CHECKING:
    import argparse
    from collections.abc import Iterator

    import torch

    from swapkit._runtime.session import Session
    from swapkit.config.settings import Part
    from swapkit.config.smart_swap import SmartSwapSource

_log = logging.getLogger(__name__)


@dataclass(frozen=True, slots=True, kw_only=True)
class Arguments(Settings):
    """What flags ask for, and how to have it. Made by `from_arguments`."""

    def choose(self, model: torch.nn.Module, *, stage: int = 0) -> torch.nn.Module:
        """Make the choices that the flags name for the layers of a model.

        Args:
            model: its layers are the elements of its largest list of modules.
            stage: of the pipeline that this process is, where flags give a number for each stage.

        Returns:
            The model.

        Raises:
            InvalidArgument: it has no layers.
        """
        if not self.document:
            return model
        layers = list(find_layers(model).values())
        chosen = [(part, list(_find_modules(part, layers, stage))) for part in self.document]
        for part, found in chosen:
            if part.group > 1:
                _log.warning("each layer is recomputed by itself, not %d at a time", part.group)
            if not found:
                _log.warning("no layer of %s has a %s", type(model).__name__, part.role)
            for module, row in found:
                part_of_module = make_part(module)
                if row not in part_of_module.rows:  # asked for twice
                    part_of_module.add(row)
        carry_marks(model)
        return model

    def budget(
        self,
        model: torch.nn.Module | None = None,
        optimizer: torch.optim.Optimizer | None = None,
        **options: Any,
    ) -> Session:
        """Make the choices for the model, and return a session with the limit that flags give.

        Args:
            model: as of `swapkit.budget`, as the others.
            optimizer: its states live on the host between steps if the flags say so.
            **options: what else `swapkit.budget` takes; they count before the flags.

        Returns:
            The session, to be entered once.

        Raises:
            SwapkitError: as `swapkit.budget`.
        """
        where = choose_device(options.get("device"), model)
        asked = {
            "policy": self.policy or "rescue",
            "min_swap_bytes": self.min_swap_bytes,
            "limit": self.resolve_limit(ensure_installation(where).total_bytes),
            **options,
        }
        session = budget(asked.pop("limit"), model, optimizer, **asked)
        if model is not None:
            self.choose(model)
        if optimizer is not None and self.swap_optimizer:
            offload(optimizer)
        if self.is_fixed_limit:
            session.add_hint(self.hint)
        return session


def add_arguments(parser: argparse.ArgumentParser) -> argparse.ArgumentParser:
    """Add the flags of MindSpeed and Megatron that have to do with memory to a parser.

    A flag that the parser has already stays as it is; one that has no counterpart here is accepted,
    and `from_arguments` warns of it and says what to use instead.

    Args:
        parser: of the training script.

    Returns:
        The parser.

    Source:
        MindSpeed and Megatron-LM: names, kinds and defaults.

    Example:
        >>> import argparse, swapkit
        >>> parser = swapkit.add_arguments(argparse.ArgumentParser())
        >>> arguments = swapkit.from_arguments(parser.parse_args(["--swap-optimizer"]))
        >>> arguments.swap_optimizer, arguments.policy
        (True, None)
    """
    return flags.add_arguments(parser)


def from_arguments(
    args: argparse.Namespace,
    *,
    train_iters: int | None = None,
    smart_swap: SmartSwapSource | None = None,
) -> Arguments:
    """Return what parsed flags and the environment ask for.

    `choose(model)` makes the choices that they name; `budget(model, optimizer)` makes them, too,
    and returns a session.

    Args:
        args: what a parser gave; flags that it lacks have their defaults.
        train_iters: steps of the whole training; None: `args.train_iters`, if that is there.
        smart_swap: the settings of `--smart-swap`: a file, a mapping or an object with the fields
            of the original's `swap_policy_config`. None: the file `--smart-swap-config` names.

    Returns:
        The settings, as attributes.

    Raises:
        InvalidArgument: a value is not possible, or two flags exclude each other: both are named.

    Example:
        >>> import argparse, swapkit
        >>> swapkit.from_arguments(argparse.Namespace(adaptive_memory_optimization=True)).policy
        'auto'
    """
    settings = flags.from_arguments(args, train_iters=train_iters, smart_swap=smart_swap)
    return Arguments(**{field.name: getattr(settings, field.name) for field in fields(settings)})


def _find_modules(
    part: Part, layers: list[torch.nn.Module], stage: int
) -> Iterator[tuple[torch.nn.Module, Row]]:
    """Yield the modules that a part means in these layers, each with its choice."""
    for index, layer in enumerate(layers):
        if not part.has_layer(index, stage=stage):
            continue
        found = _match(layer, part.pattern)
        for module in found:
            yield module, Row(source=Source.FLAGS, what=_what_of(part))
        if not found and part.role == CORE_ATTENTION:  # an operator, where it is no module
            for module in _match(layer, ROLES["self_attention"]):
                what = _what_of(part)
                yield module, Row(source=Source.FLAGS, what=what, operator="attention")


def _match(layer: torch.nn.Module, pattern: str) -> list[torch.nn.Module]:
    return [module for path, module in layer.named_modules() if re.fullmatch(pattern, path)]


def _what_of(part: Part) -> Recompute | Swap:
    if part.action == "recompute":
        return Recompute()
    if part.role == LAYER_INPUT:
        return Recompute(swap_inputs=True)
    return Swap(min_bytes=read_environment().min_swap_bytes)
