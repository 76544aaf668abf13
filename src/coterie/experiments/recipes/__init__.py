"""One module per family of published tables and figures."""

from coterie.experiments.recipes import (
    clove_autoencoder,
    clove_images,
    clove_more,
    clove_text,
    fedgmi,
    ifca,
)

__all__ = ["clove_autoencoder", "clove_images", "clove_more", "clove_text", "fedgmi", "ifca"]
