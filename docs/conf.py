"""Configures Sphinx. `make docs` writes docs/_build/html, offline and without warnings."""

from importlib.metadata import version as installed

project = "vit-fast"
author = "the vit-fast authors"
release = version = installed("vit-fast")
extensions = ["myst_parser", "sphinx.ext.autodoc", "sphinx.ext.napoleon"]
exclude_patterns = ["_build"]
html_theme = "furo"
html_title = "vit-fast"
html_static_path = ["_static"]
html_css_files = ["guide.css"]  # wraps long lines of code
html_show_copyright = False
myst_heading_anchors = 3
autodoc_typehints = "description"
autodoc_member_order = "bysource"
napoleon_use_ivar = True  # lists attributes once, with their class
