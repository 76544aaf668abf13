"""A federation on each engine."""

import pytest

from coterie.engines import Simulation

ENGINES = {
    "stacked": {"stack": True},
    "loop": {"stack": False},
    "wire": {"stack": False, "wire": True},
}


@pytest.fixture(params=ENGINES)
def federate(request):
    """`federate(data, **options)` on each of the three engines."""
    return lambda data, **options: Simulation(data, **ENGINES[request.param], **options)
