"""`add_arguments`, `from_arguments`: choices and budgets from command line flags."""

from __future__ import annotations

import argparse
import re
from collections.abc import Iterator
from dataclasses import dataclass, fields
from itertools import count
from typing import TYPE_CHECKING, Any

from swapkit._runtime.allocators.installation import choose_device, ensure_installation, install
from swapkit._runtime.session.session import Session
from swapkit._runtime.user_choices.layers import find_layers
from swapkit._runtime.user_choices.wrapping import carry_marks, make_part
from swapkit.api.budgets import budget
from swapkit.api.offloading import offload
from swapkit.config import flags
from swapkit.config.environment import read_environment
from swapkit.config.settings import CORE_ATTENTION, LAYER_INPUT, ROLES, LayerPart, Settings
from swapkit.config.smart_swap import SmartSwapConfig, SmartSwapSource
from swapkit.errors import InvalidArgument
from swapkit.planning.planner import Policy
from swapkit.planning.policies.adaptive_recompute import AdaptiveRecompute
from swapkit.planning.policies.stage_swap import AimedPolicy, StageSwapPolicy
from swapkit.registry import Choice, Recompute, Source, Swap
from swapkit.texts import get_logger
from swapkit.units import parse_bytes

if TYPE_CHECKING:
    import torch

_log = get_logger("settings")


@dataclass(frozen=True, slots=True, kw_only=True)
class Arguments(Settings):
    """Settings from flags, with methods that apply them. Made by `from_arguments`."""

    def choose(
        self, model: torch.nn.Module, *, stage: int = 0, chunk: int = 0, chunks: int = 1
    ) -> torch.nn.Module:
        """Make the choices that the flags name for the layers of a model.

        Args:
            model: the model; its layers are the elements of its largest list of modules.
            stage: pipeline stage of this process, for flags that give a number per stage.
            chunk: index of this model among the chunks of the stage (virtual pipeline).
            chunks: number of chunks of the stage. --enable-recompute-layers-per-pp-rank counts
                their layers together: the first of each chunk, then the second of each, and so on.

        Returns:
            The model.

        Raises:
            InvalidArgument: the model has no layers, or `chunk` is out of range.
        """
        if not 0 <= chunk < chunks:
            raise InvalidArgument(f"chunk={chunk}: expected a number from 0 to {chunks - 1}")
        if not self.document:
            return model
        layers = list(find_layers(model).values())
        first, step = (chunk, chunks) if self.counts_per_stage else (0, 1)
        numbered = dict(zip(count(first, step), layers))
        chosen = [(part, list(_find_modules(part, numbered, stage))) for part in self.document]
        for part, found in chosen:
            if part.group > 1:
                _log.warning("recomputing each layer separately, not %d at a time", part.group)
            if not found:
                _log.warning("no layer of %s has a module %r", type(model).__name__, part.role)
            for module, choice in found:
                part_of_module = make_part(module)
                if choice not in part_of_module.choices:  # two flags may name the same choice
                    part_of_module.add(choice)
        carry_marks(model)
        return model

    def install(self, **options: Any) -> None:
        """Install swapkit's pool as the flags specify, for training without a session.

        Args:
            **options: arguments of `swapkit.install`; they override the flags.

        Raises:
            SwapkitError: see `swapkit.install`.
        """
        install(**{"lifetimes": self.memory_fragmentation or None, **options})

    def budget(
        self,
        model: torch.nn.Module | None = None,
        optimizer: torch.optim.Optimizer | None = None,
        **options: Any,
    ) -> Session:
        """Make the choices for the model, and return a session that plans as the flags specify.

        Args:
            model: see `swapkit.budget`.
            optimizer: see `swapkit.budget`. With `--swap-optimizer`, its states live on the host
                between steps.
            **options: other arguments of `swapkit.budget`; they override the flags.

        Returns:
            The session; enter it once.

        Raises:
            SwapkitError: see `swapkit.budget`.
        """
        installation = ensure_installation(choose_device(options.get("device"), model))
        total_bytes = installation.total_bytes
        planned_bytes = self.resolve_limit(total_bytes)
        usual = total_bytes if self.searches_threshold else planned_bytes
        limit_bytes = parse_bytes(
            options.pop("limit", usual), whole_bytes=installation.shared_bytes, name="limit"
        )
        steps = {"profile_steps": self.profile_steps, "search_steps": self.search_steps}
        asked = {
            "policy": self._choose_policy(model, limit_bytes, min(planned_bytes, limit_bytes))
            or ("rescue" if options.get("plan") is None else "auto"),
            "min_swap_bytes": self.min_swap_bytes,
            "bind_cpus": self.bind_cpus or None,
            **{name: number for name, number in steps.items() if number is not None},
            **options,
        }
        session = budget(limit_bytes, model, optimizer, **asked)
        if model is not None:
            self.choose(model)
        if optimizer is not None and self.swap_optimizer:
            offload(optimizer)
        self._apply(session)
        return session

    def _apply(self, session: Session) -> None:
        """Apply the flags that are no arguments of `swapkit.budget`."""
        if self.is_fixed_limit:
            session.add_hint(self.advise)
        if self.memory_fragmentation:
            session.separate_lives()

    def _choose_policy(
        self, model: torch.nn.Module | None, limit_bytes: int, planned_bytes: int
    ) -> str | Policy | None:
        """Return the policy of a session with this limit; None: no flag sets one."""
        if self.searches_threshold:
            return AdaptiveRecompute(limit_bytes=limit_bytes, most_bytes=planned_bytes)
        if self.smart_swap is not None:
            return choose_swap_policy(self.smart_swap, model)
        return self.policy


def choose_swap_policy(config: SmartSwapConfig, model: torch.nn.Module | None) -> str | Policy:
    """Return the policy for SmartSwap: our planner, within the limits of the configuration.

    Args:
        config: the settings.
        model: the model whose layers make up the stages.
    """
    reduction_bytes, least_bytes = config.reduction_bytes, config.least_bytes
    if not (config.has_stages or reduction_bytes or least_bytes):
        return "swap"
    stages = StageSwapPolicy(
        bucket_bytes=config.bucket_bytes,
        layers_per_stage=config.num_attn_layers_per_stage,
        least_bytes=config.stage_least_bytes,
        layers=layer_paths(model),
    )
    return AimedPolicy(
        policy="swap",
        reduction_bytes=reduction_bytes,
        least_bytes=least_bytes,
        stages=stages if config.has_stages else None,
    )


def layer_paths(model: torch.nn.Module | None) -> tuple[str, ...]:
    """Return the paths of a model's layers; empty: the model has no list of layers.

    Args:
        model: the model; None: no layers.
    """
    if model is None:
        return ()
    try:
        return tuple(find_layers(model))
    except InvalidArgument:
        return ()


def add_arguments(parser: argparse.ArgumentParser) -> argparse.ArgumentParser:
    """Add the memory flags of MindSpeed and Megatron to a parser.

    Flags that the parser already has stay unchanged. Flags without a counterpart here are accepted;
    `from_arguments` warns about each of them and names an alternative.

    Args:
        parser: the parser of the training script.

    Returns:
        The parser.

    Source:
        MindSpeed and Megatron-LM: names, types and defaults.

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
    """Return the settings that parsed flags and the environment specify.

    `choose(model)` makes the choices that they name. `budget(model, optimizer)` makes them too, and
    returns a session that plans as they specify.

    Args:
        args: the parsed flags; missing flags have their defaults.
        train_iters: steps of the whole training; None: `args.train_iters`, if it exists.
        smart_swap: the settings of `--smart-swap`: a file, a mapping or an object with the fields
            of MindSpeed's `swap_policy_config`. None: the file that `--smart-swap-config` names.

    Returns:
        The settings, as attributes.

    Raises:
        InvalidArgument: a value is invalid, or two flags exclude each other; the message names
            both.

    Example:
        >>> import argparse, swapkit
        >>> swapkit.from_arguments(argparse.Namespace(adaptive_memory_optimization=True)).policy
        'auto'
    """
    settings = flags.from_arguments(args, train_iters=train_iters, smart_swap=smart_swap)
    return Arguments(**{field.name: getattr(settings, field.name) for field in fields(settings)})


def _find_modules(
    part: LayerPart, layers: dict[int, torch.nn.Module], stage: int
) -> Iterator[tuple[torch.nn.Module, Choice]]:
    """Yield the modules that a part names in these layers (by number), each with its choice."""
    for index, layer in layers.items():
        if not part.has_layer(index, stage=stage):
            continue
        found = _match(layer, part.pattern)
        for module in found:
            yield module, Choice(source=Source.FLAGS, what=_what_of(part))
        if not found and part.role == CORE_ATTENTION:  # an operator, not a module, in this model
            for module in _match(layer, ROLES["self_attention"]):
                what = _what_of(part)
                yield module, Choice(source=Source.FLAGS, what=what, operator="attention")


def _match(layer: torch.nn.Module, pattern: str) -> list[torch.nn.Module]:
    return [module for path, module in layer.named_modules() if re.fullmatch(pattern, path)]


def _what_of(part: LayerPart) -> Recompute | Swap:
    if part.action == "recompute":
        return Recompute()
    if part.role == LAYER_INPUT:
        return Recompute(swap_inputs=True)
    return Swap(min_bytes=read_environment().min_swap_bytes)
