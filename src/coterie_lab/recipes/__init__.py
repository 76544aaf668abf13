"""The recipes: one module per family of published tables and figures."""

from coterie_lab.recipes import (
    clove_autoencoder,
    clove_images,
    clove_more,
    clove_text,
    fedgem,
    fedgmi,
    ifca,
)

__all__ = [
    "clove_autoencoder",
    "clove_images",
    "clove_more",
    "clove_text",
    "fedgem",
    "fedgmi",
    "ifca",
]
