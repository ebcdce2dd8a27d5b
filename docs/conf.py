"""Configuration of the documentation site: `make docs`.

Sphinx reads the folder that `tools/stage_docs.py` lays out. No page loads anything from elsewhere.
"""

from __future__ import annotations

from pathlib import Path

import swapkit

ROOT = Path(swapkit.__file__).resolve().parents[1]
project = "swapkit"
author = "the swapkit authors"
version = release = swapkit.__version__
extensions = [
    "myst_parser",
    "sphinx.ext.autodoc",
    "sphinx.ext.napoleon",
    "sphinx_copybutton",
    "sphinx_gallery.gen_gallery",
    "tools.docs_site",
]
root_doc = "index"
exclude_patterns = ["tutorials/*.ipynb", "tutorials/*.py", "sg_execution_times.rst"]

# Names of other projects are not looked up: the build needs no network.
nitpicky = True
nitpick_ignore_regex = [("py:.*", r"(?!swapkit\.).*"), ("py:.*", r"swapkit\.(_|api|planning).*")]

myst_enable_extensions = ["deflist"]
myst_heading_anchors = 4

add_module_names = False
autodoc_member_order = "bysource"
autodoc_typehints = "signature"
napoleon_google_docstring = True
napoleon_numpy_docstring = False
napoleon_custom_sections = [("Source", "notes_style"), ("Units", "notes_style")]
python_maximum_signature_line_length = 80
python_use_unqualified_type_names = True

html_theme = "furo"
html_title = "swapkit"
html_static_path = ["static"]
html_css_files = ["site.css"]
html_show_copyright = False
html_show_sourcelink = False
html_copy_source = False
highlight_language = "none"  # a block without a language is output
pygments_style = "friendly"
pygments_dark_style = "monokai"
copybutton_selector = "div:not(.highlight-none) > div.highlight pre"
copybutton_exclude = ".linenos, .gp, .go"
copybutton_prompt_text = r">>> |\.\.\. |\$ "
copybutton_prompt_is_regexp = True

linkcheck_ignore = [r"http://localhost.*"]

sphinx_gallery_conf = {
    "examples_dirs": [str(ROOT / "tutorials")],
    "gallery_dirs": ["tutorials"],
    "filename_pattern": r"\.py$",  # all of them run
    "within_subsection_order": "tools.docs_site.tutorial_order",
    "reset_modules": ("tools.docs_site.start_anew",),
    "abort_on_example_error": True,
    "only_warn_on_example_error": False,
    "download_all_examples": False,
    "show_memory": False,
    "show_signature": False,
    "min_reported_time": 1e9,
    "write_computation_times": False,
    "remove_config_comments": True,
    "plot_gallery": "True",
}
