"""The vocabulary of methods: everything a method's file imports."""

from coterie.core.aggregate import Mean
from coterie.core.algorithm import Algorithm, Evidence, Fill, Info, PerClient, register
from coterie.core.client import Batch, Client, Reply, task
from coterie.core.federation import Federation, each, rows
from coterie.core.model import Model
from coterie.core.training import LocalSGD
from coterie.core.tree import Ids, Params, Tree, put, take

__all__ = [
    "Algorithm",
    "Batch",
    "Client",
    "Evidence",
    "Federation",
    "Fill",
    "Ids",
    "Info",
    "LocalSGD",
    "Mean",
    "Model",
    "Params",
    "PerClient",
    "Reply",
    "Tree",
    "each",
    "put",
    "register",
    "rows",
    "take",
    "task",
]
