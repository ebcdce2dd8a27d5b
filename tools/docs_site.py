"""The project's part of the documentation build, an extension of Sphinx that `docs/conf.py` names.

Docstrings mark code as Markdown does, with one backtick; Sphinx expects two. Napoleon takes the
text before a colon in a section `Returns` for a type, but types are in the signatures. A docstring
names pages by their files; the site links to them.
"""

from __future__ import annotations

import gc
import importlib
import re
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch

import swapkit

if TYPE_CHECKING:
    from sphinx.application import Sphinx

# From the first steps to the deep end.
TUTORIALS = (
    "first_budget",
    "which_budget",
    "reading_the_report",
    "choices_by_hand",
    "selective_recompute_with_offload",
    "optimizer_states",
    "compiled_model",
    "fine_tuning_with_transformers",
    "training_with_lightning",
    "custom_kernel",
    "planning_without_the_machine",
    "your_own_policy",
    "fsdp_and_pipelines",
    "from_mindspeed_and_mindformers",
    "ascend",
)
BEFORE_NAPOLEON = 400  # which uses Sphinx's usual priority, 500
_RETURNS = re.compile(r"^Returns:\n((?: {4}.*\n|\n(?= {4}))+)", re.MULTILINE)
_PAGE = re.compile(r"(?:``)?\bdocs/([\w/-]+)\.md\b(?:``)?")
_CODE = re.compile(r"(?<![`:\w])`([^`]+)`(?![`\w])")


def tutorial_order(name: str) -> int:
    """Return the place of a tutorial's file among the others; a new one comes last."""
    stem = Path(name).stem
    return TUTORIALS.index(stem) if stem in TUTORIALS else len(TUTORIALS)


def start_anew(_gallery: dict[str, Any], _file: str) -> None:
    """Take swapkit out of the process, so that a tutorial starts as a program of its own does."""
    torch.compiler.reset()  # its caches keep models
    # Dynamo notes the module of a compiled function in a cache, and as a global of its own wrapper.
    wrapper = vars(importlib.import_module("torch._dynamo.external_utils"))
    for name in [each for each in wrapper if each.startswith("__import_")]:
        del wrapper[name]
    importlib.import_module("torch._dynamo.symbolic_convert")._import_module.cache_clear()  # noqa: SLF001
    gc.collect()
    swapkit.uninstall(force=True)


def mark_code(_app: Sphinx, what: str, *rest: Any) -> None:
    """Rewrite a docstring in place: its code, and in a module's also its indented blocks."""
    lines: list[str] = rest[-1]
    text = _CODE.sub(r"``\1``", "\n".join(lines))
    text = _PAGE.sub(r":doc:`\1 </\1>`", text)
    text = _RETURNS.sub(lambda found: f":returns:\n{found[1]}\n", text)
    if what == "module":
        text = re.sub(r"(?<=\n)\n(?=    \S)", "\n::\n\n", text, count=1)
    lines[:] = text.split("\n")


def setup(app: Sphinx) -> dict[str, bool]:
    """Register the extension with Sphinx."""
    app.connect("autodoc-process-docstring", mark_code, priority=BEFORE_NAPOLEON)
    return {"parallel_read_safe": True}
