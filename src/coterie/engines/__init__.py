"""Engines run the tasks: on simulated clients (stacked, one by one, through bytes) or real ones."""

from importlib import import_module
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from coterie.engines.faults import Faults
    from coterie.engines.remote import Remote
    from coterie.engines.simulation import Simulation

# Loaded on first use, because the relay of a Flower node must not wait for torch.
_MODULE_OF = {"Faults": "faults", "Remote": "remote", "Simulation": "simulation"}

__all__ = ["Faults", "Remote", "Simulation"]


def __getattr__(name: str) -> Any:
    if name not in _MODULE_OF:
        raise AttributeError(f"module 'coterie.engines' has no attribute {name!r}")
    return getattr(import_module(f"coterie.engines.{_MODULE_OF[name]}"), name)
