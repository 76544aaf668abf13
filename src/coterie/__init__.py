"""Clustered federated learning: find the hidden groups of a federation, train a model for each."""

from importlib import import_module
from typing import Any

__version__ = "0.1.0.dev0"

# Loaded on first use: `coterie --help` must not wait for torch.
_PLACES = {
    "coterie.core.aggregate": ["Mean"],
    "coterie.core.algorithm": ["Algorithm", "register"],
    "coterie.core.client": ["Client", "Reply", "task"],
    "coterie.core.errors": ["CoterieError"],
    "coterie.core.federation": ["Federation", "each", "rows"],
    "coterie.core.model": ["Model"],
    "coterie.core.training": ["LocalSGD"],
    "coterie.core.tree": ["take"],
    "coterie.advice": ["advise"],
    "coterie.algorithms": ["CLoVE", "FedAvg", "IFCA"],
    "coterie.data": [
        "FederatedData",
        "from_arrays",
        "from_folder",
        "from_function",
        "from_partitions",
        "from_table",
    ],
    "coterie.engines": ["Simulation"],
    "coterie.running.loop": ["run"],
    "coterie.running.build": ["Settings"],
    "coterie.checks": ["check_algorithm"],
    "coterie.fitted": ["Fitted", "load"],
    "coterie.fitting": ["fit"],
}
_MODULE_OF = {name: module for module, names in _PLACES.items() for name in names}
__all__ = sorted(_MODULE_OF)
# These work as well; thirty names are listed.
_MODULE_OF |= {"LocalOnly": "coterie.algorithms", "resume": "coterie.fitting"}


def __getattr__(name: str) -> Any:
    if name not in _MODULE_OF:
        raise AttributeError(f"module 'coterie' has no attribute {name!r}")
    return getattr(import_module(_MODULE_OF[name]), name)


def __dir__() -> list[str]:
    return [*__all__, "__version__"]
