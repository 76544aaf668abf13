from functools import partial

import pytest
from tiny import ENGINES

from coterie.engines import Simulation


@pytest.fixture(params=ENGINES)
def engine(request):
    """`engine(data, **options)`: a federation on every engine in turn."""
    return partial(Simulation, **ENGINES[request.param])
