"""Sphinx: how the site is built. Nothing in it is loaded from the network."""

import headwise

project = "headwise"
author = "the headwise authors"
copyright = "the headwise authors"
version = release = headwise.__version__

extensions = ["myst_parser", "sphinx.ext.autodoc", "sphinx.ext.napoleon", "sphinx.ext.viewcode"]
myst_enable_extensions = ["colon_fence", "dollarmath"]
myst_heading_anchors = 3
html_theme = "furo"
html_title = "headwise"
html_static_path: list[str] = []
exclude_patterns = ["build"]

# shapes stay readable as written: Float[Tensor, "B H T D"]
autodoc_typehints = "signature"
autodoc_preserve_defaults = True
autodoc_member_order = "bysource"
napoleon_google_docstring = True
napoleon_numpy_docstring = False
napoleon_use_rtype = False
python_use_unqualified_type_names = True
maximum_signature_line_length = 90
nitpicky = False
suppress_warnings = ["ref.python"]
