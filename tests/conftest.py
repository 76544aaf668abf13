from functools import partial

import pytest

from coterie.engines import Simulation
from tiny import ENGINES


@pytest.fixture(params=ENGINES)
def engine(request):
    """`engine(data, **options)`: a federation on every engine in turn."""
    return partial(Simulation, **ENGINES[request.param])
