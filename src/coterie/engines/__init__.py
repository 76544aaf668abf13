"""Who runs the tasks: simulated clients, stacked, one by one, or through bytes."""

from coterie.engines.faults import Faults
from coterie.engines.simulation import Simulation

__all__ = ["Faults", "Simulation"]
