"""One module per family of published tables and figures."""

from coterie.experiments.recipes import clove_images, ifca

__all__ = ["clove_images", "ifca"]
