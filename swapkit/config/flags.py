"""The command line flags of MindSpeed and Megatron, under their names.

`add_arguments` adds them to a parser; `from_arguments` turns parsed flags into `Settings`. Flags
without a counterpart are accepted, with a warning that names an alternative; none of these changes
results, only memory use.

Source:
    MindSpeed and Megatron-LM: names, types, defaults, and refused values.
"""

from __future__ import annotations

import argparse
import os
from collections.abc import Mapping
from typing import Any, NamedTuple

from swapkit.config.environment import read_environment
from swapkit.config.settings import CORE_ATTENTION, LAYER_INPUT, LayerPart, Settings
from swapkit.config.smart_swap import (
    SmartSwapConfig,
    SmartSwapSource,
    read_smart_swap,
    swap_policy_config,
)
from swapkit.errors import InvalidArgument, warn
from swapkit.units import MIB

PROFILE_STEPS, LEAST_PROFILE_STEPS = 10, 5
SWAP_TIMES = 16
SWAP_MODULES = "input_norm,self_attention,post_attention_norm"
RECOMPUTE_TYPES = ("mlp", "self_attention", "layer")


def _gigabytes(text: str) -> float:
    return float("inf") if text == "all" else float(text)


def _on(description: str | None = None) -> dict[str, Any]:
    return {"action": "store_true", "help": description}


def _value(
    default: object = None,
    metavar: object = None,
    text: object = None,
    kind: object = str,
    **more: object,
) -> dict[str, Any]:
    return {"type": kind, "default": default, "metavar": metavar, "help": text, **more}


_LAYERS = _value(None, "N", kind=int)
_PLANNED = "memory to plan for; 0 or less: all memory of the device"
_PROFILED = "steps to measure before planning"
_SWAPPED = "the modules of a layer whose saved tensors --swap-attention swaps"
FLAGS: dict[str, dict[str, Any]] = {
    "adaptive-recompute-device-swap": _on("plan which layers to recompute"),
    "adaptive-recompute-device-size": _value(-1, "MB", _PLANNED, int),
    "adaptive-recompute-profiling-step": _value(PROFILE_STEPS, "N", _PROFILED, int),
    "adaptive-memory-optimization": _on("plan what to recompute and what to swap"),
    "smart-swap": _on("plan what is swapped"),
    "smart-swap-config": _value(None, "FILE", "settings, as YAML or JSON"),
    "swap-attention": _on("swap the saved tensors of attention"),
    "swap-modules": _value(SWAP_MODULES, "NAMES", _SWAPPED),
    "swap-layer-input": _on("swap the inputs of recomputed layers"),
    "swap-optimizer": _on("keep optimizer states on the host between steps"),
    "swap-optimizer-times": _value(SWAP_TIMES, "N", kind=int),
    "virtual-optimizer": _value(None, "GB", kind=_gigabytes, nargs="+"),
    "memory-fragmentation": _on("same as MEMORY_FRAGMENTATION=1"),
    "recompute-granularity": _value(choices=("full", "selective")),
    "recompute-method": _value(choices=("uniform", "block")),
    "recompute-num-layers": _LAYERS,
    "recompute-activation-function": _on(),
    "recompute-activation-function-num-layers": _LAYERS,
    "recompute-norm": _on(),
    "recompute-norm-num-layers": _LAYERS,
    "enable-recompute-layers-per-pp-rank": _on(),
    "recompute-in-bubble": _on(),
    "recompute-in-advance": _on(),
    "moe-adaptive-recompute-activation": _on(),
    "moe-adaptive-recompute-activation-scale": _value(2.0, kind=float),
    "automated-pipeline": _on(),
    "save-memory-ratio": _value(0.20, kind=float),
    "num-layer-list": _value(),
    "recompute-module-list": _value(None, None, "modules to recompute in each pipeline stage"),
    "recompute-type": _value(2, "N", "0: mlp, 1: attention, 2: layer", int),
    "compress-dense": _value("disable", choices=("disable", "level0", "level1")),
    "compress-activation": _value(""),
    "compress-optimizer": _on(),
    "reuse-fp32-param": _on(),
}
_PLAN = "--adaptive-memory-optimization plans what to recompute and swap"
_SPLIT = "swapkit does not spread layers over stages; use torch.distributed.pipelining"
_PACK = "swapkit swaps or recomputes tensors instead of compressing them"
# Flags without a counterpart, each with an alternative.
WITHOUT_COUNTERPART = {
    "recompute-in-bubble": f"only plans recompute in bubbles; {_PLAN}",
    "recompute-in-advance": f"swapkit does not recompute in advance; {_PLAN}",
    "moe-adaptive-recompute-activation": f"swapkit ignores the load of experts; {_PLAN}",
    "automated-pipeline": _SPLIT,
    "num-layer-list": _SPLIT,
    "compress-dense": f"{_PACK}; use --swap-attention or --recompute-granularity",
    "compress-activation": f"{_PACK}; use --swap-attention or --recompute-granularity",
    "compress-optimizer": f"{_PACK}; use --swap-optimizer",
    "reuse-fp32-param": "swapkit shares no copies of parameters; --swap-optimizer swaps the states",
}


FINE_ROLES = {
    "recompute-activation-function": ("activation_function",),
    "recompute-norm": ("input_norm", "post_attention_norm"),
}
_ADAPTIVE = ("adaptive-recompute-device-swap", "adaptive-recompute-device-size")


def add_arguments(parser: argparse.ArgumentParser) -> argparse.ArgumentParser:
    """Add the memory flags to a parser, in their own group; return the parser.

    Flags that the parser already has, such as Megatron's, stay unchanged.

    Args:
        parser: the parser of the training script.

    Example:
        >>> import argparse
        >>> from swapkit.config.flags import add_arguments, from_arguments
        >>> parser = add_arguments(argparse.ArgumentParser())
        >>> arguments = parser.parse_args(["--adaptive-recompute-device-swap"])
        >>> from_arguments(arguments).policy
        'recompute'
    """
    group = parser.add_argument_group("memory")
    present = parser._option_string_actions  # noqa: SLF001 - argparse has no public way to ask
    for name, options in FLAGS.items():
        if f"--{name}" not in present:
            group.add_argument(f"--{name}", **options)
    return parser


def from_arguments(
    args: argparse.Namespace,
    *,
    train_iters: int | None = None,
    smart_swap: SmartSwapSource = None,
    variables: Mapping[str, str] = os.environ,
) -> Settings:
    """Return the settings that parsed flags and the environment specify.

    Args:
        args: the parsed flags; missing flags have their defaults. `train_iters` and `num_layers`
            are read too, if they exist.
        train_iters: steps of the whole training, if known.
        smart_swap: the settings of --smart-swap, as `read_smart_swap` takes them; None: those in
            the file that --smart-swap-config names.
        variables: the environment.

    Raises:
        InvalidArgument: a value is invalid, or two flags exclude each other.
    """
    flags = _Flags(args)
    environment = read_environment(variables)
    fragmentation = bool(flags["memory-fragmentation"] or environment.memory_fragmentation)
    check_pairs(_list_features(flags, fragmentation=fragmentation))
    _warn_of_foreign(flags)
    size_mb = flags[_ADAPTIVE[1]]
    chosen = _read_smart_swap(flags, smart_swap)
    total = train_iters if train_iters is not None else getattr(args, "train_iters", None)
    searches, plans = bool(flags[_ADAPTIVE[0]]), bool(flags["adaptive-memory-optimization"])
    other = "auto" if plans else "swap" if chosen else None
    settings = Settings(
        policy="recompute" if _is_adaptive(flags) else other,
        limit_bytes=size_mb * MIB if size_mb > 0 else getattr(chosen, "limit_bytes", None),
        is_fixed_limit=size_mb > 0 and not searches,
        searches_threshold=searches,
        profile_steps=_read_profile_steps(flags, total)
        if _is_adaptive(flags)
        else getattr(chosen, "warmup_step", None),
        search_steps=getattr(chosen, "search_steps", None),
        min_swap_bytes=environment.min_swap_bytes,
        document=(*_list_recomputed(flags), *_list_swapped(flags)),
        counts_per_stage=bool(flags["enable-recompute-layers-per-pp-rank"]),
        swap_optimizer=_swaps_optimizer(flags, chosen),
        memory_fragmentation=fragmentation,
        bind_cpus=plans,
        smart_swap=chosen,
    )
    _warn_of_idle(flags)
    return settings


class _Flags:
    """Parsed flags by name; a flag that the parser lacks has its default."""

    def __init__(self, args: argparse.Namespace) -> None:
        self.num_layers: int | None = getattr(args, "num_layers", None)
        self._args = args

    def __getitem__(self, name: str) -> Any:  # noqa: ANN401 - of the flag's type
        return getattr(self._args, name.replace("-", "_"), FLAGS[name].get("default", False))

    def is_set(self, name: str) -> bool:
        return bool(self[name]) and self[name] != FLAGS[name].get("default")

    def count(self, name: str, *, least: int = 0) -> int | None:
        """Return the value of a flag that is a number of layers."""
        value: int | None = self[name]
        most = self.num_layers
        if value is not None and (value < least or (most is not None and value > most)):
            above = "" if most is None else f" and at most {most}, the model's layers"
            raise InvalidArgument(f"--{name}={value}: expected at least {least}{above}")
        return value


def _read_smart_swap(flags: _Flags, source: SmartSwapSource) -> SmartSwapConfig | None:
    if source is None:
        source = flags["smart-swap-config"] or swap_policy_config
    return read_smart_swap(source) if flags["smart-swap"] else None


def _warn_of_foreign(flags: _Flags) -> None:
    for name, instead in WITHOUT_COUNTERPART.items():
        if flags.is_set(name):
            _warn(f"--{name} has no effect: {instead}")


def _warn_of_idle(flags: _Flags) -> None:
    for name, switches in TUNES.items():
        if flags.is_set(name) and not any(map(flags.is_set, switches)):
            _warn(f"--{name} has no effect without --{' or --'.join(switches)}")


def _is_adaptive(flags: _Flags) -> bool:
    return bool(flags[_ADAPTIVE[0]] or flags[_ADAPTIVE[1]] > 0)


def _list_features(flags: _Flags, *, fragmentation: bool) -> dict[str, str]:
    """Return the requested features of the incompatibility table, each with its flag."""
    granularity, method = flags["recompute-granularity"], flags["recompute-method"]
    asked: dict[str, Any]
    asked = {name.replace("-", " "): f"--{name}" for name in FLAGS if flags.is_set(name)}
    asked |= {
        "adaptive recompute": _is_adaptive(flags) and f"--{_ADAPTIVE[not flags[_ADAPTIVE[0]]]}",
        f"{granularity} recompute": granularity and f"--recompute-granularity {granularity}",
        "recompute method": granularity != "full" and method and f"--recompute-method {method}",
    }
    if fragmentation:
        asked.setdefault("memory fragmentation", "MEMORY_FRAGMENTATION=1")
    return {feature: text for feature, text in asked.items() if text}


def _read_profile_steps(flags: _Flags, train_iters: int | None) -> int:
    steps: int = flags["adaptive-recompute-profiling-step"]
    what = f"--adaptive-recompute-profiling-step={steps}"
    if steps <= 0:
        _warn(f"{what}: expected more than 0; using {PROFILE_STEPS}")
        steps = PROFILE_STEPS
    if steps < LEAST_PROFILE_STEPS:
        _warn(f"{what}: at least {LEAST_PROFILE_STEPS} are recommended; training is not affected")
    if train_iters is not None and steps > train_iters // 10:
        share = f"measuring {steps} of the {train_iters} training steps, more than a tenth"
        _warn(f"{what}: {share}; training is not affected otherwise")
    return steps


# ---- actions for parts of layers ----------------------------------------------------------------


def _list_recomputed(flags: _Flags) -> list[LayerPart]:
    parts = _choose_granularity(flags)
    return [*parts, *_list_fine(flags, parts), *_list_stored(flags)]


def _choose_granularity(flags: _Flags) -> list[LayerPart]:
    granularity = flags["recompute-granularity"]
    count = flags.count("recompute-num-layers", least=1)
    if flags["swap-attention"] and count is not None:
        return [LayerPart(action="recompute", role="mlp", layers=count)]
    if granularity == "full":
        return [_whole_layers(flags["recompute-method"], count)]
    if not flags["swap-attention"]:
        for name in ("recompute-method", "recompute-num-layers"):
            if flags[name] is not None:
                _warn(f"--{name} has no effect without --recompute-granularity full")
    is_core = granularity == "selective"
    return [LayerPart(action="recompute", role=CORE_ATTENTION)] if is_core else []


def _whole_layers(method: str | None, count: int | None) -> LayerPart:
    """Return the layers of a method: `block`: the first `count`, `uniform`: all, in groups."""
    counted = {"group": count or 1} if method == "uniform" else {"layers": count}
    return LayerPart(action="recompute", role="layer", **counted)


def _list_fine(flags: _Flags, whole: list[LayerPart]) -> list[LayerPart]:
    """Return the activation functions and norms in the layers after the fully recomputed ones."""
    counted = [part.layers for part in whole if part.role == "layer"]
    first = next((count for count in counted if isinstance(count, int)), 0)
    counts = {name: flags.count(f"{name}-num-layers") for name in FINE_ROLES}
    return [
        LayerPart(action="recompute", role=role, layers=counts[name], first=first)
        for name, roles in FINE_ROLES.items()
        if flags[name]
        for role in roles
    ]


def _list_stored(flags: _Flags) -> list[LayerPart]:
    """Return the result of a pipeline search: a number of layers for each stage."""
    text, kind = flags["recompute-module-list"], flags["recompute-type"]
    if text is None:
        return []
    if not 0 <= kind < len(RECOMPUTE_TYPES):
        types = "0 (mlp), 1 (attention), 2 (layer)"
        raise InvalidArgument(f"--recompute-type={kind}: expected {types}")
    try:
        numbers = text if isinstance(text, list) else text.strip("[] ").split(",")
        counts = tuple(map(int, numbers))
    except ValueError:
        counts = (-1,)
    if min(counts) < 0:
        expected = "expected a number for each stage, e.g. 2,1,0,0"
        raise InvalidArgument(f"--recompute-module-list={text!r}: {expected}")
    return [LayerPart(action="recompute", role=RECOMPUTE_TYPES[kind], layers=counts)]


def _list_swapped(flags: _Flags) -> list[LayerPart]:
    parts = []
    if flags["swap-attention"]:
        names = [name.strip() for name in flags["swap-modules"].split(",")]
        if not all(names):
            given = flags["swap-modules"]
            raise InvalidArgument(f"--swap-modules={given!r}: expected names, e.g. {SWAP_MODULES}")
        layers = flags["recompute-num-layers"] if flags["recompute-method"] == "block" else None
        parts = [LayerPart(action="swap", role=name, layers=layers) for name in names]
    if flags["swap-layer-input"]:
        if flags["recompute-granularity"] == "full" and not flags["swap-attention"]:
            whole = _whole_layers(flags["recompute-method"], flags["recompute-num-layers"])
            parts.append(LayerPart(action="swap", role=LAYER_INPUT, layers=whole.layers))
        else:
            _warn("--swap-layer-input has no effect without --recompute-granularity full")
    return parts


def _swaps_optimizer(flags: _Flags, smart_swap: SmartSwapConfig | None) -> bool:
    times, amounts = flags["swap-optimizer-times"], flags["virtual-optimizer"] or []
    if times < 0:
        raise InvalidArgument(f"--swap-optimizer-times={times}: expected at least 0")
    if flags["swap-optimizer"] and times != SWAP_TIMES:
        _warn("--swap-optimizer-times has no effect: swapkit chooses the size of the pieces")
    if not min(amounts, default=1) > 0:
        raise InvalidArgument("--virtual-optimizer: expected 'all' or numbers above 0")
    if set(amounts) - {float("inf")}:
        _warn("--virtual-optimizer: keeping all states on the host between steps, of any size")
    moved = smart_swap is not None and smart_swap.moves_optimizer
    return bool(flags["swap-optimizer"] or amounts or moved)


def _warn(text: str) -> None:
    warn(text, stacklevel=4)


# ---- flags that exclude or need others ----------------------------------------------------------
#
# A feature that one flag switches on has the flag's name. A pair that MindSpeed's documents name as
# exclusive raises, even where both could hold: a user who sets both expects an error, not a guess
# about which one holds. Other pairs that MindSpeed's code refuses are accepted; the tests list
# them, each with the reason.
#
# Source:
#   MindSpeed: the documents of adaptive selective recomputation and of adaptive memory
#   optimisation, and the checks in its code.


class Pair(NamedTuple):
    """Two features, and the reason why they exclude each other."""

    first: str
    second: str
    reason: str


_PLANS = "the first plans what to recompute and swap"
_BY_HAND = f"{_PLANS}, so omit the second, or choose everything by hand and omit the first"
_ONE_PLAN = "only one of them can plan a step, so omit one"
_BUBBLE = f"{_PLANS}, at every point of the schedule, so omit the second"
_FRAGMENTS = "both would install their own allocator; swapkit's pool does the work of either"
_METHOD = "a method selects which layers to recompute in full"
_CHOSEN = ("full recompute", "selective recompute", "recompute method")
_FINE = ("recompute activation function", "recompute norm")

INCOMPATIBLE = tuple(
    Pair(first, second, reason)
    for first, reason, seconds in (
        ("adaptive recompute", _BY_HAND, (*_CHOSEN, *_FINE, "swap attention")),
        ("adaptive recompute", _BUBBLE, ("recompute in bubble", "recompute in advance")),
        ("adaptive recompute", _ONE_PLAN, ("adaptive memory optimization", "smart swap")),
        ("adaptive recompute", _FRAGMENTS, ("memory fragmentation",)),
        ("adaptive memory optimization", _BY_HAND, (*_CHOSEN, "swap attention")),
        ("adaptive memory optimization", _BUBBLE, ("recompute in bubble",)),
        ("adaptive memory optimization", _ONE_PLAN, ("smart swap",)),
        ("adaptive memory optimization", _FRAGMENTS, ("memory fragmentation",)),
        ("selective recompute", _METHOD, ("recompute method",)),
    )
    for second in seconds
)
# Flags that only tune a feature, and the flags that switch it on.
_RECOMPUTES = ("recompute-granularity", "recompute-activation-function", "recompute-norm")
TUNES: dict[str, tuple[str, ...]] = {
    "adaptive-recompute-profiling-step": (
        "adaptive-recompute-device-swap",
        "adaptive-recompute-device-size",
    ),
    "enable-recompute-layers-per-pp-rank": (*_RECOMPUTES, "swap-attention"),
    "moe-adaptive-recompute-activation-scale": ("moe-adaptive-recompute-activation",),
    "recompute-activation-function-num-layers": ("recompute-activation-function",),
    "recompute-norm-num-layers": ("recompute-norm",),
    "recompute-type": ("recompute-module-list",),
    "save-memory-ratio": ("automated-pipeline",),
    "smart-swap-config": ("smart-swap",),
    "swap-modules": ("swap-attention",),
    "swap-optimizer-times": ("swap-optimizer",),
}


def check_pairs(asked: Mapping[str, str]) -> None:
    """Raise if two features exclude each other.

    Args:
        asked: the requested features, each with its flag or variable; may have others.

    Raises:
        InvalidArgument: two features exclude each other; names all such pairs, with reasons.
    """
    found = [
        f"{asked[first]} and {asked[second]} exclude each other: {reason}"
        for first, second, reason in INCOMPATIBLE
        if first in asked and second in asked
    ]
    if found:
        raise InvalidArgument("; ".join(found))
