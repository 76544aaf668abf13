"""How Sphinx builds these pages: `make docs`."""

import coterie

project = "Coterie"
author = "The Coterie developers"
copyright = author
version = release = coterie.__version__

extensions = ["myst_parser", "sphinx.ext.autodoc", "sphinx.ext.napoleon"]
myst_heading_anchors = 3
exclude_patterns = ["_build"]

autodoc_typehints = "none"  # signatures stay readable; the source has the types
autodoc_member_order = "bysource"
napoleon_google_docstring = False
napoleon_use_rtype = False

html_theme = "furo"
html_title = "Coterie"
html_copy_source = False
html_static_path = ["_static"]
html_css_files = ["tables.css"]


def _before_napoleon(app, what, name, obj, options, lines):
    """Keep it from taking examples for parameters, and "a: b" of a property for its type."""
    first = next((i for i, line in enumerate(lines) if line.startswith(">>>")), None)
    if first is not None and "Examples" not in lines:
        lines[first:first] = ["Examples", "--------"]
    if what == "property":
        lines[0] = lines[0].replace(": ", " – ")


def setup(app):
    app.connect("autodoc-process-docstring", _before_napoleon, priority=100)
