"""How Sphinx builds these pages: `make docs`."""

import coterie

project = "Coterie"
author = "The Coterie developers"
copyright = author
version = release = coterie.__version__

extensions = ["myst_parser", "sphinx.ext.autodoc", "sphinx.ext.napoleon"]
myst_enable_extensions = ["colon_fence"]
myst_heading_anchors = 3
exclude_patterns = ["_build"]

autodoc_typehints = "none"  # signatures stay readable; the source has the types
autodoc_member_order = "bysource"
napoleon_google_docstring = False
napoleon_use_rtype = False

html_theme = "furo"
html_title = "Coterie"
html_copy_source = False
