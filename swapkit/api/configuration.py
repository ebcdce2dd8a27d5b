"""`configure`: recompute and swap from a configuration document."""

from __future__ import annotations

import functools
import re
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import replace
from typing import Any

import torch

from swapkit._runtime.model.ranks import check_group, find_tensor_parallel_group
from swapkit._runtime.model.tracker import runs
from swapkit._runtime.process.runtime import get_runtime
from swapkit._runtime.user_choices.layers import (
    ModuleOperator,
    ModulePart,
    find_layers,
    name_layers,
)
from swapkit._runtime.user_choices.wrapping import carry_marks, end_part, make_part
from swapkit.api.choice_table import choices
from swapkit.api.targets import match_modules
from swapkit.config.environment import list_without_effect, read_environment
from swapkit.config.mindformers.documents import Document, check_rules, read_document
from swapkit.config.mindformers.layer_actions import LayerActions, NormalSettings, settle
from swapkit.config.mindformers.patterns import Match, find
from swapkit.config.mindformers.selections import (
    Indices,
    LayerSelection,
    Layout,
    ModelInputs,
    Offset,
    is_whole,
    lay_out,
)
from swapkit.errors import InvalidArgument
from swapkit.registry import Choice, Collectives, Exclude, Recompute, Source, Swap, What
from swapkit.texts import get_logger

# ---- configuration warnings ----------------------------------------------------------------------
#
# Warnings about entries of a configuration document with no effect or a bad one.

NAMES_SHOWN = 12


def list_unmatched(
    settings: NormalSettings, parts: Sequence[ModulePart]
) -> Iterator[tuple[str, str]]:
    """Yield (key, pattern) for patterns that match nothing in any layer."""
    layout = settings.layout
    places = [layout.find_place(layer) for layer in range(layout.num_layers)]
    chosen = dict.fromkeys(
        (key, pattern)
        for key, pattern, selection in _list_selections(settings)
        if pattern and any(selection.covers(place) for place in places)
    )
    for key, pattern in chosen:
        if parts and not any(find(pattern, part) for part in parts):
            yield key, pattern


def describe(layer: ModulePart) -> str:
    """Return a text with the names that patterns can match in a layer."""
    names = [name for name, _ in layer.children][:NAMES_SHOWN]
    operators = list(layer.operators)[:NAMES_SHOWN]
    return f"a layer has the parts {', '.join(names)} and the operators {', '.join(operators)}"


def remark(
    model: torch.nn.Module, settings: NormalSettings, parts: Sequence[ModulePart]
) -> Iterator[str]:
    """Yield warnings about a configured model."""
    yield from _remark_on_indices(settings)
    rows = [row for row in choices(model) if row.by == Source.CONFIGURATION.value]
    vain = [f"{row.where} ({row.reason})" for row in rows if not row.holds]
    if vain:
        rest = f" and {len(vain) - NAMES_SHOWN} more" if len(vain) > NAMES_SHOWN else ""
        yield f"no effect: {', '.join(vain[:NAMES_SHOWN])}{rest}"
    if _fills_cache(model, parts, [row.where for row in rows if "recompute" in row.what]):
        yield (
            "model.config.use_cache is on: the cache keeps keys and values of recomputed layers "
            "on the device. Switch it off for training."
        )


def _remark_on_indices(settings: NormalSettings) -> Iterator[str]:
    most = settings.layout.num_layers
    for key, pattern, selection in _list_selections(settings):
        beyond = [layer for layer in _indices(selection) if not 0 <= layer < most]
        if beyond:
            name = f"{key}({pattern})" if pattern else key
            yield f"{name}: layers {beyond} do not exist; the last layer is {most - 1}"


def _list_selections(settings: NormalSettings) -> Iterator[tuple[str, str, LayerSelection]]:
    """Yield (key, pattern or empty text, selected layers) for the whole document."""
    yield "recompute", "", settings.recomputation.full
    for key, patterns in settings.recomputation.patterns.items():
        for pattern, selection in patterns.items():
            yield key, pattern, selection
    if settings.swapping is not None:
        for rule in settings.swapping.layer_swap:
            yield "layer_swap", "", rule.layers
        for pattern, rules in settings.swapping.op_swap.items():
            for rule in rules:
                yield "op_swap", pattern, rule.layers


def _indices(selection: LayerSelection) -> tuple[int, ...]:
    return selection.layers if isinstance(selection, Indices) else ()


def _fills_cache(
    model: torch.nn.Module, parts: Sequence[ModulePart], recomputed: Sequence[str]
) -> bool:
    config = getattr(getattr(model, "module", model), "config", None)  # unwrap DDP
    if not getattr(config, "use_cache", False):
        return False
    found = [part.find("attention") for part in parts]
    attentions = {module for part in found if part is not None for module in part.modules}
    regions = {path: module for path, module in model.named_modules() if path in recomputed}
    return any(not attentions.isdisjoint(region.modules()) for region in regions.values())


# ---- configuration -------------------------------------------------------------------------------
#
# `configure`: recompute and swap from a configuration document.

_log = get_logger("settings")
ASK_FOR_GROUP = "pass tensor_parallel_group="


class Configuration:
    """The choices that a document made for a model, with their log. `remove()` undoes them."""

    def __init__(self, model: torch.nn.Module) -> None:
        self._model = model
        self._choices: list[tuple[torch.nn.Module, Choice]] = []
        self.log_lines: list[str] = []
        self.unmatched: list[str] = []  # patterns that name nothing in any layer

    def remove(self) -> None:
        """Remove the choices. Autograd graphs recorded under them keep working."""
        for module, choice in self._choices:
            make_part(module).remove(choice)
            end_part(module)
        self._choices = []
        carry_marks(self._model)

    def __str__(self) -> str:
        return "\n".join(self.log_lines)

    def _add(
        self, module: torch.nn.Module, what: What, operator: str = "", meaning: str = ""
    ) -> None:
        choice = Choice(source=Source.CONFIGURATION, what=what, operator=operator, meaning=meaning)
        # Several patterns may make the same choice: it counts as made last.
        self._choices = [entry for entry in self._choices if entry != (module, choice)]
        self._choices.append((module, choice))

    def _hold(self) -> None:
        for module, choice in self._choices:
            make_part(module).add(choice)
        carry_marks(self._model)


def configure(  # noqa: PLR0913 - properties of the model that the document lacks
    model: torch.nn.Module,
    config: Any,  # noqa: ANN401 - a path, a mapping, any dataclass
    /,
    *,
    num_layers: int | None = None,
    offset: Offset | None = None,
    pp_interleave_num: int | None = None,
    pipeline_stage: int | None = None,
    layers: str | Sequence[torch.nn.Module] | None = None,
    layer_ids: Sequence[int] | None = None,
    names: Mapping[str, str] | None = None,
    tensor_parallel_group: Any = None,  # noqa: ANN401 - torch.distributed.ProcessGroup
) -> Configuration:
    r"""Recompute and swap the layers and operators of a model that a document names.

    The document has the sections `recompute_config` and `swap_config` of MindFormers;
    docs/mindspeed.md lists their keys. The call replaces the choices of earlier calls for the
    model.

    A pattern names parts of a layer level by level, separated by `\.`. Each level is a submodule,
    by its own name or by its usual one (`attention`, `feed_forward\.w1`, `ffn_norm`, whatever the
    model calls them). The last level may also be an operator that the module's own `forward` calls
    (`attention\.flash_attention`, `feed_forward\.mul`). An operator's results are swapped or
    recomputed wherever they were saved. Neither the results of a recomputed part nor its inputs are
    swapped.

    Args:
        model: the model; its layers are the elements of its largest `ModuleList`.
        config: path of a YAML or JSON file, mapping, or dataclass instance.
        num_layers: layers of the whole model, over all pipeline stages. None: from the document,
            else the number of layers found.
        offset: number of layers that each stage has above the average; None: from the document,
            else `model.config.offset`, else 0.
        pp_interleave_num: chunks per stage; None: as for `offset`, else 1.
        pipeline_stage: number of stages; None: as for `offset`, else 1.
        layers: the layers, if they are elsewhere: a pattern for paths such as `r"blocks\.\d+"`, or
            the modules.
        layer_ids: the layers' numbers in the whole model, if this process has only some of them.
        names: further names of parts or operators, such as `{"attention": "mixer"}`.
        tensor_parallel_group: group over whose ranks `recompute_slice_activation` slices; None: the
            group of the mesh that the parameters are distributed over, if any.

    Returns:
        The configuration, with `log_lines` and `unmatched` patterns; `remove()` undoes it.

    Raises:
        InvalidConfiguration: a key or value of the document is wrong; the message names it, and
            nothing was changed. Also a `KeyError`, `TypeError` or `IndexError` where MindFormers
            raises one.
        InvalidArgument: the model lacks layers that the document refers to.
        OSError: the file cannot be read.

    Source:
        MindFormers, recompute and fine-grained activation swap.

    Example:
        >>> import swapkit, torch
        >>> block = lambda: torch.nn.Sequential(torch.nn.Linear(8, 8), torch.nn.ReLU())
        >>> model = torch.nn.Sequential(torch.nn.ModuleList([block(), block()]))
        >>> configuration = swapkit.configure(model, {"recompute_config": {"recompute": [1]}})
        >>> print(swapkit.choices(model))
        where  what       by             holds
        0.0    recompute  configuration  yes
    """
    if not isinstance(model, torch.nn.Module):
        raise InvalidArgument(f"configure: expected a torch.nn.Module, got {model!r}")
    check_group(tensor_parallel_group)
    document = read_document(config)
    modules = _find_layers(model, layers)
    inputs = document.inputs
    asked = {
        "num_layers": num_layers,
        "offset": offset,
        "pp_interleave_num": pp_interleave_num,
        "pipeline_stage": pipeline_stage,
    }
    layout = lay_out(inputs, **_with_defaults(asked, inputs, model, len(modules)))
    numbers = _number_layers(modules, layout, layer_ids)
    check_rules(document, layout)
    settings = settle(document, layout)
    parts = name_layers(modules, _check_names(names))
    actions = [settings.actions(i, part) for i, part in zip(numbers, parts, strict=True)]
    configuration = Configuration(model)
    group = tensor_parallel_group
    if group is None and any(each.slice_activation for each in actions):
        group = find_tensor_parallel_group(model)
        if group is None:
            _log.warning("recompute_slice_activation: no ranks to slice over; %s", ASK_FOR_GROUP)
    get_runtime().tracker.add_model(model)
    for part, each in zip(parts, actions, strict=True):
        _choose(configuration, document, part, each, group)
    _report(configuration, document, settings, parts, actions)
    choices(model).remove(by=Source.CONFIGURATION.value)
    configuration._hold()  # noqa: SLF001 - its own kind
    for text in remark(model, settings, parts):
        _log.warning("%s", text)
    return configuration


# ---- the model ----------------------------------------------------------------------------------


def _find_layers(model: torch.nn.Module, layers: object) -> list[torch.nn.Module]:
    if layers is None:
        return list(find_layers(model).values())
    if isinstance(layers, str):
        found = match_modules(model, layers)
    elif isinstance(layers, Iterable):
        found = list(layers)
    else:
        raise InvalidArgument(f"layers={layers!r}: expected a pattern for paths, or modules")
    _check_layers(model, found)
    return found


def _check_layers(model: torch.nn.Module, layers: Sequence[object]) -> None:
    paths = {module: path for path, module in model.named_modules()}
    for layer in layers:
        if not isinstance(layer, torch.nn.Module) or layer not in paths:
            raise InvalidArgument(
                f"layers: expected a pattern for paths, or submodules of {type(model).__name__}; "
                f"{type(layer).__name__} is not one"
            )
        if not runs(layer):
            raise InvalidArgument(
                f"layers: {paths[layer]} is a list of modules, which has no forward. Pass its "
                "elements."
            )
    _check_apart([paths[layer] for layer in layers if isinstance(layer, torch.nn.Module)])


def _check_apart(paths: Sequence[str]) -> None:
    for index, path in enumerate(paths):
        others = (*paths[:index], *paths[index + 1 :])
        around = [other for other in others if f"{path}.".startswith(f"{other}." if other else "")]
        if around:
            if around[0] == path:
                raise InvalidArgument(f"layers: {path} is given twice")
            whole = around[0] or "the model"
            raise InvalidArgument(f"layers: {path} is inside {whole}, which is given too")


def _check_names(names: object) -> dict[str, str]:
    if names is None:
        return {}
    texts = [*names, *names.values()] if isinstance(names, Mapping) else [None]
    if not all(isinstance(text, str) and text for text in texts):
        raise InvalidArgument(
            f"names={names!r}: expected a mapping of names to paths in a layer, e.g. "
            '{"attention": "mixer"}'
        )
    return dict(names) if isinstance(names, Mapping) else {}


def _with_defaults(
    asked: dict[str, Any], inputs: ModelInputs, model: torch.nn.Module, found: int
) -> dict[str, Any]:
    """Return the model-side inputs, from the arguments, else the document, else the model."""
    config = getattr(getattr(model, "module", model), "config", None)  # unwrap DDP
    settled = dict(asked)
    for name in ("offset", "pp_interleave_num", "pipeline_stage"):
        if settled[name] is None and not getattr(inputs, name):
            settled[name] = getattr(config, name, None)
    if settled["num_layers"] is None and inputs.num_layers is None:
        settled["num_layers"] = found
    return settled


def _number_layers(
    modules: Sequence[torch.nn.Module],
    layout: Layout,
    layer_ids: Any,  # noqa: ANN401 - user input
) -> Sequence[int]:
    if layer_ids is None:
        if len(modules) != layout.num_layers:
            raise InvalidArgument(
                f"the model has {len(modules)} layers, but num_layers is {layout.num_layers}. If "
                "this process has only some of the layers, pass their numbers as layer_ids=. If "
                "the layers are elsewhere in the model, pass layers=."
            )
        return range(len(modules))
    ids = list(layer_ids) if isinstance(layer_ids, Iterable) else [layer_ids]
    most = layout.num_layers
    if not all(is_whole(i) and 0 <= i < most for i in ids) or len(set(ids)) != len(ids):
        raise InvalidArgument(
            f"layer_ids={layer_ids!r}: expected distinct whole numbers from 0 to {most - 1}; "
            f"num_layers is {most}"
        )
    if len(ids) != len(modules):
        raise InvalidArgument(
            f"layer_ids={layer_ids!r}: expected {len(modules)} numbers, one for each layer, got "
            f"{len(ids)}"
        )
    return ids


# ---- choices ------------------------------------------------------------------------------------


def _choose(
    configuration: Configuration,
    document: Document,
    layer: ModulePart,
    actions: LayerActions,
    group: Any,  # noqa: ANN401
) -> None:
    """Add the choices for one layer."""
    recompute = _region_terms(document, actions)
    add = configuration._add  # noqa: SLF001 - its own kind
    if actions.full:
        sliced = group if actions.slice_activation else None
        add(layer.modules[0], replace(recompute, slice_group=sliced))
    for match in actions.select:
        _add_match(configuration, match, Recompute() if match.operator else recompute)
    for match in actions.select_exclude:
        _add_match(configuration, match, Exclude())
    least = read_environment().min_swap_bytes
    if actions.layer_swap is not None:
        add(layer.modules[0], Swap(prefetch=int(actions.layer_swap), min_bytes=least))
    for match, prefetch in actions.op_swaps:
        _add_match(configuration, match, Swap(prefetch=int(prefetch), min_bytes=least))


def _add_match(configuration: Configuration, match: Match, what: What) -> None:
    add = configuration._add  # noqa: SLF001 - its own kind
    for module in _modules_of(match):
        add(module, what)
    for name, operator in _operators_of(match):
        add(operator.module, what, name, operator.pattern)


def _modules_of(match: Match) -> Sequence[torch.nn.Module]:
    part: Any = match.part
    return () if match.operator else part.modules


def _operators_of(match: Match) -> Iterator[tuple[str, ModuleOperator]]:
    part: Any = match.part
    # A part that is not a module stands for all its operators.
    names = [match.operator] if match.operator else [] if part.modules else part.operators
    for name in names:
        yield name, part.operator(name)


def _region_terms(document: Document, actions: LayerActions) -> Recompute:
    """Return how regions of a layer are recomputed: kept operators and repeated collectives."""
    return Recompute(
        excluded=_name_operators(actions.select_exclude),
        collectives=Collectives(
            repeat=document.recompute.mp_comm_recompute,
            repeat_weights=document.recompute.parallel_optimizer_comm_recompute,
            repeat_in=_name_modules(actions.comm),
            keep_in=_name_modules(actions.comm_exclude),
        ),
    )


def _name_operators(matches: Iterable[Match]) -> tuple[tuple[str, str], ...]:
    """Return the matched operators as (module name, pattern of operator names)."""
    name_of = get_runtime().tracker.name_of
    found = [operator for match in matches for _, operator in _operators_of(match)]
    return tuple((name_of(operator.module), operator.pattern) for operator in found)


def _name_modules(matches: Iterable[Match]) -> tuple[str, ...]:
    return tuple(dict.fromkeys(module for module, _ in _name_operators(matches)))


# ---- the log ------------------------------------------------------------------------------------


def _report(
    configuration: Configuration,
    document: Document,
    settings: NormalSettings,
    parts: Sequence[ModulePart],
    actions: Sequence[LayerActions],
) -> None:
    """Log the lines that MindFormers logs, and the patterns that match nothing."""
    for text in (*document.without_effect, *list_without_effect()):
        _warn_once(text)
    lines = [*document.log_lines, *settings.log_lines]
    lines += [line for each in actions for line in each.log_lines]
    for line in lines:
        text = re.sub(" +", " ", line.text).replace(r"\\", "\\")  # show patterns as written
        _log.log(line.level, "%s", text)
        configuration.log_lines.append(text)
    for key, pattern in list_unmatched(settings, parts):
        configuration.unmatched.append(pattern)
        _log.warning("%s: %s matches nothing in any layer; %s", key, pattern, describe(parts[0]))


@functools.cache  # the same document configures each model of a pipeline
def _warn_once(text: str) -> None:
    _log.warning("%s", text)
