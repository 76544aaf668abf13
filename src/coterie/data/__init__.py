"""Federations of clients: from arrays in memory, or made to a recipe."""

from coterie.data.federated import FederatedData, Rows, from_arrays
from coterie.data.synthetic import (
    PROBLEMS,
    blobs,
    digits,
    linear_coordinates,
    linear_groups,
    make,
)

__all__ = [
    "PROBLEMS",
    "FederatedData",
    "Rows",
    "blobs",
    "digits",
    "from_arrays",
    "linear_coordinates",
    "linear_groups",
    "make",
]
