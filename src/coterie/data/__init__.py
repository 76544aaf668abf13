"""Federations of clients: one's own data, pools cut to a recipe, or problems made from a seed."""

from coterie.data import partitions
from coterie.data.arrays import from_arrays
from coterie.data.card import DataCard
from coterie.data.encoder import Encoder
from coterie.data.federated import FederatedData, RowIndex
from coterie.data.mixture import mixture_sensitivity, mixture_tight
from coterie.data.readers import from_folder, from_function, from_partitions, from_table
from coterie.data.registry import READERS, make
from coterie.data.synthetic import (
    PROBLEMS,
    blobs,
    digits,
    linear_coordinates,
    linear_groups,
)

__all__ = [
    "PROBLEMS",
    "READERS",
    "DataCard",
    "Encoder",
    "FederatedData",
    "RowIndex",
    "blobs",
    "digits",
    "from_arrays",
    "from_folder",
    "from_function",
    "from_partitions",
    "from_table",
    "linear_coordinates",
    "linear_groups",
    "make",
    "mixture_sensitivity",
    "mixture_tight",
    "partitions",
]
