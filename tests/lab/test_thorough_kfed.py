"""The stronger k-FED of the studies."""

import pytest

from coterie.engines import Simulation
from coterie_lab.studies.thorough_kfed import ThoroughKFed
from tiny import points, rounds


def test_it_may_begin_with_the_client_that_has_the_most_centres():
    # Centres 4; 0, 10, 20; 6. From 0, 10, 20 the groups are {0, 4}, {10, 6}, {20}. From 4 or 6 the
    # farthest are 20, and 10 or 0; the groups are {0, 4, 6}, {10}, {20} or {0}, {4, 6, 10}, {20}.
    for order in ([4.0], [0.0, 10.0, 20.0], [6.0]), ([0.0, 10.0, 20.0], [6.0], [4.0]):
        method = ThoroughKFed(n_clusters=3, n_components=3, most_first=True)
        state = rounds(method, Simulation(points(*order), 0), 1)
        assert sorted(state.centres.flatten().tolist()) == pytest.approx([2.0, 8.0, 20.0])
