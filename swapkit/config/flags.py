"""The command line flags of MindSpeed and Megatron, under their names.

`add_arguments` adds them to a parser; `from_arguments` turns parsed flags into `Settings`. Flags
without a counterpart are accepted, with a warning that names an alternative; none of these changes
results, only memory use.

Source:
    MindSpeed and Megatron-LM: names, types, defaults, and refused values.
"""

from __future__ import annotations

import os
import warnings
from typing import TYPE_CHECKING, Any

from swapkit.config.environment import read_environment
from swapkit.config.incompatibilities import check_pairs, list_idle
from swapkit.config.settings import CORE_ATTENTION, LAYER_INPUT, LayerPart, Settings
from swapkit.config.smart_swap import read_smart_swap, swap_policy_config
from swapkit.errors import InvalidArgument

if TYPE_CHECKING:
    import argparse
    from collections.abc import Mapping

    from swapkit.config.smart_swap import SmartSwapConfig, SmartSwapSource

MIB = 1 << 20
PROFILE_STEPS, LEAST_PROFILE_STEPS = 10, 5
SWAP_TIMES = 16
SWAP_MODULES = "input_norm,self_attention,post_attention_norm"
RECOMPUTE_TYPES = ("mlp", "self_attention", "layer")
_ON: dict[str, Any] = {"action": "store_true"}
_NUMBER: dict[str, Any] = {"type": int, "default": None, "metavar": "N"}
_TEXT: dict[str, Any] = {"type": str, "default": None}


def _gigabytes(text: str) -> float:
    return float("inf") if text == "all" else float(text)


FLAGS: dict[str, dict[str, Any]] = {
    "adaptive-recompute-device-swap": {**_ON, "help": "plan which layers to recompute"},
    "adaptive-recompute-device-size": {
        **_NUMBER,
        "default": -1,
        "metavar": "MB",
        "help": "memory to plan for; 0 or less: all memory of the device",
    },
    "adaptive-recompute-profiling-step": {
        **_NUMBER,
        "default": PROFILE_STEPS,
        "help": "steps to measure before planning",
    },
    "adaptive-memory-optimization": {**_ON, "help": "plan what to recompute and what to swap"},
    "smart-swap": {**_ON, "help": "plan what is swapped"},
    "smart-swap-config": {**_TEXT, "metavar": "FILE", "help": "settings, as YAML or JSON"},
    "swap-attention": {**_ON, "help": "swap the saved tensors of attention"},
    "swap-modules": {
        **_TEXT,
        "default": SWAP_MODULES,
        "metavar": "NAMES",
        "help": "the modules of a layer whose saved tensors --swap-attention swaps",
    },
    "swap-layer-input": {**_ON, "help": "swap the inputs of recomputed layers"},
    "swap-optimizer": {**_ON, "help": "keep optimizer states on the host between steps"},
    "swap-optimizer-times": {**_NUMBER, "default": SWAP_TIMES},
    "virtual-optimizer": {"type": _gigabytes, "nargs": "+", "default": None, "metavar": "GB"},
    "memory-fragmentation": {**_ON, "help": "same as MEMORY_FRAGMENTATION=1"},
    "recompute-granularity": {"choices": ("full", "selective"), "default": None},
    "recompute-method": {"choices": ("uniform", "block"), "default": None},
    "recompute-num-layers": _NUMBER,
    "recompute-activation-function": _ON,
    "recompute-activation-function-num-layers": _NUMBER,
    "recompute-norm": _ON,
    "recompute-norm-num-layers": _NUMBER,
    "enable-recompute-layers-per-pp-rank": _ON,
    "recompute-in-bubble": _ON,
    "recompute-in-advance": _ON,
    "moe-adaptive-recompute-activation": _ON,
    "moe-adaptive-recompute-activation-scale": {"type": float, "default": 2.0},
    "automated-pipeline": _ON,
    "save-memory-ratio": {"type": float, "default": 0.20},
    "num-layer-list": _TEXT,
    "recompute-module-list": {**_TEXT, "help": "modules to recompute in each pipeline stage"},
    "recompute-type": {**_NUMBER, "default": 2, "help": "0: mlp, 1: attention, 2: layer"},
    "compress-dense": {"choices": ("disable", "level0", "level1"), "default": "disable"},
    "compress-activation": {"type": str, "default": ""},
    "compress-optimizer": _ON,
    "reuse-fp32-param": _ON,
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
    fragmentation = flags["memory-fragmentation"] or environment.memory_fragmentation
    check_pairs(_list_features(flags, fragmentation=fragmentation))
    _warn_of_foreign(flags)
    size_mb = flags["adaptive-recompute-device-size"]
    chosen = _read_smart_swap(flags, smart_swap)
    total = train_iters if train_iters is not None else getattr(args, "train_iters", None)
    profile_steps = None if chosen is None else chosen.warmup_step
    if _is_adaptive(flags):
        profile_steps = _read_profile_steps(flags, total)
    limit_bytes = None if chosen is None else chosen.limit_bytes
    searches = bool(flags["adaptive-recompute-device-swap"])
    settings = Settings(
        policy=_choose_policy(flags),
        limit_bytes=size_mb * MIB if size_mb > 0 else limit_bytes,
        is_fixed_limit=size_mb > 0 and not searches,
        searches_threshold=searches,
        profile_steps=profile_steps,
        search_steps=None if chosen is None else chosen.search_steps,
        min_swap_bytes=environment.min_swap_bytes,
        document=(*_list_recomputed(flags), *_list_swapped(flags)),
        counts_per_stage=bool(flags["enable-recompute-layers-per-pp-rank"]),
        swap_optimizer=_swaps_optimizer(flags, chosen),
        memory_fragmentation=bool(fragmentation),
        bind_cpus=bool(flags["adaptive-memory-optimization"]),
        smart_swap=chosen,
    )
    for text in list_idle(flags.is_set):
        _warn(text)
    return settings


class _Flags:
    """Parsed flags by name; a flag that the parser lacks has its default."""

    def __init__(self, args: argparse.Namespace) -> None:
        self.num_layers: int | None = getattr(args, "num_layers", None)
        self._args = args

    def __getitem__(self, name: str) -> Any:  # noqa: ANN401 - of the flag's type
        options = FLAGS[name]
        default = False if options.get("action") == "store_true" else options["default"]
        return getattr(self._args, name.replace("-", "_"), default)

    def is_set(self, name: str) -> bool:
        options = FLAGS[name]
        return bool(self[name]) and self[name] != options.get("default")

    def count(self, name: str, *, least: int = 0) -> int | None:
        """Return the value of a flag that is a number of layers."""
        value: int | None = self[name]
        most = self.num_layers
        if value is not None and (value < least or (most is not None and value > most)):
            above = "" if most is None else f" and at most {most}, the model's layers"
            raise InvalidArgument(f"--{name}={value}: expected at least {least}{above}")
        return value


def _is_adaptive(flags: _Flags) -> bool:
    swap, size_mb = flags["adaptive-recompute-device-swap"], flags["adaptive-recompute-device-size"]
    return bool(swap or size_mb > 0)


def _list_features(flags: _Flags, *, fragmentation: bool) -> dict[str, str]:
    """Return the requested features of the incompatibility table, each with its flag."""
    swap = flags["adaptive-recompute-device-swap"]
    granularity, method = flags["recompute-granularity"], flags["recompute-method"]
    by_flag = flags["memory-fragmentation"]
    asked = {
        "adaptive recompute": (
            _is_adaptive(flags),
            "--adaptive-recompute-device-" + ("swap" if swap else "size"),
        ),
        "memory fragmentation": (
            fragmentation,
            "--memory-fragmentation" if by_flag else "MEMORY_FRAGMENTATION=1",
        ),
        "full recompute": (granularity == "full", "--recompute-granularity full"),
        "selective recompute": (granularity == "selective", "--recompute-granularity selective"),
        "recompute method": (
            method is not None and granularity != "full",
            f"--recompute-method {method}",
        ),
    }
    by_name = {
        "adaptive memory": "adaptive-memory-optimization",
        "smart swap": "smart-swap",
        "swap attention": "swap-attention",
        "swap optimizer": "swap-optimizer",
        "activation recompute": "recompute-activation-function",
        "norm recompute": "recompute-norm",
        "recompute in bubble": "recompute-in-bubble",
        "recompute in advance": "recompute-in-advance",
        "reuse of fp32 parameters": "reuse-fp32-param",
    }
    asked |= {feature: (flags.is_set(name), f"--{name}") for feature, name in by_name.items()}
    return {feature: text for feature, (is_asked, text) in asked.items() if is_asked}


def _choose_policy(flags: _Flags) -> str | None:
    if _is_adaptive(flags):
        return "recompute"
    if flags["adaptive-memory-optimization"]:
        return "auto"
    return "swap" if flags["smart-swap"] else None


def _read_profile_steps(flags: _Flags, train_iters: int | None) -> int:
    steps: int = flags["adaptive-recompute-profiling-step"]
    what = f"--adaptive-recompute-profiling-step={steps}"
    if steps <= 0:
        _warn(f"{what}: expected more than 0; using {PROFILE_STEPS}")
        steps = PROFILE_STEPS
    if steps < LEAST_PROFILE_STEPS:
        _warn(f"{what}: at least {LEAST_PROFILE_STEPS} are recommended; training is not affected")
    if train_iters is not None and steps > train_iters // 10:
        _warn(
            f"{what}: measuring {steps} of the {train_iters} training steps, more than a tenth; "
            "training is not affected otherwise"
        )
    return steps


def _warn_of_foreign(flags: _Flags) -> None:
    for name, instead in WITHOUT_COUNTERPART.items():
        if flags.is_set(name):
            _warn(f"--{name} has no effect: {instead}")


# ---- actions for parts of layers ----------------------------------------------------------------


def _list_recomputed(flags: _Flags) -> list[LayerPart]:
    part = _choose_granularity(flags)
    first = part.layers if part is not None and part.role == "layer" else None
    fine = _list_fine(flags, first if isinstance(first, int) else 0)
    return [*([] if part is None else [part]), *fine, *_list_stored(flags)]


def _choose_granularity(flags: _Flags) -> LayerPart | None:
    granularity = flags["recompute-granularity"]
    count = flags.count("recompute-num-layers", least=1)
    if flags["swap-attention"] and count is not None:
        return LayerPart(action="recompute", role="mlp", layers=count)
    if granularity == "full":
        return _whole_layers(flags["recompute-method"], count)
    if not flags["swap-attention"]:
        for name in ("recompute-method", "recompute-num-layers"):
            if flags[name] is not None:
                _warn(f"--{name} has no effect without --recompute-granularity full")
    return (
        LayerPart(action="recompute", role=CORE_ATTENTION) if granularity == "selective" else None
    )


def _whole_layers(method: str | None, count: int | None) -> LayerPart:
    """Return the layers of a method: `block`: the first `count`, `uniform`: all, in groups."""
    if method == "uniform":
        return LayerPart(action="recompute", role="layer", group=count or 1)
    return LayerPart(action="recompute", role="layer", layers=count)


def _list_fine(flags: _Flags, first: int) -> list[LayerPart]:
    """Return the activation functions and norms in the layers after the fully recomputed ones."""
    roles = {
        "recompute-activation-function": ("activation_function",),
        "recompute-norm": ("input_norm", "post_attention_norm"),
    }
    parts = []
    for name, named in roles.items():
        count = flags.count(f"{name}-num-layers")
        if flags[name]:
            parts += [
                LayerPart(action="recompute", role=role, layers=count, first=first)
                for role in named
            ]
    return parts


def _list_stored(flags: _Flags) -> list[LayerPart]:
    """Return the result of a pipeline search: a number of layers for each stage."""
    text, kind = flags["recompute-module-list"], flags["recompute-type"]
    if text is None:
        return []
    if not 0 <= kind < len(RECOMPUTE_TYPES):
        raise InvalidArgument(
            f"--recompute-type={kind}: expected 0 (mlp), 1 (attention), 2 (layer)"
        )
    numbers = text if isinstance(text, list) else text.strip("[] ").split(",")
    try:
        counts = tuple(int(number) for number in numbers)
    except ValueError:
        counts = (-1,)
    if min(counts) < 0:
        raise InvalidArgument(
            f"--recompute-module-list={text!r}: expected a number for each stage, e.g. 2,1,0,0"
        )
    return [LayerPart(action="recompute", role=RECOMPUTE_TYPES[kind], layers=counts)]


def _list_swapped(flags: _Flags) -> list[LayerPart]:
    parts = []
    if flags["swap-attention"]:
        names = [name.strip() for name in flags["swap-modules"].split(",")]
        if not all(names):
            raise InvalidArgument(
                f"--swap-modules={flags['swap-modules']!r}: expected names, e.g. {SWAP_MODULES}"
            )
        layers = flags["recompute-num-layers"] if flags["recompute-method"] == "block" else None
        parts = [LayerPart(action="swap", role=name, layers=layers) for name in names]
    if flags["swap-layer-input"]:
        if flags["recompute-granularity"] == "full" and not flags["swap-attention"]:
            whole = _whole_layers(flags["recompute-method"], flags["recompute-num-layers"])
            parts.append(LayerPart(action="swap", role=LAYER_INPUT, layers=whole.layers))
        else:
            _warn("--swap-layer-input has no effect without --recompute-granularity full")
    return parts


def _read_smart_swap(flags: _Flags, source: SmartSwapSource) -> SmartSwapConfig | None:
    file = flags["smart-swap-config"]
    if flags["smart-swap"]:
        return read_smart_swap((file or swap_policy_config) if source is None else source)
    return None


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
    warnings.warn(text, stacklevel=4)
